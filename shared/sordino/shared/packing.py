"""Coefficient packing of a matrix product into polynomial products (no rotation, no key switching).

The encoding is Cheetah's (Huang, Lu, Hong and Ding, USENIX Security 2022, ePrint 2022/207, section 3.1), done over a
subring so that rows cost the weights nothing. With T a power of two that divides N and Y = X^T, Z[X]/(X^N + 1) is a
module over Z[Y]/(Y^(N/T) + 1) with the basis 1, X, ..., X^(T-1). For T rows, B inputs and M outputs, T*B*M <= N::

    x(X) = sum_t X^t sum_j x[t, j] Y^j             w(Y) = sum_i sum_j W[i, j] Y^(i*B + B-1-j)

    coefficient t + T*(i*B + B-1) of x(X) w(Y) mod X^N + 1  =  sum_j W[i, j] x[t, j]

Terms that wrap around fall on powers of Y below B-1 and are never read. Since w is a polynomial in Y, its transform has
N/T values, each for T neighbouring evaluation points: eight bytes a weight whatever T is, a short transform to make
them, and T rows that share each weight in a product. T = N is the packing of mask batches, T = 1 Cheetah's own.
Polynomials are columns, as everywhere (:mod:`sordino.shared.rlwe`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sordino.shared.jit import compiled
from sordino.shared.rlwe import (
    PARAMS,
    RESIDUE_BITS,
    U32,
    RlweParams,
    each_prime,
    intt_of_prime,
    ntt,
    ntt_of_prime,
    reduced,
)

I8 = NDArray[np.int8]
# c0 ``[2, n, blocks]`` in NTT form, and the other half modulo a prime, ``[n, blocks]``, made where it is needed.
Ciphertext = tuple[U32, Callable[[int], U32]]
# Measured, all layers of SmolLM2-135M on one core, a row, with all turning: along points is faster for few rows to a
# block, along outputs for many.
_MANY_POINTS: Final = 512
# Products of two residues below 2^54 that are added to a reduced sum before it is reduced again: 2^63 at most.
_SUMMANDS: Final = 512


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How one polynomial is filled: ``rows`` x ``inputs`` x ``outputs`` <= N; W is [out_features, in_features].

    Raises:
        ValueError: rows is no power of two, or the block is empty or too large.
    """

    rows: int
    inputs: int
    outputs: int
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        if min(self.rows, self.inputs, self.outputs, self.in_features, self.out_features) < 1:
            raise ValueError("a block has at least one row, input and output")
        if self.rows & (self.rows - 1) or self.rows * self.inputs * self.outputs > PARAMS.n:
            raise ValueError(f"a block has a power of two of rows and at most {PARAMS.n} coefficients")

    @property
    def input_blocks(self) -> int:
        return -(-self.in_features // self.inputs)

    @property
    def output_blocks(self) -> int:
        return -(-self.out_features // self.outputs)

    @property
    def points(self) -> int:
        """Distinct evaluation points of the weights' polynomials."""
        return PARAMS.n // self.rows

    @property
    def folds(self) -> bool:
        """Whether :func:`read_coefficients` goes its short way."""
        return self.rows == 1 and self.inputs & (self.inputs - 1) == 0

    def upload_bytes(self, params: RlweParams = PARAMS) -> int:
        """Bytes of the seeded ciphertexts of one block of rows."""
        return self.input_blocks * params.n * 2 * RESIDUE_BITS // 8

    def download_bytes(self, bits: int = 0, params: RlweParams = PARAMS) -> int:
        """Bytes of the results of one block of rows: residues of both halves, or, switched to a modulus of 2^bits, all
        coefficients of c1 and the useful ones of c0."""
        if not bits:
            return self.output_blocks * params.n * 4 * RESIDUE_BITS // 8
        return bits * (self.output_blocks * params.n + self.output_blocks * self.rows * self.outputs) // 8


@dataclass(frozen=True, slots=True)
class Part:
    """What one message carries of a product: some inputs, some outputs, and the shape of their blocks."""

    inputs: slice
    outputs: slice
    shape: BlockShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a planner minimises, in any one unit: an encrypted block, an answered block, a byte, a message.

    The default counts bytes alone, with a message at the price of 64 KiB. ``bits`` is the modulus answers are switched
    to (0: not at all); then ``answer_folded`` is the price of an answered block that :attr:`BlockShape.folds`.
    """

    encrypt: float = 0.0
    answer: float = 0.0
    answer_folded: float = 0.0
    byte: float = 1.0
    message: float = 65536.0
    bits: int = 0

    def of(self, parts: Sequence[Part], planes: int) -> float:
        """The price of a product in these parts, a message each."""
        return sum(
            self.byte * (part.shape.upload_bytes() + planes * part.shape.download_bytes(self.bits))
            + self.encrypt * part.shape.input_blocks
            + self.answer_of(part.shape) * planes * part.shape.output_blocks
            + self.message
            for part in parts
        )

    def answer_of(self, shape: BlockShape) -> float:
        return self.answer_folded if self.bits and shape.folds else self.answer


BY_BYTES: Final = Prices()


@lru_cache(maxsize=4096)
def plan(
    rows: int,
    in_features: int,
    out_features: int,
    *,
    planes: int = 1,
    max_bytes: int = 1 << 62,
    prices: Prices = BY_BYTES,
    params: RlweParams = PARAMS,
) -> tuple[Part, ...]:
    """The cheapest way to a product of up to ``rows`` rows whose noise decodes.

    A result coefficient carries the noise of every weight in its polynomials: ``outputs`` rows of W, so their norms add
    up to at most 128 sqrt(inputs of the part * outputs), which must stay within the bound of one int8 plane.

    Args:
        rows: a power of two.
        planes: int8 planes of W, each answered for itself.
        max_bytes: of the ciphertexts in a message, either way; each part has one block of each at least.

    Returns:
        Parts that cover inputs x outputs once. Results of parts with the same outputs add up mod p.

    Raises:
        ValueError: no such number of rows.
    """
    if not 1 <= rows <= params.n or rows & (rows - 1):
        raise ValueError(f"rows must be a power of two up to {params.n}, not {rows}")
    room = params.n // rows
    max_weights = int((params.max_norm(prices.bits) / 128) ** 2)
    best: tuple[float, BlockShape, int, int] = (math.inf, BlockShape(1, 1, 1, 1, 1), 0, 0)
    sizes = {min(room, -(-in_features // blocks)) for blocks in range(1, in_features + 1)}
    for block in sizes | {1 << k for k in range(min(room, in_features).bit_length())}:
        whole = BlockShape(rows, block, room // block, in_features, out_features)
        up, down = whole.upload_bytes(params), planes * whole.download_bytes(prices.bits, params)
        blocks_in = max(1, max_bytes // (up // whole.input_blocks))
        blocks_out = max(1, max_bytes // (down // whole.output_blocks))
        inputs = min(in_features, blocks_in * whole.inputs)
        if inputs * whole.outputs > max_weights:
            inputs = max_weights // (whole.inputs * whole.outputs) * whole.inputs
        outputs = min(out_features, blocks_out * whole.outputs)
        ins, outs = -(-in_features // inputs), -(-out_features // outputs)
        price = (
            outs * (prices.byte * up + prices.encrypt * whole.input_blocks)
            + ins * (prices.byte * down + prices.answer_of(whole) * planes * whole.output_blocks)
            + prices.message * ins * outs
        )
        if price < best[0]:
            best = price, whole, inputs, outputs
    _, whole, inputs, outputs = best
    return tuple(
        Part(slice(i, i_end), slice(o, o_end), replace(whole, in_features=i_end - i, out_features=o_end - o))
        for i, i_end in _ranges(in_features, inputs)
        for o, o_end in _ranges(out_features, outputs)
    )


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, count)) for first in range(0, count, step))


def encode_rows(x: U32, shape: BlockShape, params: RlweParams = PARAMS) -> U32:
    """Up to ``shape.rows`` rows ``x [R, in_features]`` of ring elements to polynomials ``[n, input_blocks]``."""
    padded = np.zeros((shape.rows, shape.input_blocks * shape.inputs), np.uint32)
    padded[: x.shape[0], : x.shape[1]] = x
    out = np.zeros((params.n, shape.input_blocks), np.uint32)
    blocks = padded.reshape(shape.rows, shape.input_blocks, shape.inputs).transpose(2, 0, 1)
    out[: shape.rows * shape.inputs] = blocks.reshape(-1, shape.input_blocks)
    return out


def useful(shape: BlockShape) -> NDArray[np.intp]:
    """Positions of the coefficients of an answer that are read, ``[outputs * rows]``, output by output."""
    first = shape.rows * (shape.inputs * np.arange(shape.outputs) + shape.inputs - 1)
    return (first[:, None] + np.arange(shape.rows)).reshape(-1)


def decode_rows(read: U32, shape: BlockShape) -> U32:
    """Coefficients at :func:`useful` positions, ``[outputs * rows, output_blocks]``, as ``[rows, out_features]``."""
    blocks = read.reshape(shape.outputs, shape.rows, shape.output_blocks).transpose(1, 2, 0)
    return np.ascontiguousarray(blocks.reshape(shape.rows, -1)[:, : shape.out_features])


def encode_weights(weights: I8, shape: BlockShape, params: RlweParams = PARAMS, *, parallel: bool = False) -> U32:
    """The plaintext polynomials of W in NTT form, 8 bytes a weight.

    Returns:
        ``[2, points / 512, output_blocks, input_blocks, 512]`` where there are so many points, along which a product
        then runs and reads the weights in their order; else ``[2, points, input_blocks, output_blocks]``.
    """
    padded = np.zeros((shape.output_blocks, shape.outputs, shape.input_blocks, shape.inputs), np.int8)
    flat = padded.reshape(shape.output_blocks * shape.outputs, shape.input_blocks * shape.inputs)
    flat[: shape.out_features, : shape.in_features] = weights
    coefficients = padded[..., ::-1].transpose(1, 3, 2, 0).reshape(shape.outputs * shape.inputs, -1)
    out = np.zeros((2, shape.points, coefficients.shape[1]), np.uint32)
    coefficients = np.ascontiguousarray(coefficients)
    each_prime(lambda i: _lift(coefficients, params.primes[i], out[i]), parallel)
    ntt(out, params, parallel=parallel)
    if shape.points < _MANY_POINTS:
        return out.reshape(2, shape.points, shape.input_blocks, shape.output_blocks)
    chunks = out.reshape(2, -1, _MANY_POINTS, shape.input_blocks, shape.output_blocks)
    return np.ascontiguousarray(chunks.transpose(0, 1, 4, 3, 2))


@compiled
def _lift(weights: I8, q: int, out: U32) -> None:
    for i in range(weights.shape[0]):
        for j in range(weights.shape[1]):
            w = np.int32(weights[i, j])
            out[i, j] = np.uint32(w + np.int32(q) if w < 0 else w)


@compiled
def _along_points(weights: U32, c: U32, q: int, out: U32) -> None:
    """``weights [K/512, O, I, 512]``, ``c [2, T, I, K]``, ``out [2, T, O, K]``: a weight serves both halves."""
    chunks, outputs, blocks, width = weights.shape
    per_one = 1.0 / q
    sums = np.empty((2, width), np.uint64)  # of 4 KB each: they stay in the L1 cache
    for chunk in range(chunks):
        points = slice(chunk * width, (chunk + 1) * width)
        for o in range(outputs):
            w = weights[chunk, o]
            for t in range(c.shape[1]):
                sums[:] = 0
                for some in range(0, blocks, _SUMMANDS):
                    stop = min(some + _SUMMANDS, blocks)
                    fours = some + (stop - some) // 4 * 4
                    for i in range(some, fours, 4):  # the sums are read and written once for four
                        w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
                        for half in range(2):
                            c0, c1 = c[half, t, i, points], c[half, t, i + 1, points]
                            c2, c3 = c[half, t, i + 2, points], c[half, t, i + 3, points]
                            total = sums[half]
                            for k in range(width):
                                total[k] += (
                                    np.uint64(w0[k]) * np.uint64(c0[k])
                                    + np.uint64(w1[k]) * np.uint64(c1[k])
                                    + np.uint64(w2[k]) * np.uint64(c2[k])
                                    + np.uint64(w3[k]) * np.uint64(c3[k])
                                )
                    for i in range(fours, stop):
                        last = w[i]
                        for half in range(2):
                            one, total = c[half, t, i, points], sums[half]
                            for k in range(width):
                                total[k] += np.uint64(last[k]) * np.uint64(one[k])
                    for half in range(2):
                        total = sums[half]
                        for k in range(width):
                            total[k] = reduced(total[k], q, per_one)
                for half in range(2):
                    total, place = sums[half], out[half, t, o, points]
                    for k in range(width):
                        place[k] = np.uint32(total[k])


@compiled
def _along_outputs(weights: U32, c: U32, q: int, out: U32) -> None:
    """``weights [K, I, O]``, ``c [2, K, T, I]``, ``out [2, K, T, O]``: a weight is read once for all rows."""
    points, blocks, outputs = weights.shape
    rows = c.shape[2]
    per_one = 1.0 / q
    acc = np.empty((2 * rows, outputs), np.uint64)
    for k in range(points):
        acc[:] = 0
        for some in range(0, blocks, _SUMMANDS):
            for b in range(some, min(some + _SUMMANDS, blocks)):
                for half in range(2):
                    for t in range(rows):
                        value = np.uint64(c[half, k, t, b])
                        row = acc[half * rows + t]
                        for o in range(outputs):
                            row[o] += np.uint64(weights[k, b, o]) * value
            for r in range(2 * rows):
                for o in range(outputs):
                    acc[r, o] = reduced(acc[r, o], q, per_one)
        for half in range(2):
            for t in range(rows):
                for o in range(outputs):
                    out[half, k, t, o] = np.uint32(acc[half * rows + t, o])


@compiled
def _turn_in(c: U32, out: U32) -> None:
    """``c [K, T, I]`` to ``out [T, I, K]``, sixteen points at a time."""
    points, rows, blocks = c.shape
    for first in range(0, points, 16):
        for t in range(rows):
            for i in range(blocks):
                for k in range(first, min(first + 16, points)):
                    out[t, i, k] = c[k, t, i]


@compiled
def _turn_out(a: U32, out: U32) -> None:
    """``a [H, T, O, K]`` to ``out [K, T, H, O]``, sixteen points at a time."""
    halves, rows, outputs, points = a.shape
    for first in range(0, points, 16):
        for half in range(halves):
            for t in range(rows):
                for o in range(outputs):
                    for k in range(first, min(first + 16, points)):
                        out[k, t, half, o] = a[half, t, o, k]


@cache
def _last_powers(params: RlweParams, i: int, inputs: int) -> U32:
    """x^(1-B) / B at each evaluation point x, ``[n]``: the transform of -X^(n+1-B), divided."""
    q = params.primes[i]
    power = np.zeros((params.n, 1), np.uint32)
    power[params.n + 1 - inputs if inputs > 1 else 0] = q - 1 if inputs > 1 else 1
    ntt_of_prime(power, i, params)
    powers: U32 = (power[:, 0].astype(np.uint64) * np.uint64(pow(inputs, -1, q)) % np.uint64(q)).astype(np.uint32)
    return powers


@compiled
def _fold(a: U32, powers: U32, q: int, out: U32) -> None:
    """``out[j] = sum_l powers[j B + l] a[j B + l]`` for ``a [n, C]``, ``out [n / B, C]``."""
    blocks, columns = out.shape
    size, per_one = a.shape[0] // blocks, 1.0 / q
    sums = np.empty(columns, np.uint64)
    for j in range(blocks):
        sums[:] = 0
        for some in range(j * size, (j + 1) * size, _SUMMANDS):
            for k in range(some, min(some + _SUMMANDS, (j + 1) * size)):
                power = np.uint64(powers[k])
                for c in range(columns):
                    sums[c] += power * np.uint64(a[k, c])
            for c in range(columns):
                sums[c] = reduced(sums[c], q, per_one)
        for c in range(columns):
            out[j, c] = np.uint32(sums[c])


def read_coefficients(a: U32, i: int, shape: BlockShape, params: RlweParams = PARAMS) -> U32:
    """Of products in NTT form modulo prime ``i``, ``[n, C]``, the coefficients at :func:`useful` positions.

    With one row and a power of two B of inputs these are the coefficients of the last of the B polynomials in Y = X^B
    of which c(X) = sum_r X^r c_r(Y) consists. The B points x with one y = x^B are neighbours, and there c_(B-1)(y) is
    the mean of c(x) / x^(B-1): what is left is a transform of length n/B.

    Returns:
        ``[outputs * rows, C]``; ``a`` may be overwritten.
    """
    if not shape.folds:
        intt_of_prime(a, i, params)
        return a[useful(shape)]
    out = np.empty((params.n // shape.inputs, a.shape[1]), np.uint32)
    _fold(a, _last_powers(params, i, shape.inputs), params.primes[i], out)
    intt_of_prime(out, i, params)
    return out[: shape.outputs]


def multiply(
    weights: U32,
    ciphertexts: Sequence[Ciphertext],
    shape: BlockShape,
    params: RlweParams = PARAMS,
    *,
    coefficients: bool = False,
    parallel: bool = False,
) -> tuple[U32, U32]:
    """Encrypted products: ``weights`` from :func:`encode_weights` times each of some ciphertexts of one shape.

    Args:
        coefficients: transform the results back.
        parallel: a thread for each prime, from the beginning to the end.

    Returns:
        Both halves ``[2, n, ciphertexts, output_blocks]`` in NTT form; or as coefficients, of c0 those at
        :func:`useful` positions.
    """
    points, rows, blocks, count = shape.points, shape.rows, shape.input_blocks, len(ciphertexts)
    many = points >= _MANY_POINTS
    outputs = weights.shape[2] if many else weights.shape[3]
    columns, read = count * outputs, len(useful(shape)) if coefficients else params.n
    out0, out1 = np.empty((2, read, columns), np.uint32), np.empty((2, params.n, columns), np.uint32)

    # The prime comes first, so that each thread has contiguous arrays: strided ones would not be vectorised.
    def work(i: int) -> None:
        # The rows of all ciphertexts, one after the other, meet each weight together.
        halves = [[half.reshape(points, rows, blocks) for half in (c0[i], c1(i))] for c0, c1 in ciphertexts]
        if many:
            turned = np.empty((2, count, rows, blocks, points), np.uint32)
            for k, both in enumerate(halves):
                for half in range(2):
                    _turn_in(both[half], turned[half, k])
            out = np.empty((2, count * rows, outputs, points), np.uint32)
            _along_points(weights[i], turned.reshape(2, count * rows, blocks, points), params.primes[i], out)
        else:
            together = np.stack([np.concatenate([both[half] for both in halves], axis=1) for half in range(2)])
            across = np.empty((2, points, count * rows, outputs), np.uint32)
            _along_outputs(weights[i], together, params.primes[i], across)
            out = across.transpose(0, 2, 3, 1)
        each = out.reshape(2 * count, rows, outputs, points)
        if coefficients and not shape.folds:  # both halves in one transform: its vectors are filled better
            whole = np.empty((points, rows, 2 * count, outputs), np.uint32)
            _turn_out(each, whole)
            intt_of_prime(whole.reshape(params.n, 2 * columns), i, params)
            flat = whole.reshape(params.n, 2, columns)
            out0[i], out1[i] = flat[useful(shape), 0], flat[:, 1]
            return
        first = np.empty((params.n, columns), np.uint32) if coefficients else out0[i]
        _turn_out(each[:count], first.reshape(points, rows, count, outputs))
        _turn_out(each[count:], out1[i].reshape(points, rows, count, outputs))
        if coefficients:
            out0[i] = read_coefficients(first, i, shape, params)
            intt_of_prime(out1[i], i, params)

    each_prime(work, parallel)
    return out0.reshape(2, read, count, outputs), out1.reshape(2, params.n, count, outputs)
