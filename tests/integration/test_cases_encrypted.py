"""Faults that users of encrypted-inference systems met, as tests for the encrypted protocols.

By design here, and why there is no test of its own: evaluation keys (none exist: products need no rotation and no key
switching), and a multiplication too many (a ciphertext is multiplied once by plain weights and then decrypted; no
operation takes an answer as its input).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pairs import InProcessServer
from stack import split_tiny

from sordino.client.blocks import prices, rounds
from sordino.client.justintime import JustInTime
from sordino.client.pool import CheckVector
from sordino.client.protocols import ClearProtocol, LinearProtocol, RlweProtocol
from sordino.client.provision import fetch_check_vectors, verify
from sordino.client.rlwe import SecretKey
from sordino.client.transport import Connection, EvaluationStream
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.blockkernels import CompiledBlocks
from sordino.server.blocks import BlockProducts, Wanted
from sordino.server.kernel import Int8Kernel, RingMatrix
from sordino.shared.errors import IntegrityError, RangeError
from sordino.shared.manifest import GroupSpec, MemberSpec
from sordino.shared.packing import BlockShape, Part
from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS, ntt, pack, unpack

CHOICES = prices(1e6)


@pytest.fixture(scope="module", params=[8, 12])
def link(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    server = InProcessServer(split_tiny("llama", tmp_path_factory.mktemp("bundle"), weight_bits=request.param))
    connection = Connection(f"grpc://127.0.0.1:{server.port}", retry_s=2)
    yield connection
    connection.close()
    server.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 63, 127, 128, 129, 300])
def test_any_number_of_rows_is_exact(link: Connection, count: int) -> None:
    """Prompts of every length around the sizes of blocks, cut as they may be (2.11)."""
    rng = np.random.default_rng(count)
    checks = fetch_check_vectors(link, 1)
    for group in link.manifest.groups[:4]:
        rows = rng.integers(-group.x_max, group.x_max + 1, (count, group.in_features)).astype(np.int32)
        protocols: list[LinearProtocol] = [ClearProtocol(link), RlweProtocol(link, checks, CHOICES)]
        clear, hidden = (protocol.apply(group, rows) for protocol in protocols)
        assert np.array_equal(clear, hidden)
        for protocol in protocols:
            protocol.close()
        if count > 40:
            return


def test_extremes_do_not_overflow(link: Connection) -> None:
    """All inputs at the largest value the quantiser gives, and at its negative."""
    clear, hidden = ClearProtocol(link), RlweProtocol(link, fetch_check_vectors(link, 1), CHOICES)
    for group in link.manifest.groups[:4]:
        rows = np.full((2, group.in_features), group.x_max, np.int32)
        rows[1] *= -1
        assert np.array_equal(clear.apply(group, rows), hidden.apply(group, rows))
    clear.close()
    hidden.close()


def test_one_ciphertext_serves_twice(link: Connection) -> None:
    """A product leaves its operands alone: the same request again has the same answer (2.3)."""
    stream = EvaluationStream(link, pb.PROTOCOL_RLWE)
    groups = link.manifest.groups
    assert groups[0].in_features == groups[2].in_features
    key = SecretKey()
    x = np.random.default_rng(3).integers(0, P, (1, groups[0].in_features), dtype=np.uint32)
    (made,) = rounds(0, groups[0], 1, max_message_bytes=link.max_message_bytes, choices=CHOICES)
    (message,) = made.requests(x, key)
    again = pb.EvaluateRequest()
    again.CopyFrom(message)
    elsewhere = pb.EvaluateRequest()
    elsewhere.CopyFrom(message)
    elsewhere.group = 2
    first, other, second = stream.exchange([message, elsewhere, again])
    stream.close()
    assert (first.data, first.c1) == (second.data, second.c1)
    assert other.c1 != first.c1
    assert np.array_equal(made.result([first], key, 1), made.result([second], key, 1))


def matrix(weights: Any) -> tuple[RingMatrix, GroupSpec]:
    tensor = torch.from_numpy(np.ascontiguousarray(weights, np.int8))
    member = MemberSpec(name="m", out_features=tensor.shape[0])
    spec = GroupSpec(
        name="g", layer=0, in_features=tensor.shape[1], members=(member,), weight_bits=8, l1_max=1 << 20, l2_max=1 << 16
    )
    return RingMatrix(tensor, 1, Int8Kernel()), spec


def served(weights: Any, x: Any, noise: int = 0) -> Any:
    """What a client reads of x times W when ``noise`` is added to each coefficient of the answers."""
    held, spec = matrix(weights)
    key, products = SecretKey(), BlockProducts(0, CompiledBlocks(parallel=False))
    (made,) = rounds(0, spec, x.shape[0], max_message_bytes=8 << 20, choices=prices(1e12)[:1])
    (block,) = made.blocks
    seed, packed, _ = block.encrypt(x, key)
    c0 = unpack(packed, (2, PARAMS.n, block.part.shape.input_blocks))
    ((out0, out1),) = products.products(held, Wanted(0, False, block.part, 0), [(seed, c0)])
    added = np.full((2, PARAMS.n, out0.shape[2]), noise, np.uint32)
    ntt(added)
    out0 = np.stack([(out0[i] + added[i]) % q for i, q in enumerate(PARAMS.primes)]).astype(np.uint32)
    return block.decrypt(pack(out0), pack(out1.astype(np.uint32)), key)[: x.shape[0]]


def test_weights_of_zero() -> None:
    """An output that does not depend on the input decodes to zero, to which the client adds the bias (2.7)."""
    x = np.random.default_rng(4).integers(0, P, (1, 64), dtype=np.uint32)
    assert not served(np.zeros((96, 64)), x).any()


def test_noise_within_the_budget_changes_nothing_and_beyond_it_is_found() -> None:
    """An exhausted ciphertext decodes to a plausible integer; the check says so, and no token comes of it (2.5)."""
    rng = np.random.default_rng(5)
    weights = rng.integers(-127, 128, (96, 64))
    x = rng.integers(0, P, (1, 64), dtype=np.uint32)
    truth = (x.astype(object) @ weights.T.astype(object)) % P
    assert (served(weights, x, noise=1 << 18) == truth).all()
    wrong = served(weights, x, noise=1 << 23)
    assert (wrong != truth).all()
    v = rng.integers(0, P, (1, 96), dtype=np.uint32)
    check = CheckVector(v=v, c=((v.astype(object) @ weights.astype(object)) % P).astype(np.uint32))
    verify(matrix(weights)[1], check, x, truth.astype(np.uint32))
    with pytest.raises(IntegrityError):
        verify(matrix(weights)[1], check, x, wrong)


def test_blocks_that_could_decode_wrongly_are_refused_before_a_product() -> None:
    """The server knows the real matrix; noise over the bound gets an error, not a number (2.4, 2.6)."""
    held, _ = matrix(np.full((2048, 1024), 127))
    shape = BlockShape(1, 2, 1024, 1024, 2048)
    part = Part(slice(0, 1024), slice(0, 2048), shape)
    with pytest.raises(RangeError, match="noise bound"):
        BlockProducts(0, CompiledBlocks(parallel=False)).products(
            held, Wanted(0, False, part, 0), [(bytes(32), np.zeros((2, PARAMS.n, 512), np.uint32))]
        )


def test_a_prompt_that_grows_and_shrinks_uses_each_mask_once(link: Connection) -> None:
    """Just-in-time masks for passes of any number of rows: right, and never the same twice."""
    checks = fetch_check_vectors(link, 1)
    source = JustInTime(link, checks.get, CHOICES)
    seen: set[bytes] = set()
    for count in (1, 40, 1, 1, 300, 2, 1):
        for group in link.manifest.groups:
            r, wr = source.take(group.name, count)
            assert (r.shape, wr.shape) == ((count, group.in_features), (count, group.out_features))
            for row in r:
                assert row.tobytes() not in seen
                seen.add(row.tobytes())
            check = checks[group.name]
            assert (
                (check.v.astype(object) @ wr.T.astype(object)) % P == (check.c.astype(object) @ r.T.astype(object)) % P
            ).all()
    source.close()
