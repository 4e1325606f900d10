"""The secret half of RLWE: keys, encryption and decryption. Parameters and bounds: :mod:`sordino.shared.rlwe`.

A :class:`SecretKey` lives for one provisioning batch or one set of check vectors and is never stored (§4.4: a server
that nudges ciphertexts and watches for aborts learns about the noise, hence about the key).
"""

from __future__ import annotations

import os
from typing import Final, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from sordino.client.interrupts import interrupts
from sordino.shared.jit import compiled
from sordino.shared.ring import P
from sordino.shared.rlwe import MAX_KEY_WEIGHT, PARAMS, U32, U64, RlweParams, intt, ntt

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
def _encode(m: U32, noise: U64, out: U32) -> None:
    """out[i] = (round(q*m/p) + e) mod q_i, e centred binomial with eta = 21 from 42 bits of ``noise``.

    q = QUOT*p + REM, so round(q*m/p) = QUOT*m + round(REM*m/p): REM*m + p/2 < 2^64, exact in 64 bits.
    """
    rows, columns = m.shape
    for i in range(rows):
        for j in range(columns):
            v = np.uint64(m[i, j])
            scaled = np.uint64(_QUOT) * v + (np.uint64(_REM) * v + np.uint64(P // 2)) // np.uint64(P)
            bits = np.int64(noise[i, j] & np.uint64(0x3FFFFFFFFFF))
            e = _popcount21(bits & 0x1FFFFF) - _popcount21(bits >> 21)
            x = np.int64(scaled) + e
            out[0, i, j] = np.uint32((x + _Q0) % _Q0)
            out[1, i, j] = np.uint32((x + _Q1) % _Q1)


@compiled
def _mask(c0: U32, c1: U32, s: U32, q: int, sign: int) -> None:
    """c0 += sign * c1 * s mod q, column by column; ``s [n]`` in NTT form."""
    rows, columns = c0.shape
    q64 = np.uint64(q)
    for i in range(rows):
        si = np.uint64(s[i]) if sign > 0 else q64 - np.uint64(s[i])
        for j in range(columns):
            c0[i, j] = np.uint32((np.uint64(c0[i, j]) + np.uint64(c1[i, j]) * si) % q64)


@compiled
def _times(c: U32, s: U32, q: int) -> None:
    """c *= s mod q, column by column."""
    for i in range(c.shape[0]):
        si = np.uint64(s[i])
        for j in range(c.shape[1]):
            c[i, j] = np.uint32(np.uint64(c[i, j]) * si % np.uint64(q))


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
def _residues(c: U64, out: U32) -> None:
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            out[0, i, j] = np.uint32(c[i, j] % np.uint64(_Q0))
            out[1, i, j] = np.uint32(c[i, j] % np.uint64(_Q1))


@compiled
def _decode_switched(d0: U32, d1: U32, c0: U64, positions: NDArray[np.intp], bits: int, out: U32) -> None:
    """round(p (c0 + x) / 2^bits) mod p with x = CRT(d0, d1) centred, at some positions of the polynomials."""
    half, q = np.int64(_Q0) * _Q1 // 2, np.int64(_Q0) * _Q1
    q1, mask = np.uint64(_Q1), np.int64((1 << bits) - 1)
    scale = np.float64(P) / np.float64(1 << bits)
    for k in range(positions.size):
        i = positions[k]
        for j in range(c0.shape[1]):
            a = np.uint64(d0[i, j])
            t = (np.uint64(d1[i, j]) + q1 + q1 - a) * np.uint64(_Q0_INV) % q1
            x = np.int64(a + np.uint64(_Q0) * t)
            x = x - q if x > half else x
            v = (x + np.int64(c0[k, j])) & mask
            out[k, j] = np.uint32(np.uint64(np.float64(v) * scale + 0.5) % np.uint64(P))


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
        noise = np.frombuffer(_random_bytes(8 * m.size), np.uint64).reshape(m.shape)
        c0 = np.empty((2, *m.shape), np.uint32)
        _encode(np.ascontiguousarray(m), noise, c0)
        with interrupts:
            ntt(c0, self._params, parallel=self._parallel)
        for i, q in enumerate(self._params.primes):
            _mask(c0[i], c1[i], self._s[i], q, -1)
        return c0

    def decrypt(self, c0: U32, c1: U32) -> U32:
        """The ring elements ``[n, C]`` of the ciphertexts ``[2, n, C]``; ``c0`` is overwritten.

        Wrong, not an error, when the noise is over the budget: callers check the matrix first
        (:meth:`RlweParams.check_norm`) and the answer afterwards (§4.4).
        """
        for i, q in enumerate(self._params.primes):
            _mask(c0[i], c1[i], self._s[i], q, 1)
        with interrupts:
            intt(c0, self._params, parallel=self._parallel)
        out = np.empty(c0.shape[1:], np.uint32)
        _decode(c0[0], c0[1], out)
        return out

    def decrypt_switched(self, c0: U64, c1: U64, positions: NDArray[np.intp], bits: int) -> U32:
        """The ring elements at ``positions`` of ciphertexts modulo 2^bits.

        Args:
            c0: ``[len(positions), C]``: these coefficients alone.
            c1: ``[n, C]``, all coefficients.

        Returns:
            ``[len(positions), C]``. c1*s is made by the transforms modulo q: below 2048 * 2^bits < q/2, so exactly.
        """
        product = np.empty((2, *c1.shape), np.uint32)
        _residues(c1, product)
        with interrupts:
            ntt(product, self._params, parallel=self._parallel)
        for i, q in enumerate(self._params.primes):
            _times(product[i], self._s[i], q)
        with interrupts:
            intt(product, self._params, parallel=self._parallel)
        out = np.empty(c0.shape, np.uint32)
        _decode_switched(product[0], product[1], c0, positions, bits, out)
        return out
