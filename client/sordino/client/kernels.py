"""The client's arithmetic between two messages, one compiled pass each (a dozen small torch operations cost more).

Shapes: R rows, n inputs, m outputs. Ring elements are uint32 in [0, p), integers of the quantised domain int32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sordino.shared.jit import compiled
from sordino.shared.ring import P

U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@compiled
def quantise(x: F32, x_max: int, out: I32, scale: F64) -> bool:
    """Rows ``x [R, n]`` to integers of magnitude <= x_max with one scale a row: x ~ out * scale.

    A zero row gets scale 0 and zeros. Returns False when a value is NaN or infinite (``out`` is then meaningless).
    """
    top = np.float64(x_max)
    for r in range(x.shape[0]):
        peak = np.float32(0)
        finite = True
        for j in range(x.shape[1]):
            value = abs(x[r, j])
            finite &= value < np.inf
            peak = max(peak, value)
        if not finite:
            return False
        scale[r] = np.float64(peak) / top
        factor = top / np.float64(peak) if peak > 0 else 0.0
        for j in range(x.shape[1]):
            out[r, j] = np.int32(min(max(np.rint(np.float64(x[r, j]) * factor), -top), top))
    return True


@compiled
def dequantise(y: I32, scale: F64, out_scale: F32, bias: F32, out: F32) -> None:
    """``y [R, m]`` times the row's scale and the output's, plus bias (``[m]``, or empty for none)."""
    for r in range(y.shape[0]):
        for i in range(y.shape[1]):
            value = np.float64(y[r, i]) * scale[r] * np.float64(out_scale[i])
            out[r, i] = np.float32(value + np.float64(bias[i]) if bias.size else value)


@compiled
def to_ring(x: I32, out: U32) -> None:
    """Centred integers to [0, p)."""
    for r in range(x.shape[0]):
        for j in range(x.shape[1]):
            v = x[r, j]
            out[r, j] = np.uint32(np.int64(v) + P) if v < 0 else np.uint32(v)


@compiled
def from_ring(y: U32, out: I32) -> None:
    """[0, p) to the centred integers in [-(p-1)/2, (p-1)/2]."""
    for r in range(y.shape[0]):
        for j in range(y.shape[1]):
            v = np.int64(y[r, j])
            out[r, j] = np.int32(v - P if v > P // 2 else v)


@compiled
def mask(x: I32, r: U32, out: U32) -> None:
    """u = x - r mod p."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            v = np.int64(x[i, j]) - np.int64(r[i, j])
            v = v + P if v < 0 else v
            out[i, j] = np.uint32(v + P if v < 0 else v)


@compiled
def unmask(y: U32, wr: U32, out: I32) -> None:
    """y + W r mod p, centred: exactly W x."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            v = np.int64(y[i, j]) + np.int64(wr[i, j])
            v = v - P if v >= P else v
            out[i, j] = np.int32(v - P if v > P // 2 else v)


@compiled
def dot_mod_p(vectors: U32, rows: U32, out: U32) -> None:
    """``vectors [k, n]`` times each of ``rows [R, n]`` mod p: ``out [R, k]``.

    2^32 = 5 mod p folds a 64-bit product below 6 * 2^32, so 2^29 terms add up without a carry.
    """
    low = np.uint64(0xFFFFFFFF)
    for r in range(rows.shape[0]):
        for k in range(vectors.shape[0]):
            acc = np.uint64(0)
            for j in range(rows.shape[1]):
                product = np.uint64(vectors[k, j]) * np.uint64(rows[r, j])
                acc += (product >> np.uint64(32)) * np.uint64(5) + (product & low)
            out[r, k] = np.uint32(acc % np.uint64(P))


@compiled
def all_in_ring(y: U32) -> bool:
    """Whether every element is below p; a larger one could pass a check mod p under another value."""
    ok = True
    for r in range(y.shape[0]):
        for j in range(y.shape[1]):
            ok &= y[r, j] < np.uint32(P)
    return ok
