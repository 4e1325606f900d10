"""Pages: the packing in exact arithmetic, the scheme end to end, its noise beside the bound, scales and outliers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from sordino.client.pages import (
    PageKey,
    decoded,
    encode_keys,
    encode_probabilities,
    encode_queries,
    encode_values,
    output_error,
    score_error,
)
from sordino.server.pagepool import Pages
from sordino.server.pages import evaluate
from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.pages import COARSE_BITS, KEYS, VALUES, Level, N, PageShape, Read, pack_answers, unpack_answers
from sordino.shared.rlwe import PAGE_PARAMS, PARAMS, VALUE_PARAMS, RlweParams, expand_uniform, unpack

HEAD_SIZES = (32, 64, 80, 128)


@pytest.fixture(scope="module")
def key() -> PageKey:
    return PageKey()


def shape_of(head_size: int) -> PageShape:
    return PageShape(head_size, N // head_size)


def ciphertexts(key: PageKey, polynomials: np.ndarray, level: Level = KEYS, parallel: bool = False) -> np.ndarray:
    """Encrypted, packed, unpacked: as the server has them."""
    count = len(polynomials)
    seed, c0 = key.encrypt(polynomials.copy(), level, parallel=parallel)
    assert len(seed) == 32
    assert len(c0) == count * level.ciphertext_bytes
    halves = [unpack(c0, (level.primes, count, N), level.params), expand_uniform(seed, 0, (count, N), level.params)]
    return np.ascontiguousarray(np.stack(halves).transpose(2, 0, 1, 3))


def stored(ciphertexts: np.ndarray) -> Pages:
    """As a page memory has them."""
    count, _, primes, _ = ciphertexts.shape
    residues = np.ascontiguousarray(ciphertexts.transpose(0, 2, 1, 3)).reshape(-1, 2, N)
    return Pages(residues, np.arange(count * primes).reshape(count, primes))


def product(
    key: PageKey, a: np.ndarray, b: np.ndarray, sums: list[list[tuple[int, int]]], read: Read, level: Level = KEYS
) -> np.ndarray:
    answers = evaluate(ciphertexts(key, a, level), stored(ciphertexts(key, b, level)), sums, read, level)
    return key.decrypt(pack_answers(answers, level), len(sums), read, level)


def negacyclic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    whole = np.convolve(a, b)
    whole = np.concatenate([whole, np.zeros(2 * N - whole.size, whole.dtype)])
    return whole[:N] - whole[N:]


# -- parameters ------------------------------------------------------------------------------------------------------


def test_the_parameters_are_the_stated_ones() -> None:
    assert RlweParams(n=4096, primes=(134176769, 134111233, 134012929), eta=21) == PAGE_PARAMS
    assert RlweParams(n=4096, primes=(134176769, 134111233), eta=21) == VALUE_PARAMS
    assert 80.9 < np.log2(float(PAGE_PARAMS.q)) < 109
    assert RlweParams(n=2048, primes=(134176769, 134111233), eta=21) == PARAMS


@pytest.mark.parametrize(
    ("n", "primes", "why"),
    [
        (2048, (134176769, 134111233, 134012929), "below 128 bits"),
        (1024, (134176769, 134111233), "below 128 bits"),
        (16384, (134176769, 134111233), "no row"),
        (4096, (134176769, 134111233, 134012929, 133963777), "two or three primes"),
        (4096, (134176769,), "two or three primes"),
        (4096, (134176769, 134111233, 134176769), "all different"),
        (4096, (134176769, 134111233, 134217689), "not a 27-bit prime"),
        (4096, (134176769, 134111233, 40961), "not a 27-bit prime"),
    ],
)
def test_other_parameters_are_refused(n: int, primes: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RlweParams(n=n, primes=primes, eta=21)


# -- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_formulas_in_exact_arithmetic(head_size: int) -> None:
    """Also that what wraps around falls where nothing is read: pages are full, and entries large everywhere."""
    shape, rng = shape_of(head_size), np.random.default_rng(head_size)
    keys, values = rng.integers(-1000, 1000, (2, shape.tokens, head_size))
    query, weights = rng.integers(-1000, 1000, head_size), rng.integers(1, 1000, shape.tokens)
    polynomial = np.zeros((4, N), np.int64)
    for t in range(shape.tokens):
        for j in range(head_size):
            polynomial[0, t * head_size + j] = keys[t, j]
            polynomial[1, head_size - 1 - j] = query[j]
            polynomial[2, j * shape.tokens + t] = values[t, j]
            polynomial[3, shape.tokens - 1 - t] = weights[t]
    for a, b, read, expected in (
        (0, 1, shape.scores, keys @ query),
        (2, 3, shape.outputs, weights @ values),
    ):
        at = read.first + read.step * np.arange(read.count)
        assert np.array_equal(negacyclic(polynomial[a], polynomial[b])[at], expected)
    # and the encoders do the same, up to their scale
    for encoded, scale, row in (
        (*encode_keys(keys[None].astype(float)), 0),
        (*encode_queries(query[None].astype(float)), 1),
        (*encode_values(values[None].astype(float)), 2),
    ):
        assert np.array_equal(np.rint(encoded[0] / scale[0]), polynomial[row])
    encoded, common = encode_probabilities(weights[None, None].astype(float), np.ones((1, 1)))
    assert np.array_equal(np.rint(encoded[0, 0] / common[0]), polynomial[3])


def test_pages_that_do_not_fit_are_refused() -> None:
    for head_size, tokens in ((64, 65), (N + 1, 1), (64, 0), (0, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            PageShape(head_size, tokens)
    for first, step, count in ((0, 1, N + 1), (N, 1, 1), (63, 64, 65), (-1, 1, 1), (0, 0, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match="are not below"):
            Read(first, step, count)


# -- the scheme ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_scores_are_within_the_stated_noise(key: PageKey, head_size: int) -> None:
    shape, rng = shape_of(head_size), np.random.default_rng(head_size)
    keys, queries = rng.uniform(-30, 30, (2, shape.tokens, head_size)), rng.uniform(-30, 30, (3, head_size))
    pages, key_scale = encode_keys(keys)
    operands, query_scale = encode_queries(queries)
    read = product(key, operands, pages, [[(0, 0)], [(1, 1)], [(2, 0)]], shape.scores)
    which = [0, 1, 0]
    error = decoded(read, (query_scale * key_scale[which])[:, None], KEYS) - np.einsum(
        "ctd,cd->ct", keys[which], queries
    )
    bound = np.linalg.norm(keys, axis=2).max() * np.linalg.norm(queries, axis=1).max()
    expected = score_error(shape.tokens, bound)
    assert expected < 2**-14
    assert error.std() < 1.25 * expected
    assert np.abs(error).max() < 6 * expected


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_outputs_of_several_pages_are_within_the_stated_noise(key: PageKey, head_size: int) -> None:
    """Pages of very different size: each has a scale of its own, and the sum has one."""
    shape, rng = shape_of(head_size), np.random.default_rng(head_size)
    values = rng.uniform(-1, 1, (3, shape.tokens, head_size)) * np.array([30, 0.01, 2])[:, None, None]
    weights = rng.random((2, 3, shape.tokens)) ** 8
    weights /= weights.sum(axis=(1, 2), keepdims=True)
    pages, scales = encode_values(values)
    operands, common = encode_probabilities(weights, np.stack([scales, scales]))
    sums = [[(0, 0), (1, 1), (2, 2)], [(3, 0), (4, 1), (5, 2)]]
    read = product(key, operands.reshape(-1, N), pages, sums, shape.outputs, VALUES)
    error = decoded(read, common[:, None], VALUES) - np.einsum("cpt,ptd->cd", weights, values)
    norms = np.linalg.norm(weights, axis=2) * np.linalg.norm(values, axis=1).max(axis=1)
    expected = output_error(head_size, 3, norms.sum(axis=1).max())
    assert expected < 2**-14
    assert error.std() < 1.25 * expected
    assert np.abs(error).max() < 6 * expected


@pytest.mark.parametrize("outlier", [1e2, 1e4])
def test_large_keys_do_not_wrap(key: PageKey, outlier: float) -> None:
    """A channel that is far larger than others, as models have them, for a query that meets it head-on."""
    shape, rng = shape_of(64), np.random.default_rng(0)
    keys = rng.uniform(-3, 3, (1, shape.tokens, 64))
    keys[:, :, 5] = outlier * rng.uniform(0.9, 1, shape.tokens)
    queries = rng.normal(size=(2, 64))
    queries[1] = keys[0, 0] / np.linalg.norm(keys[0, 0])  # the score is the bound itself
    pages, key_scale = encode_keys(keys)
    operands, query_scale = encode_queries(queries)
    read = product(key, operands, pages, [[(0, 0)], [(1, 0)]], shape.scores)
    scores = decoded(read, (query_scale * key_scale)[:, None], KEYS)
    error = scores - queries @ keys[0].T
    assert error.std() / 8 < 2**-12  # as the softmax sees it: divided by sqrt(64)
    assert np.abs(error).max() < 6 * score_error(shape.tokens, 12 * outlier)


def test_zeros_and_tiny_values(key: PageKey) -> None:
    shape = shape_of(64)
    keys = np.zeros((2, shape.tokens, 64))
    keys[1] = 1e-20
    pages, key_scale = encode_keys(keys)
    operands, query_scale = encode_queries(np.stack([np.zeros(64), np.full(64, 1e-20)]))
    sums = [[(i, k)] for i in range(2) for k in range(2)]
    scores = decoded(product(key, operands, pages, sums, shape.scores), 1.0, KEYS)
    assert np.isfinite(scores).all()
    exact = decoded(product(key, operands, pages, [[(1, 1)]], shape.scores), key_scale[1] * query_scale[1], KEYS)
    assert np.allclose(exact, 64e-40, rtol=1e-6, atol=0)
    _, common = encode_probabilities(np.zeros((1, 2, shape.tokens)), np.ones((1, 2)))
    assert np.isfinite(common).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(bad: float) -> None:
    x = np.ones((1, 4, 8))
    x[0, 1, 2] = bad
    for encode in (encode_keys, encode_values):
        with pytest.raises(RangeError, match="nothing was sent"):
            encode(x)
    with pytest.raises(RangeError, match="nothing was sent"):
        encode_queries(x[0])


@pytest.mark.parametrize("level", [KEYS, VALUES], ids=["keys", "values"])
def test_two_threads_give_the_same(key: PageKey, level: Level) -> None:
    rng, shape = np.random.default_rng(3), shape_of(64)
    a, b = (ciphertexts(key, rng.uniform(-1e9, 1e9, (20, N)), level) for _ in range(2))
    sums = [[(i, i)] for i in range(20)]
    one, two = (evaluate(a, stored(b), sums, shape.scores, level, parallel=parallel) for parallel in (False, True))
    assert all(np.array_equal(x, y) for x, y in zip(one, two, strict=True))
    m = np.rint(rng.uniform(-1e9, 1e9, (33, N)))
    ones = ciphertexts(key, np.eye(1, N) * 2.0**20, level)
    sent, whole = ciphertexts(key, m, level, parallel=True), Read(0, 1, N)
    answers = evaluate(sent, stored(ones), [[(i, 0)] for i in range(33)], whole, level)
    read = decoded(key.decrypt(pack_answers(answers, level), 33, whole, level), 2.0**20, level)
    # The answer is 2^50 modulo q, which is read with `bits`; the noise of `ones` meets 4096 coefficients of 10^9.
    noise = 3.3 * 1e9 * np.sqrt(N / 3) / 2**20
    assert np.abs(read - m).max() < 6 * (noise + 1500 * float(level.params.q) * 2.0 ** (-level.bits - 20))


def test_the_same_plaintext_never_looks_the_same(key: PageKey) -> None:
    m = np.zeros((2, N))
    first, second = key.encrypt(m.copy(), KEYS), key.encrypt(m.copy(), KEYS)
    assert first[0] != second[0]
    assert first[1] != second[1]
    a = unpack(first[1], (3, 2, N), PAGE_PARAMS)
    assert not np.array_equal(a[:, 0], a[:, 1])


def test_keys_stay_here(key: PageKey) -> None:
    assert repr(key) == "PageKey(hidden)"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="neither copied nor serialised"):
            attempt(key)


def test_answers_of_another_size_are_refused(key: PageKey) -> None:
    read = Read(63, 64, 64)
    rng = np.random.default_rng(0)
    for level in (VALUES, KEYS):
        c1, c2 = rng.integers(0, 1 << (level.bits - COARSE_BITS), (2, 2, N), np.uint64)
        parts = rng.integers(0, 1 << level.bits, (2, 64), np.uint64), c1, c2
        packed = pack_answers(parts, level)
        assert all(np.array_equal(a, b) for a, b in zip(parts, unpack_answers(packed, 2, read, level), strict=True))
        assert sum(len(part) for part in packed) == 2 * level.answer_bytes(read)
    for broken in ((packed[0][:-1], *packed[1:]), (packed[0], packed[2], packed[1]), (b"", b"", b"")):
        with pytest.raises(ProtocolError):
            key.decrypt(broken, 2, read, KEYS)
