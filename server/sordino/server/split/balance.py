"""Shares the ring's 32 bits between 12-bit weights and activations.

A product must stay below p/2, so finer weights (larger integers) leave coarser activations: x_max = (p-1)/2 divided by
the largest row sum of |W|. At 8 bits the weights are the coarse side and nothing is to be gained. At 12 bits the
activations are: with every weight as large as it may be, a row of 1,536 leaves them about 2,300 steps.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from sordino.server.split.calibrate import Inputs
from sordino.shared.ring import P_HALF

# Squared crest factor of an input, n * max_j x_j^2 / |x|^2, where no calibration measured it: SmolLM2 shows 40 to 650.
_CREST: Final = 160.0


def scale_floor(weight: torch.Tensor, inputs: Inputs | None) -> torch.Tensor:
    """The smallest useful scale of each row, float32 ``[m]``.

    The error of an output has two parts, both uniform roundings: weights of step s_i add s_i^2/12 * E|x|^2, activations
    of step max|x|/x_max add E max|x|^2 / (12 x_max^2) * |W_i|^2. With s_i = |W_i|_1 * x_max / P_HALF, the step that
    makes row i reach exactly the bound, their sum over the rows is least at

        x_max^4 = P_HALF^2 * (E max|x|^2 / E|x|^2) * (sum_i |W_i|_2^2 / sum_i |W_i|_1^2).

    A row with a small sum is not made coarser than the 12 bits ask for: the floor only ever raises a scale.

    Args:
        weight: float32 ``[m, n]``.
        inputs: of the calibration text; None takes a usual ratio of peak to norm.
    """
    l1 = weight.abs().sum(dim=1)
    energy = float(inputs.hessian.diagonal().sum()) if inputs else 0.0
    ratio = inputs.peak / energy if inputs and energy > 0 else _CREST / weight.shape[1]
    sums = float(l1.to(torch.float64).square().sum())
    if sums == 0:
        return torch.zeros_like(l1)
    shape = float(weight.to(torch.float64).square().sum()) / sums
    x_max = math.sqrt(P_HALF * math.sqrt(ratio * shape))
    return l1 * (x_max / P_HALF)
