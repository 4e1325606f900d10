"""Peers as protocols: real encryption on both sides of a byte string, and the precision that their texts state."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sordino.client.bench_linear import load_matrices
from sordino.client.kernels import I32
from sordino.client.model import attach, build_model
from sordino.client.protocols import Cost
from sordino.client.timings import Timings
from sordino.shared.errors import RangeError
from sordino.shared.manifest import CLIENT_DIR, GroupSpec, MemberSpec, ModelManifest

pytestmark = pytest.mark.peers
HINT = "pip install -c constraints.txt -e '.[peers]'"


@pytest.fixture(scope="module")
def tenseal() -> ModuleType:
    pytest.importorskip("tenseal", reason=HINT)
    return importlib.import_module("peers.tenseal")


@pytest.fixture(scope="module")
def concrete() -> ModuleType:
    pytest.importorskip("concrete_ml_extensions", reason=HINT)
    return importlib.import_module("peers.concrete")


def group_of(matrix: Any, *, bits: int = 8) -> GroupSpec:
    m, n = matrix.shape
    l1 = int(np.abs(matrix.astype(np.int64)).sum(axis=1).max())
    l2 = int(np.sqrt(np.square(matrix.astype(np.int64)).sum(axis=1).max())) + 1
    members = (MemberSpec(name="w", out_features=m),)
    return GroupSpec(name="g", layer=0, in_features=n, members=members, weight_bits=bits, l1_max=max(1, l1), l2_max=l2)


def drawn(shape: tuple[int, int], limit: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape)


class Exact:
    """The products as they should be."""

    name = "exact"

    def __init__(self, matrices: Any) -> None:
        self._matrices = matrices

    def apply(self, group: GroupSpec, rows: I32) -> I32:
        product: I32 = (rows.astype(np.int64) @ self._matrices[group.name].T.astype(np.int64)).astype(np.int32)
        return product

    def cost(self, group: GroupSpec, rows: int) -> Cost:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def tiny(bundles: Callable[..., Path]) -> tuple[PreTrainedModel, Any]:
    """The client's half of a tiny Llama, and the server's matrices."""
    bundle = bundles("llama")
    manifest = ModelManifest.load(bundle)
    return build_model(bundle / CLIENT_DIR, manifest, Timings()), load_matrices(bundle, manifest, list(manifest.groups))


def logits(model: PreTrainedModel, protocol: Any, tokens: int) -> torch.Tensor:
    attach(model, protocol)
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=torch.arange(40, 40 + tokens)[None]).logits
    return out


# -- tenseal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "bits"), [(64, 64, 8), (300, 40, 8), (5, 576, 8), (40, 64, 12)])
def test_tenseal_gives_the_exact_integers(tenseal: ModuleType, m: int, n: int, bits: int) -> None:
    top = (1 << (bits - 1)) - 1
    matrix = drawn((m, n), top).astype(np.int8 if bits == 8 else np.int16)
    matrix[0] = top  # with the row of largest values: the largest result there is
    group = group_of(matrix, bits=bits)
    rows = np.stack(
        [drawn((1, n), group.x_max, 1)[0], np.full(n, group.x_max), np.zeros(n, int), np.eye(1, n, dtype=int)[0]]
    )
    rows = rows.astype(np.int32)
    assert np.array_equal(tenseal.connect({"g": matrix}).apply(group, rows), Exact({"g": matrix}).apply(group, rows))


def test_tenseal_error_before_rounding(tenseal: ModuleType) -> None:
    """The docstring's bound: 2^-33 of the largest result."""
    matrix = np.full((8, 576), 127, np.int8)
    group, client = group_of(matrix), tenseal.Client()
    row = np.full(576, group.x_max, np.int32)
    request, scale = client.encrypt(group, row)
    answer = client.decrypt(group, tenseal.Server(client.public, {"g": matrix}).answer("g", request)) * scale
    assert np.abs(answer - 127 * 576 * group.x_max).max() <= 2.0**-33 * 128 * 576 * group.x_max


def test_the_server_of_tenseal_cannot_decrypt(tenseal: ModuleType) -> None:
    from tenseal import ckks_vector_from, context_from

    client = tenseal.Client()
    matrix = drawn((8, 8), 127).astype(np.int8)
    request, _ = client.encrypt(group_of(matrix), np.arange(8, dtype=np.int32))
    seen = context_from(client.public)
    assert not seen.is_private()
    with pytest.raises(ValueError, match="secret_key"):
        ckks_vector_from(seen, request).decrypt()


def test_tenseal_refuses_what_does_not_fit(tenseal: ModuleType) -> None:
    with pytest.raises(RangeError, match="4096 slots"):
        tenseal.connect({}).apply(group_of(np.ones((2, 4097), np.int8)), np.zeros((1, 4097), np.int32))


def test_tenseal_runs_a_model(tenseal: ModuleType, tiny: tuple[PreTrainedModel, Any]) -> None:
    model, matrices = tiny
    peer = tenseal.connect(matrices)
    assert torch.equal(logits(model, peer, 3), logits(model, Exact(matrices), 3))
    assert peer.traffic.rounds == 3 * len(matrices)
    assert peer.traffic.up["provision"] > 10_000_000  # the Galois keys


# -- concrete ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(64, 64), (16, 576), (3, 1536)])
def test_concrete_is_within_its_error(concrete: ModuleType, m: int, n: int) -> None:
    matrix = drawn((m, n), 127).astype(np.int8)
    group = group_of(matrix)
    # Small enough to need no rounding of the row, so that the scheme's own error shows.
    rows = np.stack([drawn((1, n), 2**26 // group.l1_max - 1, 1)[0], np.zeros(n, int)]).astype(np.int32)
    off = concrete.connect({"g": matrix}).apply(group, rows) - Exact({"g": matrix}).apply(group, rows)
    assert np.abs(off).max() <= concrete.ERROR


def test_concrete_rounds_wide_rows(concrete: ModuleType) -> None:
    """The row is rounded to steps of ``scale``: half a step for each weight, and the scheme's error in steps."""
    matrix = drawn((16, 64), 127).astype(np.int8)
    group = group_of(matrix)
    row = drawn((1, 64), group.x_max, 1).astype(np.int32)
    scale = np.abs(row).max() / (2**26 // group.l1_max)
    off = concrete.connect({"g": matrix}).apply(group, row) - Exact({"g": matrix}).apply(group, row)
    assert np.abs(off).max() <= 1.01 * scale * (concrete.ERROR + group.l1_max / 2)


def test_the_server_of_concrete_has_no_secret_key(concrete: ModuleType) -> None:
    """It is made of the public bytes alone, and the same bytes under another key give noise."""
    matrix = drawn((4, 32), 127).astype(np.int8)
    group, row = group_of(matrix), np.full(32, 100, np.int32)
    client, stranger = concrete.Client(), concrete.Client()
    request, _ = client.encrypt(group, row)
    answer = concrete.Server(client.public, {"g": matrix}).answer("g", request)
    exact = matrix.astype(np.int64) @ row
    assert np.abs(client.decrypt(group, answer) - exact).max() <= concrete.ERROR
    assert np.abs(stranger.decrypt(group, answer) - exact).max() > 1000 * concrete.ERROR


def test_concrete_runs_a_model(concrete: ModuleType, tiny: tuple[PreTrainedModel, Any]) -> None:
    model, matrices = tiny
    peer = concrete.connect(matrices)
    near, exact = logits(model, peer, 1), logits(model, Exact(matrices), 1)
    assert torch.nn.functional.cosine_similarity(near.flatten(), exact.flatten(), dim=0) > 0.9999
    assert peer.traffic.rounds == len(matrices)


def test_costs_are_those_of_a_row(tenseal: ModuleType) -> None:
    matrix = drawn((8, 8), 127).astype(np.int8)
    group, peer = group_of(matrix), tenseal.connect({"g": matrix})
    cost = peer.cost(group, 3)
    assert (cost.rounds, cost.masks) == (3, 0)
    assert cost.bytes_up == 3 * peer.traffic.up["online"]
    assert cost.bytes_down == 3 * peer.traffic.down["online"]
