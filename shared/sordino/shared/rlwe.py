"""RLWE parameters and the public half of the scheme: transforms, seeded randomness, the wire codec.

The scheme is the secret-key form of BFV-style RLWE encryption (Fan and Vercauteren, ePrint 2012/144; Lyubashevsky,
Peikert and Regev, ePrint 2012/230) with plaintext modulus p = 2^32 - 5 and no multiplication of ciphertexts: a
ciphertext is (c0, c1) with c0 + c1*s = round(q*m/p) + e, and the only operations are integer linear combinations.

Everything is kept in NTT form, residue by residue, with *columns* as polynomials: an array ``[2, N, C]`` of ``uint32``
holds C polynomials; axis 0 is the prime (two, or three for pages), axis 1 the evaluation point. In this form a linear
combination of ciphertexts is one matrix product per point, so a server needs neither N nor a transform
(docs/protocol.md).

Nothing here can hold a secret: keys, encryption and decryption are in ``sordino.client``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.jit import compiled
from sordino.shared.ring import P

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

SEED_BYTES: Final = 32
# Homomorphic Encryption Standard (Albrecht et al., ePrint 2019/939), Table 1, ternary secret, 128-bit classical.
MAX_LOG_Q: Final = {1024: 27, 2048: 54, 4096: 109, 8192: 218}
# Probability that one coefficient decodes wrongly: 2^-64 for a token whose products have up to 2^24 coefficients
# (SmolLM2-135M: 2^17.3; a 70B model: 2^22.7). The norm bounds are made for it.
FAILURE_LOG2: Final = -64 - 24
# Keys of a larger squared norm are drawn anew (mean 1,365, deviation 21: about one in 30,000), so that the rounding of
# a switched answer has a bound.
MAX_KEY_WEIGHT: Final = 1450
# Modulus 2^41 of switched answers: the smallest power of two whose norm bound is near that of full answers; 2^40 would
# allow a third of it.
SWITCH_BITS: Final = 41


@dataclass(frozen=True, slots=True)
class RlweParams:
    """Checked RLWE parameters; the instances shipped are :data:`PARAMS` and :data:`PAGE_PARAMS`.

    Attributes:
        n: ring degree, a power of two.
        primes: two or three primes = 1 mod 2n; their product q stays within the 128-bit row of the HE standard.
        eta: errors are centred binomial, the difference of two sums of ``eta`` bits: variance eta/2. 21 is the default
            of Microsoft SEAL, standard deviation 3.24 against the standard's 3.2.
    """

    n: int
    primes: tuple[int, ...]
    eta: int

    def __post_init__(self) -> None:
        if self.n not in MAX_LOG_Q:
            raise ValueError(f"no row of the security standard for ring degree {self.n}")
        for q in self.primes:
            if not is_prime(q) or q % (2 * self.n) != 1 or not 1 << 26 < q < 1 << 27:
                raise ValueError(f"{q} is not a 27-bit prime = 1 mod {2 * self.n}")
        if len(self.primes) not in (2, 3) or len(set(self.primes)) != len(self.primes):
            raise ValueError("there are two or three primes, all different")
        if math.log2(self.q) > MAX_LOG_Q[self.n]:
            raise ValueError(
                f"log2 q = {math.log2(self.q):.2f} is over {MAX_LOG_Q[self.n]}: below 128 bits of security"
            )
        if self.eta < 21:
            raise ValueError("error below the standard's deviation of 3.2")

    @property
    def q(self) -> int:
        return math.prod(self.primes)

    def budget(self, bits: int = 0) -> float:
        """Largest noise that still decodes, modulo q or 2^bits: modulus / (2p), less one for the decoder's rounding."""
        return (2.0**bits if bits else self.q) / (2 * P) - 1

    def max_norm(self, bits: int = 0) -> float:
        """Largest Euclidean norm of the weights in a product for which a coefficient decodes but with 2^FAILURE_LOG2.

        The noise is sum_j W_j (e_j + d_j): e_j centred binomial, sub-Gaussian with variance proxy eta/2 (Hoeffding's
        lemma on each of the 2*eta bits, each of width 1: proxy 2*eta/4), d_j the encoder's rounding, |d_j| <= 1/2
        (proxy 1/4). Switching the answer from q to 2^bits scales it and adds f0 + f1*s, f the roundings of both halves:
        uniform in [-1/2, 1/2], hence strictly sub-Gaussian with proxy 1/12 (Arbel, Marchal and Nguyen, "On strict
        sub-Gaussianity", ESAIM P&S 24, 2020), f1 being of a uniform polynomial. A noise of proxy v exceeds the budget t
        with probability <= 2 exp(-t^2 / 2v).

        Args:
            bits: 0 for answers modulo q.
        """
        scale, rounding = (2.0**bits / self.q, (1 + MAX_KEY_WEIGHT) / 12) if bits else (1.0, 0.0)
        budget = self.budget(bits)
        allowed = budget * abs(budget) / (2 * math.log(2) * (1 - FAILURE_LOG2)) - rounding
        return math.sqrt(max(0.0, allowed) / (self.eta / 2 + 0.25)) / scale

    def check_norm(self, name: str, norm: float, bits: int = 0) -> None:
        """Raises RangeError when weights of this norm could decode wrongly."""
        if norm > self.max_norm(bits):
            raise RangeError(f"group {name!r}: a norm of {norm:.0f} is over the noise bound {self.max_norm(bits):.0f}")


def is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, math.isqrt(q) + 1))


PARAMS: Final = RlweParams(n=2048, primes=(134176769, 134111233), eta=21)
# Of pages of the KV cache (sordino.shared.pages), of keys and of values: log2 q = 81.0 and 54.0, where the standard
# allows 109.
PAGE_PARAMS: Final = RlweParams(n=4096, primes=(134176769, 134111233, 134012929), eta=21)
VALUE_PARAMS: Final = RlweParams(n=4096, primes=PAGE_PARAMS.primes[:2], eta=21)


# -- transforms ------------------------------------------------------------------------------------------------------

_LANES: Final = 16  # 2048 x 16 x 4 B = 128 KiB: a block of columns stays in the L2 cache


@cache
def twiddles(params: RlweParams, index: int) -> tuple[U32, U32, U32, U32]:
    """Powers of psi and psi^-1 (a primitive 2n-th root) in bit-reversed order, with their Shoup quotients, ``[n]``."""
    q, n = params.primes[index], params.n
    psi = next(r for g in range(2, 100) if pow(r := pow(g, (q - 1) // (2 * n), q), n, q) == q - 1)
    bits = n.bit_length() - 1
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(n)]
    forward = [pow(psi, k, q) for k in order]
    inverse = [pow(w, q - 2, q) for w in forward]
    quotients = [[(w << 32) // q for w in table] for table in (forward, inverse)]
    a, b, c, d = (np.array(t, dtype=np.uint32) for t in (forward, quotients[0], inverse, quotients[1]))
    return a, b, c, d


@compiled
def forward_stages(buf: U32, w: U32, ws: U32, q: int) -> None:
    """In-place forward NTT of 16 polynomials ``buf [n, 16]``, values < q; negacyclic, bit-reversed output.

    Cooley-Tukey with Shoup products (Harvey, arXiv 1205.2926), two stages at a time: in this form, and not stage by
    stage, LLVM makes vectors of the lanes (eight times as fast). With q < 2^27 a lazy value grows by 2q a stage and
    ends below (1 + 2*12) q < 2^32 for n = 4096, so nothing is reduced.
    """
    n = buf.shape[0]
    q64, mask, two_q, half = np.uint64(q), np.uint64(0xFFFFFFFF), np.uint32(2 * q), np.uint64(32)
    t, m = n // 2, 1
    while 2 * m < n:
        u = t // 2
        for i in range(m):
            w0, s0 = np.uint64(w[m + i]), np.uint64(ws[m + i])
            w1, s1 = np.uint64(w[2 * m + 2 * i]), np.uint64(ws[2 * m + 2 * i])
            w2, s2 = np.uint64(w[2 * m + 2 * i + 1]), np.uint64(ws[2 * m + 2 * i + 1])
            for j in range(2 * i * t, 2 * i * t + u):
                for c in range(16):
                    x0, x1 = buf[j, c], buf[j + u, c]
                    y0, y1 = np.uint64(buf[j + t, c]), np.uint64(buf[j + t + u, c])
                    r0 = np.uint32((w0 * y0 - ((s0 * y0) >> half) * q64) & mask)
                    r1 = np.uint32((w0 * y1 - ((s0 * y1) >> half) * q64) & mask)
                    a0, a1 = np.uint32(x0 + r0), np.uint64(np.uint32(x1 + r1))
                    a2, a3 = np.uint32(x0 + two_q - r0), np.uint64(np.uint32(x1 + two_q - r1))
                    r0 = np.uint32((w1 * a1 - ((s1 * a1) >> half) * q64) & mask)
                    r1 = np.uint32((w2 * a3 - ((s2 * a3) >> half) * q64) & mask)
                    buf[j, c] = np.uint32(a0 + r0)
                    buf[j + u, c] = np.uint32(a0 + two_q - r0)
                    buf[j + t, c] = np.uint32(a2 + r1)
                    buf[j + t + u, c] = np.uint32(a2 + two_q - r1)
        t //= 4
        m *= 4
    if m < n:  # an odd number of stages
        for i in range(m):
            w0, s0 = np.uint64(w[m + i]), np.uint64(ws[m + i])
            for c in range(16):
                y0 = np.uint64(buf[2 * i + 1, c])
                r0 = np.uint32((w0 * y0 - ((s0 * y0) >> half) * q64) & mask)
                x0 = buf[2 * i, c]
                buf[2 * i, c] = np.uint32(x0 + r0)
                buf[2 * i + 1, c] = np.uint32(x0 + two_q - r0)


@compiled
def inverse_stages(buf: U32, w: U32, ws: U32, q: int) -> None:
    """In-place inverse of :func:`forward_stages` (Gentleman-Sande), without the factor 1/n; values < 2q all the way."""
    n = buf.shape[0]
    q64, mask, two_q, half = np.uint64(q), np.uint64(0xFFFFFFFF), np.uint32(2 * q), np.uint64(32)
    t, m = 1, n // 2
    while m >= 2:
        for i in range(m // 2):
            w0, s0 = np.uint64(w[m + 2 * i]), np.uint64(ws[m + 2 * i])
            w1, s1 = np.uint64(w[m + 2 * i + 1]), np.uint64(ws[m + 2 * i + 1])
            w2, s2 = np.uint64(w[m // 2 + i]), np.uint64(ws[m // 2 + i])
            for j in range(4 * i * t, 4 * i * t + t):
                for c in range(16):
                    x0, x1, x2, x3 = buf[j, c], buf[j + t, c], buf[j + 2 * t, c], buf[j + 3 * t, c]
                    d0, d1 = np.uint64(np.uint32(x0 + two_q - x1)), np.uint64(np.uint32(x2 + two_q - x3))
                    a0, a2 = np.uint32(x0 + x1), np.uint32(x2 + x3)
                    a0, a2 = min(a0, np.uint32(a0 - two_q)), min(a2, np.uint32(a2 - two_q))
                    a1 = np.uint32((w0 * d0 - ((s0 * d0) >> half) * q64) & mask)
                    a3 = np.uint32((w1 * d1 - ((s1 * d1) >> half) * q64) & mask)
                    d0, d1 = np.uint64(np.uint32(a0 + two_q - a2)), np.uint64(np.uint32(a1 + two_q - a3))
                    b0, b1 = np.uint32(a0 + a2), np.uint32(a1 + a3)
                    buf[j, c] = min(b0, np.uint32(b0 - two_q))
                    buf[j + t, c] = min(b1, np.uint32(b1 - two_q))
                    buf[j + 2 * t, c] = np.uint32((w2 * d0 - ((s2 * d0) >> half) * q64) & mask)
                    buf[j + 3 * t, c] = np.uint32((w2 * d1 - ((s2 * d1) >> half) * q64) & mask)
        t *= 4
        m //= 4
    if m == 1:  # an odd number of stages
        w0, s0 = np.uint64(w[1]), np.uint64(ws[1])
        for j in range(t):
            for c in range(16):
                x0, x1 = buf[j, c], buf[j + t, c]
                a0 = np.uint32(x0 + x1)
                d0 = np.uint64(np.uint32(x0 + two_q - x1))
                buf[j, c] = min(a0, np.uint32(a0 - two_q))
                buf[j + t, c] = np.uint32((w0 * d0 - ((s0 * d0) >> half) * q64) & mask)


@compiled
def _ntt_columns(a: U32, w: U32, ws: U32, q: int) -> None:
    """In-place forward NTT of each column of ``a [n, C]``, values < q; negacyclic, bit-reversed output."""
    n, columns = a.shape
    q64, mask, q32, one = np.uint64(q), np.uint64(0xFFFFFFFF), np.uint32(q), np.uint64((1 << 32) // q)
    buf = np.empty((n, 16), np.uint32)
    for start in range(0, columns, 16):
        width = min(16, columns - start)
        buf[:, width:] = 0
        for i in range(n):
            for c in range(width):
                buf[i, c] = a[i, start + c]
        forward_stages(buf, w, ws, q)
        for i in range(n):
            for c in range(width):  # modulo q: the quotient by multiplication is one too small at most
                y = np.uint64(buf[i, c])
                r = np.uint32((y - ((y * one) >> np.uint64(32)) * q64) & mask)
                a[i, start + c] = min(r, np.uint32(r - q32))


@compiled
def _intt_columns(a: U32, w: U32, ws: U32, n_inv: int, n_inv_shoup: int, q: int) -> None:
    """In-place inverse of :func:`_ntt_columns`."""
    n, columns = a.shape
    q64, mask, q32 = np.uint64(q), np.uint64(0xFFFFFFFF), np.uint32(q)
    buf = np.empty((n, 16), np.uint32)
    for start in range(0, columns, 16):
        width = min(16, columns - start)
        buf[:, width:] = 0
        for i in range(n):
            for c in range(width):
                buf[i, c] = a[i, start + c]
        inverse_stages(buf, w, ws, q)
        for i in range(n):
            for c in range(width):
                y = np.uint64(buf[i, c])
                r = np.uint32((np.uint64(n_inv) * y - ((np.uint64(n_inv_shoup) * y) >> np.uint64(32)) * q64) & mask)
                a[i, start + c] = min(r, np.uint32(r - q32))


@compiled
def reduced(x: int, q: int, inverse: float) -> int:
    """x mod q for x < 2^63 and q < 2^27, with ``inverse`` = 1/q as a float, in operations that make vectors.

    The quotient is below 2^37 and comes from factors within 2^-51 of the truth, so it is off by one at most, either
    way; a remainder below 0 wraps around, and the minimum takes the right one.
    """
    r = x - np.uint64(np.float64(x) * inverse) * np.uint64(q)
    r = min(r, r + np.uint64(q))
    return min(r, r - np.uint64(q))  # type: ignore[return-value]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="sordino-rlwe")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has no copy of the threads


def each_prime(work: Callable[[int], None], parallel: bool, count: int = 2) -> None:
    """``work(0)`` to ``work(count - 1)``, at the same time when ``parallel``."""
    others = [_threads().submit(work, i) for i in range(1, count)] if parallel else []
    work(0)
    for other in others:
        other.result()
    if not parallel:
        for i in range(1, count):
            work(i)


def in_halves(work: Callable[[int, int], None], count: int, parallel: bool) -> None:
    """``work(first, stop)`` over ``range(count)``, in two halves at the same time when ``parallel``."""
    middle = (count + 1) // 2 if parallel else count
    other = _threads().submit(work, middle, count) if middle < count else None
    work(0, middle)
    if other is not None:
        other.result()


def ntt(a: U32, params: RlweParams = PARAMS, *, parallel: bool = False) -> None:
    """Forward transform in place: ``[primes, k, C]`` coefficients (each < its prime) to evaluation points.

    k is n, or a smaller power of two: then of polynomials in X^(n/k), at the points of n without the repetitions.
    """
    each_prime(lambda i: ntt_of_prime(a[i], i, params), parallel, len(params.primes))


def ntt_of_prime(a: U32, i: int, params: RlweParams = PARAMS) -> None:
    """:func:`ntt` of one prime's residues ``[k, C]``."""
    w, ws, _, _ = twiddles(params, i)
    _ntt_columns(a, w, ws, params.primes[i])


def intt(a: U32, params: RlweParams = PARAMS, *, parallel: bool = False) -> None:
    """Inverse of :func:`ntt`, in place."""
    each_prime(lambda i: intt_of_prime(a[i], i, params), parallel, len(params.primes))


def intt_of_prime(a: U32, i: int, params: RlweParams = PARAMS) -> None:
    """:func:`intt` of one prime's residues ``[k, C]``."""
    q = params.primes[i]
    _, _, w, ws = twiddles(params, i)
    k_inv = pow(a.shape[0], -1, q)
    _intt_columns(a, w, ws, k_inv, (k_inv << 32) // q, q)


# -- modulus switching -----------------------------------------------------------------------------------------------


@compiled
def _switch(d0: U32, d1: U32, inverse: int, q0: int, q1: int, bits: int, out: U64) -> None:
    """round(2^bits x / q) mod 2^bits for x = CRT(d0, d1) = d0 + q0 t, with t = (d1 - d0) q0^-1 mod q1.

    In float64 x 2^bits / q is within 2^(bits-52) of the truth: nothing beside the rounding.
    """
    q64, mask, per_one = np.uint64(q1), np.uint64((1 << bits) - 1), 1.0 / q1
    per_t = np.float64(1 << bits) / np.float64(q1)
    per_d = per_t / np.float64(q0)
    for i in range(d0.shape[0]):
        for j in range(d0.shape[1]):
            a = np.uint64(d0[i, j])
            t = reduced((np.uint64(d1[i, j]) + q64 + q64 - a) * np.uint64(inverse), q1, per_one)
            out[i, j] = np.uint64(np.float64(t) * per_t + np.float64(a) * per_d + 0.5) & mask


def switch(a: U32, bits: int, params: RlweParams = PARAMS) -> U64:
    """Coefficients ``[2, k, C]`` from modulus q to 2^bits: ``[k, C]``, each times 2^bits/q and rounded."""
    q0, q1 = params.primes
    out = np.empty(a.shape[1:], np.uint64)
    a = np.ascontiguousarray(a)  # strided, it would not be vectorised
    _switch(a[0], a[1], pow(q0, -1, q1), q0, q1, bits, out)
    return out


# -- seeded public randomness ----------------------------------------------------------------------------------------


@compiled
def _reject(words: U32, q: int, out: U32, filled: int) -> int:
    for start in range(0, words.size, 64):
        some = words[start : start + 64]
        if filled + some.size <= out.size:  # mostly none is rejected
            copy, largest = out[filled : filled + some.size], np.uint32(0)
            for k in range(some.size):
                copy[k] = some[k] & np.uint32(0x7FFFFFF)
            for k in range(some.size):
                largest = max(largest, copy[k])
            if largest < q:
                filled += some.size
                continue
        for word in some:
            if filled < out.size:
                value = word & np.uint32(0x7FFFFFF)
                out[filled] = value
                filled += value < q
    return filled


def expand_uniform(seed: bytes, block: int, shape: tuple[int, int], params: RlweParams = PARAMS) -> U32:
    """The public random half c1 of one block of points, ``[primes, points, channels]``, uniform below each prime.

    AES-256 in counter mode (NIST SP 800-38A) under ``seed``, the initial counter carrying block and prime; words are
    masked to 27 bits and rejected when not below the prime, so the result is exactly uniform.

    Args:
        seed: 32 public bytes, of their own: never derived from anything secret.
        block: which block of the ciphertext, >= 0; blocks are independent.

    Raises:
        ProtocolError: the seed has another length.
    """
    parts = [expand_uniform_of_prime(seed, block, shape, i, params) for i in range(len(params.primes))]
    return np.stack(parts)


def expand_uniform_of_prime(
    seed: bytes, block: int, shape: tuple[int, int], i: int, params: RlweParams = PARAMS
) -> U32:
    """:func:`expand_uniform` for one prime, ``[points, channels]``.

    Raises:
        ProtocolError: the seed has another length.
    """
    if len(seed) != SEED_BYTES:
        raise ProtocolError(f"a seed has {SEED_BYTES} bytes, this one {len(seed)}")
    out = np.empty(math.prod(shape), np.uint32)
    # 8 bytes of block, 2 of prime, 6 of counter: streams of different blocks never overlap.
    counter = block.to_bytes(8, "big") + i.to_bytes(2, "big") + bytes(6)
    stream = Cipher(algorithms.AES(seed), modes.CTR(counter)).encryptor()
    filled = 0
    while filled < out.size:
        count = out.size - filled
        count += count // 512 + 64  # at most one word in 655 is rejected
        words = np.frombuffer(stream.update(bytes(4 * count)), dtype="<u4")
        filled = _reject(words, params.primes[i], out, filled)
    return out.reshape(shape)


# -- codec -----------------------------------------------------------------------------------------------------------

RESIDUE_BITS: Final = 27
_GROUP: Final = 64  # values to a group of words: 64 values of b bits fill b words exactly


def packed_bytes(count: int, bits: int = RESIDUE_BITS) -> int:
    """Bytes on the wire for ``count`` values (rounded up to groups of 64)."""
    return -(-count // _GROUP) * bits * 8


@compiled
def _pack(values: U32 | U64, words: U64, bits: int) -> None:
    lanes = values.shape[1]
    for start in range(0, lanes, 512):
        stop = min(start + 512, lanes)
        for k in range(64):
            word, shift = (k * bits) >> 6, np.uint64((k * bits) & 63)
            spill = np.int64(shift) + bits - 64
            if shift == 0:
                for c in range(start, stop):
                    words[word, c] = np.uint64(values[k, c])
            else:
                for c in range(start, stop):
                    words[word, c] |= np.uint64(values[k, c]) << shift
            if spill > 0:
                for c in range(start, stop):
                    words[word + 1, c] = np.uint64(values[k, c]) >> np.uint64(bits - spill)


@compiled
def _unpack(words: U64, values: U32 | U64, bits: int) -> None:
    lanes = values.shape[1]
    mask = np.uint64((1 << bits) - 1)
    for start in range(0, lanes, 512):
        stop = min(start + 512, lanes)
        for k in range(64):
            word, shift = (k * bits) >> 6, np.uint64((k * bits) & 63)
            spill = np.int64(shift) + bits - 64
            if spill > 0:
                up = np.uint64(64) - shift
                for c in range(start, stop):
                    values[k, c] = ((words[word, c] >> shift) | (words[word + 1, c] << up)) & mask
            else:
                for c in range(start, stop):
                    values[k, c] = (words[word, c] >> shift) & mask


def pack(values: U32 | U64, bits: int = RESIDUE_BITS) -> bytes:
    """Values below 2^bits to bytes: groups of 64 values in ``bits`` little-endian words, lane by lane.

    Value ``k * lanes + c`` is the k-th of lane c, which lets both directions run over lanes in parallel.
    """
    flat = values.reshape(-1)
    lanes = -(-flat.size // _GROUP)
    if flat.size != lanes * _GROUP:
        flat = np.concatenate([flat, np.zeros(lanes * _GROUP - flat.size, flat.dtype)])
    words = np.zeros((bits, lanes), np.uint64)
    _pack(flat.reshape(_GROUP, lanes), words, bits)
    return words.astype("<u8", copy=False).tobytes()


def unpack(data: bytes, shape: tuple[int, ...], params: RlweParams = PARAMS) -> U32:
    """Residues from :func:`pack`; ``shape[0]`` indexes the primes.

    Raises:
        ProtocolError: the length is not that of the shape, or a residue is not below its prime.
    """
    out: U32 = _unpacked(data, shape, RESIDUE_BITS, np.dtype(np.uint32))
    for residues, q in zip(out, params.primes, strict=True):
        if residues.size and int(residues.max()) >= q:
            raise ProtocolError("a residue is not below its prime")
    return out


def unpack_switched(data: bytes, shape: tuple[int, ...], bits: int) -> U64:
    """Values below 2^bits from :func:`pack`.

    Raises:
        ProtocolError: the length is not that of the shape.
    """
    out: U64 = _unpacked(data, shape, bits, np.dtype(np.uint64))
    return out


def _unpacked(data: bytes, shape: tuple[int, ...], bits: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    count = math.prod(shape)
    if len(data) != packed_bytes(count, bits):
        raise ProtocolError(
            f"{len(data)} bytes for {count} values of {bits} bits, expected {packed_bytes(count, bits)}"
        )
    lanes = -(-count // _GROUP)
    values = np.empty((_GROUP, lanes), dtype)
    _unpack(np.frombuffer(data, dtype="<u8").reshape(bits, lanes), values, bits)
    return values.reshape(-1)[:count].reshape(shape)
