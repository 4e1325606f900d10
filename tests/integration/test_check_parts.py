"""Check vectors of groups whose product does not fit in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import models
import numpy as np
import pytest
from pairs import InProcessServer
from stack import check_message, split_tiny

from sordino.client.provision import fetch_check_vectors, plan_batch
from sordino.client.transport import Connection
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.service import Limits
from sordino.server.split import split_model
from sordino.shared.manifest import ModelManifest
from sordino.shared.ring import P

SMALL = Limits(max_message_bytes=1 << 16)


def exact(server: InProcessServer, index: int, v: np.ndarray) -> np.ndarray:
    """v^T W mod p by Python's integers."""
    group, stored = server.store.manifest.groups[index], server.store.matrices[index].weights.numpy()
    planes = stored.reshape(group.planes, group.out_features, group.in_features).astype(object)
    whole = planes[0] if group.planes == 1 else planes[0] + 256 * planes[1]
    product: np.ndarray = (v.astype(object) @ whole) % P
    return product


def sizes(connection: Connection, requests: list[pb.ProvisionRequest]) -> None:
    """Notes every provisioning request of a connection."""
    provision = connection.provision

    def noted(source: Iterator[pb.ProvisionRequest]) -> object:
        def all_of() -> Iterator[pb.ProvisionRequest]:
            for request in source:
                requests.append(request)
                yield request

        return provision(all_of())

    connection.provision = noted  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("count", [1, 2])
def test_parts_of_a_large_group_add_up(tmp_path: Path, bits: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if count == 2:
        monkeypatch.setattr("sordino.server.blocks._POLYNOMIALS", 1)  # and the server encodes them one by one
    model = models.make_tiny("llama", tmp_path / "model", intermediate_size=517)
    split_model(model, tmp_path / "bundle", rounding="nearest", weight_bits=bits)
    server = InProcessServer(tmp_path / "bundle", SMALL)
    connection = Connection(f"grpc://127.0.0.1:{server.port}", retry_s=1)
    requests: list[pb.ProvisionRequest] = []
    try:
        assert connection.max_message_bytes == SMALL.max_message_bytes
        sizes(connection, requests)
        done: list[tuple[int, int]] = []
        vectors = fetch_check_vectors(connection, count, lambda *now: done.append(now))
        groups = connection.manifest.groups
        assert len(requests) > len(groups), "nothing was cut: the test tests nothing"
        assert done == [(i + 1, len(groups)) for i in range(len(groups))]
        for index, group in enumerate(groups):
            check = vectors[group.name]
            assert check.v.shape == (count, group.out_features)
            assert (check.c == exact(server, index, check.v)).all()
        assert max(len(request.c0) for request in requests) <= SMALL.max_message_bytes
        assert len({request.seed for request in requests}) == len({request.c0 for request in requests}) == len(requests)
        traffic = connection.traffic.up["provision"] + connection.traffic.down["provision"]
        plan = plan_batch(connection.manifest, 64, checks=count, max_message_bytes=SMALL.max_message_bytes)
        assert 0 <= traffic - plan.check_bytes <= 128 * len(requests), "the plan says what it costs"
    finally:
        connection.close()
        server.close()


def test_a_group_that_fits_names_no_range(bundles: Callable[..., Path]) -> None:
    """One message a group, as it has always been."""
    server = InProcessServer(bundles("llama"))
    connection = Connection(f"grpc://127.0.0.1:{server.port}", retry_s=1)
    requests: list[pb.ProvisionRequest] = []
    try:
        sizes(connection, requests)
        fetch_check_vectors(connection, 1)
    finally:
        connection.close()
        server.close()
    assert [request.group for request in requests] == list(range(len(connection.manifest.groups)))
    for request in requests:
        assert {field.name for field, _ in request.block.ListFields()} == {"rows", "inputs", "outputs", "transposed"}


@pytest.mark.parametrize(
    "fields",
    [
        {"first_input": 0, "input_count": 129},
        {"first_input": 128},
        {"first_input": 127, "input_count": 2},
        {"first_input": 2**32 - 1, "input_count": 2**32 - 1},
        {"first_output": 64, "output_count": 1},
        {"first_output": 1, "output_count": 2**32 - 1},
    ],
    ids=str,
)
def test_a_range_outside_the_matrix_is_refused(bundles: Callable[..., Path], fields: dict[str, int]) -> None:
    server = InProcessServer(bundles("llama"))
    manifest = ModelManifest.load(bundles("llama"))
    assert (manifest.groups[0].out_features, manifest.groups[0].in_features) == (128, 64)
    request = pb.ProvisionRequest.FromString(check_message(manifest))
    for name, value in fields.items():
        setattr(request.block, name, value)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.enable_http_proxy", 0)]) as channel:
            call = channel.stream_stream("/sordino.proto.v1.Sordino/Provision")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([request.SerializeToString()]), timeout=20))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a range of the" in caught.value.details()
    finally:
        server.close()


def test_an_answer_over_the_limit_is_refused_in_parts_too(tmp_path: Path) -> None:
    """Blocks chosen so that few ciphertexts ask for many polynomials."""
    bundle = split_tiny("llama", tmp_path)
    server = InProcessServer(bundle, SMALL)
    manifest = ModelManifest.load(bundle)
    request = pb.ProvisionRequest.FromString(check_message(manifest))
    request.block.CopyFrom(pb.BlockProduct(rows=1, inputs=2048, outputs=1, first_output=8, output_count=40))
    request.c0 = request.c0[: 2 * 2048 * 27 // 8]
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.enable_http_proxy", 0)]) as channel:
            call = channel.stream_stream("/sordino.proto.v1.Sordino/Provision")
            with pytest.raises(grpc.RpcError, match="ask in parts"):
                list(call(iter([request.SerializeToString()]), timeout=20))
    finally:
        server.close()
