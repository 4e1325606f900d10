"""Encrypted products for provisioning: integer combinations of ciphertexts, one matrix product per evaluation point.

The server holds no key and runs no transform. A residue is below 2^27 and |W_ij| < 2^7, so float64 sums are exact for
rows up to 2^19 (MAX_IN_FEATURES is 2^17).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.shared.jit import compiled
from sordino.shared.rlwe import PARAMS, U32, expand_uniform

_M_ARENA_MAX: Final = -8  # malloc.h


@compiled
def _reduce(sums: NDArray[np.float64], q: float, out: U32) -> None:
    """Exact sums to [0, q): floor by reciprocal may be off by one either way."""
    inverse = 1.0 / q
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            x = sums[i, j]
            r = x - np.floor(x * inverse) * q
            r = r + q if r < 0 else r
            r = r - q if r >= q else r
            out[i, j] = np.uint32(np.int64(r))


def products_of_masks(weights64: torch.Tensor, sent: Sequence[tuple[bytes, int, U32]]) -> list[tuple[U32, U32]]:
    """W times one ciphertext per input channel, at some evaluation points; of all that was sent in one product.

    Args:
        weights64: W as float64, ``[planes * m, n]``, on the device that computes.
        sent: of each: the seed of the random half, which block of points, and c0 ``[2, points, n]``.

    Returns:
        Both halves of each result, ``[2, points, planes * m]``.
    """
    halves = []
    for seed, block, c0 in sent:
        c1 = expand_uniform(seed, block, c0.shape[1:])
        halves.append(np.stack([c0, c1]).reshape(-1, c0.shape[2]))
    stacked = torch.from_numpy(np.concatenate(halves)).to(weights64.device).to(torch.float64)
    sums = (stacked @ weights64.t()).cpu().numpy()
    results, first = [], 0
    for half in halves:
        some = sums[first : first + len(half)].reshape(2, 2, len(half) // 4, -1)
        first += len(half)
        out = np.empty(some.shape, np.uint32)
        for k in range(2):
            for i, q in enumerate(PARAMS.primes):
                _reduce(some[k, i], float(q), out[k, i])
        results.append((out[0], out[1]))
    return results


def few_arenas() -> None:
    """Has glibc keep one heap a processor: it would make one a thread, each as large as its largest request."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, os.cpu_count() or 1)


def return_memory() -> None:
    """Gives freed memory back to the system, after the weights were loaded and after a stream of products.

    glibc would keep what their large temporary arrays took (measured: once the weights of a 135M model), and
    mapping each array anew instead costs half as much CPU again.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
