"""RLWE in column form: transforms, encryption, noise, codec, packing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.client.rlwe import SecretKey, _encode
from sordino.shared import packing
from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.ring import P
from sordino.shared.rlwe import (
    PAGE_PARAMS,
    PARAMS,
    SWITCH_BITS,
    RlweParams,
    expand_uniform,
    intt,
    ntt,
    pack,
    packed_bytes,
    reduced,
    switch,
    unpack,
)

N = PARAMS.n
Q0, Q1 = PARAMS.primes


def residues(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, q, shape, dtype=np.uint32) for q in PARAMS.primes])


def encrypted_product(weights: np.ndarray, m: np.ndarray, key: SecretKey, seed: bytes = bytes(32)) -> np.ndarray:
    """W times the columns of m, through encryption: [N, rows of W]."""
    c1 = expand_uniform(seed, 0, m.shape)
    c0 = key.encrypt(m, c1)
    w = weights.astype(np.float64)
    halves = [
        np.stack([np.mod(c[i].astype(np.float64) @ w.T, q).astype(np.uint32) for i, q in enumerate(PARAMS.primes)])
        for c in (c0, c1)
    ]
    return key.decrypt(halves[0], halves[1])


def test_transform_is_negacyclic_convolution() -> None:
    """X^(N-1) * X = -1, and a product equals the schoolbook one."""
    a = np.zeros((2, N, 2), np.uint32)
    a[:, N - 1, 0] = 1
    a[:, 1, 1] = 1
    ntt(a)
    product = np.stack([(a[i, :, 0].astype(object) * a[i, :, 1] % q).astype(np.uint32) for i, q in enumerate((Q0, Q1))])
    out = np.ascontiguousarray(product[:, :, None])
    intt(out)
    expected = np.zeros((2, N, 1), np.uint32)
    expected[0, 0], expected[1, 0] = Q0 - 1, Q1 - 1
    assert (out == expected).all()


@pytest.mark.parametrize("columns", [1, 15, 16, 33])
def test_transform_round_trip(columns: int) -> None:
    a = residues((N, columns))
    b = a.copy()
    ntt(b)
    assert not (a == b).all()
    intt(b)
    assert (a == b).all()


def test_transform_of_extreme_values_does_not_overflow() -> None:
    a = np.stack([np.full((N, 16), q - 1, np.uint32) for q in PARAMS.primes])
    b = a.copy()
    ntt(b)
    for i, q in enumerate(PARAMS.primes):
        assert int(b[i].max()) < q
    intt(b)
    assert (a == b).all()


def test_full_range_masks_decode_exactly() -> None:
    rng = np.random.default_rng(1)
    weights = rng.integers(-127, 128, (40, 1536)).astype(np.int8)
    weights[0] = 127  # the worst row there is
    r = rng.integers(0, P, (N, 1536), dtype=np.uint32)
    got = encrypted_product(weights, r, SecretKey())
    sample = slice(0, N, 97)
    assert (got[sample] == (r[sample].astype(object) @ weights.T.astype(object)) % P).all()


def test_noise_is_what_the_bound_says() -> None:
    """Std of the error within 3 % of sqrt(eta/2), range within eta; and a norm far over the bound does break."""
    zeros = np.zeros((N, 64), np.uint32)
    noise = np.random.default_rng(3).integers(0, 2**63, zeros.shape, dtype=np.uint64)
    out = np.empty((2, N, 64), np.uint32)
    for q, residues_of_q in zip(PARAMS.primes, out, strict=True):
        _encode(zeros, noise, q, residues_of_q)
    centred = out[0].astype(np.int64)
    centred[centred > Q0 // 2] -= Q0
    assert abs(centred.std() / math.sqrt(PARAMS.eta / 2) - 1) < 0.03
    assert abs(int(centred.max())) <= PARAMS.eta
    assert abs(centred.mean()) < 0.05


def test_budget_broken_decodes_wrongly() -> None:
    """The bound is not decoration: rows with a norm 40 times over it decode wrongly."""
    PARAMS.check_norm("fine", PARAMS.max_norm())
    with pytest.raises(RangeError, match="'bad'"):
        PARAMS.check_norm("bad", PARAMS.max_norm() * 1.01)
    rng = np.random.default_rng(2)
    weights = np.full((1, 8), int(40 * PARAMS.max_norm() / math.sqrt(8)), np.int64)
    r = rng.integers(0, P, (N, 8), dtype=np.uint32)
    c1 = expand_uniform(bytes(32), 0, r.shape)
    key = SecretKey()
    halves = [
        np.stack([(c[i].astype(np.int64) @ weights.T % q).astype(np.uint32) for i, q in enumerate(PARAMS.primes)])
        for c in (key.encrypt(r, c1), c1)
    ]
    assert (key.decrypt(halves[0], halves[1])[:, 0] != (r.astype(object) @ weights[0].astype(object)) % P).any()


@pytest.mark.parametrize(
    ("n", "primes", "eta", "match"),
    [
        (2048, (Q0, Q0), 21, "differ"),
        (2048, (Q0, 134152193), 21, "prime"),  # composite or not 1 mod 4096
        (2048, (Q0, Q1), 20, "deviation"),
        (1024, (Q0, Q1), 21, "security"),
        (512, (Q0, Q1), 21, "standard"),
    ],
)
def test_bad_parameters_are_refused(n: int, primes: tuple[int, int], eta: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RlweParams(n=n, primes=primes, eta=eta)


@pytest.mark.parametrize("bits", [0, SWITCH_BITS])
def test_a_planned_block_is_one_that_the_server_takes(bits: int) -> None:
    """Filled by more than half."""
    sizes = (1, 2, 3, 7, 20, 64, 100, 577, 1536, 3072, 8192)
    for rows, n, m, limit in itertools.product((1, 8, 32, 256), sizes, sizes, (64 << 10, 8 << 20)):
        for part in packing.plan(rows, n, m, max_bytes=limit, prices=packing.Prices(bits=bits)):
            assert 2 * rows * part.shape.inputs * part.shape.outputs > N


def test_ciphertext_hides_and_fresh_keys_differ() -> None:
    m = np.zeros((N, 2), np.uint32)
    c1 = expand_uniform(bytes(32), 0, m.shape)
    first, second = SecretKey().encrypt(m, c1), SecretKey().encrypt(m, c1)
    assert (first != second).mean() > 0.99
    assert "hidden" in repr(SecretKey())


def test_expansion_is_uniform_deterministic_and_separate() -> None:
    a = expand_uniform(bytes(32), 0, (64, 512))
    assert (a == expand_uniform(bytes(32), 0, (64, 512))).all()
    assert (a != expand_uniform(bytes(32), 1, (64, 512))).mean() > 0.99
    for i, q in enumerate(PARAMS.primes):
        assert int(a[i].max()) < q
        counts = np.bincount((a[i].ravel().astype(np.int64) * 64 // q), minlength=64)
        chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert chi2 < 150  # 63 degrees of freedom: p ~ 1e-9
    with pytest.raises(ProtocolError, match="32 bytes"):
        expand_uniform(b"short", 0, (1, 1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_codec_round_trip(rows: int, columns: int, seed: int) -> None:
    a = residues((rows, columns), seed)
    data = pack(a)
    assert len(data) == packed_bytes(a.size)
    assert (unpack(data, a.shape) == a).all()


def test_codec_refuses_what_is_not_a_residue() -> None:
    a = residues((4, 16))
    a[1, 2, 3] = Q1
    with pytest.raises(ProtocolError, match="below its prime"):
        unpack(pack(a), a.shape)
    with pytest.raises(ProtocolError, match="bytes for"):
        unpack(pack(a)[:-1], a.shape)
    with pytest.raises(ProtocolError, match="bytes for"):
        unpack(b"", a.shape)


def block_product(weights: Any, x: Any, part: packing.Part, key: SecretKey, bits: int = 0) -> Any:
    """The part's product under encryption, as the server computes and the client decodes it."""
    shape = part.shape
    encoded = packing.encode_rows(x[:, part.inputs], shape)
    c1 = expand_uniform(bytes(32), 3, encoded.shape)
    w = packing.encode_weights(weights[part.outputs, part.inputs], shape)
    sent = [(key.encrypt(encoded, c1), c1.__getitem__)]
    halves = packing.multiply(w, sent, shape, coefficients=bits > 0)
    out0, out1 = (np.ascontiguousarray(half[:, :, 0]) for half in halves)
    if not bits:
        return packing.decode_rows(key.decrypt(out0, out1)[packing.useful(shape)], shape)
    return packing.decode_rows(key.decrypt_switched(switch(out0, bits), switch(out1, bits), shape, bits), shape)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("inputs", [1, 2, 64, 512])
def test_the_coefficients_read_are_those_of_the_whole_transform(rows: int, inputs: int) -> None:
    shape = packing.BlockShape(rows, inputs, N // rows // inputs, inputs, 3 * (N // rows // inputs))
    assert shape.folds == (rows == 1)
    a = expand_uniform(bytes(32), 0, (N, 3))
    whole = a.copy()
    intt(whole)
    for i in range(2):
        read = packing.read_coefficients(a[i].copy(), i, shape)
        assert np.array_equal(read, whole[i, packing.useful(shape)])


@given(st.lists(st.one_of(st.integers(0, P - 1), st.sampled_from([0, 1, P // 2, P - 1])), min_size=1, max_size=40))
def test_the_encoder_rounds_exactly(values: list[int]) -> None:
    m = np.array([values], np.uint32)
    for q in PARAMS.primes:
        out = np.empty(m.shape, np.uint32)
        _encode(m, np.zeros(m.shape, np.uint64), q, out)
        assert out[0].tolist() == [(2 * PARAMS.q * v + P) // (2 * P) % q for v in values]


@given(st.integers(0, (1 << 37) - 1), st.sampled_from([-1, 0, 1]), st.sampled_from(PAGE_PARAMS.primes))
def test_reduction_by_floats_is_exact(quotient: int, beside: int, q: int) -> None:
    """Next to multiples of q, where a quotient that is off by one shows, up to 2^63."""
    x = min(max(quotient * q + beside, 0), (1 << 63) - 1)
    assert int(reduced(np.uint64(x), q, 1.0 / q)) == x % q


@pytest.mark.parametrize("bits", [0, SWITCH_BITS])
@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (100, 64), (2047, 3), (2048, 2), (2049, 2), (96, 300)])
def test_packed_product_is_exact(rows: int, inputs: int, outputs: int, bits: int) -> None:
    """in + out around N included (a slot overflow would show as a wrong number)."""
    rng = np.random.default_rng(inputs)
    weights = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    x = rng.integers(0, P, (rows, inputs), dtype=np.uint32)
    (part,) = packing.plan(rows, inputs, outputs, prices=packing.Prices(bits=bits))
    assert N < 2 * part.shape.rows * part.shape.inputs * part.shape.outputs <= 2 * N
    got = block_product(weights, x, part, SecretKey(), bits)
    assert (got == (x.astype(object) @ weights.T.astype(object)) % P).all()


def test_all_rows_at_once_are_the_packing_of_mask_batches() -> None:
    rng = np.random.default_rng(5)
    weights = rng.integers(-127, 128, (7, 5)).astype(np.int8)
    x = rng.integers(0, P, (N, 5), dtype=np.uint32)
    (part,) = packing.plan(N, 5, 7)
    assert part.shape.points == 1
    assert (packing.encode_rows(x, part.shape) == x).all()
    assert (block_product(weights, x, part, SecretKey()) == (x.astype(object) @ weights.T.astype(object)) % P).all()


@pytest.mark.parametrize("shape", [(3, 1, 1), (4096, 1, 1), (2, 64, 17), (0, 1, 1), (1, 0, 1)])
def test_blocks_that_do_not_exist(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a block has"):
        packing.BlockShape(*shape, 100, 100)


def test_plan_takes_the_cheapest_shape_that_decodes() -> None:
    (part,) = packing.plan(1, 960, 576)
    others = [packing.BlockShape(1, k, N // k, 960, 576) for k in range(1, N + 1)]
    least = min(s.upload_bytes() + s.download_bytes() for s in others)
    assert part.shape.upload_bytes() + part.shape.download_bytes() == least
    (wide,) = packing.plan(1, 49152, 576)
    assert 128 * math.sqrt(49152 * wide.shape.outputs) <= PARAMS.max_norm()


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("limit", [1 << 16, 8 << 20])
@pytest.mark.parametrize("size", [(57344, 8192), (22016, 4096), (300, 64), (1 << 20, 4), (1, 1), (7, 100_003)])
def test_parts_cover_the_product_once_and_fit_both_ways(size: tuple[int, int], limit: int, planes: int) -> None:
    covered = 0
    for part in packing.plan(1, *size, planes=planes, max_bytes=limit):
        shape = part.shape
        assert (part.inputs.stop - part.inputs.start, part.outputs.stop - part.outputs.start) == (
            shape.in_features,
            shape.out_features,
        )
        assert part.inputs.stop <= size[0]
        assert part.outputs.stop <= size[1]
        assert max(shape.upload_bytes(), planes * shape.download_bytes()) <= limit
        assert 128 * math.sqrt(shape.in_features * shape.outputs) <= PARAMS.max_norm()
        assert N < 2 * shape.rows * shape.inputs * shape.outputs <= 2 * N
        covered += shape.in_features * shape.out_features
    assert covered == size[0] * size[1]
    if size == (57344, 8192) and limit == 8 << 20 and planes == 1:
        shapes = [part.shape for part in packing.plan(1, *size, max_bytes=limit)]
        assert sum(s.upload_bytes() + s.download_bytes() for s in shapes) < 80e6, "cutting costs little"


@given(st.integers(0, 4), st.integers(1, 300), st.integers(1, 300), st.integers(1, 60_000), st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_results_of_parts_add_up(log_rows: int, inputs: int, outputs: int, limit: int, seed: int) -> None:
    rng, rows = np.random.default_rng(seed), 1 << log_rows
    weights = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    x = rng.integers(0, P, (rows, inputs), dtype=np.uint32)
    key, total = SecretKey(), np.zeros((rows, outputs), np.uint64)
    for part in packing.plan(rows, inputs, outputs, max_bytes=limit):
        total[:, part.outputs] += block_product(weights, x, part, key)
    assert (total % P == (x.astype(object) @ weights.T.astype(object)) % P).all()
