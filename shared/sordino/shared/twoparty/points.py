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

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError, RangeError
from sordino.shared.jit import compiled
from sordino.shared.twoparty.aes import CHILDREN, LEAVES, hash_into, in_loops

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
# Blocks that are made at once: with hashes, 64 bytes each, they stay in the L2 cache.
_CHUNK: Final = 1 << 13


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
def _descend(
    nodes: U64, m: int, hashes: U64, left: U64, right: U8, level: int, first: U64, shift: int, new: int, out: U64
) -> None:
    """One level down: ``nodes [n * m, 2]`` and ``hashes [2, n * m, 2]`` of them to ``out [n * new, 2]``.

    ``left [n, depth, 2]`` and ``right [n, depth]`` are corrections, used at ``level``. Slot k of a wire is node
    (``first >> shift``) + k of the new level, where k counts around the level's end.
    """
    one, zero = np.uint64(1), np.uint64(0)
    for w in range(len(first)):
        c0, c1 = left[w, level, 0], left[w, level, 1]
        c2 = (c0 & ~one) | np.uint64(right[w, level])
        base = first[w] >> np.uint64(shift)
        begin = base >> one
        if 2 * m == new and base & one == 0:  # every node, in order
            for k in range(w * m, w * m + m):
                on = zero - (nodes[k, 0] & one)
                out[2 * k, 0] = hashes[0, k, 0] ^ (c0 & on)
                out[2 * k, 1] = hashes[0, k, 1] ^ (c1 & on)
                out[2 * k + 1, 0] = hashes[1, k, 0] ^ (c2 & on)
                out[2 * k + 1, 1] = hashes[1, k, 1] ^ (c1 & on)
        else:
            for k in range(new):
                child = base + np.uint64(k)
                parent = w * m + np.int64((child >> one) - begin) % m
                side = np.int64(child & one)
                on = zero - (nodes[parent, 0] & one)
                out[w * new + k, 0] = hashes[side, parent, 0] ^ ((c2 if side else c0) & on)
                out[w * new + k, 1] = hashes[side, parent, 1] ^ (c1 & on)


@compiled
def _slots(count: int, shift: int, level: int) -> int:
    """How many nodes of a level, each of 2^shift leaves, a window of ``count`` leaves can touch."""
    return 1 if count == 1 else min(1 << level, ((count - 1) >> shift) + 2)


@in_loops
def _walk(left: U64, right: U8, roots: U64, first: U64, count: int, bits: int, a: U64, b: U64, hashes: U64) -> U64:
    """From root nodes ``[n, 2]`` to blocks ``[n * slots, 2]`` that hold leaves first to first + count - 1.

    What leaves are made of goes to ``hashes[0]``. ``a``, ``b [*, 2]`` and ``hashes [2, *, 2]`` are room for all slots;
    the blocks are in a or b.
    """
    n, depth = right.shape
    for w in range(n):
        a[w, 0], a[w, 1] = roots[w, 0], roots[w, 1]
    m = 1
    for level in range(depth):
        hash_into(a, n * m, CHILDREN, 2, hashes)
        new = _slots(count, bits - level - 1, level + 1)
        _descend(a, m, hashes, left, right, level, first, bits - level - 1, new, b)
        m = new
        a, b = b, a
    hash_into(a, n * m, LEAVES, 1, hashes)
    return a[: n * m]


class _Tree:
    """The corrections of n wires, unpacked, with room for the nodes of as many wires as a cache holds."""

    def __init__(self, corrections: U8, roots: U64, party: int, bits: int, log_leaves: int, count: int) -> None:
        n, depth = len(roots), bits - log_leaves
        self._left, self._right, self.leaf = unpack(corrections, n, depth)
        self._roots = root_nodes(roots, party)
        self._bits, self._count = bits, count
        self.slots = _slots(count, log_leaves, depth)
        self._wires = max(1, min(n, _CHUNK // self.slots))
        room = np.empty((4, self._wires * self.slots, 2), np.uint64)
        self._room = room[0], room[1], room[2:]

    def blocks(self, first: U64, start: int = 0, stop: int | None = None) -> Iterator[tuple[slice, U64, U64]]:
        """Wires start to stop, some at a time: which, their blocks ``[wires * slots, 2]``, what leaves are made of.

        The arrays hold until the next come.
        """
        stop = len(self._roots) if stop is None else stop
        for at in range(start, stop, self._wires):
            part = slice(at, min(at + self._wires, stop))
            corrected = self._left[part], self._right[part], self._roots[part], first[part]
            yield part, _walk(*corrected, self._count, self._bits, *self._room), self._room[2][0]


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
    return np.ascontiguousarray(np.concatenate([turned, turned], axis=2)).view(np.uint64)


def _add_masked_lanes(_context: Any, table: Any, phase: Any, at: Any, mask: Any, sums: Any) -> Any:
    """``sums[c, i % 8] += table[phase, c, at + i]`` for c < 3 and each bit i < 64 of ``mask``, eight lanes at a time.

    Vectors and masks of LLVM, on any processor: of a loop over bits LLVM makes something seven times as slow.
    """
    if table.layout != "C" or sums.layout != "C":
        return None  # numba then says that it cannot compile the call
    signature = types.void(table, phase, at, mask, sums)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, lanes = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)
        source, target = (context.make_array(sig.args[i])(context, builder, value=args[i]) for i in (0, 4))

        def constant(value: int) -> Any:
            return ir.Constant(word, value)

        def vector(data: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(data, [index]), lanes.as_pointer())

        masks = []
        for g in range(8):
            byte = builder.trunc(builder.lshr(args[3], constant(8 * g)), ir.IntType(8))
            masks.append(builder.bitcast(byte, ir.VectorType(ir.IntType(1), 8)))
        _, rows, size = cgutils.unpack_tuple(builder, source.shape)
        for c in range(3):
            row = builder.add(builder.mul(args[1], rows), constant(c))
            begin = builder.add(builder.mul(row, size), args[2])
            total = builder.load(vector(target.data, constant(8 * c)), align=8)
            for g, mask in enumerate(masks):
                values = builder.load(vector(source.data, builder.add(begin, constant(8 * g))), align=8)
                total = builder.add(total, builder.select(mask, values, ir.Constant(lanes, None)))
            builder.store(total, vector(target.data, constant(8 * c)), align=8)
        return context.get_dummy_value()

    return signature, build


_add_masked: Any = intrinsic(_add_masked_lanes)


@compiled
def _masked_sums(
    blocks: U64, leaves: U64, correction: U64, first: U64, phases: I64, table: U64, start: int, out: U64
) -> None:
    """Of ``blocks [n * m, 2]`` with ``leaves [n * m, 2]``, not yet corrected, to ``out [3, start : start + n]``."""
    n = len(first)
    m = len(blocks) // n
    one, zero = np.uint64(1), np.uint64(0)
    sums = np.empty((3, 8), np.uint64)
    for w in range(n):
        at = (128 * m - np.int64(first[w])) % (128 * m)
        for c in range(3):
            for i in range(8):
                sums[c, i] = zero
        for k in range(w * m, w * m + m):
            on = zero - (blocks[k, 0] & one)
            for side in range(2):
                _add_masked(table, phases[w], at, leaves[k, side] ^ (correction[w, side] & on), sums)
                at += 64
        for c in range(3):
            total = zero
            for i in range(8):
                total += sums[c, i]
            out[c, start + w] = total


def bit_sums(corrections: U8, roots: U64, party: int, first: U64, phases: I64, table: U64) -> U64:
    """Shares ``[3, n]`` of sigma * T[phase, (first - alpha) mod 2^bits]; the dealer knows the sign sigma.

    Leaves are bits, equal for both parties but at alpha: party 0 adds the entries where its bit is set, party 1
    subtracts them, and all but one cancel.

    Args:
        first: ``[n]``, public, below 2^bits. phases: ``[n]``, public. table: of :func:`bit_table`, three coefficients.

    Raises:
        RangeError, ProtocolError: an argument of another size.
    """
    size = table.shape[2] // 2
    bits = size.bit_length() - 1
    _check_first(first, len(roots), bits)
    if phases.shape != first.shape or phases.dtype != np.int64:
        raise ProtocolError(f"phases of shape {phases.shape}, {phases.dtype}: expected one int64 for each index")
    if phases.size and not 0 <= int(phases.min()) <= int(phases.max()) < len(table):
        raise RangeError(f"a phase is not one of the {len(table)} of the table")
    tree = _Tree(corrections, roots, party, bits, BIT_LEAVES, size)
    out = np.empty((3, len(roots)), np.uint64)
    for part, blocks, leaves in tree.blocks(np.zeros(len(roots), np.uint64)):
        _masked_sums(blocks, leaves, tree.leaf[part], first[part], phases[part], table, part.start, out)
    return _signed(out, party)


def _check_first(first: U64, n: int, bits: int) -> None:
    if first.shape != (n,) or first.dtype != np.uint64:
        raise ProtocolError(f"indices of shape {first.shape}, {first.dtype}, for {n} roots: expected [n] uint64")
    if n and int(first.max()) >> bits:
        raise RangeError(f"an index is over {bits} bits: take it modulo 2^{bits} before the look-up")


def _signed(sums: U64, party: int) -> U64:
    return np.negative(sums) if party else sums


# -- comparisons -----------------------------------------------------------------------------------------------------


@compiled
def _step_down(nodes: U64, hashes: U64, left: U64, right: U8, level: int, place: U64, shift: int, out: U8) -> None:
    """``nodes [n, 2]``, with their ``hashes [2, n, 2]``, become their children towards ``place [n]``; to ``out`` go the
    bits of right children that are passed by."""
    one, zero = np.uint64(1), np.uint64(0)
    for w in range(len(place)):
        on = zero - (nodes[w, 0] & one)
        side = np.int64((place[w] >> np.uint64(shift)) & one)
        bit = right[w, level]
        if side == 0:
            out[w] ^= np.uint8((hashes[1, w, 0] ^ (np.uint64(bit) & on)) & one)
            c = left[w, level, 0]
        else:
            c = (left[w, level, 0] & ~one) | np.uint64(bit)
        nodes[w, 0] = hashes[side, w, 0] ^ (c & on)
        nodes[w, 1] = hashes[side, w, 1] ^ (left[w, level, 1] & on)


@compiled
def _parities_above(nodes: U64, leaves: U64, correction: U64, place: U64, out: U8) -> None:
    """To ``out [n]`` the parity of what a block of 128 one-bit leaves, once corrected, has above ``place``."""
    one, zero, end = np.uint64(1), np.uint64(0), np.uint64(63)
    for w in range(len(place)):
        on = zero - (nodes[w, 0] & one)
        low, high = leaves[w, 0] ^ (correction[w, 0] & on), leaves[w, 1] ^ (correction[w, 1] & on)
        at = place[w] & end
        if (place[w] >> np.uint64(6)) & one:
            low, high = zero, (high >> at) >> one
        else:
            low = (low >> at) >> one
        word = low ^ high
        for shift in (32, 16, 8, 4, 2, 1):
            word ^= word >> np.uint64(shift)
        out[w] ^= np.uint8(word & one)


@in_loops
def _above(left: U64, right: U8, leaf: U64, nodes: U64, place: U64, bits: int, hashes: U64, out: U8) -> None:
    """Down from root ``nodes [n, 2]``, which are changed, towards ``place [n]``; ``hashes [2, n, 2]`` is room."""
    n, depth = right.shape
    for level in range(depth):
        hash_into(nodes, n, CHILDREN, 2, hashes)
        _step_down(nodes, hashes, left, right, level, place, bits - level - 1, out)
    hash_into(nodes, n, LEAVES, 1, hashes)
    _parities_above(nodes, hashes[0], leaf, place, out)


def above(corrections: U8, roots: U64, party: int, bits: int, place: U64) -> U8:
    """Shares ``[n]`` in Z_2, whose exclusive or is [alpha > place]: of corrections for :func:`bit_sums`.

    The control bits of both parties differ on the path to alpha alone, so they are shares of [alpha begins with this
    prefix]. Prefixes of all that is above a place are the right children that the path to it passes by on their left:
    the parity of a stretch of leaves (Storrier, Vadapalli, Lyons and Henry, "Grotto", CCS 2023, ePrint 2023/108).

    Args:
        bits: 7 to 64. place: ``[n]``, public, below 2^bits.

    Raises:
        RangeError, ProtocolError: an argument of another size.
    """
    _check_first(place, len(roots), bits)
    n, depth = len(roots), bits - BIT_LEAVES
    left, right, leaf = unpack(corrections, n, depth)
    nodes, out = root_nodes(roots, party), np.zeros(n, np.uint8)
    hashes = np.empty((2, min(n, _CHUNK), 2), np.uint64)
    for start in range(0, n, _CHUNK):
        part = slice(start, min(start + _CHUNK, n))
        _above(left[part], right[part], leaf[part], nodes[part], place[part], bits, hashes, out[part])
    return out


# -- words -----------------------------------------------------------------------------------------------------------


@compiled
def _window_sums(blocks: U64, leaves: U64, correction: U64, first: U64, bits: int, factors: U64, out: U64) -> None:
    """Of ``blocks [n * m, 2]`` with ``leaves [n * m, 2]``, not yet corrected, times ``factors [n, count]``: ``[n]``."""
    n, count = factors.shape
    m = len(blocks) // n
    one, zero, end = np.uint64(1), np.uint64(0), np.uint64((1 << bits) - 1)
    for w in range(n):
        total = zero
        base = (first[w] >> one) << one
        for k in range(m):
            on = zero - (blocks[w * m + k, 0] & one)
            for side in range(2):
                at = np.int64((base + np.uint64(2 * k + side) - first[w]) & end)
                if at < count:
                    total += factors[w, at] * (leaves[w * m + k, side] + (correction[w, side] & on))
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
    _check_first(first, len(roots), bits)
    if n != len(roots) or factors.dtype != np.uint64:
        raise ProtocolError(f"factors of shape {factors.shape}, {factors.dtype}, for {len(roots)} roots")
    tree = _Tree(corrections, roots, party, bits, WORD_LEAVES, count)
    out = np.empty(n, np.uint64)
    for part, blocks, leaves in tree.blocks(first):
        _window_sums(blocks, leaves, tree.leaf[part], first[part], bits, factors[part], out[part])
    return _signed(out, party)


# -- histograms ------------------------------------------------------------------------------------------------------


@compiled
def _count(
    blocks: U64,
    leaves: U64,
    correction: U64,
    first: U64,
    counted: Any,
    carry: np.uint64,
    words: U64,
    line: Any,
    out: Any,
) -> None:
    """Adds the leaves of ``blocks [n * m, 2]``, once corrected, to ``out [2^bits]`` at (leaf - first) mod 2^bits.

    ``counted [n]`` says which wires count. ``words`` and ``line [2^bits]`` are the same room to work in. Several leaves
    of a word are corrected at once: ``carry`` has the highest bit of each, where no carry may leave it.
    """
    n, size = len(first), len(out)
    m = len(blocks) // n
    for w in range(n):
        if not counted[w]:
            continue
        c0, c1 = correction[w, 0], correction[w, 1]
        for k in range(m):
            on = np.uint64(0) - (blocks[w * m + k, 0] & np.uint64(1))
            x, y = leaves[w * m + k, 0], c0 & on
            words[2 * k] = ((x & ~carry) + (y & ~carry)) ^ ((x ^ y) & carry)
            x, y = leaves[w * m + k, 1], c1 & on
            words[2 * k + 1] = ((x & ~carry) + (y & ~carry)) ^ ((x ^ y) & carry)
        cut = np.int64(first[w])
        # Slices from 0: other indices may be negative to the compiler, which makes no vectors then.
        _add(line[cut:], out[: size - cut])
        _add(line[:cut], out[size - cut :])


@compiled
def _add(values: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] += values[i]


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
    size, flat = 1 << bits, first.reshape(-1)
    wanted = np.broadcast_to(counted, first.shape).reshape(-1)
    _check_first(flat, len(roots), bits)
    tree = _Tree(corrections, roots, party, bits, log_lanes, size)
    room = np.empty(2 * tree.slots, np.uint64)
    carry = np.uint64(0x8080808080808080 if kind.itemsize == 1 else 0x8000800080008000)
    out = np.zeros((heads * rows, size), kind)
    everything = np.zeros(flat.size, np.uint64)
    for i, line in enumerate(out):
        for part, blocks, leaves in tree.blocks(everything, i * length, (i + 1) * length):
            _count(blocks, leaves, tree.leaf[part], flat[part], wanted[part], carry, room, room.view(kind), line)
    turned: U8 | U16 = out[:, -np.arange(size) % size]
    return np.negative(turned) if party else turned
