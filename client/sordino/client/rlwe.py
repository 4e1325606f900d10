"""The secret half of RLWE: keys, encryption and decryption. Parameters and bounds: :mod:`sordino.shared.rlwe`.

A :class:`SecretKey` lives for one provisioning batch or one set of check vectors and is never stored (§4.4: a server
that nudges ciphertexts and watches for aborts learns about the noise, hence about the key).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from sordino.client.interrupts import interrupts
from sordino.shared.jit import compiled
from sordino.shared.packing import BlockShape, read_coefficients
from sordino.shared.ring import P
from sordino.shared.rlwe import (
    MAX_KEY_WEIGHT,
    PARAMS,
    U32,
    U64,
    RlweParams,
    each_prime,
    expand_uniform_of_prime,
    intt_of_prime,
    ntt,
    ntt_of_prime,
    reduced,
)

_Q0, _Q1 = PARAMS.primes
_Q0_INV: Final = pow(_Q0, -1, _Q1)
_QUOT, _REM = divmod(PARAMS.q, P)


def _random_bytes(count: int) -> bytes:
    """CSPRNG output: AES-256-CTR under a fresh key of the system (several times faster than getrandom for bulk)."""
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor().update(bytes(count))


@compiled
def _popcount21(x: int) -> int:
    x = x - ((x >> 1) & 0x155555)
    x = (x & 0x133333) + ((x >> 2) & 0x133333)
    x = (x + (x >> 4)) & 0x10F0F0F
    return (x + (x >> 8) + (x >> 16)) & 0x1F


@compiled
def _encode(m: U32, noise: U64, q: int, out: U32) -> None:
    """(round(q*m/p) + e) mod one prime, e centred binomial with eta = 21 from 42 bits of ``noise``.

    q = QUOT*p + REM, so round(q*m/p) = QUOT*m + floor((REM*m + p/2) / p). For the floor of y / p, p = 2^32 - 5 and
    y = a*2^32 + b: y = a*p + 5a + b, and 5a + b is below 6 * 2^32, where the same step leaves one comparison.
    """
    p, low, per_one = np.uint64(P), np.uint64(0xFFFFFFFF), 1.0 / q
    for i in range(m.shape[0]):
        for j in range(m.shape[1]):
            v = np.uint64(m[i, j])
            y = np.uint64(_REM) * v + np.uint64(P // 2)
            a = y >> np.uint64(32)
            rest = np.uint64(5) * a + (y & low)
            b = rest >> np.uint64(32)
            floor = a + b + np.uint64(np.uint64(5) * b + (rest & low) >= p)
            bits = np.int64(noise[i, j] & np.uint64(0x3FFFFFFFFFF))
            e = np.uint64(q + _popcount21(bits & 0x1FFFFF) - _popcount21(bits >> 21))
            out[i, j] = np.uint32(reduced(np.uint64(_QUOT) * v + floor + e, q, per_one))


@compiled
def _mask(c0: U32, c1: U32, s: U32, q: int, sign: int) -> None:
    """c0 += sign * c1 * s mod q, column by column; ``s [n]`` in NTT form."""
    per_one = 1.0 / q
    for i in range(c0.shape[0]):
        si = np.uint64(s[i]) if sign > 0 else np.uint64(q) - np.uint64(s[i])
        for j in range(c0.shape[1]):
            c0[i, j] = np.uint32(reduced(np.uint64(c0[i, j]) + np.uint64(c1[i, j]) * si, q, per_one))


@compiled
def _times(c: U32, s: U32, q: int) -> None:
    """c *= s mod q, column by column."""
    per_one = 1.0 / q
    for i in range(c.shape[0]):
        si = np.uint64(s[i])
        for j in range(c.shape[1]):
            c[i, j] = np.uint32(reduced(np.uint64(c[i, j]) * si, q, per_one))


@compiled
def _decode(d0: U32, d1: U32, out: U32) -> None:
    """round(p*x/q) mod p for x = CRT(d0, d1).

    x/q = d0/(q0 q1) + t/q1 with t = (d1 - d0) q0^-1 mod q1, so p*x/q = (p*t + p*d0/q0) / q1: the integer part is exact
    in 64 bits, the fraction needs only the precision of the noise margin.
    """
    p, q1 = np.uint64(P), np.uint64(_Q1)
    for i in range(d0.shape[0]):
        for j in range(d0.shape[1]):
            a = np.uint64(d0[i, j])
            t = (np.uint64(d1[i, j]) + q1 - a % q1) * np.uint64(_Q0_INV) % q1
            whole = p * t
            high = whole // q1
            rest = np.float64(np.int64(whole - high * q1)) + np.float64(np.int64(p * a)) / np.float64(_Q0)
            y = high + np.uint64(np.int64(rest / np.float64(_Q1) + 0.5))
            out[i, j] = np.uint32(y % p)


@compiled
def _residues(c: U64, q: int, out: U32) -> None:
    per_one = 1.0 / q
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            out[i, j] = np.uint32(reduced(c[i, j], q, per_one))


@compiled
def _decode_switched(d0: U32, d1: U32, c0: U64, bits: int, out: U32) -> None:
    """round(p (c0 + x) / 2^bits) mod p with x = CRT(d0, d1) centred."""
    half, q = np.int64(_Q0) * _Q1 // 2, np.int64(_Q0) * _Q1
    q1, mask = np.uint64(_Q1), np.int64((1 << bits) - 1)
    scale = np.float64(P) / np.float64(1 << bits)
    for i in range(c0.shape[0]):
        for j in range(c0.shape[1]):
            a = np.uint64(d0[i, j])
            t = (np.uint64(d1[i, j]) + q1 + q1 - a) * np.uint64(_Q0_INV) % q1
            x = np.int64(a + np.uint64(_Q0) * t)
            x = x - q if x > half else x
            v = (x + np.int64(c0[i, j])) & mask
            out[i, j] = np.uint32(np.uint64(np.float64(v) * scale + 0.5) % np.uint64(P))


def _ternary(count: int) -> NDArray[np.int64]:
    """Uniform in {-1, 0, 1} by rejection: bytes below 255 = 3 * 85."""
    kept = np.empty(0, np.uint8)
    while kept.size < count:
        draw = np.frombuffer(_random_bytes(2 * count), np.uint8)
        kept = np.concatenate([kept, draw[draw < 255]])
    return kept[:count].astype(np.int64) % 3 - 1


class SecretKey:
    """A ternary RLWE secret, fresh from the system's CSPRNG. Never serialised; its repr shows nothing."""

    __slots__ = ("_parallel", "_params", "_s")

    def __init__(self, params: RlweParams = PARAMS, *, parallel: bool = False) -> None:
        self._params = params
        self._parallel = parallel
        ternary = _ternary(params.n)
        while int((ternary != 0).sum()) > MAX_KEY_WEIGHT:
            ternary = _ternary(params.n)
        s = np.stack([(ternary % q).astype(np.uint32)[:, None] for q in params.primes])
        ntt(s, params)
        self._s = np.ascontiguousarray(s[:, :, 0])

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret key is neither copied nor serialised")

    def encrypt(self, m: U32, c1: U32) -> U32:
        """c0 for the columns of ``m [n, C]`` (ring elements), in NTT form ``[2, n, C]``.

        Args:
            m: plaintext polynomials as columns, values in [0, p).
            c1: the public random half, uniform, used once under this key; ``[2, n, C]``.
        """
        return self._encrypt(m, lambda i: c1[i])

    def encrypt_seeded(self, m: U32, seed: bytes) -> U32:
        """As :meth:`encrypt`, with block 0 of :func:`sordino.shared.rlwe.expand_uniform` as the random half."""
        return self._encrypt(m, lambda i: expand_uniform_of_prime(seed, 0, m.shape, i, self._params))

    def _encrypt(self, m: U32, random_half: Callable[[int], U32]) -> U32:
        m = np.ascontiguousarray(m)
        noise = np.frombuffer(_random_bytes(8 * m.size), np.uint64).reshape(m.shape)
        c0 = np.empty((2, *m.shape), np.uint32)

        def work(i: int) -> None:
            q = self._params.primes[i]
            _encode(m, noise, q, c0[i])
            ntt_of_prime(c0[i], i, self._params)
            _mask(c0[i], random_half(i), self._s[i], q, -1)

        with interrupts:
            each_prime(work, self._parallel)
        return c0

    def decrypt(self, c0: U32, c1: U32) -> U32:
        """The ring elements ``[n, C]`` of the ciphertexts ``[2, n, C]``; ``c0`` is overwritten.

        Wrong, not an error, when the noise is over the budget: callers check the matrix first
        (:meth:`RlweParams.check_norm`) and the answer afterwards (§4.4).
        """

        def work(i: int) -> None:
            _mask(c0[i], c1[i], self._s[i], self._params.primes[i], 1)
            intt_of_prime(c0[i], i, self._params)

        with interrupts:
            each_prime(work, self._parallel)
        out = np.empty(c0.shape[1:], np.uint32)
        _decode(c0[0], c0[1], out)
        return out

    def decrypt_switched(self, c0: U64, c1: U64, shape: BlockShape, bits: int) -> U32:
        """The ring elements at the :func:`~sordino.shared.packing.useful` positions of ciphertexts modulo 2^bits.

        Args:
            c0: ``[outputs * rows, C]``: these coefficients alone.
            c1: ``[n, C]``, all coefficients.

        Returns:
            ``[outputs * rows, C]``. c1*s is made by the transforms modulo q: below 2048 * 2^bits < q/2, so exactly.
        """
        product = np.empty((2, *c0.shape), np.uint32)

        def work(i: int) -> None:
            q = self._params.primes[i]
            residues = np.empty(c1.shape, np.uint32)
            _residues(c1, q, residues)
            ntt_of_prime(residues, i, self._params)
            _times(residues, self._s[i], q)
            product[i] = read_coefficients(residues, i, shape, self._params)

        with interrupts:
            each_prime(work, self._parallel)
        out = np.empty(c0.shape, np.uint32)
        _decode_switched(product[0], product[1], c0, bits, out)
        return out
