"""The secret half of pages: keys, scales, encryption and decryption (:mod:`sordino.shared.pages`).

The scheme is approximate: what is decrypted is right up to a noise that :func:`score_error` and :func:`output_error`
bound. Scales depend on the data; they stay here.
"""

from __future__ import annotations

import math
import os
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from sordino.client.interrupts import interrupts
from sordino.client.rlwe import _popcount21, _random_bytes, _ternary
from sordino.shared.errors import RangeError
from sordino.shared.jit import compiled
from sordino.shared.pages import COARSE_BITS, KEYS, VALUES, Level, N, Read, montgomery, unpack_answers
from sordino.shared.rlwe import (
    PAGE_PARAMS,
    SEED_BYTES,
    U32,
    U64,
    expand_uniform,
    forward_stages,
    in_halves,
    ntt,
    pack,
    twiddles,
)

F64 = NDArray[np.float64]

_PRIMES: Final = PAGE_PARAMS.primes
_BLOCK: Final = 16  # polynomials in one transform
# Keys of larger norms are drawn anew. ||s||^2 has mean 2N/3 and deviation 30, ||s^2|| mean 3,862 and deviation 57.
_MAX_WEIGHT: Final = 2851
_MAX_SQUARE: Final = 4100.0
# Norms times scales: a product of two of this size is 0.49 q, so that no coefficient that is read wraps.
_FULL: Final = {level: math.sqrt(0.49 * level.params.q) for level in (KEYS, VALUES)}
# Standard deviation of a fresh coefficient: the error, and the rounding of the encoder.
_FRESH: Final = math.sqrt(PAGE_PARAMS.eta / 2 + 1 / 12)
# The same of an answer, in units of 2^-bits q: roundings of c0, of c1 times s, of c2 times s^2.
_ROUNDING: Final = math.sqrt((1 + 4.0**COARSE_BITS * _MAX_WEIGHT + _MAX_SQUARE**2) / 12)


@compiled
def _add_noise(m: F64, noise: U64) -> None:
    """m += e, centred binomial with eta = 21 from 42 bits of ``noise``, rounded: ``[C, N]``."""
    for c in range(m.shape[0]):
        for i in range(m.shape[1]):
            bits = np.int64(noise[c, i] & np.uint64(0x3FFFFFFFFFF))
            e = _popcount21(bits & 0x1FFFFF) - _popcount21(bits >> 21)
            m[c, i] = np.rint(m[c, i]) + np.float64(e)


@compiled
def _encrypt(
    m: F64, c1: U32, s: U64, w: U32, ws: U32, q: int, q_inv: int, radix: int, first: int, stop: int, c0: U32
) -> None:
    """c0 = NTT(m) - c1 * s mod q for polynomials ``first`` to ``stop`` of ``m [C, N]``, integers below 2^45.

    ``s [N]``: -s * 2^32 mod q. A transform leaves values below 25 q, which take the factor 2^32 mod q along into
    Montgomery's reduction: the sum stays below q * 2^32.
    """
    n = m.shape[1]
    q64, q32, qi, mask = np.uint64(q), np.uint32(q), np.uint64(q_inv), np.uint64(0xFFFFFFFF)
    one = np.uint64(radix)
    qf, inverse = np.float64(q), 1.0 / np.float64(q)
    buf = np.empty((n, 16), np.uint32)
    for start in range(first, stop, 16):
        width = min(16, stop - start)
        buf[:, width:] = 0
        for c in range(width):
            row = m[start + c]
            for i in range(n):
                r = row[i] - np.floor(row[i] * inverse) * qf
                r = r + qf if r < 0 else r
                r = r - qf if r >= qf else r
                buf[i, c] = np.uint32(np.int32(r))
        forward_stages(buf, w, ws, q)
        for c in range(width):
            for i in range(n):
                t = np.uint64(buf[i, c]) * one + np.uint64(c1[start + c, i]) * s[i]
                k = ((t & mask) * qi) & mask
                r32 = np.uint32((t + k * q64) >> np.uint64(32))
                c0[start + c, i] = min(r32, np.uint32(r32 - q32))


@compiled
def _centred(values: U64, bits: int, out: F64) -> None:
    """Values modulo 2^bits, in [-2^(bits-1), 2^(bits-1)), as float64."""
    shift = np.uint64(64 - bits)
    for r in range(values.shape[0]):
        for i in range(values.shape[1]):
            out[r, i] = np.float64(np.int64(values[r, i] << shift) >> np.int64(64 - bits))


def _negacyclic_square(s: F64) -> F64:
    """s^2 mod X^N + 1, exact: integers of at most N."""
    whole = np.rint(np.fft.irfft(np.fft.rfft(s, 2 * N) ** 2, 2 * N))
    return np.asarray(whole[:N] - whole[N:], np.float64)


class PageKey:
    """A ternary secret for pages, fresh from the system's generator. Never serialised; its repr shows nothing."""

    __slots__ = ("_negated", "_s", "_square", "_toeplitz")

    def __init__(self) -> None:
        while True:
            self._s = _ternary(N).astype(np.float64)
            self._square = _negacyclic_square(self._s)
            if (self._s**2).sum() <= _MAX_WEIGHT and np.linalg.norm(self._square) <= _MAX_SQUARE:
                break
        s = np.stack([(self._s.astype(np.int64) % q).astype(np.uint32)[:, None] for q in _PRIMES])
        ntt(s, PAGE_PARAMS)
        self._negated = [
            np.array([(q - int(x)) * montgomery(q)[1] % q for x in s[i, :, 0]], np.uint64)
            for i, q in enumerate(_PRIMES)
        ]
        self._toeplitz: dict[Read, F64] = {}

    def __repr__(self) -> str:
        return "PageKey(hidden)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret key is neither copied nor serialised")

    def encrypt(self, m: F64, level: Level, *, parallel: bool = False) -> tuple[bytes, bytes]:
        """A seed and the packed c0 ``[primes, C, N]`` of ciphertexts of ``m [C, N]``, which is overwritten.

        Args:
            m: polynomials as rows, |m| < 2^45; rounded here.
        """
        count, seed = m.shape[0], os.urandom(SEED_BYTES)
        c1 = expand_uniform(seed, 0, (count, N), level.params)
        _add_noise(m, np.frombuffer(_random_bytes(8 * m.size), np.uint64).reshape(m.shape))
        c0 = np.empty(c1.shape, np.uint32)
        blocks = -(-count // _BLOCK)

        def work(first: int, stop: int) -> None:
            # Tasks are (block, prime): the blocks alone would be too few for two threads.
            for task in range(first, stop):
                block, i = divmod(task, level.primes)
                q, (w, ws, _, _) = _PRIMES[i], twiddles(PAGE_PARAMS, i)
                start, end = _BLOCK * block, min(_BLOCK * (block + 1), count)
                _encrypt(m, c1[i], self._negated[i], w, ws, q, *montgomery(q), start, end, c0[i])

        with interrupts:
            in_halves(work, blocks * level.primes, parallel)
        return seed, pack(c0)

    def decrypt(self, packed: tuple[bytes, bytes, bytes], answers: int, read: Read, level: Level) -> F64:
        """The coefficients that are read, as fractions of q in [-1/2, 1/2): ``[answers, read.count]``.

        c1*s and c2*s^2 are needed at few positions: one matrix product with rows of s and s^2. Its sums reach 2^55, so
        float64 adds an error of a few units where the roundings of the answer have 1,500.

        Raises:
            ProtocolError: the answer has another size.
        """
        c0, c1, c2 = unpack_answers(packed, answers, read, level)
        both = np.empty((answers, 2 * N))
        _centred(c1, level.bits - COARSE_BITS, both[:, :N])
        _centred(c2, level.bits, both[:, N:])
        value = c0.astype(np.float64) + both @ self._rows(read).T
        value *= 2.0**-level.bits
        return np.asarray(value - np.rint(value), np.float64)

    def _rows(self, read: Read) -> F64:
        """For each position p read the factors of all c_i in (c1 s)_p and (c2 s^2)_p: ``[count, 2 N]``."""
        if read not in self._toeplitz:
            p = read.first + read.step * np.arange(read.count)[:, None]
            k = p - np.arange(N)
            sign = np.where(k < 0, -1.0, 1.0)
            rows = [sign * part[k % N] for part in (self._s * 2**COARSE_BITS, self._square)]
            self._toeplitz[read] = np.concatenate(rows, axis=1)
        return self._toeplitz[read]


# -- encoding --------------------------------------------------------------------------------------------------------
# C polynomials at a time. A scale is _FULL of the level over a bound: for a page the largest norm of a key, or of a
# column of values; for a query its norm. So by Cauchy-Schwarz nothing that is read reaches q/2, whatever the outliers.


def encode_keys(keys: F64) -> tuple[F64, F64]:
    """Keys ``[C, tokens, d]`` as polynomials ``[C, N]``, and their scales ``[C]``."""
    return _placed(keys.reshape(len(keys), -1), np.linalg.norm(keys, axis=2).max(axis=1), KEYS, "keys")


def encode_values(values: F64) -> tuple[F64, F64]:
    """Values ``[C, tokens, d]`` as polynomials ``[C, N]``, and their scales ``[C]``."""
    columns = values.transpose(0, 2, 1).reshape(len(values), -1)
    return _placed(columns, np.linalg.norm(values, axis=1).max(axis=1), VALUES, "values")


def encode_queries(queries: F64) -> tuple[F64, F64]:
    """Queries ``[C, d]`` as polynomials ``[C, N]``, and their scales ``[C]``."""
    return _placed(queries[:, ::-1], np.linalg.norm(queries, axis=1), KEYS, "queries")


def encode_probabilities(weights: F64, scales: F64) -> tuple[F64, F64]:
    """Probabilities of C heads over P pages, ``[C, P, tokens]``, as polynomials ``[C, P, N]``, and scales ``[C]``.

    Results of pages are added up while encrypted, so that all of a head must have one scale: that of the page's values,
    ``scales [C, P]``, times that of the probabilities. By Cauchy-Schwarz an output is at most the sum over pages of
    ||p|| times the largest norm of a column.
    """
    total = (np.linalg.norm(weights, axis=2) * (_FULL[VALUES] / scales)).sum(axis=1)
    common = _FULL[VALUES] ** 2 / np.where(total > 0, total, 1.0)
    out = np.zeros((*scales.shape, N))
    np.multiply(weights[:, :, ::-1], (common[:, None] / scales)[:, :, None], out=out[:, :, : weights.shape[2]])
    return out, common


def _placed(coefficients: F64, bounds: F64, level: Level, what: str) -> tuple[F64, F64]:
    if not np.isfinite(bounds).all():
        raise RangeError(f"{what} have NaN or infinite values: nothing was sent")
    scales = _FULL[level] / np.where(bounds > 0, bounds, 1.0)
    out = np.zeros((len(coefficients), N))
    np.multiply(coefficients, scales[:, None], out=out[:, : coefficients.shape[1]])
    return out, scales


def decoded(fractions: F64, scale: F64, level: Level) -> F64:
    """Decrypted coefficients (fractions of q) as scores or outputs; ``scale`` is the product of both factors'."""
    return np.asarray(fractions * (level.params.q / scale), np.float64)


# -- error -----------------------------------------------------------------------------------------------------------


def score_error(tokens: int, bound: float) -> float:
    """Standard deviation of a score, for the product ``bound`` of the query's norm and the largest norm of a key.

    Scaled to ``_FULL`` each, the plaintexts have norms of at most sqrt(tokens) and 1 times ``_FULL``. Their
    product carries the noise of each times the other, and the product of both noises; then the answer is rounded.
    """
    return _error(tokens, 1, bound, KEYS)


def output_error(head_size: int, pages: int, bound: float) -> float:
    """Standard deviation of an output, for the ``bound`` sum_k ||p_k|| ||largest column of V_k||; as above."""
    return _error(head_size, pages, bound, VALUES)


def _error(rows: int, pages: int, bound: float, level: Level) -> float:
    fresh = _FRESH * math.sqrt((pages * rows + 1) * _FULL[level] ** 2 + pages * _FRESH**2 * N) / level.params.q
    return bound / 0.49 * math.hypot(fresh, _ROUNDING * 2.0**-level.bits)
