"""Float matrices to integers with one scale per row, and the two int8 planes of 12-bit weights.

Everything works on rows independently: ``weight[i, j] ~ scale[i] * values[i, j]`` with ``|values| <= top(bits)``.
Values are int16 in memory for both widths and int8 on disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from sordino.shared.errors import RangeError
from sordino.shared.manifest import WeightBits

_TOP: Final = {8: 127, 12: 2047}
# Rows below this are zero in effect: their scale would leave float32's normal numbers.
_ZERO_ROW: Final = 1e-30
# Share of the largest entry that still fits without clipping. A Gaussian row gains from clipping its tail; above one
# the grid may meet a matrix that was quantised before.
_SEARCH_GRID: Final = tuple(0.72 + 0.01 * step for step in range(31))
_ROWS_AT_ONCE: Final = 1 << 20
# Share of the mean importance that every column gets: a channel that the calibration text never used may matter in use.
DAMPING: Final = 0.01


@dataclass(frozen=True, slots=True)
class Quantised:
    """Integers ``values`` int16 ``[m, n]`` and ``scale`` float32 ``[m]``; the matrix is their product row by row."""

    values: torch.Tensor
    scale: torch.Tensor

    def dequantise(self) -> torch.Tensor:
        """Float32 ``[m, n]``."""
        return self.values.to(torch.float32) * self.scale[:, None]


def top(bits: WeightBits) -> int:
    """Largest magnitude of a quantised weight: 127 or 2047."""
    return _TOP[bits]


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Refuses NaN and infinity.

    Raises:
        RangeError: names the tensor; values are not shown.
    """
    if not bool(torch.isfinite(weight).all()):
        count = int((~torch.isfinite(weight)).sum())
        raise RangeError(f"{name!r} has {count} entries that are NaN or infinite")


def quantise_nearest(weight: torch.Tensor, bits: WeightBits, floor: torch.Tensor | None = None) -> Quantised:
    """Rounds to nearest with the scale of each row's largest entry, so every error is at most half a scale.

    Args:
        weight: float32 ``[m, n]``, finite. A row of zeros gets scale 1.
        floor: smallest scale of each row, float32 ``[m]``; see :mod:`~sordino.server.split.balance`.
    """
    return round_to(weight, _full_scale(weight, bits, floor), bits)


def round_to(weight: torch.Tensor, scale: torch.Tensor, bits: WeightBits) -> Quantised:
    """Rounds ``weight`` ``[m, n]`` to the given scales ``[m]``; what is larger than the grid is clipped."""
    values = (weight / scale[:, None]).round_().clamp_(-_TOP[bits], _TOP[bits])
    return Quantised(values.to(torch.int16), scale)


def quantise_search(
    weight: torch.Tensor, bits: WeightBits, importance: torch.Tensor, floor: torch.Tensor | None = None
) -> Quantised:
    """Picks for each row, out of a grid of scales, the one of least weighted squared error; then rounds to nearest.

    Args:
        weight: float32 ``[m, n]``, finite.
        importance: ``[n]``, >= 0: the diagonal of H = X^T X over calibration inputs.
        floor: smallest scale of each row, float32 ``[m]``.
    """
    scale = torch.empty(weight.shape[0], dtype=torch.float32)
    importance = importance.to(torch.float32)
    mean = float(importance.mean())
    importance = importance + (DAMPING * mean if mean > 0 else 1.0)
    step = max(1, _ROWS_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        least = None if floor is None else floor[start : start + step]
        full = _full_scale(rows, bits, least)
        best = torch.full_like(full, math.inf)
        chosen = full.clone()
        for factor in _SEARCH_GRID:
            candidate = full * factor if least is None else torch.maximum(full * factor, least)
            rounded = (rows / candidate[:, None]).round_().clamp_(-_TOP[bits], _TOP[bits]).mul_(candidate[:, None])
            error = rounded.sub_(rows).square_() @ importance
            better = error < best
            best = torch.where(better, error, best)
            chosen = torch.where(better, candidate, chosen)
        # A zero row has no error at any scale: keep the defined one.
        scale[start : start + step] = torch.where(rows.abs().amax(dim=1) > _ZERO_ROW, chosen, full)
    return round_to(weight, scale, bits)


def to_planes(values: torch.Tensor, bits: WeightBits) -> torch.Tensor:
    """int16 ``[m, n]`` to the stored int8 ``[planes * m, n]``: for 12 bits first the low bytes, then the high ones."""
    if bits == 8:
        return values.to(torch.int8)
    wide = values.to(torch.int32)
    low = ((wide + 128) & 255) - 128
    return torch.cat([low, (wide - low) >> 8]).to(torch.int8)


def from_planes(planes: torch.Tensor, bits: WeightBits) -> torch.Tensor:
    """The inverse of :func:`to_planes`; int16 ``[m, n]``."""
    if bits == 8:
        return planes.to(torch.int16)
    low, high = planes.to(torch.int16).chunk(2)
    return low + 256 * high


def norms(values: torch.Tensor, bits: WeightBits) -> tuple[int, int]:
    """``(l1_max, l2_max)`` of a group as :class:`~sordino.shared.manifest.GroupSpec` defines them, exact."""
    l1 = int(values.to(torch.int64).abs().sum(dim=1).max())
    square = int(to_planes(values, bits).to(torch.int64).square().sum(dim=1).max())
    root = math.isqrt(square)
    return l1, root + (root * root < square)


def _full_scale(weight: torch.Tensor, bits: WeightBits, floor: torch.Tensor | None) -> torch.Tensor:
    largest = weight.abs().amax(dim=1)
    scale = largest / _TOP[bits]
    if floor is not None:
        scale = torch.maximum(scale, floor)
    return torch.where(largest > _ZERO_ROW, scale, torch.ones_like(largest))
