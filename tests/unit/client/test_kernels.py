"""The client's compiled arithmetic beside slow references: float64 numpy for scales, Python's integers for the ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sordino.client.kernels import all_in_ring, dequantise, dot_mod_p, from_ring, mask, quantise, to_ring, unmask
from sordino.client.model import RemoteGroup
from sordino.client.timings import Timings
from sordino.shared.errors import RangeError
from sordino.shared.manifest import GroupSpec, MemberSpec
from sordino.shared.ring import P

HALF = (P - 1) // 2
EDGES = (0, 1, 2, HALF - 1, HALF, HALF + 1, P - 2, P - 1)
X_MAX = (7, 2047, 37_000, 1 << 24)
FEW = settings(max_examples=60, deadline=None)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows_of_floats = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=finite)
elements = st.one_of(st.sampled_from(EDGES), st.integers(0, P - 1))


def quantised(x: np.ndarray, x_max: int) -> tuple[np.ndarray, np.ndarray]:
    out, scale = np.full(x.shape, -77, np.int32), np.full(x.shape[0], np.nan)
    assert quantise(x, x_max, out, scale)
    return out, scale


# -- scales ----------------------------------------------------------------------------------------------------------


@FEW
@given(rows_of_floats, st.sampled_from(X_MAX))
def test_a_value_is_off_by_half_a_step_of_its_row_at_most(x: np.ndarray, x_max: int) -> None:
    """Case 1.1: nothing overflows at any size of the values, and each row has its own step, peak / x_max."""
    out, scale = quantised(x, x_max)
    peak = np.abs(x.astype(np.float64)).max(axis=1)
    assert np.abs(out).max() <= x_max
    np.testing.assert_allclose(scale, peak / x_max, rtol=1e-15)
    error = np.abs(out * scale[:, None] - x.astype(np.float64))
    assert (error <= 0.5 * scale[:, None] * (1 + 1e-9)).all()
    # The largest value of a row is met exactly, so a channel of outliers is not clipped.
    assert (np.abs(out).max(axis=1)[peak > 0] == x_max).all()


@FEW
@given(rows_of_floats, st.sampled_from(X_MAX))
def test_quantised_rows_equal_the_reference(x: np.ndarray, x_max: int) -> None:
    out, _ = quantised(x, x_max)
    wide = x.astype(np.float64)
    peak = np.abs(wide).max(axis=1, keepdims=True)
    factor = np.divide(x_max, peak, out=np.zeros_like(peak), where=peak > 0)
    np.testing.assert_array_equal(out, np.clip(np.rint(wide * factor), -x_max, x_max))


def test_a_row_of_zeros_stays_zeros_beside_others() -> None:
    x = np.array([[0, 0, 0], [-0.0, 0, 0], [1e-45, 0, 0], [0, -3e38, 3e38]], np.float32)
    out, scale = quantised(x, 37_000)
    assert out.tolist() == [[0, 0, 0], [0, 0, 0], [37_000, 0, 0], [0, -37_000, 37_000]]
    assert (scale[:2] == 0).all()
    assert (scale[2:] > 0).all()
    back = np.full(x.shape, np.nan, np.float32)
    dequantise(out, scale, np.ones(3, np.float32), np.empty(0, np.float32), back)
    assert (back[:2] == 0).all()


@FEW
@given(rows_of_floats, st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_nan_and_infinity_are_reported_wherever_they_are(x: np.ndarray, bad: float, data: st.DataObject) -> None:
    x = x.copy()
    x[data.draw(st.integers(0, x.shape[0] - 1)), data.draw(st.integers(0, x.shape[1] - 1))] = bad
    assert not quantise(x, 37_000, np.empty(x.shape, np.int32), np.empty(x.shape[0]))


@FEW
@given(hnp.arrays(np.int32, (3, 5), elements=st.integers(-HALF, HALF)), st.booleans(), st.integers(0, 1 << 30))
def test_dequantised_equals_the_reference(y: np.ndarray, with_bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale, out_scale = rng.random(3), rng.random(5, np.float32)
    bias = rng.standard_normal(5, np.float32) if with_bias else np.empty(0, np.float32)
    out = np.empty(y.shape, np.float32)
    dequantise(y, scale, out_scale, bias, out)
    exact = y * scale[:, None] * out_scale.astype(np.float64) + (bias.astype(np.float64) if with_bias else 0.0)
    np.testing.assert_array_equal(out, exact.astype(np.float32))


# -- a whole remote group, with the product done here ------------------------------------------------------------------


class Local:
    """A linear protocol that holds the matrix itself, and notes what it was asked."""

    name = "local"

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights.astype(np.int64)
        self.asked = 0

    def apply(self, group: GroupSpec, rows: np.ndarray) -> np.ndarray:
        self.asked += 1
        assert np.abs(rows).max() <= group.x_max
        exact = rows.astype(np.int64) @ self._weights.T
        assert np.abs(exact).max() <= HALF, "the product wraps"
        return exact.astype(np.int32)


def remote_group(n: int = 48, outs: tuple[int, ...] = (8, 24), bits: int = 8, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    top = 127 if bits == 8 else 2047
    weights = rng.integers(-top, top + 1, (sum(outs), n))
    weights[0] = top  # the row with the largest L1 norm there can be
    l1 = int(np.abs(weights).sum(axis=1).max())
    members = tuple(MemberSpec(name=f"layers.3.part{i}", out_features=m) for i, m in enumerate(outs))
    spec = GroupSpec(name="layers.3.group", layer=3, in_features=n, members=members, weight_bits=bits,
                     l1_max=l1, l2_max=int(np.sqrt((weights.astype(float) ** 2).sum(1)).max()) + 1)  # fmt: skip
    scales = [torch.rand(m) + 0.01 for m in outs]
    local = Local(weights)
    return RemoteGroup(spec, local, Timings(), scales, [None] * len(outs)), spec, local, weights, torch.cat(scales)


def parts_of(group: Any, spec: GroupSpec, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([group.part(i, x) for i in range(len(spec.members))], dim=-1)


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("base", [1e-7, 1.0, 1e6])
@pytest.mark.parametrize("outlier", [1.0, 1e2, 1e4, 1e6])
def test_outlier_channels_stay_within_the_bound_of_x_max(bits: int, base: float, outlier: float) -> None:
    """Case 1.1: |error of W x| <= |W_i|_1 * step / 2, step = peak / x_max of the row, relative to nothing else."""
    group, spec, _, weights, scales = remote_group(bits=bits)
    x = torch.randn(5, spec.in_features, generator=torch.Generator().manual_seed(1)) * base
    x[1:4, 7] *= outlier
    x[4] = 0
    got = parts_of(group, spec, x).double().numpy()
    exact = x.double().numpy() @ weights.T * scales.double().numpy()
    step = np.abs(x.double().numpy()).max(axis=1, keepdims=True) / spec.x_max
    bound = np.abs(weights).sum(axis=1) * step / 2 * scales.double().numpy()
    assert (np.abs(got - exact) <= bound * (1 + 1e-9) + np.abs(exact) * 2**-23).all()
    assert (got[4] == 0).all()
    # And the bound means something: at eight bits the largest part of an answer keeps three digits and more.
    if bits == 8:
        assert (bound / (np.abs(weights).max() * np.abs(x.double().numpy()).max(1, keepdims=True).clip(1e-30)))[
            :4
        ].max() < 1e-2


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_that_was_written_to_is_another(inference: bool) -> None:
    """Between two members of a group: torch counts no versions in inference mode."""
    group, spec, local, _, _ = remote_group()
    with torch.inference_mode(inference):
        x = torch.ones(1, spec.in_features)
        first = group.part(0, x)
        x.mul_(2)
        second = group.part(1, x)
        fresh = x.clone()
        assert torch.equal(second, group.part(1, fresh))
        assert torch.equal(2 * first, group.part(0, fresh))
        assert local.asked == 3
        assert torch.equal(parts_of(group, spec, x), parts_of(group, spec, fresh))


@FEW
@given(st.integers(1, 64), st.sampled_from([8, 12]), st.integers(0, 1 << 30))
def test_the_largest_activations_never_wrap(n: int, bits: int, seed: int) -> None:
    """All of the peak's size with the signs of the heaviest row: ``Local`` asserts that nothing leaves the ring."""
    group, spec, _, weights, _ = remote_group(n=n, bits=bits, seed=seed)
    x = torch.from_numpy(np.sign(weights[0]).astype(np.float32))[None]
    assume(bool(x.any()))
    parts_of(group, spec, torch.cat([x, -x]) * 3e30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_range_error_names_the_group_and_no_value(bad: float) -> None:
    """Case 1.1: nothing is asked of the server, and the next input works."""
    group, spec, local, _, _ = remote_group()
    x = torch.full((2, spec.in_features), 1234.5)
    x[1, 3] = bad
    with pytest.raises(RangeError, match=r"layers\.3\.group") as caught:
        group.part(0, x)
    assert "1234" not in str(caught.value)
    assert local.asked == 0
    assert parts_of(group, spec, torch.ones(1, spec.in_features)).isfinite().all()
    assert local.asked == 1, "the members of a group share one product"


def test_no_rows_are_an_error_and_ask_nothing() -> None:
    group, spec, local, _, _ = remote_group()
    with pytest.raises(RangeError, match="prompt is empty"):
        group.part(0, torch.empty(2, 0, spec.in_features))
    assert local.asked == 0


# -- the ring --------------------------------------------------------------------------------------------------------


def centred(value: int) -> int:
    value %= P
    return value - P if value > HALF else value


def grid(left: list[int], right: list[int]) -> tuple[list[int], list[int]]:
    return [a for a in left for _ in right], [b for _ in left for b in right]


def test_edges_of_mask_and_unmask_equal_pythons_integers() -> None:
    xs, rs = grid([centred(e) for e in EDGES], list(EDGES))
    u = np.empty((1, len(xs)), np.uint32)
    mask(np.array([xs], np.int32), np.array([rs], np.uint32), u)
    assert u[0].tolist() == [(x - r) % P for x, r in zip(xs, rs, strict=True)]
    ys, wrs = grid(list(EDGES), list(EDGES))
    out = np.empty((1, len(ys)), np.int32)
    unmask(np.array([ys], np.uint32), np.array([wrs], np.uint32), out)
    assert out[0].tolist() == [centred(y + wr) for y, wr in zip(ys, wrs, strict=True)]


def test_edges_of_the_ring_equal_pythons_integers() -> None:
    values = [centred(e) for e in EDGES]
    ring = np.empty((1, len(values)), np.uint32)
    to_ring(np.array([values], np.int32), ring)
    assert ring[0].tolist() == [v % P for v in values]
    back = np.empty(ring.shape, np.int32)
    from_ring(ring, back)
    assert back[0].tolist() == values


@FEW
@given(
    hnp.arrays(np.int32, (2, 9), elements=st.integers(-HALF, HALF)), hnp.arrays(np.uint32, (2, 9), elements=elements)
)
def test_masked_and_back_is_the_same(x: np.ndarray, r: np.ndarray) -> None:
    """With W the identity: y = u and W r = r."""
    u, out = np.empty(x.shape, np.uint32), np.empty(x.shape, np.int32)
    mask(x, r, u)
    unmask(u, r, out)
    assert (out == x).all()
    assert all_in_ring(u)


@FEW
@given(
    hnp.arrays(np.uint32, (2, 17), elements=elements),
    hnp.arrays(np.uint32, (3, 17), elements=elements),
)
def test_dot_products_equal_pythons_integers(vectors: np.ndarray, rows: np.ndarray) -> None:
    out = np.empty((3, 2), np.uint32)
    dot_mod_p(vectors, rows, out)
    assert out.tolist() == [
        [sum(int(a) * int(b) for a, b in zip(v, row, strict=True)) % P for v in vectors] for row in rows
    ]


def test_the_longest_dot_product_of_the_largest_elements() -> None:
    n = 1 << 20  # MAX_FEATURES of the manifest; (p-1)^2 = 1 mod p
    full = np.full((1, n), P - 1, np.uint32)
    out = np.empty((1, 1), np.uint32)
    dot_mod_p(full, full, out)
    assert out[0, 0] == n


@pytest.mark.parametrize("outside", [P, P + 1, 2**32 - 1])
def test_an_element_outside_the_ring_is_seen(outside: int) -> None:
    y = np.full((3, 40), P - 1, np.uint32)
    assert all_in_ring(y)
    y[2, 39] = outside
    assert not all_in_ring(y)
