"""Kernels of block products: compiled loops on a CPU, torch operations on any other device; the same bits from both."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from sordino.server.kernel import I8
from sordino.shared.packing import BlockShape, Ciphertext, encode_weights, multiply, useful
from sordino.shared.rlwe import PARAMS, U32, U64, switch, twiddles

log = logging.getLogger(__name__)

Answer = tuple[U32 | U64, U32 | U64]
# Inputs summed at a time: a residue below 2^27 times half of another, below 2^14, stays exact in float64 (2^53).
_SUMMANDS: Final = 1 << 12


class BlockKernel(Protocol):
    """``name`` goes to the log."""

    name: str

    def encode(self, weights: I8, shape: BlockShape) -> Any:
        """Weights ``[out_features, in_features]`` as :meth:`answer` takes them, 8 bytes a weight."""
        ...

    def answer(
        self, encoded: Iterable[Any], ciphertexts: Sequence[Ciphertext], shape: BlockShape, bits: int
    ) -> list[Answer]:
        """Products of each ciphertext with each of ``encoded``, one after the other.

        Args:
            ciphertexts: of blocks of this shape.
            bits: of the modulus of the answers; 0 is q.

        Returns:
            For each ciphertext as :meth:`sordino.server.blocks.BlockProducts.product`.
        """
        ...


class CompiledBlocks:
    """CPU. ``parallel`` uses two threads."""

    name = "blocks-cpu"

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel

    def encode(self, weights: I8, shape: BlockShape) -> U32:
        return encode_weights(weights, shape, parallel=self._parallel)

    def answer(
        self, encoded: Iterable[U32], ciphertexts: Sequence[Ciphertext], shape: BlockShape, bits: int
    ) -> list[Answer]:
        parts = [
            multiply(weights, ciphertexts, shape, coefficients=bits > 0, parallel=self._parallel) for weights in encoded
        ]
        first, second = parts[0]
        if len(parts) > 1:
            first, second = (np.concatenate(halves, axis=3) for halves in zip(*parts, strict=True))
        answers = [[np.ascontiguousarray(half[:, :, k]) for half in (first, second)] for k in range(len(ciphertexts))]
        return [(switch(c0, bits), switch(c1, bits)) if bits else (c0, c1) for c0, c1 in answers]


class TorchBlocks:
    """Any torch device, made for CUDA: products, inverse transforms and switching stay on the device.

    Residues are multiplied in float64, exactly, with one factor in two halves; transforms are in int64.
    """

    name = "blocks-torch"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._primes = torch.tensor(PARAMS.primes, device=device).view(2, 1, 1)
        self._powers = torch.from_numpy(np.stack([twiddles(PARAMS, i)[2] for i in range(2)]).astype(np.int64)).to(
            device
        )

    def encode(self, weights: I8, shape: BlockShape) -> torch.Tensor:
        encoded = torch.from_numpy(encode_weights(weights, shape).view(np.int32))
        if encoded.ndim == 5:  # in chunks of points, which come last
            encoded = encoded.permute(0, 1, 4, 3, 2).reshape(2, shape.points, shape.input_blocks, -1)
        return encoded.to(self._device).contiguous()

    def answer(
        self, encoded: Iterable[torch.Tensor], ciphertexts: Sequence[Ciphertext], shape: BlockShape, bits: int
    ) -> list[Answer]:
        count = len(ciphertexts)
        both = np.stack([np.stack([c0, np.stack([c1(i) for i in range(2)])]) for c0, c1 in ciphertexts], axis=1)
        sent = torch.from_numpy(both.view(np.int32)).to(self._device)
        sent = sent.view(2 * count, 2, shape.points, shape.rows, -1)
        # [prime, points, half * ciphertext * row, input_blocks]
        rows = sent.permute(1, 2, 0, 3, 4).reshape(2, shape.points, 2 * count * shape.rows, -1).to(torch.int64)
        out = torch.cat([self._multiply(weights, rows) for weights in encoded], dim=3)
        blocks = out.shape[3]
        halves = out.view(2, shape.points, 2 * count, shape.rows, blocks).permute(2, 0, 1, 3, 4)
        halves = halves.reshape(2, count, 2, PARAMS.n, blocks)
        if not bits:
            whole: U32 = halves.to(torch.int32).cpu().numpy().view(np.uint32)
            return [(whole[0, k], whole[1, k]) for k in range(count)]
        columns = self._intt(halves.permute(2, 3, 0, 1, 4).reshape(2, PARAMS.n, -1))
        each = columns.view(2, PARAMS.n, 2, count, blocks)
        read = each[:, torch.from_numpy(useful(shape)).to(self._device), 0]
        return [(self._switch(read[:, :, k], bits), self._switch(each[:, :, 1, k], bits)) for k in range(count)]

    def _multiply(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``[prime, points, R, I]`` times ``[prime, points, I, O]`` modulo each prime, int64."""
        primes = self._primes[..., None]
        total = torch.zeros(())
        for first in range(0, rows.shape[3], _SUMMANDS):
            some = rows[..., first : first + _SUMMANDS]
            w = weights[:, :, first : first + _SUMMANDS].to(torch.float64)
            high, low = ((part.to(torch.float64) @ w).to(torch.int64) % primes for part in (some >> 14, some & 0x3FFF))
            product = ((high << 14) + low) % primes
            total = product if first == 0 else (total + product) % primes
        return total

    def _intt(self, a: torch.Tensor) -> torch.Tensor:
        """Inverse transforms of the columns of ``a [2, N, C]``, int64: Gentleman-Sande, a stage an operation."""
        count, primes = PARAMS.n, self._primes[..., None]
        columns, groups = a.shape[2], count // 2
        while groups:
            pairs = a.view(2, groups, 2, count // (2 * groups), columns)
            x, y = pairs[:, :, 0], pairs[:, :, 1]
            powers = self._powers[:, groups : 2 * groups, None, None]
            a = torch.stack([(x + y) % primes, (x - y + primes) * powers % primes], dim=2)
            groups //= 2
        inverse = torch.tensor([pow(count, -1, q) for q in PARAMS.primes], device=self._device).view(2, 1, 1)
        return a.view(2, count, columns) * inverse % self._primes

    def _switch(self, a: torch.Tensor, bits: int) -> U64:
        """As :func:`sordino.shared.rlwe.switch`, in the same order of roundings."""
        q0, q1 = PARAMS.primes
        per_t = float(1 << bits) / q1
        per_d = per_t / q0
        t = (a[1] + 2 * q1 - a[0]) * pow(q0, -1, q1) % q1
        scaled = t.to(torch.float64) * per_t + a[0].to(torch.float64) * per_d + 0.5
        result: U64 = (scaled.to(torch.int64) & ((1 << bits) - 1)).cpu().numpy().view(np.uint64)
        return result


def known_answer_test(kernel: BlockKernel) -> bool:
    """Whether ``kernel`` gives the bits of the compiled loops (fixed data from SHAKE-256)."""
    plain = CompiledBlocks(parallel=False)
    for rows, inputs, outputs in ((1, 40, 51), (8, 5, 51)):
        shape = BlockShape(rows, inputs, outputs, 90, 60)
        stream = hashlib.shake_256(b"sordino block known-answer test").digest(90 * 60)
        weights = np.frombuffer(stream, np.int8).reshape(60, 90).clip(-127, 127)
        words = hashlib.shake_256(stream).digest(16 * PARAMS.n * shape.input_blocks)
        both = np.frombuffer(words, "<u4").reshape(2, 2, PARAMS.n, -1) & np.uint32(0x3FFFFFF)
        for bits in (0, 41):
            sent = [(both[0], both[1].__getitem__)]
            (wanted,) = plain.answer([plain.encode(weights, shape)], sent, shape, bits)
            (got,) = kernel.answer([kernel.encode(weights, shape)], sent, shape, bits)
            if not all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True)):
                return False
    return True


def choose_block_kernel(device: torch.device, *, parallel: bool) -> BlockKernel:
    """The kernel for matrices on ``device``; the compiled one if the device fails its known-answer test."""
    compiled = CompiledBlocks(parallel=parallel)
    if device.type == "cpu":
        return compiled
    if known_answer_test(kernel := TorchBlocks(device)):
        return kernel
    log.warning("kernel %s fails its known-answer test on %s: not used", kernel.name, device)
    return compiled
