"""RLWE with plaintext modulus 2^64, for products W r + s made ahead: parameters, bounds, encoding, packing, wire form.

As :mod:`sordino.shared.rlwe`, whose transforms and codec serve here too: a ciphertext is (c0, c1) with c0 + c1*s =
round(q m / 2^64) + noise, polynomials are columns, ``[primes, N, C]`` of ``uint32`` in NTT form. What differs is that
an answer must tell the holder of the key nothing on W beside the result, so its noise is drowned in a much larger one
(docs/two-party.md, section 3, Lemma 5).

An answer is then switched to a modulus of three primes. Lemma 5 holds for it as for the pair that it is made of:
switching is a function of that pair alone, without W or any secret, and so is leaving out coefficients. What a function
makes of two pairs that cannot be told apart cannot be told apart either; the simulator switches what it has drawn.

Nothing here holds a key: those are in ``sordino.client.twoparty.linear``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.jit import compiled
from sordino.shared.packing import BlockShape, useful
from sordino.shared.rlwe import (
    MAX_LOG_Q,
    SEED_BYTES,
    U8,
    U32,
    U64,
    RlweParams,
    expand_uniform,
    is_prime,
    pack,
    packed_bytes,
    reduced,
    unpack,
)

I8 = NDArray[np.int8]

WORD_BITS: Final = 64  # log2 of the plaintext modulus
# What all answers that one key sees may differ from simulated ones by, beyond what RLWE hides, and in how many
# coefficients (SmolLM2-135M has 2^17.3 a token).
DISTANCE_LOG2: Final = -40
LIFETIME_LOG2: Final = 44
# Primes of a switched answer: the fewest whose product exceeds 2^65 times the rounding of N coefficients.
ANSWER_PRIMES: Final = 3
# Of a row: products of 27-bit residues, one of them cut in two, add up exactly in float64 for so many.
MAX_INPUT_BLOCKS: Final = 1 << 13
# Columns of a message: 3 MB of residues of one half.
MESSAGE_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True)
class WordParams(RlweParams):
    """Checked parameters for plaintext modulus 2^64; the instance shipped is :data:`WORD_PARAMS`.

    Attributes:
        flood_bits: F; noise uniform on [-2^F, 2^F) is added to what the key's holder decrypts.
    """

    flood_bits: int

    def __post_init__(self) -> None:
        if self.n not in MAX_LOG_Q:
            raise ValueError(f"no row of the security standard for ring degree {self.n}")
        for q in self.primes:
            # Transforms of 13 stages leave values below 27 q in 32 bits, and reduce them by one product with 32.
            if not is_prime(q) or q % (2 * self.n) != 1 or not (1 << 32) // 33 < q < 1 << 27:
                raise ValueError(f"{q} is not a prime = 1 mod {2 * self.n} just below 2^27")
        if len(set(self.primes)) != len(self.primes):
            raise ValueError("a prime occurs twice")
        if math.log2(self.q) > MAX_LOG_Q[self.n]:
            raise ValueError(
                f"log2 q = {math.log2(self.q):.2f} is over {MAX_LOG_Q[self.n]}: below 128 bits of security"
            )
        if self.eta != 21:
            raise ValueError("errors are drawn with eta = 21, the standard's deviation")
        if not WORD_BITS <= self.flood_bits < 2 * WORD_BITS - 1:
            raise ValueError(f"a flood of 2^{self.flood_bits} is not made of two words")
        if self.budget() <= self.noise_bound(0):
            raise ValueError(f"a flood of 2^{self.flood_bits} leaves no room for decoding")

    def budget(self, bits: int = 0) -> float:
        """Largest noise beside the flood, before switching, that still decodes.

        With q' the product of the primes of an answer, that is q' / 2^65, less what the decoder rounds off, less the
        rounding of both halves f0 + f1 s, |f0 + f1 s| <= (1 + N) / 2 (1 + 2^-25): all this times q / q', less 2^F.

        Raises:
            ValueError: ``bits`` is not 0; answers are not switched to a power of two.
        """
        if bits:
            raise ValueError("answers of this profile are not switched to a power of two")
        answer = math.prod(self.primes[:ANSWER_PRIMES])
        room = float(answer / 2 ** (WORD_BITS + 1)) * (1 - 2.0**-27) - (1 + self.n) / 2 * (1 + 2.0**-25)
        return room * (self.q / answer) - 2.0**self.flood_bits

    def noise_bound(self, l1: int) -> int:
        """B of Lemma 5: the largest noise beside the flood, W e + u e_pk + e0 + e1 s and roundings.

        Args:
            l1: sum of |W| over all entries that meet in a coefficient: one row of W, or all rows of a block.
        """
        return l1 * self.eta + -(-l1 // 2) + 2 * self.n * self.eta + self.eta + 1

    def distance_log2(self, l1: int, coefficients_log2: float = LIFETIME_LOG2) -> float:
        """log2 of a bound on the statistical distance, over so many coefficients, of their noise from the flood alone.

        Noise of magnitude at most B added to one uniform on [-2^F, 2^F) is within B / 2^(F+1) of it ("smudging":
        Asharov et al., EUROCRYPT 2012, ePrint 2011/613). Distances of independent draws add up.
        """
        return math.log2(self.noise_bound(l1)) - (self.flood_bits + 1) + coefficients_log2

    def check_l1(self, name: str, l1: int) -> None:
        """Raises RangeError when products with such weights could decode wrongly, or would show more than they may."""
        if self.noise_bound(l1) > self.budget():
            raise RangeError(f"{name}: an L1 norm of {l1} could decode wrongly; use blocks of fewer outputs")
        if self.distance_log2(l1) > DISTANCE_LOG2:
            raise RangeError(f"{name}: the noise of an L1 norm of {l1} is not hidden; use blocks of fewer outputs")


# log2 q = 188.93, and up to 2^123.8 decodes. F = 108 would hide rows of an L1 norm up to 2^17.6, hence those of
# SmolLM2-135M, but neither blocks of several outputs nor larger models; a larger F costs nothing.
WORD_PARAMS: Final = WordParams(
    n=8192,
    primes=(133857281, 133644289, 133611521, 133513217, 133251073, 132825089, 132759553),
    eta=21,
    flood_bits=120,
)


# -- secret randomness -------------------------------------------------------------------------------------------------


def _random_bytes(count: int) -> bytes:
    """AES-256-CTR (NIST SP 800-38A) under a fresh key of the system's generator."""
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor().update(bytes(count))


def random_words(shape: tuple[int, ...]) -> U64:
    """Uniform words."""
    return np.frombuffer(_random_bytes(8 * math.prod(shape)), "<u8").astype(np.uint64, copy=False).reshape(shape)


def random_ternary(shape: tuple[int, ...]) -> I8:
    """Uniform on {-1, 0, 1} by rejection: bytes below 255 = 3 * 85."""
    count = math.prod(shape)
    kept = np.empty(0, np.uint8)
    while kept.size < count:
        draw: U8 = np.frombuffer(_random_bytes(count - kept.size + count // 128 + 16), np.uint8)
        kept = np.concatenate([kept, draw[draw < 255]])
    return (kept[:count] % 3).astype(np.int8).reshape(shape) - np.int8(1)


def random_errors(shape: tuple[int, ...]) -> I8:
    """Centred binomial with eta = 21: the difference of two sums of 21 bits."""
    out = np.empty(math.prod(shape), np.int8)
    _binomial(random_words((out.size,)), out)
    return out.reshape(shape)


@compiled
def _binomial(words: U64, out: I8) -> None:
    """Bits are counted in fields of 2, 4 and 8 bits, of the lower and the upper 21 bits at once."""
    for k in range(out.size):
        w = words[k]
        x = (w & np.uint64(0x1FFFFF)) | ((w >> np.uint64(21)) & np.uint64(0x1FFFFF)) << np.uint64(32)
        x -= (x >> np.uint64(1)) & np.uint64(0x5555555555555555)
        x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
        x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        x += (x >> np.uint64(8)) + (x >> np.uint64(16))
        out[k] = np.int8(np.int64(x & np.uint64(0x1F)) - np.int64((x >> np.uint64(32)) & np.uint64(0x1F)))


# -- encoding ----------------------------------------------------------------------------------------------------------


@cache
def _encoders(params: WordParams) -> tuple[tuple[int, int], ...]:
    """Of each prime, -2^-64 and -2^-32 modulo it."""
    return tuple((-pow(1 << 64, -1, q) % q, -pow(1 << 32, -1, q) % q) for q in params.primes)


@compiled
def _encode(m: U64, e: I8, q: int, whole: int, low: int, high: int, out: U32) -> None:
    """round(Q m / 2^64) + e modulo a prime q of Q; ``whole`` is Q mod 2^64, ``low`` and ``high`` of :func:`_encoders`.

    With d the remainder of Q m modulo 2^64, centred, Q m - d is a multiple of 2^64, and Q m is 0 modulo q: so the
    quotient is -d 2^-64. d is the unsigned remainder, less 2^64 from 2^63 on: a half is rounded up.
    """
    per_one = 1.0 / q
    for i in range(m.shape[0]):
        for j in range(m.shape[1]):
            d = np.uint64(whole) * m[i, j]
            x = (d >> np.uint64(32)) * np.uint64(high) + (d & np.uint64(0xFFFFFFFF)) * np.uint64(low)
            out[i, j] = np.uint32(reduced(x + (d >> np.uint64(63)) + np.uint64(q + e[i, j]), q, per_one))


def encode(m: U64, e: I8, i: int, params: WordParams = WORD_PARAMS) -> U32:
    """(round(q m / 2^64) + e) mod prime ``i``, a half rounded up: ``[k, C]``, for words ``m`` and errors ``e``."""
    low, high = _encoders(params)[i]
    out = np.empty(m.shape, np.uint32)
    _encode(m, e, params.primes[i], params.q % (1 << 64), low, high, out)
    return out


@compiled
def _flood(words: U64, mask: int, q: int, powers: U64, offset: int, out: U32) -> None:
    """Adds (w1 & mask) 2^64 + w0 + offset; ``powers`` are 2^32, 2^64, 2^96 modulo q."""
    per_one, low, half = 1.0 / q, np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            w0, w1 = words[0, i, j], words[1, i, j] & np.uint64(mask)
            x = (w0 & low) + (w0 >> half) * powers[0] + (w1 & low) * powers[1] + (w1 >> half) * powers[2]
            out[i, j] = np.uint32(reduced(x + np.uint64(out[i, j]) + np.uint64(offset), q, per_one))


def add_flood(out: U32, words: U64, i: int, params: WordParams = WORD_PARAMS) -> None:
    """Adds noise uniform on [-2^F, 2^F), made of uniform ``words [2, k, C]``, to residues ``out [k, C]`` in place."""
    q, bits = params.primes[i], params.flood_bits
    powers = np.array([pow(2, 32 * k, q) for k in (1, 2, 3)], np.uint64)
    _flood(words, (1 << (bits + 1 - WORD_BITS)) - 1, q, powers, -(1 << bits) % q, out)


@cache
def answer_params(params: WordParams = WORD_PARAMS) -> RlweParams:
    """The ring of switched answers."""
    return RlweParams(n=params.n, primes=params.primes[:ANSWER_PRIMES], eta=params.eta)


@compiled
def _drop(x: U32, last: U32, q: int, dropped: int, inverse: int) -> None:
    """x = (x - last) / dropped modulo q, for ``last`` modulo the prime that is dropped, centred."""
    per_one, half = 1.0 / q, np.uint32(dropped // 2)
    for k in range(x.size):
        v = last[k]
        up = np.uint64(2 * q) - np.uint64(v) + np.uint64(dropped if v > half else 0)
        x[k] = np.uint32(reduced((np.uint64(x[k]) + up) * np.uint64(inverse), q, per_one))


def switch(d: U32, params: WordParams = WORD_PARAMS) -> U32:
    """Coefficients ``[primes, k, C]`` modulo q to q', the product of the first three primes: times q' / q, rounded.

    One prime after the other is dropped (Cheon, Han, Kim, Kim and Song, SAC 2018, ePrint 2018/931); the result is
    within 1/2 (1 + 2^-25) of the truth.
    """
    d = d.copy()
    for j in range(len(d) - 1, ANSWER_PRIMES - 1, -1):
        for i in range(j):
            inverse = pow(params.primes[j], -1, params.primes[i])
            _drop(d[i].reshape(-1), d[j].reshape(-1), params.primes[i], params.primes[j], inverse)
    return d[:ANSWER_PRIMES]


@cache
def _decoders(primes: tuple[int, ...]) -> U64:
    """Of each prime: (q / q_i)^-1 mod q_i, and floor(2^128 / q_i) as words of 38, 32 and 32 bits, ``[primes, 4]``."""
    table, whole = [], math.prod(primes)
    for q in primes:
        part = (1 << 128) // q
        table.append([pow(whole // q, -1, q), part >> 64, (part >> 32) & 0xFFFFFFFF, part & 0xFFFFFFFF])
    return np.array(table, np.uint64)


@compiled
def _decode(d: U32, primes: U64, table: U64, out: U64) -> None:
    """Sums are made in units of 1 and of 2^-32, of which the second ends below 2^62, some hundred values at a time."""
    half, some = np.uint64(32), 512
    fractions = np.empty(some, np.uint64)
    for start in range(0, out.size, some):
        width = min(some, out.size - start)
        whole = out[start : start + width]
        whole[:] = 0
        fractions[:] = 1 << 31
        for k in range(d.shape[0]):
            q, x = primes[k], d[k, start : start + width]
            per_one, a, b0, b1, b2 = 1.0 / np.float64(q), table[k, 0], table[k, 1], table[k, 2], table[k, 3]
            for j in range(width):
                y = reduced(np.uint64(x[j]) * a, q, per_one)
                whole[j] += y * b0
                fractions[j] += y * b1 + ((y * b2) >> half)
        for j in range(width):
            whole[j] += fractions[j] >> half


def decode(d: U32, params: WordParams = WORD_PARAMS) -> U64:
    """round(2^64 x / q) mod 2^64 of residues ``[primes, k, C]`` of x: ``[k, C]``; or modulo q', of as many primes.

    x / q is the sum of y_i / q_i modulo 1, y_i = x (q / q_i)^-1 mod q_i (Halevi, Polyakov and Shoup, ePrint 2018/117,
    simple scaling), here in fixed point: what is rounded lies at most 7 (2^-32 + 2^-37) below the truth, hence the
    2^-27 of :meth:`WordParams.budget`.
    """
    flat = np.ascontiguousarray(d).reshape(len(d), -1)
    out = np.empty(flat.shape[1], np.uint64)
    primes = params.primes[: len(d)]
    _decode(flat, np.array(primes, np.uint64), _decoders(primes), out)
    return out.reshape(d.shape[1:])


@compiled
def _lift(small: I8, q: int, out: U32) -> None:
    for i in range(small.shape[0]):
        for j in range(small.shape[1]):
            v = np.int32(small[i, j])
            out[i, j] = np.uint32(v + np.int32(q) if v < 0 else v)


def lift(small: I8, i: int, params: WordParams = WORD_PARAMS) -> U32:
    """Small signed numbers ``[k, C]`` modulo prime ``i``."""
    out = np.empty(small.shape, np.uint32)
    _lift(small, params.primes[i], out)
    return out


@compiled
def _add_products(c: U32, a: U32, b: U32, q: int) -> None:
    per_one = 1.0 / q
    for i in range(c.shape[0]):
        bi = np.uint64(b[i, 0])
        for j in range(c.shape[1]):
            c[i, j] = np.uint32(reduced(np.uint64(c[i, j]) + np.uint64(a[i, j]) * bi, q, per_one))


def add_products(c: U32, a: U32, b: U32, i: int, params: WordParams = WORD_PARAMS) -> None:
    """c += a b modulo prime ``i``, in place, in NTT form: ``c``, ``a`` ``[N, C]``, ``b [N, 1]``."""
    _add_products(c, a, b, params.primes[i])


# -- packing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WordShape(BlockShape):
    """:class:`sordino.shared.packing.BlockShape` over :data:`WORD_PARAMS`; with N rows, one input and one output to a
    polynomial, the packing of batches."""

    def __post_init__(self) -> None:
        if min(self.rows, self.inputs, self.outputs, self.in_features, self.out_features) < 1:
            raise ValueError("a block has at least one row, input and output")
        if self.rows & (self.rows - 1) or self.rows * self.inputs * self.outputs > WORD_PARAMS.n:
            raise ValueError(f"a block has a power of two of rows and at most {WORD_PARAMS.n} coefficients")
        if self.points > 1 and self.input_blocks > MAX_INPUT_BLOCKS:
            raise ValueError(f"{self.input_blocks} blocks to a row are over {MAX_INPUT_BLOCKS}: ask for fewer rows")

    @property
    def points(self) -> int:
        return WORD_PARAMS.n // self.rows

    def upload_bytes(self, params: RlweParams = WORD_PARAMS) -> int:
        """Bytes of the messages of a request."""
        return sum(request_bytes(stop - first, params) for first, stop in messages(self.input_blocks))

    def download_bytes(self, bits: int = 0, params: RlweParams = WORD_PARAMS) -> int:
        """Bytes of the messages of an answer.

        Raises:
            ValueError: ``bits`` is not 0; answers are not switched to a power of two.
        """
        if bits:
            raise ValueError("answers of this profile are not switched to a power of two")
        return sum(sum(answer_bytes(self, stop - first, params)) for first, stop in messages(self.output_blocks))


@cache
def word_shape(rows: int, in_features: int, out_features: int) -> WordShape:
    """The packing of the fewest bytes for up to ``rows`` rows.

    Raises:
        ValueError: there are no rows, more than N, or more than half of N and a very long matrix.
    """
    if not 1 <= rows <= WORD_PARAMS.n:
        raise ValueError(f"a request has 1 to {WORD_PARAMS.n} rows, not {rows}")
    whole = 1 << (rows - 1).bit_length()
    room = WORD_PARAMS.n // whole
    sizes = {min(room, -(-in_features // blocks)) for blocks in range(1, in_features + 1)}
    sizes = {size for size in sizes if -(-in_features // size) <= MAX_INPUT_BLOCKS} or sizes
    shapes = [WordShape(whole, size, room // size, in_features, out_features) for size in sizes]
    return min(shapes, key=lambda shape: shape.upload_bytes() + shape.download_bytes())


def encode_words(r: U64, shape: WordShape) -> U64:
    """Up to ``shape.rows`` rows ``r [R, in_features]`` to polynomials ``[N, input_blocks]``."""
    padded = np.zeros((shape.rows, shape.input_blocks * shape.inputs), np.uint64)
    padded[: len(r), : shape.in_features] = r
    out = np.zeros((WORD_PARAMS.n, shape.input_blocks), np.uint64)
    blocks = padded.reshape(shape.rows, shape.input_blocks, shape.inputs).transpose(2, 0, 1)
    out[: shape.rows * shape.inputs] = blocks.reshape(-1, shape.input_blocks)
    return out


def decode_words(read: U64, shape: WordShape, first: int) -> U64:
    """Coefficients at :func:`~sordino.shared.packing.useful` positions ``[outputs * rows, C]``, of the blocks from
    ``first`` on, as ``[rows, outputs of these blocks]``."""
    blocks = read.reshape(shape.outputs, shape.rows, -1).transpose(1, 2, 0).reshape(shape.rows, -1)
    return np.ascontiguousarray(blocks[:, : shape.out_features - first * shape.outputs])


# -- wire form ---------------------------------------------------------------------------------------------------------


def messages(blocks: int) -> list[tuple[int, int]]:
    """Which blocks, first and stop, each message carries."""
    return [(first, min(first + MESSAGE_BLOCKS, blocks)) for first in range(0, blocks, MESSAGE_BLOCKS)]


def request_bytes(columns: int, params: RlweParams = WORD_PARAMS) -> int:
    """Bytes of so many ciphertexts whose second half is a seed; of a public key: 1."""
    return SEED_BYTES + packed_bytes(len(params.primes) * params.n * columns)


def answer_bytes(shape: WordShape, columns: int, params: RlweParams = WORD_PARAMS) -> tuple[int, int]:
    """Bytes of the two halves of so many answered blocks: of the first, only what is read."""
    read = shape.outputs * shape.rows
    return packed_bytes(ANSWER_PRIMES * read * columns), packed_bytes(ANSWER_PRIMES * params.n * columns)


def pack_seeded(seed: bytes, half: U32) -> bytes:
    """A seed and a half ``[primes, N, C]`` in NTT form."""
    return seed + pack(half)


def unpack_seeded(message: bytes, columns: int, params: WordParams = WORD_PARAMS) -> tuple[U32, U32]:
    """Both halves ``[primes, N, columns]``: the one that was sent, the one of the seed.

    Raises:
        ProtocolError: of another length, or a residue is not below its prime.
    """
    if len(message) != request_bytes(columns, params):
        raise ProtocolError(
            f"{len(message)} bytes for {columns} ciphertexts, expected {request_bytes(columns, params)}"
        )
    sent = unpack(message[SEED_BYTES:], (len(params.primes), params.n, columns), params)
    return sent, expand_uniform(message[:SEED_BYTES], 0, (params.n, columns), params)


def pack_answer(c0: U32, c1: U32) -> bytes:
    """Of switched answers, the read coefficients ``[3, outputs * rows, C]`` of c0 and all ``[3, N, C]`` of c1."""
    return pack(c0) + pack(c1)


def unpack_answer(message: bytes, shape: WordShape, columns: int, params: WordParams = WORD_PARAMS) -> tuple[U32, U32]:
    """Of :func:`pack_answer`.

    Raises:
        ProtocolError: of another length, or a residue is not below its prime.
    """
    first, second = answer_bytes(shape, columns, params)
    if len(message) != first + second:
        raise ProtocolError(f"{len(message)} bytes for {columns} answered blocks, expected {first + second}")
    ring = answer_params(params)
    c0 = unpack(message[:first], (ANSWER_PRIMES, len(useful(shape)), columns), ring)
    return c0, unpack(message[first:], (ANSWER_PRIMES, params.n, columns), ring)
