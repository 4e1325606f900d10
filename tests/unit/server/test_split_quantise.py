"""Rounding, planes and bounds of quantised matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sordino.server.split import quantise
from sordino.server.split.gptq import quantise_gptq, rescale, row_errors
from sordino.server.split.quality import quantise_activations
from sordino.shared.errors import RangeError
from sordino.shared.ring import P_HALF, activation_bound

BITS = (8, 12)
finite = st.floats(min_value=-1e4, max_value=1e4, width=32)
matrices = hnp.arrays("float32", st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=finite).map(torch.from_numpy)


def spread(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A random matrix and the H of correlated inputs with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(400, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    inputs[:, ::7] *= 8
    return weight, inputs.T @ inputs / 400


@pytest.mark.parametrize("bits", BITS)
@given(weight=matrices)
@settings(max_examples=60, deadline=None)
def test_nearest_is_within_half_a_scale(bits, weight):
    result = quantise.quantise_nearest(weight, bits)
    error = (weight.double() - result.values.double() * result.scale.double()[:, None]).abs()
    # A float32 quotient may land on the other side of a half.
    assert bool((error <= result.scale.double()[:, None] * (0.5 + 1e-3)).all())
    assert int(result.values.abs().max()) <= quantise.top(bits)
    assert bool((result.scale > 0).all())


@pytest.mark.parametrize("bits", BITS)
@given(weight=matrices, data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_product_can_wrap(bits, weight, data):
    values = quantise.quantise_nearest(weight, bits).values.to(torch.int64)
    l1_max, _ = quantise.norms(values.to(torch.int16), bits)
    bound = activation_bound(weight.shape[1], bits, l1_max)
    corner = [bound, -bound, 0]
    row = data.draw(
        st.lists(
            st.integers(-bound, bound) | st.sampled_from(corner), min_size=weight.shape[1], max_size=weight.shape[1]
        )
    )
    worst = values.sign() * bound
    products = torch.cat([(values @ torch.tensor(row)).flatten(), (values * worst).sum(dim=1)])
    assert int(products.abs().max()) <= P_HALF


@given(values=hnp.arrays("int16", (3, 5), elements=st.integers(-2047, 2047)).map(torch.from_numpy))
def test_planes_of_12_bits_reassemble(values):
    planes = quantise.to_planes(values, 12)
    assert planes.dtype == torch.int8
    assert planes.shape == (6, 5)
    assert torch.equal(quantise.from_planes(planes, 12), values)
    assert torch.equal(planes[:3].int() + 256 * planes[3:].int(), values.int())
    assert int(planes[3:].abs().max()) <= 8


def test_every_12_bit_value_reassembles():
    values = torch.arange(-2047, 2048, dtype=torch.int16)[None]
    assert torch.equal(quantise.from_planes(quantise.to_planes(values, 12), 12), values)


def test_planes_of_8_bits_are_the_values():
    values = torch.tensor([[-127, 0, 127]], dtype=torch.int16)
    assert torch.equal(quantise.from_planes(quantise.to_planes(values, 8), 8), values)


@pytest.mark.parametrize("bits", BITS)
def test_norms(bits):
    values = torch.tensor([[3, -4, 0], [1, 1, 1]], dtype=torch.int16)
    assert quantise.norms(values, bits) == (7, 5)
    assert quantise.norms(values[1:], bits) == (3, 2)  # sqrt(3), rounded up


@pytest.mark.parametrize("bits", BITS)
def test_zero_rows_get_scale_one(bits):
    weight, hessian = spread(4, 16)
    weight[1] = 0
    weight[2] = 1e-38
    for result in (
        quantise.quantise_nearest(weight, bits),
        quantise.quantise_search(weight, bits, hessian.diagonal()),
        quantise_gptq(weight, bits, hessian),
    ):
        assert result.scale[1] == result.scale[2] == 1
        assert not result.values[1:3].any()
        assert bool(torch.isfinite(result.scale).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused_by_name(bad):
    weight = torch.ones(2, 2)
    weight[0, 1] = bad
    with pytest.raises(RangeError, match=r"'a\.b\.weight' has 1 "):
        quantise.check_finite("a.b.weight", weight)


@pytest.mark.parametrize("seed", range(4))
def test_search_is_no_worse_than_nearest(seed):
    weight, hessian = spread(24, 48, seed)
    diagonal = torch.diag(hessian.diagonal())
    nearest = row_errors(weight, quantise.quantise_nearest(weight, 8), diagonal)
    searched = row_errors(weight, quantise.quantise_search(weight, 8, hessian.diagonal()), diagonal)
    assert bool((searched <= nearest * 1.0001).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("columns", [40, 200])
def test_gptq_is_no_worse_than_nearest_and_better_in_sum(bits, act_order, columns):
    weight, hessian = spread(32, columns)
    nearest = row_errors(weight, quantise.quantise_nearest(weight, bits), hessian)
    result = quantise_gptq(weight, bits, hessian, act_order=act_order)
    assert bool((row_errors(weight, result, hessian) <= nearest * 1.0001).all())
    assert float(row_errors(weight, result, hessian).sum()) < 0.6 * float(nearest.sum())
    assert int(result.values.abs().max()) <= quantise.top(bits)


def test_gptq_survives_a_singular_and_an_empty_hessian():
    weight, hessian = spread(8, 40)
    hessian[5:] = 0
    hessian[:, 5:] = 0
    for degenerate in (hessian, torch.zeros_like(hessian)):
        result = quantise_gptq(weight, 8, degenerate)
        assert bool(torch.isfinite(result.scale).all())
        # Where the calibration says nothing the weights must still be there.
        assert float((result.dequantise() - weight).abs().max()) < 0.2


def test_rescale_never_makes_it_worse():
    weight, hessian = spread(16, 32)
    rough = quantise.round_to(weight, weight.abs().amax(dim=1) / 100, 8)
    better = rescale(weight, rough, hessian)
    assert bool((row_errors(weight, better, hessian) <= row_errors(weight, rough, hessian) * 1.0001).all())


@given(rows=matrices, x_max=st.integers(1, 2**24))
@settings(max_examples=60, deadline=None)
def test_activations_stay_in_their_bound(rows, x_max):
    integers, scale = quantise_activations(rows, x_max)
    assert int(integers.abs().max()) <= x_max
    assert torch.equal(integers, integers.round())
    assert bool((scale > 0).all())
