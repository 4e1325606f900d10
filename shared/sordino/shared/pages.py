"""Pages of an encrypted KV cache: how keys, values, queries and probabilities lie in polynomials, and what comes back.

A page holds the keys (or values) of some tokens of one head in one ciphertext. With d the head size and B tokens,
B*d <= N, in the coefficient encoding of CKKS (Cheon, Kim, Kim and Song, ePrint 2016/421: real numbers times a scale,
rounded)::

    keys           sum_t sum_j K[t, j] X^(t*d + j)        query          sum_j q_j X^(d-1-j)
    values         sum_j sum_t V[t, j] X^(j*B + t)        probabilities  sum_t p_t X^(B-1-t)

    coefficient t*d + d-1 of keys * query            =  sum_j K[t, j] q_j    the score of token t
    coefficient j*B + B-1 of values * probabilities  =  sum_t p_t V[t, j]    output j

Terms that wrap around fall on powers below d-1 and B-1, which are not read. Both factors are encrypted; a product is
(c0, c1, c2) with c0 + c1*s + c2*s^2 the product of the plaintexts, and is not brought back to two parts: whoever holds
s multiplies with s^2. There are no evaluation keys.

An answer is switched from q to 2^bits in coefficient form: of c0 the coefficients that are read, c1 and c2 whole. A
rounding of c2 counts times ||s^2|| = 3,860 and one of c1 times ||s|| = 52, so c1 goes with :data:`COARSE_BITS` less.

Scores can be sums of large terms that cancel, and the softmax takes their error as it is; outputs are averages of
values. So keys and queries are at the level of three primes, values and probabilities at that of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sordino.shared.rlwe import PAGE_PARAMS, U64, VALUE_PARAMS, RlweParams, pack, packed_bytes, unpack_switched

N: Final = PAGE_PARAMS.n
COARSE_BITS: Final = 6


@dataclass(frozen=True, slots=True)
class Level:
    """Both factors of a product are at one level: its parameters, and answers modulo 2^bits."""

    params: RlweParams
    bits: int

    @property
    def primes(self) -> int:
        return len(self.params.primes)

    @property
    def ciphertext_bytes(self) -> int:
        """Of a seeded ciphertext."""
        return packed_bytes(self.primes * N)

    @property
    def page_bytes(self) -> int:
        """Of both halves in memory, a residue in four bytes."""
        return 2 * self.primes * N * 4

    def answer_bytes(self, read: Read) -> int:
        """Of one answer on its own."""
        return packed_bytes(read.count, self.bits) + N * (2 * self.bits - COARSE_BITS) // 8


# The errors are 2^-30.4 of the largest score, and for eight pages 2^-20.2 of the largest output, that could be
# (docs/protocol.md).
KEYS: Final = Level(PAGE_PARAMS, 42)
VALUES: Final = Level(VALUE_PARAMS, 34)
LEVELS: Final = {level.primes: level for level in (KEYS, VALUES)}


@dataclass(frozen=True, slots=True)
class Read:
    """Which coefficients of a product are read: ``first``, ``first + step``, ..., ``count`` of them.

    Raises:
        ValueError: there are none, or not all of them are in the ring.
    """

    first: int
    step: int
    count: int

    def __post_init__(self) -> None:
        if min(self.step, self.count) < 1 or self.first < 0 or self.first + self.step * (self.count - 1) >= N:
            raise ValueError(f"{self.count} coefficients from {self.first} in steps of {self.step} are not below {N}")


@dataclass(frozen=True, slots=True)
class PageShape:
    """``tokens`` tokens of ``head_size`` entries in a polynomial; what is over stays empty.

    Raises:
        ValueError: they do not fit.
    """

    head_size: int
    tokens: int

    def __post_init__(self) -> None:
        if min(self.head_size, self.tokens) < 1 or self.head_size * self.tokens > N:
            raise ValueError(f"{self.tokens} tokens of head size {self.head_size} do not fit in a page of {N}")

    @property
    def scores(self) -> Read:
        return Read(self.head_size - 1, self.head_size, self.tokens)

    @property
    def outputs(self) -> Read:
        return Read(self.tokens - 1, self.tokens, self.head_size)


def pack_answers(parts: tuple[U64, U64, U64], level: Level) -> tuple[bytes, bytes, bytes]:
    """Answers of one message: ``c0 [R, count]``, ``c1 [R, N]`` (:data:`COARSE_BITS` less), ``c2 [R, N]``."""
    c0, c1, c2 = parts
    return pack(c0, level.bits), pack(c1, level.bits - COARSE_BITS), pack(c2, level.bits)


def unpack_answers(packed: tuple[bytes, bytes, bytes], answers: int, read: Read, level: Level) -> tuple[U64, U64, U64]:
    """The reverse of :func:`pack_answers`.

    Raises:
        ProtocolError: a part has another size.
    """
    shapes = ((answers, read.count), (answers, N), (answers, N))
    bits = (level.bits, level.bits - COARSE_BITS, level.bits)
    c0, c1, c2 = (unpack_switched(*part) for part in zip(packed, shapes, bits, strict=True))
    return c0, c1, c2


def montgomery(q: int) -> tuple[int, int]:
    """-q^-1 mod 2^32 and 2^32 mod q: constants of Montgomery's reduction (Math. Comp. 44, 1985) with radix 2^32."""
    return -pow(q, -1, 1 << 32) % (1 << 32), (1 << 32) % q
