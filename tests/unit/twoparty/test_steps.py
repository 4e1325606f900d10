"""Steps of a pass against integers: Lemma 2 and what is built on it, at the ends of what they allow."""

from __future__ import annotations

import numpy as np
import pytest
from parties import Run, signed, uniform

from sordino.dealer.deal import deal_with_cache
from sordino.shared.twoparty.steps import Trunc, TruncMul, TruncSquare, WithCache

EDGE = (1 << 62) - 1


def floors(x: np.ndarray, k: int) -> np.ndarray:
    return x >> np.int64(k)


@pytest.mark.parametrize("k", [1, 14, 28, 40, 61])
def test_truncation_is_the_floor_or_one_more(k: int) -> None:
    x = np.concatenate([uniform(20_000, 62), [0, 1, -1, EDGE, -EDGE, -(1 << 62)]])
    step = Trunc(len(x), k)
    run = Run([step], step.run, x)
    over = signed(run.result) - floors(x, k)
    assert set(np.unique(over)) <= {0, 1}
    assert run.parties[0].count.rounds == 1


def test_truncation_has_no_gross_error_in_ten_million() -> None:
    """Case 5.2. Local truncation would have about 2^62 / 2^64 = a quarter of these wrong."""
    wrong = 0
    for _ in range(10):
        x = uniform(1_000_000, 62)
        x[:1000] = EDGE - np.arange(1000)
        step = Trunc(len(x), 30)
        wrong += int((np.abs(signed(Run([step], step.run, x).result) - floors(x, 30)) > 1).sum())
    print(f"gross errors in 10,000,000 truncations: {wrong}")
    assert wrong == 0


def test_truncation_rounds_without_bias() -> None:
    """One more as often as the rest of x is of 2^k."""
    x = np.full(200_000, (5 << 20) + (1 << 18), np.int64)
    step = Trunc(len(x), 20)
    share = (signed(Run([step], step.run, x).result) - 5).mean()
    assert abs(share - 0.25) < 0.01


def test_beyond_the_bound_truncation_is_wrong() -> None:
    """So the bound is one: 2^62 and more is what scale budgets must keep out."""
    x = np.full(1000, 3 << 61, np.int64)
    step = Trunc(len(x), 20)
    assert (np.abs(signed(Run([step], step.run, x).result) - floors(x, 20)) > 1).any()


@pytest.mark.parametrize("k", [30, 38])
def test_square_sums_are_those_of_the_truncated_wire(k: int) -> None:
    x = uniform(8 * 64, 57).reshape(8, 64)
    step = TruncSquare(8, 64, k)
    values, squares = Run([step], step.run, x).result
    assert np.isin(signed(values) - floors(x, k), (0, 1)).all()
    assert (squares == (values * values).sum(axis=1, dtype=np.uint64)).all()


def test_product_of_two_truncated_wires() -> None:
    y, t = uniform(16 * 100, 62).reshape(16, 100), uniform(16, 62)
    step = TruncMul(16, 100, 40, 35)
    product = signed(Run([step], step.run, y, t).result)
    low_y, low_t = floors(y, 40), floors(t, 35)
    possible = [(low_y + i) * (low_t + j)[:, None] for i in (0, 1) for j in (0, 1)]
    assert np.logical_or.reduce([product == one for one in possible]).all()


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (9, 3), (4, 1)])
def test_products_with_the_cache(heads: int, groups: int) -> None:
    rows, k, kept = 3, 16, 11
    left = uniform(rows * heads * k, 20).reshape(rows, heads, k)
    right = uniform(kept * groups * k, 20).reshape(kept, groups, k)
    of = np.repeat(right, heads // groups, axis=1)
    b = uniform(right.size, 64).reshape(right.shape)
    opened = (right - b).view(np.uint64)
    step = WithCache(rows, heads, groups, k, kept, values=False)

    def program(party, left, b_share):  # type: ignore[no-untyped-def]
        masked, material = step.begin(party, left)
        (shown,) = party.open(masked)
        return step.end(party, shown, material, opened, b_share)

    run = Run([], program, left, b, dealt=lambda press: deal_with_cache(step, press, b.view(np.uint64)))
    assert (signed(run.result) == np.einsum("rhk,thk->rht", left, of)).all()

    e = uniform(rows * heads * kept, 20).reshape(rows, heads, kept)
    other = WithCache(rows, heads, groups, k, kept, values=True)

    def mixing(party, e, b_share):  # type: ignore[no-untyped-def]
        masked, material = other.begin(party, e)
        (shown,) = party.open(masked)
        return other.end(party, shown, material, opened, b_share)

    run = Run([], mixing, e, b, dealt=lambda press: deal_with_cache(other, press, b.view(np.uint64)))
    assert (signed(run.result) == np.einsum("rht,thk->rhk", e, of)).all()
