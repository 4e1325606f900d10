"""Material for each step of a pass: the dealer's side of :mod:`sordino.shared.twoparty.steps`."""

from __future__ import annotations

import os
from functools import singledispatch
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sordino.dealer import points
from sordino.dealer.press import Press
from sordino.shared.twoparty.numbers import GRAIN, NOISE
from sordino.shared.twoparty.steps import Trunc, TruncMul, TruncSquare, WithCache
from sordino.shared.twoparty.tables import (
    EXP_SHARE,
    GATE_COARSE,
    GATE_FINE,
    Curve,
    Exp,
    Gated,
    Highest,
    index,
    low,
    ring,
)
from sordino.shared.twoparty.tokens import Larger, Noise

U64 = NDArray[np.uint64]

_TOP: Final = np.uint64(63)


@singledispatch
def deal(step: Any, press: Press) -> None:
    """Writes the material of one step, in the order in which its ``run`` reads it."""
    raise TypeError(f"{type(press).__name__} has nothing for {type(step).__name__}: no dealer knows this step")


def _halves(r: U64, k: int) -> tuple[U64, U64]:
    """A and B of a wire that is truncated by k (docs/two-party.md, §4)."""
    return r >> np.uint64(k), (r >> _TOP) << np.uint64(64 - k)


@deal.register
def _(step: Trunc, press: Press) -> None:
    press.give(*_halves(press.words(step.n), step.k))


@deal.register
def _(step: TruncSquare, press: Press) -> None:
    a, b = _halves(press.words(step.rows, step.d), step.k)
    press.give(a, b, a * a, a * b)


@deal.register
def _(step: TruncMul, press: Press) -> None:
    ya, yb = _halves(press.words(step.n, step.m), step.ky)
    ta, tb = _halves(press.words(step.n), step.kt)
    press.give(ya, yb, ta, tb, ya * ta[:, None], ya * tb[:, None], yb * ta[:, None], yb * tb[:, None])


@deal.register
def _(step: Curve, press: Press) -> None:
    r, domain = press.words(step.n), step.domain
    press.points(points.prefix_points(r, domain.first_level, domain.last_level, *press.roots(step.n)))


@deal.register
def _(step: Highest, press: Press) -> None:
    r, kind = press.words(step.lines, step.length).reshape(-1), ring(step.length)
    press.points(points.unit_points(index(r, step.k, step.bits), step.bits, *press.roots(r.size), kind))
    mu = press.small(kind, step.lines, step.cells + 1).reshape(-1).astype(np.uint64)
    bits = 8 * np.dtype(kind).itemsize
    press.points(points.word_points(mu, bits, *press.roots(mu.size), np.ones_like(mu)))


@deal.register
def _(step: Exp, press: Press) -> None:
    r = press.words(step.n)
    payload = np.rint(np.exp(low(r, step.k, step.k) * -(2.0**-step.k)) * 2.0**EXP_SHARE).astype(np.uint64)
    press.points(points.word_points(index(r, step.k, step.bits), step.bits, *press.roots(step.n), payload))


@deal.register
def _(step: Gated, press: Press) -> None:
    n = step.n
    r = press.words(n)
    corrections, sign = points.bit_points(index(r, step.k, step.bits), step.bits, *press.roots(n))
    press.points(corrections)
    nu, ru = press.words(3, n), press.words(n)
    a, b = _halves(ru, step.cut)
    press.give(a, b)
    sigma = sign.view(np.uint64)
    fine, coarse = low(r, step.k, GATE_FINE), low(r, step.k, GATE_COARSE)
    square = coarse * coarse
    base = sigma * (nu[0] - nu[1] * fine + nu[2] * square)
    times = np.stack([np.ones_like(a), a, b])
    for value in (sigma, sigma * fine, sigma * coarse, sigma * square):
        press.give(value * times)
    for value in (base, sigma * nu[1], sigma * nu[2], sigma * nu[2] * coarse):
        press.give(value * times)


@deal.register
def _(step: Noise, press: Press) -> None:
    """-log(-log u) has Gumbel's distribution (Gumbel, Statistical Theory of Extreme Values, 1954). Of 1 - u, whose
    numbers are finest where noise is large; it is neither 0 nor 1, and exact."""
    places = np.frombuffer(os.urandom(8 * step.n), np.uint64) >> np.uint64(64 - GRAIN)
    u = (2.0 * places.astype(np.float64) + 1) * 2.0 ** -(GRAIN + 1)
    press.give(np.rint(-np.log(-np.log1p(-u)) * 2.0**NOISE).astype(np.int64).view(np.uint64))


@deal.register
def _(step: Larger, press: Press) -> None:
    r, below = press.words(step.n), step.bits - 1
    alpha = index(r, step.k, step.bits)
    rest = alpha & np.uint64((1 << below) - 1)
    press.points(points.bit_points(rest, below, *press.roots(step.n))[0])
    flip = press.small(np.uint8, step.n) & np.uint8(1)
    s = flip ^ (alpha >> np.uint64(below))
    press.give(s, s * r)


def deal_with_cache(step: WithCache, press: Press, b: U64) -> None:
    """``b [kept, groups, k]``: the masks of the rows of the cache that are alive, of its keys or of its values."""
    press.give(step.product(press.words(*step.inputs), b))
