"""Error-compensated rounding.

GPTQ (Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022, https://arxiv.org/abs/2210.17323): columns are rounded one after the other, and the error of each
is pushed into the columns still to come, so as to keep the outputs X W^T of calibration inputs X. H = X^T X.
"""

from __future__ import annotations

from typing import Final

import torch

from sordino.server.split.quantise import DAMPING, Quantised, quantise_nearest, quantise_search, top
from sordino.shared.manifest import WeightBits

_BLOCK: Final = 128


def quantise_gptq(
    weight: torch.Tensor,
    bits: WeightBits,
    hessian: torch.Tensor,
    floor: torch.Tensor | None = None,
    *,
    act_order: bool = True,
) -> Quantised:
    """Quantises so that the outputs on calibration inputs change little.

    Each row ends with the best of nearest rounding, scale search and GPTQ, judged by its error under ``hessian``; so
    the error is never larger than with nearest rounding.

    Args:
        weight: float32 ``[m, n]``, finite.
        hessian: float32 ``[n, n]``, X^T X over calibration inputs; it may be singular.
        floor: smallest scale of each row, float32 ``[m]``; the last least-squares step may still lower it a little.
        act_order: round the columns of large inputs first.
    """
    damped = _damp(hessian)
    searched = quantise_search(weight, bits, hessian.diagonal(), floor)
    compensated = _compensate(weight, searched.scale, bits, damped, act_order)
    candidates = [
        rescale(weight, compensated, damped),
        rescale(weight, searched, damped),
        quantise_nearest(weight, bits, floor),
    ]
    errors = torch.stack([row_errors(weight, candidate, hessian) for candidate in candidates])
    choice = errors.argmin(dim=0)
    values, scale = candidates[0].values.clone(), candidates[0].scale.clone()
    for index, candidate in enumerate(candidates[1:], start=1):
        rows = choice == index
        values[rows], scale[rows] = candidate.values[rows], candidate.scale[rows]
    return Quantised(values, scale)


def row_errors(weight: torch.Tensor, quantised: Quantised, hessian: torch.Tensor) -> torch.Tensor:
    """Squared error of each output over the calibration inputs: float32 ``[m]``."""
    error = quantised.dequantise() - weight
    return ((error @ hessian) * error).sum(dim=1)


def rescale(weight: torch.Tensor, quantised: Quantised, hessian: torch.Tensor) -> Quantised:
    """The scales of least error for integers already chosen: s = (q H w) / (q H q), a line's least squares."""
    values = quantised.values.to(torch.float32)
    projected = values @ hessian
    length = (projected * values).sum(dim=1)
    best = (projected * weight).sum(dim=1) / length
    usable = (length > 0) & torch.isfinite(best) & (best > 0)
    return Quantised(quantised.values, torch.where(usable, best, quantised.scale))


def _compensate(
    weight: torch.Tensor, scale: torch.Tensor, bits: WeightBits, hessian: torch.Tensor, act_order: bool
) -> Quantised:
    n = weight.shape[1]
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True) if act_order else torch.arange(n)
    factor = _inverse_factor(hessian[order][:, order])
    # Transposed, so that a column is contiguous.
    rest = weight.T[order].contiguous()
    rounded = torch.empty(rest.shape, dtype=torch.int16)
    limit = top(bits)
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        errors = torch.empty(end - start, rest.shape[1])
        for column in range(start, end):
            value = (rest[column] / scale).round_().clamp_(-limit, limit)
            rounded[column] = value.to(torch.int16)
            error = (rest[column] - value * scale) / factor[column, column]
            rest[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
            errors[column - start] = error
        rest[end:] -= factor[start:end, end:].T @ errors
    values = torch.empty_like(rounded)
    values[order] = rounded
    return Quantised(values.T.contiguous(), scale)


def _damp(hessian: torch.Tensor) -> torch.Tensor:
    """Adds a share of the mean diagonal to the diagonal: positive definite even where the text left H singular."""
    damped = hessian.clone()
    mean = float(damped.diagonal().mean())
    damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    return damped


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of H, float32 ``[n, n]``. H is positive definite."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.to(torch.float64)))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.to(torch.float32)
