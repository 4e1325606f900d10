"""Microsoft SEAL as the oracle: same ciphertexts, same keys, same products, whichever side does the work."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="pip install -c constraints.txt -e '.[peers]'")

from seal import I64, U32, Seal, seal_context

from sordino.client.rlwe import SecretKey
from sordino.shared.packing import BlockShape, encode_rows, encode_weights, multiply, useful
from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS, expand_uniform, intt, ntt

pytestmark = pytest.mark.peers
N = PARAMS.n


def secret_of(key: SecretKey) -> I64:
    """The coefficients of one of our keys."""
    s = key._s[:, :, None].copy()
    intt(s)
    signed = [np.where(c > q // 2, c.astype(np.int64) - q, c) for c, q in zip(s[:, :, 0], PARAMS.primes, strict=True)]
    assert np.array_equal(signed[0], signed[1])
    return signed[0].astype(np.int64)


def key_of(secret: I64) -> SecretKey:
    """A key of ours with these coefficients."""
    key = SecretKey()
    s = np.stack([(secret % q).astype(np.uint32) for q in PARAMS.primes])[:, :, None]
    ntt(s)
    key._s = np.ascontiguousarray(s[:, :, 0])
    return key


def transformed(half: U32) -> U32:
    """``[2, N]`` coefficients to one column in NTT form."""
    column = half[:, :, None].copy()
    ntt(column)
    return column


def coefficients(column: U32) -> U32:
    half = column.copy()
    intt(half)
    return half[:, :, 0]


def message(seed: int) -> U32:
    drawn: U32 = np.random.default_rng(seed).integers(0, P, N, dtype=np.uint32)
    drawn[:3] = 0, 1, P - 1
    return drawn


def test_seal_accepts_the_parameters_as_128_bits_secure() -> None:
    assert seal_context(strict=True).parameters_set()


def test_seal_decrypts_ours() -> None:
    key, m = SecretKey(), message(1)
    c1 = expand_uniform(bytes(range(32)), 0, (N, 1))
    c0 = key.encrypt(m[:, None], c1)
    seal = Seal(secret_of(key))
    assert np.array_equal(seal.secret(), secret_of(key))
    ciphertext = seal.ciphertext(coefficients(c0), coefficients(c1))
    assert np.array_equal(seal.decrypt(ciphertext), m)
    # As much noise as SEAL's own: its sampler is the same.
    assert seal.noise_budget(ciphertext) == pytest.approx(seal.noise_budget(seal.encrypt(m)), abs=1)


def test_we_decrypt_seals() -> None:
    seal, m = Seal(), message(2)
    c0, c1 = (transformed(half) for half in seal.halves(seal.encrypt(m)))
    assert np.array_equal(key_of(seal.secret()).decrypt(c0, c1)[:, 0], m)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_block_product_is_seals_product_with_a_plaintext(rows: int) -> None:
    """The same ciphertext, residue by residue, and the right numbers when SEAL decrypts it."""
    rng = np.random.default_rng(3)
    shape = BlockShape(rows, 32, N // rows // 32, in_features=32, out_features=N // rows // 32)
    weights = rng.integers(-127, 128, (shape.out_features, shape.in_features)).astype(np.int8)
    x = rng.integers(0, P, (rows, shape.in_features), dtype=np.uint32)

    key = SecretKey()
    c1 = expand_uniform(bytes(range(32)), 7, (N, 1))
    c0 = key.encrypt(encode_rows(x, shape), c1)
    ours = [half[:, :, 0] for half in multiply(encode_weights(weights, shape), [(c0, c1.__getitem__)], shape)]

    seal = Seal(secret_of(key))
    polynomial = np.zeros(N, np.int64)  # the weights of docs/protocol.md §4.1, written out
    for i in range(shape.outputs):
        for j in range(shape.inputs):
            polynomial[rows * (i * shape.inputs + shape.inputs - 1 - j)] = weights[i, j]
    product = seal.times(seal.ciphertext(coefficients(c0), coefficients(c1)), polynomial)
    for theirs, half in zip(seal.halves(product), ours, strict=True):
        assert np.array_equal(theirs, coefficients(half))

    exact = [[sum(int(w) * int(v) for w, v in zip(line, row, strict=True)) % P for row in x] for line in weights]
    assert seal.decrypt(product)[useful(shape)].reshape(shape.outputs, rows).tolist() == exact
