"""How much the dealer sends for a pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sordino.shared.twoparty.forward import LastSteps, LayerSteps
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.points import BIT_LEAVES, BYTE_LEAVES, PAIR_LEAVES, WORD_LEAVES, width
from sordino.shared.twoparty.steps import Trunc, TruncMul, TruncSquare, WithCache
from sordino.shared.twoparty.tables import Curve, Exp, Gated, Highest, ring
from sordino.shared.twoparty.tokens import Larger, Noise, steps_of_choice


def steps_of(plan: Plan, layer: int, rows: int, kept: int, tokens: int = 0) -> Iterable[Any]:
    """Of a layer, in order; those after the last one have the next number, and those that choose tokens the numbers
    after that. kept: with the rows of this pass. tokens: that are chosen, of as many rows."""
    if layer > plan.shape.layers and plan.choice is not None:
        return steps_of_choice(plan.choice, tokens, plan.shape.d, layer - plan.shape.layers - 1)
    if layer == plan.shape.layers:
        return LastSteps.of(plan.shape, rows)
    return LayerSteps.of(plan.shape, plan.sizes[layer], rows, kept)


def size(step: Any) -> tuple[int, int]:
    """Bytes of corrections of point functions, and of the server's corrections, that a step takes."""
    match step:
        case Trunc(n=n):
            return 0, 16 * n
        case TruncSquare(rows=rows, d=d):
            return 0, 32 * rows * d
        case TruncMul(n=n, m=m):
            return 0, 48 * n * m + 16 * n
        case WithCache(outputs=outputs):
            return 0, 8 * math.prod(outputs)
        case Curve(n=n, domain=domain):
            return n * domain.width, 0
        case Highest(lines=lines, length=length, bits=bits, thresholds=thresholds):
            ring_bits = 8 * np.dtype(ring(length)).itemsize
            lanes = BYTE_LEAVES if ring_bits == 8 else PAIR_LEAVES
            return lines * length * width(bits - lanes) + thresholds * width(ring_bits - WORD_LEAVES), 0
        case Exp(n=n, bits=bits):
            return n * width(bits - WORD_LEAVES), 0
        case Gated(n=n, bits=bits):
            return n * width(bits - BIT_LEAVES), 8 * 26 * n
        case Noise(n=n):
            return 0, 8 * n
        case Larger(n=n, bits=bits):
            return n * width(bits - 1 - BIT_LEAVES), 16 * n
    raise TypeError(f"nobody knows how much {type(step).__name__} takes")


def layer_bytes(plan: Plan, layer: int, rows: int, kept: int, tokens: int = 0) -> int:
    """Of both kinds together."""
    return sum(sum(size(step)) for step in steps_of(plan, layer, rows, kept, tokens))


def pass_bytes(plan: Plan, rows: int, kept: int, tokens: int = 0) -> int:
    """What both parties read of it, what both read counted once."""
    return sum(layer_bytes(plan, layer, rows, kept, tokens) for layer in range(plan.parts(tokens)))
