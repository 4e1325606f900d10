"""Keys of distributed point functions, as the dealer makes them (Boyle, Gilboa and Ishai, ePrint 2018/707, figure 1).

A key is a root, out of a party's own generator and never sent, and corrections that are the same for both parties. What
the parties make of them is in ``sordino.shared.twoparty.points`` and ``cells``, with shapes and layout.

Seeds have 127 bits, control bits are the lowest of a block. To a party all corrections are uniform: each is masked by
what the generator makes of a seed of the other party that is off its own tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import RangeError
from sordino.shared.jit import compiled
from sordino.shared.twoparty.aes import CHILDREN, LEAVES, hashed
from sordino.shared.twoparty.points import (
    BIT_LEAVES,
    BYTE_LEAVES,
    I64,
    PAIR_LEAVES,
    U8,
    U64,
    WORD_LEAVES,
    Ring,
    pack,
    root_nodes,
)


@compiled
def _grow(hashes: U64, alpha: U64, shift: int, nodes: U64, left: U64, right: U8) -> None:
    """One level down the paths: ``nodes [2, n, 2]`` of both parties become their children towards alpha.

    ``hashes [2, 2 * n, 2]`` of the nodes, side by side; writes the corrections ``left [n, 2]``, ``right [n]``. Both
    seeds of the side that is left get equal, and both control bits; on the side that is kept the bits get different.
    """
    n = left.shape[0]
    one, zero = np.uint64(1), np.uint64(0)
    for w in range(n):
        keep = (alpha[w] >> np.uint64(shift)) & one
        lose = np.int64(one - keep)
        c0 = (hashes[lose, w, 0] ^ hashes[lose, n + w, 0]) & ~one
        c1 = hashes[lose, w, 1] ^ hashes[lose, n + w, 1]
        t_left = (hashes[0, w, 0] ^ hashes[0, n + w, 0] ^ keep ^ one) & one
        t_right = (hashes[1, w, 0] ^ hashes[1, n + w, 0] ^ keep) & one
        left[w, 0], left[w, 1], right[w] = c0 | t_left, c1, np.uint8(t_right)
        kept = np.int64(keep)
        c0 |= t_right if kept else t_left
        for party in range(2):
            on = zero - (nodes[party, w, 0] & one)
            nodes[party, w, 0] = hashes[kept, party * n + w, 0] ^ (c0 & on)
            nodes[party, w, 1] = hashes[kept, party * n + w, 1] ^ (c1 & on)


class _Paths:
    """The nodes of both parties on the paths to alpha ``[n]``, level by level, and the corrections so far."""

    def __init__(self, alpha: U64, bits: int, depth: int, roots0: U64, roots1: U64) -> None:
        if roots0.shape != roots1.shape or len(roots0) != len(alpha):
            raise RangeError(f"roots of shapes {roots0.shape} and {roots1.shape} for {len(alpha)} places")
        if bits < 64 and alpha.size and int(alpha.max()) >> bits:
            raise RangeError(f"a place is over {bits} bits: take it modulo 2^{bits}")
        self.nodes = np.stack([root_nodes(roots0, 0), root_nodes(roots1, 1)])
        self.left = np.empty((len(alpha), depth, 2), np.uint64)
        self.right = np.empty((len(alpha), depth), np.uint8)
        self._alpha, self._bits = alpha, bits

    def grow(self, level: int) -> None:
        """To ``level``, from the one above."""
        hashes = hashed(self.nodes.reshape(-1, 2), CHILDREN, 2)
        at = level - 1
        _grow(hashes, self._alpha, self._bits - level, self.nodes, self.left[:, at], self.right[:, at])

    def leaves(self, blocks: int) -> U64:
        """What both parties make leaves of, ``[2, n, 2 * blocks]``."""
        made = hashed(self.nodes.reshape(-1, 2), LEAVES, blocks)
        return made.transpose(1, 0, 2).reshape(2, len(self._alpha), 2 * blocks)

    def negative(self) -> NDArray[np.bool_]:
        """``[n]``: whether it is party 1 that adds the correction of the leaf, which is negated then."""
        return (self.nodes[1, :, 0] & np.uint64(1)).astype(np.bool_)


def _paths(alpha: U64, bits: int, log_leaves: int, roots0: U64, roots1: U64) -> _Paths:
    if not log_leaves <= bits <= 64:
        raise RangeError(f"a domain of {bits} bits: with these leaves it has {log_leaves} to 64")
    paths = _Paths(alpha, bits, bits - log_leaves, roots0, roots1)
    for level in range(1, bits - log_leaves + 1):
        paths.grow(level)
    return paths


def bit_points(alpha: U64, bits: int, roots0: U64, roots1: U64) -> tuple[U8, I64]:
    """Keys for ``bit_sums``: corrections, and for each wire sigma, 1 where party 0 has the bit at alpha and else -1.

    Args:
        alpha: ``[n]``, below 2^bits. bits: 7 to 64. roots0, roots1: ``[n, 2]`` of both parties.

    Raises:
        RangeError: alpha or bits are out of range.
    """
    paths = _paths(alpha, bits, BIT_LEAVES, roots0, roots1)
    made = paths.leaves(1)
    place = alpha & np.uint64(127)
    unit = np.zeros((len(alpha), 2), np.uint64)
    unit[np.arange(len(alpha)), place >> np.uint64(6)] = np.uint64(1) << (place & np.uint64(63))
    leaf = made[0] ^ made[1] ^ unit
    # Party 0's block at alpha: corrected if its control bit is set, which is when party 1's is not.
    block = made[0] ^ (leaf & ~np.negative(paths.negative().astype(np.uint64))[:, None])
    sign = np.where((block & unit).any(axis=1), 1, -1).astype(np.int64)
    return pack(paths.left, paths.right, leaf), sign


def word_points(alpha: U64, bits: int, roots0: U64, roots1: U64, payload: U64) -> U8:
    """Corrections for ``word_sums``: ``payload [n]`` in Z_2^64 at ``alpha [n]``, 0 elsewhere; bits: 1 to 64.

    Raises:
        RangeError: alpha or bits are out of range.
    """
    if payload.shape != alpha.shape:
        raise RangeError(f"a payload of shape {payload.shape} for {len(alpha)} places")
    paths = _paths(alpha, bits, WORD_LEAVES, roots0, roots1)
    made = paths.leaves(1)
    leaf = made[1] - made[0]
    leaf[np.arange(len(alpha)), alpha & np.uint64(1)] += payload
    leaf[paths.negative()] *= np.uint64(2**64 - 1)
    return pack(paths.left, paths.right, leaf)


def unit_points(alpha: U64, bits: int, roots0: U64, roots1: U64, ring: Ring) -> U8:
    """Corrections for ``histogram``: 1 in Z_2^8 or Z_2^16 (``ring``) at ``alpha [n]``, 0 elsewhere.

    Raises:
        RangeError: alpha or bits are out of range.
    """
    kind = np.dtype(ring)
    log_leaves = BYTE_LEAVES if kind.itemsize == 1 else PAIR_LEAVES
    paths = _paths(alpha, bits, log_leaves, roots0, roots1)
    made = paths.leaves(1).view(kind)
    leaf = made[1] - made[0]
    leaf[np.arange(len(alpha)), alpha & np.uint64((1 << log_leaves) - 1)] += 1
    leaf[paths.negative()] = np.negative(leaf[paths.negative()])
    return pack(paths.left, paths.right, leaf.view(np.uint64))


def prefix_points(r: U64, first_level: int, last_level: int, roots0: U64, roots1: U64) -> U8:
    """Corrections for ``cells``: a point function for each prefix of the masks ``r [n]``, all on one tree.

    At a level l the payload at r's first l bits is (1, rho, rho^2), rho the 10 bits below them (zeros after r's end).
    An incremental point function (Boneh, Boyle, Corrigan-Gibbs, Gilboa and Ishai, ePrint 2021/017, section 4): leaves
    of a node come from its seed by other keys than its children do, so that one seed gives both.

    Raises:
        RangeError: the levels are not 1 <= first <= last <= 64.
    """
    if not 1 <= first_level <= last_level <= 64:
        raise RangeError(f"levels {first_level} to {last_level}: they must be from 1 to 64, in order")
    paths = _Paths(r, 64, last_level, roots0, roots1)
    leaf = np.empty((len(r), last_level - first_level + 1, 3), np.uint64)
    for level in range(1, last_level + 1):
        paths.grow(level)
        if level < first_level:
            continue
        below = (r << np.uint64(level)) >> np.uint64(54) if level < 64 else np.zeros_like(r)
        made = paths.leaves(2)[:, :, :3]
        words = made[1] - made[0] + np.stack([np.ones_like(r), below, below * below], axis=1)
        words[paths.negative()] *= np.uint64(2**64 - 1)
        leaf[:, level - first_level] = words
    return pack(paths.left, paths.right, leaf.reshape(len(r), -1))
