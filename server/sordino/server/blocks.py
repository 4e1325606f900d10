"""Encrypted block products: a matrix, or its transpose, times rows that are packed as in :mod:`sordino.shared.packing`.

Check vectors, just-in-time masks and the rows of protocol ``rlwe`` all come this way; the server cannot tell which, and
holds no key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from sordino.server.blockkernels import Answer, BlockKernel
from sordino.server.kernel import I8, RingMatrix
from sordino.shared.packing import Part
from sordino.shared.rlwe import PARAMS, U32, expand_uniform_of_prime

_POLYNOMIALS: Final = 1024  # encoded at a time when they are not kept: 16 MB
_MOST_A_WEIGHT: Final = 32  # bytes that are kept
_IDLE_S: Final = 10.0  # after so long unused, encoded weights make room for others


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for: a part of the group's matrix, and the modulus of the answer (0 bits: q)."""

    group: int
    transposed: bool
    part: Part
    bits: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for requests that may be answered together."""
        ins, outs = self.part.inputs, self.part.outputs
        where = (ins.start, ins.stop, outs.start, outs.stop)
        return (self.group, self.transposed, where, self.part.shape, self.bits)


@dataclass(slots=True)
class _Kept:
    planes: list[Any]
    norm: float  # the largest of a block
    size: int
    used: float


class BlockProducts:
    """Multiplies blocks and keeps encoded weights, 8 bytes a weight and some for padding, up to a limit.

    Weights are encoded when they are first asked for. What does not fit is encoded anew for each request: each token
    passes through all groups in the same order, so dropping the least recently used would drop each just before its
    turn; only what lay idle for ten seconds makes room.

    Args:
        limit: bytes of encoded weights to keep, on the kernel's device.
    """

    def __init__(self, limit: int, kernel: BlockKernel) -> None:
        self._limit = limit
        self._kernel = kernel
        self._lock = threading.Lock()
        self._kept: dict[tuple[object, ...], _Kept] = {}

    def products(self, matrix: RingMatrix, wanted: Wanted, sent: Sequence[tuple[bytes, U32]]) -> list[Answer]:
        """Both halves of each answer.

        Args:
            sent: seed and c0 ``[2, N, input_blocks]`` of each.

        Returns:
            ``[2, N, planes * output_blocks]`` twice, in NTT form; or with ``wanted.bits`` coefficients, ``[rows *
            outputs, planes * output_blocks]`` of c0 and ``[N, planes * output_blocks]`` of c1.

        Raises:
            RangeError: the weights of a block are so large that the answer could decode wrongly.
        """
        ciphertexts = [(c0, _random_half(seed, c0)) for seed, c0 in sent]
        return self._kernel.answer(self._encoded(matrix, wanted), ciphertexts, wanted.part.shape, wanted.bits)

    def _encoded(self, matrix: RingMatrix, wanted: Wanted) -> Iterator[Any]:
        key = wanted.key[:-1]  # the modulus of the answer changes no weight
        with self._lock:
            kept = None if wanted.transposed else self._kept.get(key)
            if kept is not None:
                kept.used = time.monotonic()
        if kept is not None:
            _check_norm(wanted, kept.norm)  # which may have been kept for answers that bear more
            yield from kept.planes
            return
        shape = wanted.part.shape
        size = 8 * shape.points * shape.input_blocks * shape.output_blocks * matrix.planes
        # Blocks that reach far beyond their range are no use to keep: somebody could fill the cache with them.
        most = _MOST_A_WEIGHT * matrix.planes * shape.in_features * shape.out_features
        keep = not wanted.transposed and size <= most and self._make_room(size)
        step = shape.outputs * (shape.output_blocks if keep else max(1, _POLYNOMIALS // shape.input_blocks))
        planes, norm = [], 0.0
        for plane in _planes(matrix, wanted):
            for first in range(0, shape.out_features, step):
                weights = np.ascontiguousarray(plane[first : first + step])
                norm = max(norm, _largest_norm(wanted, weights))
                _check_norm(wanted, norm)
                some = replace(shape, out_features=weights.shape[0])
                encoded = self._kernel.encode(weights, some)
                if keep:
                    planes.append(encoded)
                yield encoded
        if keep:
            with self._lock:
                self._kept[key] = _Kept(planes, norm, size, time.monotonic())

    def _make_room(self, size: int) -> bool:
        with self._lock:
            used = sum(kept.size for kept in self._kept.values())
            idle = [key for key, kept in self._kept.items() if kept.used < time.monotonic() - _IDLE_S]
            for key in sorted(idle, key=lambda key: self._kept[key].used):
                if used + size <= self._limit:
                    break
                used -= self._kept.pop(key).size
            return used + size <= self._limit


def _random_half(seed: bytes, c0: U32) -> Callable[[int], U32]:
    @cache  # asked for by each plane
    def of_prime(i: int) -> U32:
        return expand_uniform_of_prime(seed, 0, c0.shape[1:], i)

    return of_prime


def _planes(matrix: RingMatrix, wanted: Wanted) -> Iterator[I8]:
    rows, columns = wanted.part.outputs, wanted.part.inputs
    if wanted.transposed:
        rows, columns = columns, rows
    planes = matrix.weights.view(matrix.planes, matrix.out_features, matrix.in_features)
    for plane in planes[:, rows, columns].cpu().numpy():
        yield plane.T if wanted.transposed else plane


def _largest_norm(wanted: Wanted, weights: I8) -> float:
    """A coefficient of the answer carries the noise of all weights of its block (§5.1)."""
    squares = np.einsum("ij,ij->i", weights, weights, dtype=np.float64)
    starts = np.arange(0, weights.shape[0], wanted.part.shape.outputs)
    return float(np.sqrt(np.add.reduceat(squares, starts).max()))


def _check_norm(wanted: Wanted, norm: float) -> None:
    PARAMS.check_norm(f"number {wanted.group}", norm, wanted.bits)
