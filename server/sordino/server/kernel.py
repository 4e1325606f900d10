"""Ring kernels: exact y = W u mod p over int8 matrices, on CPU or CUDA.

A ring element is split into four balanced 8-bit digits, u = sum_k d_k 256^k with d_k in [-128, 127]; the digits of all
rows are multiplied by W in one int8 GEMM with int32 accumulation, and recombined mod p. |sum_j W_ij d_j| <= 128*127*n
stays below 2^31 for n <= 131,072.

For a few rows, the shape of decoding, a plain loop over 64-bit integers is faster on a CPU than any GEMM (which packs W
anew for each call): measured for all layers of SmolLM2-135M and one row on one core, 4.6 ms against 13 ms.

``torch._int_mm`` is silently wrong on x86 without VNNI (16-bit saturation inside oneDNN), so a kernel must pass a
known-answer test when it is chosen; otherwise an exact float64 product takes its place.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError
from sordino.shared.jit import compiled
from sordino.shared.ring import P, combine_planes

log = logging.getLogger(__name__)

U32 = NDArray[np.uint32]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
MAX_IN_FEATURES: Final = 1 << 17
# Largest value with four balanced digits: 127 * (1 + 256 + 256^2 + 256^3). Above it, u - p has them.
_TOP: Final = 0x7F7F7F7F
# Up to so many rows the loop beats oneDNN's int8 product.
_FEW: Final = 3


class RingKernel(Protocol):
    """One way to multiply. ``name`` goes to the log and the metrics; up to ``few`` rows there is another way."""

    name: str
    few: int

    def matmul(self, weights: torch.Tensor, rows: U32) -> U32:
        """``weights`` int8 ``[m, n]`` times ``rows [R, n]`` (ring elements): ``[R, m]``, exact mod p."""
        ...

    def few_rows(self, weights: I8, rows: U32) -> U32:
        """The same for at most ``few`` rows, by weights that are an array already: to make one takes a while."""
        ...


@compiled
def _digits(rows: U32, out: I8) -> None:
    """Balanced digits ``[4, R, n]``: adding 0x80808080 carries each borrow, then every byte is its digit + 128."""
    for r in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            u = rows[r, j]
            v = np.uint32(u - np.uint32(P)) if u > np.uint32(_TOP) else u
            w = np.uint32(v + np.uint32(0x80808080)) ^ np.uint32(0x80808080)
            out[0, r, j] = np.int8(w & np.uint32(0xFF))
            out[1, r, j] = np.int8((w >> np.uint32(8)) & np.uint32(0xFF))
            out[2, r, j] = np.int8((w >> np.uint32(16)) & np.uint32(0xFF))
            out[3, r, j] = np.int8(w >> np.uint32(24))


@compiled
def _recombine(sums: I32, out: U32) -> None:
    """``sums [4, R, m]`` to sum_k 256^k s_k mod p; |value| < 2^56, made non-negative by a multiple of p."""
    offset = np.int64(P) << 25
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            value = np.int64(sums[3, r, i]) * 16777216 + np.int64(sums[2, r, i]) * 65536
            value += np.int64(sums[1, r, i]) * 256 + np.int64(sums[0, r, i])
            v = np.uint64(value + offset)
            # 2^32 = 5 mod p
            v = (v >> np.uint64(32)) * np.uint64(5) + (v & np.uint64(0xFFFFFFFF))
            v = (v >> np.uint64(32)) * np.uint64(5) + (v & np.uint64(0xFFFFFFFF))
            out[r, i] = np.uint32(v - np.uint64(P) if v >= np.uint64(P) else v)


@compiled
def _few_rows(weights: I8, rows: I64, out: U32) -> None:
    """``weights [m, n]`` times ``rows [R, n]`` mod p; |sum| < 2^7 * 2^32 * n, far from 2^63."""
    m, n = weights.shape
    for i in range(m):
        for r in range(rows.shape[0]):
            total = np.int64(0)
            for j in range(n):
                total += np.int64(weights[i, j]) * rows[r, j]
            out[r, i] = np.uint32(total % P)


class Int8Kernel:
    """CPU: a compiled loop for a few rows; for more, digits and recombination compiled and one product by oneDNN."""

    name = "int8-cpu"
    few = _FEW

    def few_rows(self, weights: I8, rows: U32) -> U32:
        out = np.empty((len(rows), len(weights)), np.uint32)
        _few_rows(weights, rows.astype(np.int64), out)
        return out

    def matmul(self, weights: torch.Tensor, rows: U32) -> U32:
        count, n = rows.shape
        if count <= _FEW:
            return self.few_rows(weights.numpy(), rows)
        digits = np.empty((4, count, n), np.int8)
        _digits(rows, digits)
        sums = torch._int_mm(torch.from_numpy(digits).view(4 * count, n), weights.t())
        out = np.empty((count, weights.shape[0]), np.uint32)
        _recombine(sums.numpy().reshape(4, count, -1), out)
        return out


class _OneWay:
    few = 0

    def few_rows(self, weights: I8, rows: U32) -> U32:
        raise NotImplementedError


class TorchInt8Kernel(_OneWay):
    """Any torch device, made for CUDA: the same arithmetic in torch operations, no host round trip in between."""

    name = "int8-torch"

    def matmul(self, weights: torch.Tensor, rows: U32) -> U32:
        count, n = rows.shape
        device = weights.device
        u = torch.from_numpy(rows.astype(np.int64)).to(device)
        v = torch.where(u > _TOP, u - P, u) + 0x80808080
        digits = torch.stack([((v >> shift) & 0xFF) - 128 for shift in (0, 8, 16, 24)]).to(torch.int8)
        flat = digits.view(4 * count, n)
        m = weights.shape[0]
        # CUDA's int8 GEMM wants more than 16 rows and all sizes multiples of 8.
        pad_rows = max(24 - flat.shape[0], -flat.shape[0] % 8)
        flat = torch.nn.functional.pad(flat, (0, -n % 8, 0, pad_rows))
        padded = torch.nn.functional.pad(weights, (0, -n % 8, 0, -m % 8)) if n % 8 or m % 8 else weights
        sums = torch._int_mm(flat, padded.t())[: 4 * count, :m].view(4, count, m).to(torch.int64)
        value = sums[0] + sums[1] * 256 + sums[2] * 65536 + sums[3] * 16777216
        result: U32 = torch.remainder(value, P).cpu().numpy().astype(np.uint32)
        return result


class Float64Kernel(_OneWay):
    """Exact fallback: |sum_j W_ij u_j| < 2^7 * 2^32 * n stays below 2^53 for n <= 16,384; longer rows are cut."""

    name = "float64"
    _BLOCK = 8192

    def matmul(self, weights: torch.Tensor, rows: U32) -> U32:
        total = np.zeros((rows.shape[0], weights.shape[0]), np.int64)
        for start in range(0, rows.shape[1], self._BLOCK):
            part = torch.from_numpy(rows[:, start : start + self._BLOCK].astype(np.float64)).to(weights.device)
            product = part @ weights[:, start : start + self._BLOCK].to(torch.float64).t()
            total = (total + product.cpu().numpy().astype(np.int64)) % P
        return total.astype(np.uint32)


def reference_matmul(weights: I8, rows: U32) -> U32:
    """W u mod p by Python's integers: slow, obviously right; the yardstick of the known-answer test."""
    return np.array(
        [[sum(int(w) * int(u) for w, u in zip(line, row, strict=True)) % P for line in weights] for row in rows],
        dtype=np.uint32,
    )


def known_answer_test(kernel: RingKernel, device: torch.device) -> bool:
    """Whether ``kernel`` multiplies full-range int8 by full-range digits exactly (fixed data from SHAKE-256)."""
    n, m, count = 264, 24, 6
    stream = hashlib.shake_256(b"sordino kernel known-answer test").digest(n * m + 4 * n * count)
    weights = np.frombuffer(stream[: n * m], np.int8).reshape(m, n).clip(-127, 127)
    rows = (np.frombuffer(stream[n * m :], "<u4").astype(np.uint64) % P).astype(np.uint32).reshape(count, n)
    # The extremes, where 16-bit pairs saturate: all digits -128 and all 127 against weights of +-127.
    weights[0], weights[1] = 127, -127
    rows[0], rows[1] = 0x7F7F7F7F, (P - 0x80808080) % P
    on_device, expected = torch.from_numpy(weights.copy()).to(device), reference_matmul(weights, rows)
    # All rows at once, and one by one: a kernel may go two ways.
    alone = [kernel.matmul(on_device, rows[i : i + 1]) for i in range(count)]
    return np.array_equal(kernel.matmul(on_device, rows), expected) and np.array_equal(np.concatenate(alone), expected)


def choose_kernel(device: torch.device) -> RingKernel:
    """The fastest kernel for ``device`` that passes its known-answer test.

    Raises:
        RuntimeError: none does (a broken BLAS, never seen).
    """
    candidates: list[RingKernel] = [Int8Kernel()] if device.type == "cpu" else [TorchInt8Kernel()]
    candidates.append(Float64Kernel())
    for kernel in candidates:
        if known_answer_test(kernel, device):
            return kernel
        log.warning("kernel %s fails its known-answer test on %s: not used", kernel.name, device)
    raise RuntimeError(f"no kernel computes exactly on {device}")


class RingMatrix:
    """One group's matrix on its device, ``[planes * m, n]`` int8, with the online product.

    Raises:
        ProtocolError: from :meth:`matmul`, when rows have another length.
    """

    def __init__(self, weights: torch.Tensor, planes: int, kernel: RingKernel) -> None:
        self.weights = weights
        self.planes = planes
        self.out_features = weights.shape[0] // planes
        self.in_features = weights.shape[1]
        self._kernel = kernel
        self._array = weights.numpy() if kernel.few else None

    def matmul(self, rows: U32) -> U32:
        """``rows [R, n]`` to ``[R, m]``: W u mod p with W = low + 256 * high when there are two planes."""
        if rows.ndim != 2 or rows.shape[1] != self.in_features:
            raise ProtocolError(f"rows of shape {rows.shape}, expected [*, {self.in_features}]")
        if self._array is not None and len(rows) <= self._kernel.few:
            product = self._kernel.few_rows(self._array, rows)
        else:
            product = self._kernel.matmul(self.weights, rows)
        return combine_planes(product, self.planes)


@compiled
def below_p(rows: U32) -> bool:
    """Whether all are ring elements; numpy's maximum takes a few times as long for a row."""
    largest = np.uint32(0)
    for value in rows.flat:
        largest = max(largest, value)
    return bool(largest < np.uint32(P))
