"""Distributed point functions: what both parties evaluate; keys are made in ``sordino.dealer.points``.

A point function is 0 but at a secret place alpha. Each party holds a tree of nodes that grows from a root of its own by
the same corrections (Boyle, Gilboa and Ishai, ePrint 2018/707, figure 1): off the path to alpha both hold the same seed
and control bit, on it independent seeds and different bits. So the leaves of both are shares of zero everywhere but at
alpha. A tree ends where one block holds several leaves (early termination, section 3.2.3).

Everything is for n wires at once. Roots are 16 bytes a wire, ``[n, 2]`` uint64, out of each party's own generator; the
corrections, ``[n, width]`` uint8, are the same for both parties. ``party`` is 0 for the client and 1 for the server,
and the results of both add up modulo the ring.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.jit import compiled
from sordino.shared.twoparty.aes import CHILDREN, LEAVES, hashed

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Ring = type[np.uint8] | type[np.uint16]

# log2 of how many leaves a block of 128 bits has.
BIT_LEAVES: Final = 7
BYTE_LEAVES: Final = 4
PAIR_LEAVES: Final = 3
WORD_LEAVES: Final = 1
_BLOCK_BYTES: Final = 16
# Blocks of a histogram that are made at once: their seeds stay in the L2 cache.
_CHUNK: Final = 1 << 14


def width(depth: int, leaf_bytes: int = _BLOCK_BYTES) -> int:
    """Bytes of corrections for a wire: a block and one bit for each level of the tree, then the leaf's."""
    return _BLOCK_BYTES * depth + (depth + 7) // 8 + leaf_bytes


def pack(left: U64, right: U8, leaf: U64) -> U8:
    """Corrections as they are sent, ``[n, width]``.

    Args:
        left: ``[n, depth, 2]``, what a left child is corrected by: the seed, and the control bit as its lowest.
        right: ``[n, depth]``, the control bit for a right child, whose seed has the same correction.
        leaf: ``[n, words]``.
    """
    n = len(left)
    parts = [left.astype("<u8").view(np.uint8).reshape(n, -1), np.packbits(right, axis=1, bitorder="little")]
    return np.concatenate([*parts, leaf.astype("<u8").view(np.uint8).reshape(n, -1)], axis=1)


def unpack(corrections: U8, n: int, depth: int, leaf_bytes: int = _BLOCK_BYTES) -> tuple[U64, U8, U64]:
    """The inverse of :func:`pack`.

    Raises:
        ProtocolError: corrections of another shape or kind.
    """
    expected = (n, width(depth, leaf_bytes))
    if corrections.shape != expected or corrections.dtype != np.uint8:
        raise ProtocolError(f"corrections of shape {corrections.shape}, {corrections.dtype}; expected {expected} uint8")
    seeds, bits = _BLOCK_BYTES * depth, (depth + 7) // 8
    left = np.ascontiguousarray(corrections[:, :seeds]).view("<u8").reshape(n, depth, 2)
    packed = np.ascontiguousarray(corrections[:, seeds : seeds + bits])
    right = np.unpackbits(packed, axis=1, count=depth, bitorder="little")
    leaf = np.ascontiguousarray(corrections[:, seeds + bits :]).view("<u8").reshape(n, -1)
    return left.astype(np.uint64, copy=False), right, leaf.astype(np.uint64, copy=False)


def root_nodes(roots: U64, party: int) -> U64:
    """Nodes ``[n, 2]`` of the roots: the control bit of a root is the number of its party."""
    if roots.ndim != 2 or roots.shape[1] != 2 or roots.dtype != np.uint64:
        raise ProtocolError(f"roots of shape {roots.shape}, {roots.dtype}; expected [n, 2] uint64")
    nodes = roots.copy()
    nodes[:, 0] = (nodes[:, 0] & ~np.uint64(1)) | np.uint64(party)
    return nodes


@compiled
def _descend(hashes: U64, left: U64, right: U8, nodes: U64, first: U64, shift: int, out: U64) -> None:
    """One level down. ``nodes [n, m, 2]``, ``hashes [2, n * m, 2]`` of them, ``out [n, m', 2]``.

    ``left [n, 2]`` and ``right [n]`` are the corrections of the level. Slot k of a wire is node
    (``first >> shift``) + k of the new level, where k counts around the level's end.
    """
    n, m, _ = nodes.shape
    one, last = np.uint64(1), ~np.uint64(0)
    new = out.shape[1]
    for w in range(n):
        c0, c1, c2 = left[w, 0], left[w, 1], (left[w, 0] & ~one) | np.uint64(right[w])
        base = first[w] >> np.uint64(shift)
        begin = base >> one
        if m * 2 == new and base & one == 0:  # every node, in order
            for k in range(m):
                on = (nodes[w, k, 0] & one) * last
                out[w, 2 * k, 0] = hashes[0, w * m + k, 0] ^ (c0 & on)
                out[w, 2 * k, 1] = hashes[0, w * m + k, 1] ^ (c1 & on)
                out[w, 2 * k + 1, 0] = hashes[1, w * m + k, 0] ^ (c2 & on)
                out[w, 2 * k + 1, 1] = hashes[1, w * m + k, 1] ^ (c1 & on)
        else:
            for k in range(new):
                child = base + np.uint64(k)
                parent = np.int64((child >> one) - begin) % m
                side = np.int64(child & one)
                on = (nodes[w, parent, 0] & one) * last
                out[w, k, 0] = hashes[side, w * m + parent, 0] ^ ((c2 if side else c0) & on)
                out[w, k, 1] = hashes[side, w * m + parent, 1] ^ (c1 & on)


def _slots(count: int, shift: int, level: int) -> int:
    """How many nodes of a level, each of 2^shift leaves, a window of ``count`` leaves can touch."""
    return 1 if count == 1 else min(1 << level, ((count - 1) >> shift) + 2)


def _walk(left: U64, right: U8, nodes: U64, first: U64, count: int, bits: int) -> U64:
    """From root nodes ``[n, 2]`` to the blocks ``[n, slots, 2]`` that hold leaves first to first + count - 1."""
    n, depth = right.shape
    current = nodes[:, None, :]
    for level in range(1, depth + 1):
        m = current.shape[1]
        hashes = hashed(current.reshape(n * m, 2), CHILDREN, 2)
        out = np.empty((n, _slots(count, bits - level, level), 2), np.uint64)
        _descend(hashes, left[:, level - 1], right[:, level - 1], current, first, bits - level, out)
        current = out
    return current


# -- one-bit leaves --------------------------------------------------------------------------------------------------


def bit_table(table: I64) -> U64:
    """``[phases, 2^bits, coefficients]`` laid out for :func:`bit_sums`: ``[phases, coefficients, 2 * 2^bits]``.

    Turned round and twice in a row, so that the entries that meet leaves 0, 1, ... stand side by side.

    Raises:
        RangeError: bits is not 7 to 20.
    """
    size = table.shape[1]
    if size & (size - 1) or not 7 <= size.bit_length() - 1 <= 20:
        raise RangeError(f"a table of {size} entries: their number must be a power of two, 2^7 to 2^20")
    turned = table[:, -np.arange(size) % size].transpose(0, 2, 1)
    return np.concatenate([turned, turned], axis=2).astype(np.uint64)


@compiled
def _masked_sums(leaves: U64, control: U64, correction: U64, first: U64, phases: I64, table: U64, out: U64) -> None:
    """``leaves [n, blocks * 2]`` of 64 bits each, not yet corrected, to ``out [3, n]``."""
    n, words = leaves.shape
    one, zero = np.uint64(1), np.uint64(0)
    for w in range(n):
        start = (64 * words - np.int64(first[w])) % (64 * words)
        t0, t1, t2 = table[phases[w], 0], table[phases[w], 1], table[phases[w], 2]
        a0, a1, a2 = zero, zero, zero
        for g in range(words):
            on = zero - (control[w, g >> 1] & one)
            v = leaves[w, g] ^ (correction[w, g & 1] & on)
            at = start + 64 * g
            for l in range(64):
                bit = zero - ((v >> np.uint64(l)) & one)
                a0 += t0[at + l] & bit
                a1 += t1[at + l] & bit
                a2 += t2[at + l] & bit
        out[0, w], out[1, w], out[2, w] = a0, a1, a2


def bit_sums(corrections: U8, roots: U64, party: int, first: U64, phases: I64, table: U64) -> U64:
    """Shares ``[3, n]`` of sigma * T[phase, (first - alpha) mod 2^bits]; the dealer knows the sign sigma.

    Leaves are bits, equal for both parties but at alpha: party 0 adds the entries where its bit is set, party 1
    subtracts them, and all but one cancel.

    Args:
        first: ``[n]``, public, below 2^bits. phases: ``[n]``, public. table: of :func:`bit_table`, three coefficients.
    """
    size = table.shape[2] // 2
    bits = size.bit_length() - 1
    _check_first(first, bits)
    n = len(roots)
    left, right, leaf = unpack(corrections, n, bits - BIT_LEAVES)
    everything = np.zeros(n, np.uint64)
    nodes = _walk(left, right, root_nodes(roots, party), everything, size, bits)
    leaves = hashed(nodes.reshape(-1, 2), LEAVES, 1).reshape(n, -1)
    out = np.empty((3, n), np.uint64)
    _masked_sums(leaves, nodes[:, :, 0], leaf, first, phases, table, out)
    return _signed(out, party)


def _check_first(first: U64, bits: int) -> None:
    if first.size and int(first.max()) >> bits:
        raise RangeError(f"an index is over {bits} bits: take it modulo 2^{bits} before the look-up")


def _signed(sums: U64, party: int) -> U64:
    return np.negative(sums) if party else sums


# -- words -----------------------------------------------------------------------------------------------------------


@compiled
def _window_sums(leaves: U64, nodes: U64, correction: U64, first: U64, bits: int, factors: U64, out: U64) -> None:
    """``leaves [n, slots, 2]`` of blocks ``nodes``, not yet corrected, times ``factors [n, count]``: ``out [n]``."""
    n, slots, _ = nodes.shape
    count = factors.shape[1]
    one, zero, end = np.uint64(1), np.uint64(0), np.uint64((1 << bits) - 1)
    for w in range(n):
        total = zero
        base = (first[w] >> one) << one
        for k in range(slots):
            on = zero - (nodes[w, k, 0] & one)
            for side in range(2):
                at = np.int64((base + np.uint64(2 * k + side) - first[w]) & end)
                if at < count:
                    total += factors[w, at] * (leaves[w, k, side] + (correction[w, side] & on))
        out[w] = total


def word_sums(corrections: U8, roots: U64, party: int, bits: int, first: U64, factors: U64) -> U64:
    """Shares ``[n]`` in Z_2^64 of payload * factors[(alpha - first) mod 2^bits], or of 0 outside the window.

    The work grows with bits + count, not with 2^bits. One factor 1 and payload 1 make it a test of equality: shares
    of [first = alpha].

    Args:
        bits: 1 to 32. first: ``[n]``, the first leaf of the window, public, below 2^bits.
        factors: ``[n, count]``, public, for leaves first, first + 1, ... modulo 2^bits; count is at most 2^bits.

    Raises:
        RangeError, ProtocolError: an argument of another size.
    """
    n, count = factors.shape
    if not 1 <= bits <= 32 or not 1 <= count <= 1 << bits:
        raise RangeError(
            f"a window of {count} in a domain of {bits} bits: at most 32 bits, and no wider than the domain"
        )
    _check_first(first, bits)
    left, right, leaf = unpack(corrections, len(roots), bits - WORD_LEAVES)
    nodes = _walk(left, right, root_nodes(roots, party), first, count, bits)
    leaves = hashed(nodes.reshape(-1, 2), LEAVES, 1).reshape(nodes.shape)
    out = np.empty(n, np.uint64)
    _window_sums(leaves, nodes, leaf, first, bits, factors, out)
    return _signed(out, party)


# -- histograms ------------------------------------------------------------------------------------------------------


@compiled
def _count(leaves: Any, nodes: U64, correction: Any, first: U64, counted: Any, line: Any, out: Any) -> None:
    """Adds ``leaves [n, blocks * lanes]``, once corrected, to ``out [2^bits]`` at (leaf - first) mod 2^bits.

    ``correction [n, lanes]``; ``counted [n]`` says which wires count; ``line [2^bits]`` is room to work in. Sums are
    modulo the ring of the elements' type.
    """
    n, blocks, _ = nodes.shape
    size = out.shape[0]
    eights = correction.shape[1] // 8
    for w in range(n):
        if not counted[w]:
            continue
        for k in range(blocks):
            on = nodes[w, k, 0] & np.uint64(1)
            for h in range(eights):
                at = 8 * (k * eights + h)
                for e in range(8):
                    line[at + e] = leaves[w, at + e] + correction[w, 8 * h + e] * on
        cut = np.int64(first[w])
        for i in range(size - cut):
            out[i] += line[cut + i]
        for i in range(cut):
            out[size - cut + i] += line[i]


def histogram(corrections: U8, roots: U64, party: int, bits: int, first: U64, counted: Bools, ring: Ring) -> U8 | U16:
    """Shares ``[heads * rows, 2^bits]`` of how often each j = (first - alpha) mod 2^bits occurs in a line.

    Args:
        bits: 4 to 24 (3 to 24 for 16 bits). first: ``[heads, rows, T]``, public, below 2^bits; the n wires are in this
            order. counted: ``[rows, T]``, which places count. ring: type of the counts; T must be below its size.

    Raises:
        RangeError, ProtocolError: an argument of another size.
    """
    heads, rows, length = first.shape
    kind = np.dtype(ring)
    lanes = _BLOCK_BYTES // kind.itemsize
    log_lanes = lanes.bit_length() - 1
    if not log_lanes <= bits <= 24:
        raise RangeError(f"a histogram over {bits} bits: {log_lanes} to 24 are possible")
    if length >= 1 << 8 * kind.itemsize:
        raise RangeError(f"{length} places would overflow counts of {8 * kind.itemsize} bits")
    if counted.shape != (rows, length):
        raise ProtocolError(f"a mask of shape {counted.shape}, expected {(rows, length)}")
    n, depth, size = first.size, bits - log_lanes, 1 << bits
    flat, wanted = first.reshape(n), np.broadcast_to(counted, first.shape).reshape(n)
    _check_first(flat, bits)
    left, right, leaf = unpack(corrections, n, depth)
    nodes, line = root_nodes(roots, party), np.empty(size, kind)
    out = np.zeros((heads * rows, size), kind)
    everything = np.zeros(n, np.uint64)
    step = max(1, _CHUNK >> depth)
    for i, start in enumerate(range(0, n, length)):
        for at in range(start, start + length, step):
            part = slice(at, min(at + step, start + length))
            blocks = _walk(left[part], right[part], nodes[part], everything[part], size, bits)
            leaves = hashed(blocks.reshape(-1, 2), LEAVES, 1).reshape(len(blocks), -1).view(kind)
            _count(leaves, blocks, leaf[part].view(kind), flat[part], wanted[part], line, out[i])
    turned: U8 | U16 = out[:, -np.arange(size) % size]
    return np.negative(turned) if party else turned
