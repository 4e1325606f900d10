"""Coefficient packing of a matrix product into polynomial products (no rotation, no key switching).

The encoding is Cheetah's (Huang, Lu, Hong and Ding, USENIX Security 2022, ePrint 2022/207, section 3.1), with several
input rows in one polynomial. For a block of T rows, B inputs and M outputs with T*B*M <= N::

    x(X) = sum_t sum_j x[t, j] X^(t*B*M + j)        w(X) = sum_i sum_j W[i, j] X^(i*B + B-1-j)

    coefficient t*B*M + i*B + B-1 of x(X) w(X) mod X^N + 1  =  sum_j W[i, j] x[t, j]

Terms that wrap around or reach the next row's region fall on positions below B-1 and are never read.
Polynomials are columns, as everywhere (:mod:`sordino.shared.rlwe`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sordino.shared.rlwe import PARAMS, RESIDUE_BITS, U32, RlweParams, ntt

I8 = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How one polynomial is filled: ``rows`` x ``inputs`` x ``outputs`` <= N; W is [out_features, in_features]."""

    rows: int
    inputs: int
    outputs: int
    in_features: int
    out_features: int

    @property
    def input_blocks(self) -> int:
        return -(-self.in_features // self.inputs)

    @property
    def output_blocks(self) -> int:
        return -(-self.out_features // self.outputs)

    def upload_bytes(self, params: RlweParams = PARAMS) -> int:
        """Bytes of the seeded ciphertexts of one block of rows."""
        return self.input_blocks * params.n * 2 * RESIDUE_BITS // 8

    def download_bytes(self, params: RlweParams = PARAMS) -> int:
        """Bytes of the results of one block of rows: both halves, two residues."""
        return self.output_blocks * params.n * 4 * RESIDUE_BITS // 8


@dataclass(frozen=True, slots=True)
class Part:
    """What one message carries of a product: some inputs, some outputs, and the shape of their blocks."""

    inputs: slice
    outputs: slice
    shape: BlockShape


def plan(
    rows: int,
    in_features: int,
    out_features: int,
    *,
    planes: int = 1,
    max_bytes: int = 1 << 62,
    params: RlweParams = PARAMS,
) -> list[Part]:
    """A product of up to ``rows`` rows in the fewest messages, and then with the least traffic, whose noise decodes.

    A result coefficient carries the noise of every weight in its polynomials: ``outputs`` rows of W, so their norms add
    up to at most 127 sqrt(inputs of the part * outputs), which must stay within the bound of one int8 plane.

    Args:
        planes: int8 planes of W, each answered for itself.
        max_bytes: of the ciphertexts in a message, either way; each part has one block of each at least.

    Returns:
        Parts that cover inputs x outputs once. Results of parts with the same outputs add up mod p.
    """
    if not 1 <= rows <= params.n:
        raise ValueError(f"rows must be 1..{params.n}, not {rows}")
    room = params.n // rows
    max_weights = int((params.max_row_norm / 127) ** 2)
    cuts: list[tuple[int, int, BlockShape, int, int]] = []
    for k in range(room.bit_length()):
        whole = BlockShape(rows, 1 << k, room >> k, in_features, out_features)
        up, down = whole.upload_bytes(params), whole.download_bytes(params)
        blocks_in = max(1, max_bytes // (up // whole.input_blocks))
        blocks_out = max(1, max_bytes // (planes * down // whole.output_blocks))
        inputs = min(in_features, blocks_in * whole.inputs)
        if inputs * whole.outputs > max_weights:
            inputs = max_weights // room * whole.inputs
        outputs = min(out_features, blocks_out * whole.outputs)
        ins, outs = -(-in_features // inputs), -(-out_features // outputs)
        cuts.append((ins * outs, outs * up + ins * down, whole, inputs, outputs))
    _, _, whole, inputs, outputs = min(cuts, key=lambda cut: cut[:2])
    return [
        Part(slice(i, i_end), slice(o, o_end), replace(whole, in_features=i_end - i, out_features=o_end - o))
        for i, i_end in _ranges(in_features, inputs)
        for o, o_end in _ranges(out_features, outputs)
    ]


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, count)) for first in range(0, count, step))


def encode_rows(x: U32, shape: BlockShape, params: RlweParams = PARAMS) -> U32:
    """Rows ``x [rows, in_features]`` of ring elements to polynomials ``[n, input_blocks]``."""
    padded = np.zeros((shape.rows, shape.input_blocks * shape.inputs), np.uint32)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(shape.rows, shape.input_blocks, shape.inputs)
    out = np.zeros((params.n, shape.input_blocks), np.uint32)
    stride = shape.inputs * shape.outputs
    for t in range(shape.rows):
        out[t * stride : t * stride + shape.inputs] = blocks[t].T
    return out


def decode_rows(product: U32, shape: BlockShape) -> U32:
    """Useful coefficients of ``product [n, output_blocks]`` as ``[rows, out_features]``."""
    stride = shape.inputs * shape.outputs
    used = product[: shape.rows * stride].reshape(shape.rows, shape.outputs, shape.inputs, shape.output_blocks)
    rows = used[:, :, shape.inputs - 1].transpose(0, 2, 1).reshape(shape.rows, -1)
    return np.ascontiguousarray(rows[:, : shape.out_features])


def encode_weights(weights: I8, shape: BlockShape, params: RlweParams = PARAMS) -> U32:
    """The plaintext polynomials of W in NTT form, ``[2, n, input_blocks * output_blocks]`` (input block major)."""
    padded = np.zeros((shape.output_blocks, shape.outputs, shape.input_blocks, shape.inputs), np.int64)
    flat = padded.reshape(shape.output_blocks * shape.outputs, shape.input_blocks * shape.inputs)
    flat[: shape.out_features, : shape.in_features] = weights
    coefficients = padded[..., ::-1].transpose(1, 3, 2, 0).reshape(shape.outputs * shape.inputs, -1)
    out = np.zeros((2, params.n, coefficients.shape[1]), np.uint32)
    for i, q in enumerate(params.primes):
        out[i, : coefficients.shape[0]] = coefficients % q
    ntt(out, params)
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _accumulate(weights: U32, c: U32, q: int, out: U32) -> None:
    points, blocks = c.shape
    outputs = out.shape[1]
    q64 = np.uint64(q)
    for p in range(points):
        for o in range(outputs):
            # products below 2^54: 1,024 of them fit in 64 bits
            acc = np.uint64(0)
            for b in range(blocks):
                acc += np.uint64(weights[p, b * outputs + o]) * np.uint64(c[p, b])
                if b & 511 == 511:
                    acc %= q64
            out[p, o] = np.uint32(acc % q64)


def multiply(weights: U32, c: U32, shape: BlockShape, params: RlweParams = PARAMS) -> U32:
    """One half of the encrypted product: ``weights`` from :func:`encode_weights` times ``c [2, n, input_blocks]``.

    Returns:
        ``[2, n, output_blocks]``, in NTT form; applied to both halves of the ciphertexts it gives the result's halves.
    """
    out = np.empty((2, params.n, shape.output_blocks), np.uint32)
    for i, q in enumerate(params.primes):
        _accumulate(weights[i], np.ascontiguousarray(c[i]), q, out[i])
    return out
