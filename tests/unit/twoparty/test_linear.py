"""Linear layers of profile two-party: W r + s by encryption, what its answers show, and W u mod 2^64."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from provision64 import cost
from rlwe_security import primal

from sordino.client.twoparty.linear import WordKey
from sordino.server import kernel as ring
from sordino.server.twoparty import linear as server
from sordino.server.twoparty.linear import Provisioner, WordMatrix, choose_kernel, largest_l1
from sordino.shared.errors import LimitError, ProtocolError, RangeError
from sordino.shared.rlwe import SEED_BYTES, expand_uniform, intt
from sordino.shared.twoparty import lwe
from sordino.shared.twoparty.lwe import WORD_PARAMS, WordShape, word_shape

N, Q, PRIMES = WORD_PARAMS.n, WORD_PARAMS.q, WORD_PARAMS.primes
T = 1 << 64
FLOOD = 1 << WORD_PARAMS.flood_bits
# Chi-square with 15 degrees of freedom is over it with probability 2e-12.
CHI_SQUARE = 90.0


def words(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, T, shape, dtype=np.uint64)


def matrix(m: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, (m, n)).astype(np.int8)


def times(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """W r mod 2^64, ``[R, m]``, by numpy's wrapping integers."""
    return rows @ weights.T.astype(np.int64).view(np.uint64)


def composed(d: np.ndarray) -> np.ndarray:
    """Residues modulo the first primes, ``[primes, ...]``, to Python's integers."""
    whole = math.prod(PRIMES[: len(d)])
    parts = [x.astype(object) * (pow(whole // q, -1, q) * (whole // q)) for x, q in zip(d, PRIMES, strict=False)]
    return sum(parts) % whole


def rounded(m: np.ndarray) -> np.ndarray:
    return (Q * m.astype(object) + T // 2) // T


def hidden(key: WordKey, weights: np.ndarray, request: list[bytes], shape: WordShape) -> tuple[np.ndarray, np.ndarray]:
    """Both halves of an answer before they are switched, where all of their noise can be seen."""
    provisioner = Provisioner(key.public)
    c0, c1 = lwe.unpack_seeded(request[0], shape.input_blocks)
    products = provisioner._products(weights, c0, c1, shape, 0, shape.output_blocks)
    return provisioner._hidden(*products, shape)[:2]


def noise(key: WordKey, c0: np.ndarray, c1: np.ndarray, shape: WordShape) -> np.ndarray:
    """What the key's holder sees beside the result, centred, as Python's integers ``[outputs * rows, C]``."""
    phase = key._phase(c0, c1, shape)
    x = (composed(phase) - rounded(lwe.decode(phase)) + Q // 2) % Q
    return x - Q // 2


def answered(key: WordKey, weights: np.ndarray, r: np.ndarray, shape: WordShape) -> tuple[list[bytes], np.ndarray]:
    found, s = zip(*Provisioner(key.public).answers(weights, key.requests(r, shape), shape), strict=True)
    return list(found), np.concatenate(s, axis=1)


@pytest.fixture(scope="module")
def key() -> WordKey:
    return WordKey()


# -- parameters and bounds ---------------------------------------------------------------------------------------------


def test_parameters_are_secure() -> None:
    assert math.log2(Q) <= 218
    found = primal(N, math.log2(Q), math.sqrt(WORD_PARAMS.eta / 2), math.sqrt(2 / 3))
    assert found.standard_bits >= 128


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 4096}, "below 128 bits"),
        ({"n": 16384}, "no row"),
        ({"primes": PRIMES[:6]}, "no room"),
        ({"primes": (*PRIMES[:6], PRIMES[0])}, "twice"),
        ({"primes": (*PRIMES[:6], 133857283)}, "not a prime"),
        ({"primes": (*PRIMES, 132710401, 132612097)}, "below 128 bits"),
        ({"eta": 20}, "deviation"),
        ({"flood_bits": 124}, "no room"),
        ({"flood_bits": 60}, "two words"),
    ],
)
def test_broken_parameters_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(WORD_PARAMS, **change)


def test_flood_hides_the_noise() -> None:
    """Lemma 5 with the page's flood and norm, and with the flood that is shipped; half of either is not enough."""
    page = replace(WORD_PARAMS, flood_bits=108)
    row, block = 127 * 1536, 127 * 1536 * 8
    assert math.log2(page.noise_bound(row)) < 22.2
    assert page.distance_log2(row) < -41
    page.check_l1("a row", row)
    with pytest.raises(RangeError, match="not hidden"):
        page.check_l1("a block", block)
    WORD_PARAMS.check_l1("a block", block)
    assert WORD_PARAMS.distance_log2(block) < -50
    with pytest.raises(RangeError, match="not hidden"):
        replace(WORD_PARAMS, flood_bits=95).check_l1("a row", 1)
    with pytest.raises(RangeError, match="decode wrongly"):
        WORD_PARAMS.check_l1("a giant", 1 << 120)


@pytest.mark.parametrize("bound", [0, 1, 5, 31])
def test_smudging(bound: int) -> None:
    """The distance of a uniform number on [-32, 32) from itself shifted, counted."""
    plain, shifted = set(range(-32, 32)), set(range(-32 + bound, 32 + bound))
    assert len(plain - shifted) / 64 == bound / 2 ** (5 + 1)
    if bound:
        params = replace(WORD_PARAMS, flood_bits=64)
        assert params.distance_log2(0, 0) == pytest.approx(math.log2(params.noise_bound(0) / 2**65))


# -- encoding ----------------------------------------------------------------------------------------------------------

EDGES = np.array([0, 1, 2, T // 2 - 1, T // 2, T // 2 + 1, T - 2, T - 1, 0xFFFFFFFF, 1 << 32], np.uint64)


def test_encoding_equals_python_integers() -> None:
    m = np.concatenate([EDGES, words((500,))]).reshape(-1, 2)
    for error in (-21, 0, 21):
        e = np.full(m.shape, error, np.int8)
        expected = rounded(m) + error
        for i, q in enumerate(PRIMES):
            assert (lwe.encode(m, e, i) == (expected % q).astype(np.uint32)).all()


def residues(x: np.ndarray) -> np.ndarray:
    return np.stack([(x % q).astype(np.uint32) for q in PRIMES])


def test_decoding_equals_python_integers() -> None:
    x = np.array([int.from_bytes(os.urandom(24)) % Q for _ in range(500)] + [0, 1, Q - 1], object)
    for d in (residues(x), residues(x)[:3]):
        whole = math.prod(PRIMES[: len(d)])
        assert lwe.decode(d).tolist() == [(2 * T * v + whole) // (2 * whole) % T for v in (x % whole).tolist()]


def test_switching_rounds() -> None:
    x = np.array([int.from_bytes(os.urandom(24)) % Q for _ in range(500)] + [0, 1, Q - 1, Q // 2], object)
    small, part = math.prod(PRIMES[:3]), math.prod(PRIMES[3:])
    off = (composed(lwe.switch(residues(x))) * part - x + Q // 2) % Q - Q // 2
    assert small * part == Q
    assert max(abs(off)) <= part // 2 + (part >> 26)


@pytest.mark.parametrize("sign", [-1, 1])
def test_decoding_bears_all_noise_of_the_budget_and_no_more(sign: int) -> None:
    """Noise and flood at their largest, and then the rounding of switching."""
    m, small = np.concatenate([EDGES, words((500,))]), math.prod(PRIMES[:3])

    def decoded(noise: int) -> np.ndarray:
        x = composed(lwe.switch(residues((rounded(m) + sign * noise) % Q))) + sign * N // 2
        return lwe.decode(residues(x % small)[:3])

    largest = int(WORD_PARAMS.budget()) + FLOOD
    assert (decoded(largest) == m).all()
    assert (decoded(largest + largest // 100) == m + np.uint64(sign % T)).all()


def test_flood_is_made_of_its_words() -> None:
    rare = np.array([[[0, T - 1, 0, 5]], [[0, T - 1, 1, 0]]], np.uint64)
    expected = [-FLOOD, FLOOD - 1, T - FLOOD, 5 - FLOOD]
    for i, q in enumerate(PRIMES):
        out = np.full((1, 4), q - 1, np.uint32)
        lwe.add_flood(out, rare, i)
        assert out[0].tolist() == [(v - 1) % q for v in expected]


def test_errors_are_centred_binomial() -> None:
    some = np.concatenate([EDGES, words((2000,))])
    out = np.empty(some.shape, np.int8)
    lwe._binomial(some, out)
    assert out.tolist() == [(w & 0x1FFFFF).bit_count() - (w >> 21 & 0x1FFFFF).bit_count() for w in some.tolist()]
    drawn = lwe.random_errors((1 << 16,)).astype(float)
    # Seven deviations of either estimate.
    assert abs(drawn.mean()) < 7 * math.sqrt(10.5 / drawn.size)
    assert abs(drawn.var() - 10.5) < 7 * 10.5 * math.sqrt(2 / drawn.size)


def test_ternary_is_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three numbers for 85 of 255 bytes, and the last byte for none."""
    with monkeypatch.context() as fixed:
        fixed.setattr(lwe, "_random_bytes", lambda count: bytes(k % 256 for k in range(count)))
        drawn = lwe.random_ternary((2, 255)).reshape(-1)
    assert drawn.tolist() == [k % 3 - 1 for k in range(255)] * 2
    counts = np.bincount(lwe.random_ternary((3 << 16,)).astype(int) + 1, minlength=3)
    assert (np.abs(counts - (1 << 16)) < 7 * math.sqrt((1 << 16) * 2 / 3)).all()


# -- W r + s -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "m", "n"), [(16, 70, 100), (16, 530, 31), (3, 1, 1), (1, 50, 33), (256, 40, 300), (N, 5, 20)], ids=str
)
def test_result_is_exact(key: WordKey, rows: int, m: int, n: int) -> None:
    shape, weights, r = word_shape(rows, n, m), matrix(m, n), words((rows, n))
    weights[0], r[0] = 127, EDGES[np.arange(n) % len(EDGES)]
    request = key.requests(r, shape)
    assert sum(map(len, request)) == shape.upload_bytes()
    provisioner = Provisioner(key.public)
    answer, s = zip(*provisioner.answers(weights, request, shape), strict=True)
    assert sum(map(len, answer)) == shape.download_bytes()
    assert provisioner.coefficients == shape.rows * shape.outputs * shape.output_blocks
    c, mask = key.open(answer, shape), np.concatenate(s, axis=1)
    assert c.shape == mask.shape == (shape.rows, m)
    assert (c[:rows] == times(weights, r) + mask[:rows]).all()
    # Rows that were not sent are 0, and the mask of each value is its own.
    assert (c[rows:] == mask[rows:]).all()
    assert len(np.unique(mask)) == mask.size


@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_sums_are_exact(sign: int) -> None:
    """Residues and weights at their largest, in as many blocks as a row may have: below 2^53, and recombined."""
    q, shape = PRIMES[0], WordShape(16, 1, 1, 3, 1)
    c0, c1 = (np.random.default_rng(k).integers(0, q, (N, 3), dtype=np.uint32) for k in range(2))
    c0[:16] = q - 1
    low, high = np.split(server._halves64(c0, c1, shape), 2, axis=1)
    weight = sign * (q // 2) * lwe.MAX_INPUT_BLOCKS
    sums = np.concatenate([low, high], axis=1) * float(weight)
    assert np.abs(sums).max() < 1 << 53
    assert np.abs(sums).max() > 1 << 52
    out = np.empty((2, N, 3), np.uint32)
    server._recombine_halves(sums, q, 16, out[0], out[1])
    for found, c in zip(out, (c0, c1), strict=True):
        assert (found == (c.astype(object) * weight % q).astype(np.uint32)).all()


def test_shares_add_up(key: WordKey) -> None:
    """The protocol of section 3: u = x0 - r is all the client sends online."""
    shape, weights = word_shape(4, 60, 40), matrix(40, 60)
    x, x0, r = np.arange(240, dtype=np.uint64).reshape(4, 60), words((4, 60), 1), words((4, 60), 2)
    answer, s = answered(key, weights, r, shape)
    y0 = key.open(answer, shape)
    product = WordMatrix(torch.from_numpy(weights), choose_kernel(CPU)).product
    y1 = product((x0 - r) + (x - x0)) - s
    assert ((y0 + y1).view(np.int64) == x.astype(np.int64) @ weights.T.astype(np.int64)).all()


def test_slices_of_outputs_come_in_order(key: WordKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SLICE", lwe.MESSAGE_BLOCKS)
    shape, weights, r = WordShape(16, 40, 3, 40, 130), matrix(130, 40), words((16, 40))
    answer, s = answered(key, weights, r, shape)
    assert shape.output_blocks > 2 * lwe.MESSAGE_BLOCKS
    assert (key.open(answer, shape) == times(weights, r) + s).all()


def test_parallel_is_the_same() -> None:
    key = WordKey(parallel=True)
    shape, weights, r = word_shape(16, 40, 50), matrix(50, 40), words((16, 40))
    request = key.requests(r, shape)
    answer, s = zip(*Provisioner(key.public, parallel=True).answers(weights, request, shape), strict=True)
    assert (key.open(answer, shape) == times(weights, r) + np.concatenate(s, axis=1)).all()


@pytest.mark.parametrize("rows", [16, N])
def test_worst_noise_is_below_its_bound(key: WordKey, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All errors and weights at their largest: beside the flood the noise comes near B, and does not reach it."""
    largest = lambda shape: np.full(shape, 21, np.int8)  # noqa: E731
    monkeypatch.setattr("sordino.client.twoparty.linear.random_errors", largest)
    monkeypatch.setattr(server, "random_errors", largest)
    monkeypatch.setattr(server, "add_flood", lambda *_: None)
    m, n = 3, 16
    shape, weights = word_shape(rows, n, m), np.full((m, n), 127, np.int8)
    found = noise(key, *hidden(key, weights, key.requests(words((rows, n)), shape), shape), shape)
    l1 = largest_l1(weights, shape)
    assert l1 == 127 * n * min(shape.outputs, m)
    assert 0.5 * 21 * l1 < max(abs(found.min()), found.max()) <= WORD_PARAMS.noise_bound(l1)


# -- what an answer shows ----------------------------------------------------------------------------------------------

BATCH = WordShape(N, 1, 1, 8, 1)


def chi_square(a: np.ndarray, b: np.ndarray) -> float:
    """Of two samples in 16 bins that hold as many of both together: large when their distributions differ."""
    edges = np.quantile(np.concatenate([a, b]), np.arange(1, 16) / 16)
    counts = np.array([np.bincount(np.searchsorted(edges, x), minlength=16) for x in (a, b)])
    expected = counts.sum(axis=0) / 2
    return float(((counts - expected) ** 2 / expected).sum())


def noises(key: WordKey, weight: int) -> np.ndarray:
    weights, request = np.full((1, 8), weight, np.int8), key.requests(words((N, 8)), BATCH)
    return noise(key, *hidden(key, weights, request, BATCH), BATCH)[:, 0]


def test_noise_is_that_of_the_flood_whatever_w(key: WordKey, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = noises(key, 1), noises(key, 127)
    assert chi_square(small.astype(float), large.astype(float)) < CHI_SQUARE
    for found in (small, large):
        assert -FLOOD - WORD_PARAMS.noise_bound(8 * 127) <= found.min()
        assert found.max() < FLOOD + WORD_PARAMS.noise_bound(8 * 127)
        # High bits and, of each value, low ones too are uniform.
        for bits in ((found + FLOOD) * 16 // (2 * FLOOD), found % 16):
            counts = np.bincount(np.clip(bits.astype(int), 0, 15), minlength=16)
            assert ((counts - N / 16) ** 2 / (N / 16)).sum() < CHI_SQUARE
    monkeypatch.setattr(server, "add_flood", lambda *_: None)
    assert chi_square(noises(key, 1).astype(float), noises(key, 127).astype(float)) > 10 * CHI_SQUARE


def test_weights_are_not_in_the_noise(key: WordKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client knows its errors e: by least squares it finds W in a noise W e + ..., unless that is drowned."""
    weights, r = matrix(1, 8, seed=3), words((N, 8))

    def estimate() -> np.ndarray:
        request = key.requests(r, BATCH)
        sent = lwe.unpack_seeded(request[0], 8)
        for half in sent:
            intt(half, WORD_PARAMS)
        e = (composed(key._phase(*sent, BATCH)) - rounded(r) + Q // 2) % Q - Q // 2
        seen = noise(key, *hidden(key, weights, request, BATCH), BATCH).astype(float)
        return np.linalg.lstsq(e.astype(float), seen[:, 0], rcond=None)[0]

    assert np.abs(estimate()).min() > 1e6
    monkeypatch.setattr(server, "add_flood", lambda *_: None)
    assert np.abs(estimate() - weights[0]).max() < 12  # ten deviations


def test_weights_are_not_in_the_second_half(key: WordKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the encryption of zero the second half is W times what the client sent, rounded: it tries all W."""
    shape, weights = replace(BATCH, in_features=2), matrix(1, 2, seed=4)
    request = key.requests(words((N, 2)), shape)
    sent = expand_uniform(request[0][:SEED_BYTES], 0, (N, 2), WORD_PARAMS)
    intt(sent, WORD_PARAMS)
    unit = 1 << 60
    known = (composed(sent[:, :2]) * unit // Q).astype(np.int64)
    tried = np.stack(np.meshgrid(np.arange(-127, 128), np.arange(-127, 128)), axis=-1).reshape(-1, 2)

    def attack() -> list[list[int]]:
        (answer, _), *_ = Provisioner(key.public).answers(weights, request, shape)
        _, c1 = lwe.unpack_answer(answer, shape, 1)
        seen = (composed(c1[:, :2, 0]) * unit // math.prod(PRIMES[:3])).astype(np.int64)
        off = (tried @ known.T - seen + unit // 2) % unit - unit // 2  # of both coefficients, as parts of the modulus
        return tried[(np.abs(off) < 1 << 12).all(axis=1)].tolist()

    assert attack() == []
    for drawn in ("random_ternary", "random_errors"):
        monkeypatch.setattr(server, drawn, lambda shape: np.zeros(shape, np.int8))
    assert attack() == weights.tolist()


def test_the_same_request_is_answered_differently(key: WordKey) -> None:
    shape, weights = word_shape(16, 40, 50), matrix(50, 40)
    request = key.requests(words((16, 40)), shape)
    provisioner = Provisioner(key.public)
    halves = []
    for _ in range(2):
        (answer, _), *_ = provisioner.answers(weights, request, shape)
        halves.append(lwe.unpack_answer(answer, shape, shape.output_blocks))
    for one, other in zip(*halves, strict=True):
        assert (one == other).mean() < 1e-3
    # Nor do two blocks of one answer share their zero.
    shape, weights = word_shape(N, 1, 2), np.ones((2, 1), np.int8)
    (answer, _), *_ = provisioner.answers(weights, key.requests(words((N, 1)), shape), shape)
    _, c1 = lwe.unpack_answer(answer, shape, 2)
    assert (c1[:, :, 0] == c1[:, :, 1]).mean() < 1e-3


def test_a_key_is_hidden_and_its_requests_are_fresh(key: WordKey) -> None:
    assert repr(key) == "WordKey(hidden)"
    with pytest.raises(TypeError, match="neither copied nor serialised"):
        pickle.dumps(key)
    shape, r = word_shape(16, 40, 50), words((16, 40))
    one, other = (lwe.unpack_seeded(key.requests(r, shape)[0], shape.input_blocks) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert (a == b).mean() < 1e-3
    assert WordKey().public != key.public


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_malformed_messages_are_refused(key: WordKey) -> None:
    shape, weights, r = WordShape(16, 16, 32, 400, 600), matrix(600, 400), words((16, 400))
    request = key.requests(r, shape)
    provisioner = Provisioner(key.public)
    answer = [message for message, _ in provisioner.answers(weights, request, shape)]
    assert len(request) > 1
    assert len(answer) > 1
    full = b"\xff" * (len(request[0]) - SEED_BYTES)
    for bad in (
        request[1:],
        [*request, request[0]],
        [request[0][:-1], *request[1:]],
        [request[0][:32] + full, *request[1:]],
    ):
        with pytest.raises(ProtocolError):
            provisioner.answers(weights, bad, shape)
    with pytest.raises(ProtocolError, match="a matrix of"):
        provisioner.answers(weights.T, request, shape)
    for wrong in (answer[1:], [*answer, answer[0]], [answer[0] + b"\0", *answer[1:]], [b"\xff" * len(answer[0])]):
        with pytest.raises(ProtocolError):
            key.open(wrong, shape)
    for rows in (r[:, 1:], words((17, 400)), r[:0], r[0]):
        with pytest.raises(ProtocolError, match="rows of shape"):
            key.requests(rows, shape)
    for public in (key.public[:-8], key.public[:32] + b"\xff" * (len(key.public) - 32)):
        with pytest.raises(ProtocolError):
            Provisioner(public)
    with pytest.raises(ValueError, match="1 to 8192 rows"):
        word_shape(N + 1, 1, 1)
    with pytest.raises(ValueError, match="at most 8192"):
        WordShape(16, 32, 17, 400, 300)
    with pytest.raises(ValueError, match="fewer rows"):
        word_shape(N // 2, 20_000, 1)
    assert word_shape(N // 2, 10_000, 1).input_blocks <= 1 << 13


def test_a_norm_that_is_not_hidden_is_refused() -> None:
    """At the flood of a single row, a block of eight full rows is."""
    params = replace(WORD_PARAMS, flood_bits=108)
    key, weights = WordKey(params), np.full((8, 1536), -127, np.int8)
    shape = WordShape(16, 64, 8, 1536, 8)
    with pytest.raises(RangeError, match="not hidden"):
        Provisioner(key.public, params).answers(weights, key.requests(words((16, 1536)), shape), shape)


def test_a_key_is_given_up(key: WordKey) -> None:
    shape, weights = word_shape(16, 40, 50), matrix(50, 40)
    provisioner = Provisioner(key.public)
    provisioner.coefficients = (1 << lwe.LIFETIME_LOG2) - shape.rows * shape.outputs * shape.output_blocks
    request = key.requests(words((16, 40)), shape)
    list(provisioner.answers(weights, request, shape))
    with pytest.raises(LimitError, match="begin a session"):
        list(provisioner.answers(weights, request, shape))


# -- online ------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
KERNELS = [server.Int8Words(), server.TorchInt8Words(), server.Float64Words()]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("rows", "m", "n"), [(1, 3, 5), (3, 40, 600), (4, 7, 9), (33, 24, 264)])
def test_every_kernel_is_exact(kernel: server.WordKernel, rows: int, m: int, n: int) -> None:
    if kernel.name != "float64" and ring.choose_kernel(CPU).name == "float64":
        pytest.skip("torch._int_mm is wrong on this processor")
    weights, u = matrix(m, n), words((rows, n))
    weights[0], weights[-1], u[0] = 127, -128, EDGES[np.arange(n) % len(EDGES)]
    u[-1] = 0x7F7F7F7F7F7F7F80
    assert (WordMatrix(torch.from_numpy(weights), kernel).product(u) == times(weights, u)).all()


def test_the_choice_is_that_of_the_other_profile() -> None:
    assert choose_kernel(CPU).name == ring.choose_kernel(CPU).name


def test_kernel_that_saturates_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of oneDNN without VNNI: one side is made unsigned, and pairs of products saturate at 16 bits."""

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        signed = b.to(torch.int32)
        products = (a.to(torch.int32) + 128)[:, :, None] * signed[None]
        pairs = products.view(a.shape[0], -1, 2, b.shape[1]).sum(2).clamp(-32768, 32767)
        return (pairs.sum(1) - 128 * signed.sum(0)).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert choose_kernel(CPU).name == "float64"


def test_rows_of_another_length_are_refused() -> None:
    held = WordMatrix(torch.from_numpy(matrix(4, 6)), choose_kernel(CPU))
    for rows in (words((1, 5)), words((6,))):
        with pytest.raises(ProtocolError, match="rows of shape"):
            held.product(rows)


def test_benchmark() -> None:
    """It compares its results itself; a batch costs fewer bytes a token than a few rows."""
    few, batch = cost(16, 40, 30), cost(N, 40, 30)
    assert 0 < batch.up < few.up
    assert 0 < batch.down < few.down
