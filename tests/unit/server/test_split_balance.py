"""12-bit weights share the ring with the activations."""

import pytest
import torch
from models import make_tiny

from sordino.server.split import pipeline, split_model
from sordino.server.split.balance import scale_floor
from sordino.server.split.calibrate import Inputs, gather
from sordino.server.split.discovery import find_groups
from sordino.server.split.load import load, locate
from sordino.server.split.quantise import norms, quantise_nearest, quantise_search
from sordino.shared.ring import P_HALF, activation_bound


def inputs_of(rows):
    return Inputs(rows.T @ rows / len(rows), float(rows.abs().amax(dim=1).square().mean()))


def error(weight, rows, floor):
    """Squared error of all outputs with both roundings, and the bound that came out."""
    quantised = quantise_nearest(weight, 12, floor)
    x_max = activation_bound(weight.shape[1], 12, norms(quantised.values, 12)[0])
    step = rows.abs().amax(dim=1, keepdim=True) / x_max
    integers = (rows / step).round()
    exact = (integers.double() @ quantised.values.double().T) * step * quantised.scale
    return float((exact - rows.double() @ weight.double().T).square().sum()), x_max


@pytest.mark.parametrize("columns", [512, 4096])
def test_floor_is_near_the_best_split(columns):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, columns, generator=generator)
    rows = torch.randn(64, columns, generator=generator)
    floor = scale_floor(weight, inputs_of(rows))
    chosen, _ = error(weight, rows, floor)
    others = [error(weight, rows, floor * factor)[0] for factor in (0.25, 0.5, 2, 4)]
    assert chosen < 1.05 * min(others)


def test_wide_rows_get_finer_activations():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(16, 4096, generator=generator)
    rows = torch.randn(32, 4096, generator=generator)
    rows[:, 0] *= 20
    plain, low = error(weight, rows, None)
    balanced, high = error(weight, rows, scale_floor(weight, inputs_of(rows)))
    assert high > 2 * low
    assert balanced < plain / 3


def test_search_keeps_the_floor():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    floor = weight.abs().amax(dim=1) / 500
    scale = quantise_search(weight, 12, torch.ones(64), floor).scale
    assert bool((scale >= floor).all())
    assert int(quantise_search(weight, 12, torch.ones(64), floor).values.abs().max()) <= 500


def test_zero_matrix_and_silent_inputs():
    zero = torch.zeros(3, 5)
    assert not scale_floor(zero, None).any()
    silent = Inputs(torch.zeros(5, 5), 0.0)
    assert bool(torch.isfinite(scale_floor(torch.ones(3, 5), silent)).all())


def test_gather_matches_the_inputs(tmp_path):
    model = load(locate(make_tiny("gpt2", tmp_path))).model
    groups = find_groups(model)
    windows = [torch.arange(10)[None], torch.arange(20, 26)[None]]
    seen = []
    handle = groups[0].members[0].module.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0]))
    got = gather(model, groups, windows)[groups[0].name]
    handle.remove()
    rows = torch.cat(seen).detach()
    assert rows.shape == (16, 64)
    assert torch.allclose(got.hessian, rows.T @ rows / 16, atol=1e-5)
    assert got.peak == pytest.approx(float(rows.abs().amax(dim=1).square().mean()), rel=1e-5)


def test_balance_helps_a_whole_model(tmp_path, monkeypatch):
    folder = make_tiny("llama", tmp_path / "m", hidden_size=256, intermediate_size=1024)
    balanced = split_model(folder, tmp_path / "a", weight_bits=12, rounding="nearest")
    monkeypatch.setattr(pipeline, "scale_floor", lambda *_: None)
    plain = split_model(folder, tmp_path / "b", weight_bits=12, rounding="nearest")
    assert balanced.x_max_min > plain.x_max_min
    assert balanced.kl < plain.kl
    assert balanced.x_max_min < P_HALF
