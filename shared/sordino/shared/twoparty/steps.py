"""The steps of a pass that need the dealer: what each opens, and what it makes of it (docs/two-party.md).

A step is its sizes; :mod:`sordino.dealer.deal` makes the material of each. All arrays are shares, ``uint64``, of signed
fixed-point numbers; integers wrap. Wires are bounded by 2^62 where a step truncates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.tape import CLIENT

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_OFFSET: Final = np.uint64(1 << 62)
_TOP: Final = np.uint64(63)
_ONE: Final = np.uint64(1)


@dataclass(slots=True)
class Halves:
    """A truncated wire P - A + w B: P and w public, A = r >> k and B = r's top bit * 2^(64-k) shares (§4)."""

    p: U64
    w: U64
    a: U64
    b: U64

    def value(self, party: Party) -> U64:
        """The share of it."""
        return party.public(self.p) - self.a + self.w * self.b


def masked(party: Party, x: U64, r: U64) -> U64:
    """What is sent of a wire that is truncated."""
    return x + r + _OFFSET if party.index == CLIENT else x + r


def halves(opened: U64, k: int, a: U64, b: U64) -> Halves:
    """Lemma 2."""
    shift = np.uint64(k)
    return Halves((opened >> shift) - (_OFFSET >> shift), _ONE - (opened >> _TOP), a, b)


@dataclass(frozen=True, slots=True)
class Trunc:
    """|x| < 2^62 to floor(x / 2^k), or one more: ``[n]``."""

    n: int
    k: int

    def run(self, party: Party, x: U64) -> U64:
        tape = party.tape
        r, a, b = tape.words(self.n), tape.given(self.n), tape.given(self.n)
        (opened,) = party.open(masked(party, x.reshape(-1), r))
        return halves(opened, self.k, a, b).value(party).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class TruncSquare:
    """``[rows, d]`` to x truncated, and the sum of its squares of each row: one round."""

    rows: int
    d: int
    k: int

    def run(self, party: Party, x: U64) -> tuple[U64, U64]:
        tape, shape = party.tape, (self.rows, self.d)
        r, a, b, aa, ab = tape.words(*shape), *(tape.given(*shape) for _ in range(4))
        (opened,) = party.open(masked(party, x, r))
        h = halves(opened, self.k, a, b)
        two = np.uint64(2)
        # (P - A + wB)^2, with w^2 = w, and B^2 = 2^(64-k) B
        squares = (
            party.public(h.p * h.p) + aa - two * h.p * a + h.w * (two * (h.p * b - ab) + (b << np.uint64(64 - self.k)))
        )
        return h.value(party), squares.sum(axis=1, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class TruncMul:
    """``y [n, m]`` truncated by ky times ``t [n]`` truncated by kt: ``[n, m]``, one round."""

    n: int
    m: int
    ky: int
    kt: int

    def run(self, party: Party, y: U64, t: U64) -> U64:
        tape, shape = party.tape, (self.n, self.m)
        ry, rt = tape.words(*shape), tape.words(self.n)
        ya, yb, ta, tb = tape.given(*shape), tape.given(*shape), tape.given(self.n), tape.given(self.n)
        aa, ab, ba, bb = (tape.given(*shape) for _ in range(4))
        opened_y, opened_t = party.open(masked(party, y, ry), masked(party, t, rt))
        hy, ht = halves(opened_y, self.ky, ya, yb), halves(opened_t, self.kt, ta, tb)
        p, w = ht.p[:, None], ht.w[:, None]
        # (P - A + wB)(p - a + vb), the shares of masks alone first
        out = aa - w * ab - hy.w * (ba - w * bb)
        out += hy.p * (ht.w * ht.b - ht.a)[:, None] + p * (hy.w * hy.b - hy.a)
        return out + party.public(hy.p * p)


@dataclass(frozen=True, slots=True)
class WithCache:
    """Products of what is opened now with rows of the cache, which were opened when they were appended (§6.6).

    Of ``left [rows, heads, k]`` with keys ``[kept, groups, k]``: ``[rows, heads, kept]``; or, with ``values``, of
    ``left [rows, heads, kept]`` with values: ``[rows, heads, k]``. A group is shared by heads / groups heads that
    follow each other.
    """

    rows: int
    heads: int
    groups: int
    k: int
    kept: int
    values: bool

    @property
    def inputs(self) -> tuple[int, int, int]:
        return self.rows, self.heads, self.kept if self.values else self.k

    @property
    def outputs(self) -> tuple[int, int, int]:
        return self.rows, self.heads, self.k if self.values else self.kept

    def product(self, left: U64, cached: U64) -> U64:
        """By ``cached [kept, groups, k]``."""
        grouped = left.reshape(self.rows, self.groups, self.heads // self.groups, -1)
        out: U64 = np.einsum("rght,tgk->rghk" if self.values else "rghk,tgk->rght", grouped, cached)
        return out.reshape(self.outputs)

    def begin(self, party: Party, left: U64) -> tuple[U64, tuple[U64, U64]]:
        """What is to be opened, and what :meth:`end` needs."""
        a = party.tape.words(*self.inputs)
        return left - a, (a, party.tape.given(*self.outputs))

    def end(self, party: Party, opened: U64, material: tuple[U64, U64], cached: U64, b: U64) -> U64:
        """By ``cached`` as it was opened, and the share ``b`` of its mask."""
        a, ab = material
        # (l + a)(C + b) = l C + a C + l b + a b, of which l C is public
        return ab + self.product(party.public(opened) + a, cached) + self.product(opened, b)
