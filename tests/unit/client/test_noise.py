"""Decryption noise: measured over ten million coefficients, it lies under the proven bound; and the parameter table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from sordino.client.rlwe import SecretKey
from sordino.shared import packing
from sordino.shared.errors import RangeError
from sordino.shared.ring import P
from sordino.shared.rlwe import (
    FAILURE_LOG2,
    MAX_KEY_WEIGHT,
    PARAMS,
    SWITCH_BITS,
    RlweParams,
    expand_uniform,
    intt,
    switch,
)

N, (Q0, Q1) = PARAMS.n, PARAMS.primes
I64 = NDArray[np.int64]
# Inputs and outputs of the measured product: N x OUTPUTS coefficients, each read.
INPUTS, OUTPUTS = 64, 5000


def integers(residues: NDArray[np.uint32]) -> I64:
    """[2, n, C] residues to centred integers modulo q."""
    t = (residues[1].astype(np.int64) - residues[0]) * pow(Q0, -1, Q1) % Q1
    x = residues[0] + Q0 * t
    return np.where(x > PARAMS.q // 2, x - PARAMS.q, x)


def times_secret(c: NDArray[np.uint32], key: SecretKey) -> NDArray[np.uint32]:
    return np.stack(
        [(c[i].astype(np.uint64) * key._s[i][:, None] % q).astype(np.uint32) for i, q in enumerate(PARAMS.primes)]
    )


@pytest.fixture(scope="module")
def product() -> tuple[SecretKey, NDArray[np.int8], NDArray[np.uint32], I64]:
    """Key, weights, both halves of the answer in NTT form, and the true results."""
    rng = np.random.default_rng(11)
    weights = rng.choice([-127, 127], (OUTPUTS, INPUTS)).astype(np.int8)
    x = rng.integers(0, P, (N, INPUTS), dtype=np.uint32)
    (part,) = packing.plan(N, INPUTS, OUTPUTS)
    key = SecretKey()
    encoded = packing.encode_rows(x, part.shape)
    c1 = expand_uniform(bytes(32), 0, encoded.shape)
    c0, w = key.encrypt(encoded, c1), packing.encode_weights(weights, part.shape)
    halves = packing.multiply(w, [(c0, c1.__getitem__)], part.shape, parallel=True)
    out = [half[:, :, 0] for half in halves]
    # 2^32 * 2^7 * 64 < 2^53: exact in float64
    y = (x.astype(np.float64) @ weights.T.astype(np.float64)).astype(np.int64) % P
    return key, weights, out, y


def test_noise_of_ten_million_coefficients(
    product: tuple[SecretKey, NDArray[np.int8], NDArray[np.uint32], I64],
) -> None:
    key, weights, out, y = product
    phase = out[0].astype(np.uint64) + times_secret(out[1], key)
    residues = np.stack([(phase[i] % q).astype(np.uint32) for i, q in enumerate(PARAMS.primes)])
    intt(residues)
    quotient, remainder = divmod(PARAMS.q, P)
    message = quotient * y + (remainder * y.astype(np.uint64) // np.uint64(P)).astype(np.int64)
    noise = (integers(residues) - message + PARAMS.q // 2) % PARAMS.q - PARAMS.q // 2
    assert noise.size >= 10**7
    norm = float(np.linalg.norm(weights[0].astype(np.float64)))
    assert abs(noise.std() / (norm * math.sqrt(PARAMS.eta / 2 + 1 / 12)) - 1) < 0.02
    assert abs(noise).max() < PARAMS.budget() * norm / PARAMS.max_norm(), "over the bound that fails once in 2^88"
    assert abs(noise).max() > 4.5 * noise.std(), "ten million samples reach further"


def test_noise_of_switched_answers(product: tuple[SecretKey, NDArray[np.int8], NDArray[np.uint32], I64]) -> None:
    key, weights, out, y = product
    c0, c1 = out[0].copy(), out[1].copy()
    intt(c0)
    intt(c1)
    modulus = 1 << SWITCH_BITS
    s0, s1 = switch(c0, SWITCH_BITS).astype(np.int64), switch(c1, SWITCH_BITS)
    residues = np.stack([(s1 % q).astype(np.uint32) for q in PARAMS.primes])
    from sordino.shared.rlwe import ntt

    ntt(residues)
    product_s = times_secret(residues, key)
    intt(product_s)
    phase = (s0 + integers(product_s)) % modulus
    message = np.rint(y.astype(np.float64) * (modulus / P)).astype(np.int64)
    noise = (phase - message + modulus // 2) % modulus - modulus // 2
    assert noise.size >= 10**7
    norm = float(np.linalg.norm(weights[0].astype(np.float64)))
    scale = modulus / PARAMS.q
    expected = math.sqrt((scale * norm) ** 2 * (PARAMS.eta / 2 + 1 / 12) + (1 + N * 2 / 3) / 12)
    assert abs(noise.std() / expected - 1) < 0.1
    allowed = PARAMS.budget(SWITCH_BITS)
    variance = (scale * norm) ** 2 * (PARAMS.eta / 2 + 0.25) + (1 + MAX_KEY_WEIGHT) / 12
    assert abs(noise).max() < math.sqrt(2 * variance * math.log(2) * (1 - FAILURE_LOG2)) < allowed


def test_a_coefficient_fails_less_than_once_in_two_to_the_88() -> None:
    """The bound, written out again: 2 exp(-t^2 / 2v) at the largest norm allowed, and for a token of 2^24."""
    for bits, scale in ((0, 1.0), (SWITCH_BITS, 2.0**SWITCH_BITS / PARAMS.q)):
        norm = PARAMS.max_norm(bits)
        variance = (scale * norm) ** 2 * (PARAMS.eta / 2 + 0.25) + ((1 + MAX_KEY_WEIGHT) / 12 if bits else 0)
        failure = 1 - PARAMS.budget(bits) ** 2 / (2 * variance) / math.log(2)
        assert failure + 24 <= -64 + 1e-6
    PARAMS.check_norm("fine", PARAMS.max_norm(SWITCH_BITS), SWITCH_BITS)
    with pytest.raises(RangeError, match="noise bound"):
        PARAMS.check_norm("bad", 1.01 * PARAMS.max_norm(SWITCH_BITS), SWITCH_BITS)
    assert PARAMS.max_norm(38) == 0.0, "a modulus that leaves no room for the rounding allows nothing"


def test_every_plan_keeps_to_the_bound() -> None:
    for bits in (0, SWITCH_BITS):
        for n, m in ((576, 3072), (1536, 576), (4096, 22016), (14336, 4096), (28672, 8192)):
            for rows in (1, 8, 64, 256):
                for part in packing.plan(rows, n, m, prices=packing.Prices(bits=bits), max_bytes=8 << 20):
                    worst = 128 * math.sqrt(part.shape.in_features * part.shape.outputs)
                    assert worst <= PARAMS.max_norm(bits)


def test_keys_are_ternary_and_not_too_heavy() -> None:
    from sordino.client.rlwe import _ternary

    s = _ternary(200_000)
    assert set(np.unique(s)) == {-1, 0, 1}
    assert abs((s == 0).mean() - 1 / 3) < 0.005
    for _ in range(20):
        key = SecretKey()
        residues = np.ascontiguousarray(key._s[:, :, None])
        intt(residues)
        assert int(abs(integers(residues)).sum()) <= MAX_KEY_WEIGHT


@pytest.mark.parametrize(
    ("n", "primes", "eta"),
    [
        (2048, (134176769, 134176769), 21),  # the same prime twice
        (2048, (268369921, 134111233), 21),  # one bit more: log2 q over 54
        (2048, (67043329, 134111233), 21),  # one bit less: the bounds are for 27
        (2048, (134176769, 134111233), 10),  # narrower errors
        (1024, (134176769, 134111233), 21),  # log2 q over 27
        (2048, (134176771, 134111233), 21),  # no prime
        (2000, (134176769, 134111233), 21),  # no row of the standard
    ],
)
def test_parameters_outside_the_table_are_refused(n: int, primes: tuple[int, int], eta: int) -> None:
    with pytest.raises(ValueError, match=r"prime|security|deviation|row"):
        RlweParams(n=n, primes=primes, eta=eta)
