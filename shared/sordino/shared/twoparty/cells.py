"""1/sqrt(x) and 1/x on shares in one round, by point functions for all prefixes of a mask (docs/two-party.md §6.2).

A wire x is opened as x + r. A node of level l and prefix p of the tree over r holds the x of an interval of width
2^(64 - l), known to both parties. Nodes that touch no x of the domain are left out, nodes no wider than 1/16 of their
lower end are *cells*, others are split. Exactly one cell holds r; there f is a quadratic in rho, the 10 bits of r below
l, whose coefficients are public and whose powers are the payload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.jit import compiled
from sordino.shared.twoparty.aes import CHILDREN, LEAVES, hash_into, in_loops
from sordino.shared.twoparty.points import U8, U64, root_nodes, unpack, width

I64 = NDArray[np.int64]

PAYLOAD_BYTES: Final = 24  # of a level
# Of a wire and level at most: nodes that are split (their lower ends are from -1 to 16 widths), and cells (16 to 34).
_SPLIT: Final = 18
_CELLS: Final = 19
# Wires at once.
_WIRES: Final = 32


@dataclass(frozen=True, slots=True)
class Domain:
    """Where f is known, and its scale. A value v stands for v / 2^fraction.

    Attributes:
        function: "rsqrt" or "reciprocal".
        lo, hi: f is right for 2^lo <= x <= 2^hi, x the integer on the wire; 5 <= lo < hi <= 62.
        fraction: fraction bits of x. result_fraction: fraction bits of f.

    Raises:
        RangeError: the ends are out of order, or f at 2^lo is not below 2^62.
    """

    function: Literal["rsqrt", "reciprocal"]
    lo: int
    hi: int
    fraction: int
    result_fraction: int

    def __post_init__(self) -> None:
        if self.function not in ("rsqrt", "reciprocal"):
            raise RangeError("the function of a domain is rsqrt or reciprocal")
        if not 5 <= self.lo < self.hi <= 62:
            raise RangeError(f"a domain from 2^{self.lo} to 2^{self.hi}: the ends must be in order, from 2^5 to 2^62")
        # Of the largest value, with what the lowest cell may go below 2^lo.
        if self.log2_scale - self.lo / (2 if self.function == "rsqrt" else 1) >= 61.9:
            raise RangeError(f"{self.function} at 2^{self.lo} is not below 2^62: take fewer fraction bits")

    @property
    def log2_scale(self) -> float:
        """log2 of s, where the integer result is s / sqrt(x) or s / x."""
        return self.result_fraction + (self.fraction / 2 if self.function == "rsqrt" else self.fraction)

    @property
    def first_level(self) -> int:
        """No cell is above it: half as many bits would be wider than 1/16 of 2^hi."""
        return 68 - self.hi

    @property
    def last_level(self) -> int:
        """Every node of it that touches the domain is a cell: 17 widths are at most 2^lo."""
        return 69 - self.lo

    @property
    def levels(self) -> int:
        """How many levels have a payload."""
        return self.last_level - self.first_level + 1

    @property
    def width(self) -> int:
        """Bytes of corrections for a wire."""
        return width(self.last_level, PAYLOAD_BYTES * self.levels)


@compiled
def _coefficients(middle: float, width: float, scale: float, root: bool, out: I64) -> None:
    """Integers c0, c1, c2 with f(x) = c0 + c1 rho + c2 rho^2 on a cell, up to its error.

    x = middle + h (511.5 - rho) in the middle of rho's step h = width / 1024. Taylor about the middle, the cubic term
    replaced by the line that is nearest to it (Chebyshev: 3/4 of its value at the end). Rounding errors of c2 and c1
    are handed on to the coefficients below, where nearly all of them fits (rho^2 is within 1023^2 / 8 of a line).
    Only IEEE operations that are correctly rounded: all machines get the same integers.
    """
    d = width / 1024.0 / middle
    half = 512.0 * d
    if root:
        f = scale / math.sqrt(middle)
        k1, k2, k3 = 0.5, 0.375, 0.3125
    else:
        f = scale / middle
        k1, k2, k3 = 1.0, 1.0, 1.0
    # f (1 - k1 z + k2 z^2 - k3 z^3), z = d (511.5 - rho)
    k1 += k3 * (0.75 * (half * half))
    a0 = f * (1.0 - k1 * (511.5 * d) + k2 * ((511.5 * d) * (511.5 * d)))
    a1 = f * (k1 * d - k2 * (1023.0 * (d * d)))
    a2 = f * (k2 * (d * d))
    c2 = math.floor(a2 + 0.5)
    left = a2 - c2
    # a0 + a1 rho + a2 rho^2
    a1 += left * 1023.0
    a0 -= left * (1023.0 * 1023.0 / 8.0)
    c1 = math.floor(a1 + 0.5)
    a0 += (a1 - c1) * 511.5
    out[0], out[1], out[2] = np.int64(math.floor(a0 + 0.5)), np.int64(c1), np.int64(c2)


@compiled
def _split(
    nodes: U64,
    places: U64,
    size: int,
    hashes: U64,
    left: U64,
    right: U8,
    opened: U64,
    level: int,
    ends: tuple[int, int],
    deeper: U64,
    deeper_places: U64,
    cells: U64,
    cell_places: U64,
    found: int,
) -> tuple[int, int]:
    """Children, at ``level``, of ``size`` nodes: to ``deeper`` or behind ``found`` cells, or left out; both numbers.

    ``places [*, 2]`` are a node's first bits of r, moved up to their place, and its wire; ``cell_places [*, 3]`` a
    cell's largest x, its level and its wire.
    """
    one, zero, sixteen = np.uint64(1), np.uint64(0), np.uint64(16)
    width = one << np.uint64(64 - level)
    low, high = one << np.uint64(ends[0]), one << np.uint64(ends[1])
    more = 0
    for i in range(size):
        w = places[i, 1]
        c0, c1 = left[w, level - 1, 0], left[w, level - 1, 1]
        c2 = (c0 & ~one) | np.uint64(right[w, level - 1])
        on = zero - (nodes[i, 0] & one)
        for side in range(2):
            prefix = places[i, 0] | (width if side else zero)
            top = opened[w] - prefix
            bottom = top - (width - one)
            wraps = bottom > top
            if (wraps and top < low and bottom > high) or (not wraps and (top < low or bottom > high)):
                continue
            a, b = hashes[side, i, 0] ^ ((c2 if side else c0) & on), hashes[side, i, 1] ^ (c1 & on)
            if not wraps and width <= bottom // sixteen:
                cells[found, 0], cells[found, 1] = a, b
                cell_places[found, 0], cell_places[found, 1], cell_places[found, 2] = top, np.uint64(level), w
                found += 1
            else:
                deeper[more, 0], deeper[more, 1] = a, b
                deeper_places[more, 0], deeper_places[more, 1] = prefix, w
                more += 1
    return more, found


@in_loops
def _find(
    left: U64, right: U8, roots: U64, opened: U64, ends: tuple[int, int], room: U64, cells: U64, places: U64
) -> tuple[int, U64]:
    """All cells of n wires: how many, to ``cells [*, 2]`` and ``places [*, 3]`` as in :func:`_split`, and hashes.

    ``room [6, *, 2]`` holds the nodes of a level and of the next, their places, and hashes of them.
    """
    n, depth = right.shape
    nodes, node_places, deeper, deeper_places, hashes = room[0], room[1], room[2], room[3], room[4:]
    for w in range(n):
        nodes[w, 0], nodes[w, 1] = roots[w, 0], roots[w, 1]
        node_places[w, 0], node_places[w, 1] = 0, w
    size, found = n, 0
    for level in range(1, depth + 1):
        hash_into(nodes, size, CHILDREN, 2, hashes)
        size, found = _split(
            nodes,
            node_places,
            size,
            hashes,
            left,
            right,
            opened,
            level,
            ends,
            deeper,
            deeper_places,
            cells,
            places,
            found,
        )
        nodes, node_places, deeper, deeper_places = deeper, deeper_places, nodes, node_places
    made = np.empty((2, found, 2), np.uint64)
    hash_into(cells, found, LEAVES, 2, made)
    return found, made


@compiled
def _sum_cells(
    cells: U64,
    places: U64,
    hashes: U64,
    leaf: U64,
    first_level: int,
    scale: float,
    root: bool,
    values: U64,
    inside: U64,
) -> None:
    """Adds up f and 1 over ``cells [m, 2]``; ``hashes [2, m, 2]`` and ``leaf [n, levels, 3]`` give the payload."""
    c = np.empty(3, np.int64)
    for i in range(len(cells)):
        w, level = places[i, 2], np.int64(places[i, 1])
        width = np.float64(np.uint64(1) << np.uint64(64 - level))
        _coefficients(np.float64(places[i, 0]) - 0.5 * width, width, scale, root, c)
        on = np.uint64(0) - (cells[i, 0] & np.uint64(1))
        at = level - first_level
        unit = hashes[0, i, 0] + (leaf[w, at, 0] & on)
        values[w] += (
            np.uint64(c[0]) * unit
            + np.uint64(c[1]) * (hashes[0, i, 1] + (leaf[w, at, 1] & on))
            + np.uint64(c[2]) * (hashes[1, i, 0] + (leaf[w, at, 2] & on))
        )
        inside[w] += unit


class CellTree:
    """The corrections of n wires, unpacked, and their cells.

    Raises:
        ProtocolError: corrections or roots of another size.
    """

    def __init__(self, corrections: U8, roots: U64, party: int, domain: Domain) -> None:
        self._domain = domain
        leaf_bytes = PAYLOAD_BYTES * domain.levels
        self._left, self._right, leaf = unpack(corrections, len(roots), domain.last_level, leaf_bytes)
        self.leaf = leaf.reshape(len(roots), domain.levels, 3)
        self._roots = root_nodes(roots, party)

    def cells(self, opened: U64, part: slice) -> tuple[U64, U64, U64]:
        """Of the wires of ``part``: cells ``[m, 2]``, their places ``[m, 3]`` (largest x, level, wire), and hashes."""
        wires = len(opened[part])
        room = np.empty((6, wires * _SPLIT, 2), np.uint64)
        cells = np.empty((wires * _CELLS * self._domain.levels, 2), np.uint64)
        places = np.empty((len(cells), 3), np.uint64)
        corrected = self._left[part], self._right[part], self._roots[part]
        ends = self._domain.lo, self._domain.hi
        found, made = _find(*corrected, opened[part], ends, room, cells, places)
        return cells[:found], places[:found], made


def evaluate(corrections: U8, roots: U64, party: int, opened: U64, domain: Domain) -> tuple[U64, U64]:
    """Shares ``[n]`` of f(opened - r), and of 1 if a cell holds it, else 0 (f is 0 then).

    The indicator is 1 on all of [2^lo, 2^hi] and 0 beyond 2^lo (1 - 1/16) and 2^hi (1 + 1/16); in between f is right
    where it is 1. Relative error of f: at most 2e-5 (rsqrt) or 4e-5 (1/x), and 2^17 units of the result.

    Args:
        opened: ``[n]``, x + r mod 2^64.

    Raises:
        ProtocolError: corrections, roots or opened of another size.
    """
    if opened.shape != (len(roots),) or opened.dtype != np.uint64:
        raise ProtocolError(f"opened values of shape {opened.shape}, {opened.dtype}, for {len(roots)} roots")
    tree = CellTree(corrections, roots, party, domain)
    root = domain.function == "rsqrt"
    odd = root and domain.fraction % 2 == 1
    scale = math.ldexp(math.sqrt(2.0) if odd else 1.0, math.floor(domain.log2_scale))
    values, inside = np.zeros((2, len(opened)), np.uint64)
    for start in range(0, len(opened), _WIRES):
        part = slice(start, start + _WIRES)
        cells, places, made = tree.cells(opened, part)
        _sum_cells(cells, places, made, tree.leaf[part], domain.first_level, scale, root, values[part], inside[part])
    return (np.negative(values), np.negative(inside)) if party else (values, inside)
