"""Look-ups against float64, over their whole domains and at the ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parties import Run, signed, uniform

from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.cells import Domain
from sordino.shared.twoparty.tables import EXP_PUBLIC, EXP_SHARE, GATED, Activation, Curve, Exp, Gated, Highest

RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("length", [7, 300])
def test_the_highest_is_a_bound_and_near(length: int) -> None:
    """Lemma 4, with counts of 8 and of 16 bits; places that do not count hold anything."""
    k, lines = 20, 6
    step = Highest(lines, length, 9, k, -48, 96)
    scores = uniform(lines * length, k + 6).reshape(lines, length) // 2
    seen = np.arange(length)[None] <= np.arange(lines)[:, None] + 1
    scores[~seen] = uniform(int((~seen).sum()), k + 8) // 2
    run = Run([step], lambda party, x: step.run(party, x, seen), scores)
    top, above = (signed(values) for values in run.result)
    largest = np.where(seen, scores, -(1 << 62)).max(axis=1)
    assert (top >= largest).all()
    assert (top - largest <= 2 << k).all()
    assert (above == 0).all()
    assert run.parties[0].count.rounds == 2


def test_a_score_above_the_window_is_told() -> None:
    step = Highest(2, 4, 9, 20, -16, 32)
    scores = np.zeros((2, 4), np.int64)
    scores[1, 2] = 17 << 20
    everything = np.ones((2, 4), bool)
    _, above = Run([step], lambda party, x: step.run(party, x, everything), scores).result
    assert list(signed(above)) == [0, 1]


def test_exp_over_its_domain() -> None:
    k, n = 24, 20_000
    x = -np.abs(uniform(n, k + 5))
    x[:6] = [0, -1, -(1 << k), -(1 << k) + 1, -15 << k, -500 << k]
    step = Exp(n, 11, k)
    found = signed(Run([step], step.run, x).result) / 2.0 ** (EXP_SHARE + EXP_PUBLIC)
    right = np.exp(x / 2.0**k)
    # Half a unit of the dealer's e^-rho, which is over 1/e, and half a unit of the public factor.
    relative, absolute = 1.01 * np.e * 2.0 ** (-1 - EXP_SHARE), 1.01 * 2.0 ** (-1 - EXP_PUBLIC)
    print(f"e^x: largest error {np.abs(found - right).max():.1e}")
    assert (np.abs(found - right) <= relative * right + absolute + np.exp(-15.9) * (x < -15 << k)).all()
    assert found[5] == 0


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("cell", [0.05, 0.15, 0.37])
def test_gated_over_its_domain(cell: float, activation: Activation) -> None:
    """Of the activation: the cubic term of a cell, 7 bits of the place for the curvature, rounding; times up, whose
    rounding counts for large gates."""
    bits, k, cut, n = 10, 48, 20, 20_000
    span = 0.99 * cell * 2 ** (bits - 1)
    gate = np.linspace(-span, span, n)
    up = uniform(n, 22 + cut).astype(np.int64)
    step = Gated(n, bits, k, cell, cut, activation)
    run = Run([step], step.run, np.rint(gate / cell * 2.0**k).astype(np.int64), up)
    found = signed(run.result) / 2.0 ** (GATED + nb.UP)
    real = up / 2.0 ** (cut + nb.UP)
    right = RIGHT[activation](torch.from_numpy(gate)).numpy()
    error = np.abs(found - right * real)
    third, second = (0.3, 0.5) if activation == "silu" else (0.9, 0.8)  # largest derivatives
    own = 2e-5 + third / 24 * cell**3 + second / 2 * cell**2 * 2.0**-6
    allowed = own * (np.abs(real) + 2.0**-nb.UP) + np.abs(right) * 2.0**-nb.UP
    large = np.abs(real) > 2
    print(f"{activation}, cell {cell}: largest error {(error[large] / np.abs(real[large])).max():.1e}")
    assert (error <= allowed).all()
    assert run.parties[0].count.rounds == 2


def test_curves_say_what_left_their_domain() -> None:
    step = Curve(4, Domain("rsqrt", 20, 61, 28, 48))
    x = np.array([1 << 20, (1 << 61) - 1, 1 << 10, -(1 << 40)], np.int64)
    values, inside = Run([step], step.run, x).result
    assert list(inside) == [1, 1, 0, 0]
    right = 2.0 ** (48 + 14) / np.sqrt(x[:2])
    assert np.abs(signed(values)[:2] / right - 1).max() < 3e-5
