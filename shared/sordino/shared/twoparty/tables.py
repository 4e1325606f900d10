"""Steps that look a function up, at a place that neither party knows (docs/two-party.md, §5 and §6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sordino.shared.twoparty import cells, points
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.steps import halves, masked

U64 = NDArray[np.uint64]
U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

Activation = Literal["silu", "gelu", "gelu_tanh"]

EXP_SHARE: Final = 16  # fraction bits of e^-rho, which the dealer makes
EXP_PUBLIC: Final = 19  # of what it is multiplied with
EXP_PLACE: Final = 24  # bits of a place in a cell
EXP_CELLS: Final = 16  # of 1 nat below the reference that are not 0
GATE_FINE: Final = 14  # bits of a place in a cell, times the slope
GATE_COARSE: Final = 7  # times the curvature
GATED: Final = 30  # fraction bits of what comes out of a gate's table


def index(opened: U64, k: int, bits: int) -> U64:
    """The public part of a place in a table: x's high part, modulo its size."""
    return (opened >> np.uint64(k)) & np.uint64((1 << bits) - 1)


def low(opened: U64, k: int, bits: int) -> U64:
    """The first ``bits`` of the k low ones."""
    return (opened >> np.uint64(k - bits)) & np.uint64((1 << bits) - 1)


def ring(length: int) -> type[np.uint8] | type[np.uint16]:
    """Of counts up to ``length``."""
    return np.uint8 if length < 1 << 8 else np.uint16


@dataclass(frozen=True, slots=True)
class Curve:
    """1 / sqrt(x) or 1 / x: ``[n]`` to ``[n]``, and 1 for each x in the domain, else 0. One round (§6.2)."""

    n: int
    domain: cells.Domain

    def begin(self, party: Party, x: U64) -> tuple[U64, tuple[U8, U64]]:
        """What is to be opened, and what :meth:`end` needs."""
        r = party.tape.words(self.n)
        return x + r, party.tape.points(self.n, self.domain.width)

    def end(self, party: Party, opened: U64, material: tuple[U8, U64]) -> tuple[U64, U64]:
        return cells.evaluate(*material, party.index, opened, self.domain)

    def run(self, party: Party, x: U64) -> tuple[U64, U64]:
        masked, material = self.begin(party, x)
        (opened,) = party.open(masked)
        return self.end(party, opened, material)


@dataclass(frozen=True, slots=True)
class Highest:
    """A number that is at least the largest of a line, and less than two cells over it: ``[lines, length]`` to
    ``[lines]``, two rounds (§6.3, Lemma 4).

    Attributes:
        bits: of a cell's number, so that scores are below 2^(bits - 1) cells. k: log2 of a cell.
        first, cells: the cells in which a line's largest may lie; if it is higher the second result is not 0, if it is
            lower what comes out is over it by more.
    """

    lines: int
    length: int
    bits: int
    k: int
    first: int
    cells: int

    @property
    def thresholds(self) -> int:
        return self.lines * (self.cells + 1)

    def run(self, party: Party, scores: U64, seen: Bool) -> tuple[U64, U64]:
        """``seen [lines, length]``: which places count."""
        tape, kind = party.tape, ring(self.length)
        r = tape.words(self.lines, self.length)
        lanes = points.BYTE_LEAVES if kind is np.uint8 else points.PAIR_LEAVES
        units, roots = tape.points(self.lines * self.length, points.width(self.bits - lanes))
        mu = tape.small(kind, self.lines, self.cells + 1)
        ring_bits = 8 * np.dtype(kind).itemsize
        zeros, zero_roots = tape.points(self.thresholds, points.width(ring_bits - points.WORD_LEAVES))
        (opened,) = party.open(scores + r)
        places = index(opened, self.k, self.bits)
        counts = points.histogram(units, roots, party.index, self.bits, places[None], seen, kind)
        # Sums from the top, of cells in the order of signed numbers.
        counts = np.roll(counts, 1 << (self.bits - 1), axis=1)
        above = np.cumsum(counts[:, ::-1], axis=1, dtype=kind)[:, ::-1]
        start = self.first + (1 << (self.bits - 1))
        wanted = np.ascontiguousarray(above[:, start : start + self.cells + 1])
        shown = party.open_small(wanted + mu).reshape(-1).astype(np.uint64)
        ones = np.ones((self.thresholds, 1), np.uint64)
        empty = points.word_sums(zeros, zero_roots, party.index, ring_bits, shown, ones).reshape(self.lines, -1)
        full = party.public(np.ones_like(empty)) - empty
        top = full[:, :-1].sum(axis=1, dtype=np.uint64) + party.public(
            np.full(self.lines, self.first).astype(np.uint64)
        )
        return top << np.uint64(self.k), full[:, -1]


@dataclass(frozen=True, slots=True)
class Exp:
    """e^x for x <= 0: ``[n]`` to ``[n]``, with ``EXP_SHARE + EXP_PUBLIC`` fraction bits; 0 below -15. One round (§6.4).

    Attributes:
        bits: x is over -2^(bits - 1) nats. k: fraction bits of x, so that a cell is 1 nat.
    """

    n: int
    bits: int
    k: int

    def run(self, party: Party, x: U64) -> U64:
        r = party.tape.words(self.n)
        corrections, roots = party.tape.points(self.n, points.width(self.bits - points.WORD_LEAVES))
        (opened,) = party.open(x + r)
        # Cell j = 0, -1, ... is met at alpha = (place - j): the window begins at the place, for x = j + low - rho.
        place = index(opened, self.k, self.bits)
        factors = exp_factors(low(opened, self.k, EXP_PLACE))
        return points.word_sums(corrections, roots, party.index, self.bits, place, factors)


@cache
def exp_tables() -> tuple[F64, F64, F64]:
    """e^(i / 2^12) and e^(i / 2^24) for 12 bits i, and e^-j for cells 0, -1, ... -15, times 2^``EXP_PUBLIC``."""
    fine = np.arange(1 << 12) / 2.0**12
    return np.exp(fine), np.exp(fine / 2.0**12), np.exp(-np.arange(EXP_CELLS)) * 2.0**EXP_PUBLIC


def exp_factors(place: U64) -> U64:
    """e^(place / 2^24 - j) for each cell: ``[n]`` to ``[n, 16]``. By tables and products, which both parties have
    alike, and by no library's exponential."""
    first, second, cells = exp_tables()
    part = first[place >> np.uint64(12)] * second[place & np.uint64((1 << 12) - 1)]
    out: U64 = np.rint(part[:, None] * cells).astype(np.uint64)
    return out


@cache
def gate_table(bits: int, cell: float, activation: Activation = "silu") -> U64:
    """An activation in cells: value, slope and curvature of the best quadratic about the middle of what a cell can be,
    laid out for :func:`points.bit_sums`. Cell j is all x with x / cell - j in (-1, 1)."""
    size = 1 << bits
    j = np.arange(size, dtype=np.float64)
    j = np.where(j < size // 2, j, j - size)
    at = math.sqrt(0.75)  # Chebyshev's three places
    left, middle, right = (_activated((j + place) * cell, activation) for place in (-at, 0.0, at))
    slope, curve = (right - left) / (2 * at), (right + left - 2 * middle) / (2 * at * at)
    scaled = [middle * 2.0**GATED, slope * 2.0 ** (GATED - GATE_FINE), curve * 2.0 ** (GATED - 2 * GATE_COARSE)]
    return points.bit_table(np.rint(np.stack(scaled, axis=1)).astype(np.int64)[None])


def _activated(x: F64, activation: Activation) -> F64:
    out: F64
    if activation == "gelu":
        out = x * np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in x])
    elif activation == "gelu_tanh":
        out = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        out = x / (1 + np.exp(-x))
    return out


@dataclass(frozen=True, slots=True)
class Gated:
    """An activation of gate, times up: ``[n]`` each to ``[n]``, two rounds (§6.5, Lemma 6).

    Attributes:
        bits: of a cell's number. k: log2 of a cell, of gate's integers. cell: as a real number. cut: bits cut off of
            up.
    """

    n: int
    bits: int
    k: int
    cell: float
    cut: int
    activation: Activation = "silu"

    def run(self, party: Party, gate: U64, up: U64) -> U64:
        tape, n = party.tape, self.n
        r = tape.words(n)
        corrections, roots = tape.points(n, points.width(self.bits - points.BIT_LEAVES))
        nu, ru = tape.words(3, n), tape.words(n)
        a, b = tape.given(n), tape.given(n)
        # Each alone, times A and times B: of the place, sigma * (1, fine, coarse, coarse^2), and what that makes of the
        # masks nu, by powers of the public places.
        sigma, fine, coarse, square, base, slope, bend, turn = (tape.given(3, n) for _ in range(8))
        (opened,) = party.open(gate + r)
        phases = np.zeros(n, np.int64)
        table = gate_table(self.bits, self.cell, self.activation)
        sums = points.bit_sums(corrections, roots, party.index, index(opened, self.k, self.bits), phases, table)
        z, shown = party.open(sums + nu, masked(party, up, ru))
        h = halves(shown, self.cut, a, b)
        x, y = low(opened, self.k, GATE_FINE), low(opened, self.k, GATE_COARSE)
        two = np.uint64(2)
        # sigma (x - fine), sigma (y - coarse)^2; the masks' part likewise
        out = z[0] * sigma + z[1] * (x * sigma - fine) + z[2] * (y * y * sigma - two * y * coarse + square)
        out -= base + x * slope + y * y * bend - two * y * turn
        product: U64 = h.p * out[0] - out[1] + h.w * out[2]
        return product
