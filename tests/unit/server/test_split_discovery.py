"""Which groups are found, and which models are refused."""

import pytest
import torch
from models import FAMILIES, make_tiny, make_tiny_moe
from torch import nn

from sordino.server.split.discovery import find_groups, refuse_experts
from sordino.server.split.load import load, locate
from sordino.shared.errors import UnsupportedModelError

# The groups of layer 0, without the layer's prefix.
SEPARATE = ["self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj"]
EXPECTED = {
    "phi3": ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "gpt_neox": ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    "opt": ["self_attn.q_proj+k_proj+v_proj", "self_attn.out_proj", "fc1", "fc2"],
}
PREFIX = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


def model_of(folder):
    return load(locate(folder)).model


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_every_family(family, tmp_path):
    groups = find_groups(model_of(make_tiny(family, tmp_path)))
    prefix = PREFIX.get(family, "model.layers")
    found = [group.name.removeprefix(f"{prefix}.0.") for group in groups if group.layer == 0]
    assert found == EXPECTED.get(family, SEPARATE)
    assert [group.layer for group in groups] == [0, 0, 0, 0, 1, 1, 1, 1]
    for group in groups:
        assert group.weight.shape == (sum(m.out_features for m in group.members), group.in_features)


def test_conv1d_is_transposed(tmp_path):
    group = find_groups(model_of(make_tiny("gpt2", tmp_path)))[0]
    module = group.members[0].module
    x = torch.randn(3, 64)
    assert torch.allclose(x @ group.weight.T + module.bias, module(x), atol=1e-5)


def test_local_layers_and_modules(llama):
    groups = find_groups(model_of(llama), local_layers=[0], local_modules=["o_proj", "k_proj"])
    assert [group.name for group in groups] == [
        "model.layers.1.self_attn.q_proj+v_proj",
        "model.layers.1.mlp.gate_proj+up_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_remote_head_is_a_group_of_its_own(llama):
    groups = find_groups(model_of(llama), remote_head=True)
    assert (groups[-1].name, groups[-1].layer) == ("lm_head", 2)
    assert groups[-1].weight.shape == (300, 64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"local_layers": [2]}, "the model has layers 0 to 1"),
        ({"local_layers": [-1]}, "do not exist"),
        ({"local_modules": ["attention"]}, r"\['attention'\] do not exist: the layers have .*'o_proj'"),
        ({"local_layers": [0, 1]}, "no linear module is left"),
    ],
)
def test_options_that_name_nothing(llama, options, text):
    with pytest.raises(UnsupportedModelError, match=text):
        find_groups(model_of(llama), **options)


def test_module_that_is_never_called(llama):
    model = model_of(llama)
    model.model.layers[1].mlp.spare = nn.Linear(4, 4)
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.1\.mlp\.spare' is called never"):
        find_groups(model)


def test_module_that_is_called_twice(llama):
    model = model_of(llama)
    layer = model.model.layers[0]
    inner = layer.self_attn.o_proj.forward
    layer.self_attn.o_proj.forward = lambda x: inner(x) + 0 * layer.mlp.down_proj(torch.zeros(*x.shape[:-1], 128))
    with pytest.raises(UnsupportedModelError, match="down_proj' is called 2 times"):
        find_groups(model)


def test_input_changed_in_place_is_another_input(llama):
    model = model_of(llama)
    gate = model.model.layers[0].mlp.gate_proj
    inner = gate.forward

    def doubling(x):
        out = inner(x)
        x.mul_(2)
        return out

    gate.forward = doubling
    names = [group.name for group in find_groups(model)]
    assert "model.layers.0.mlp.gate_proj" in names
    assert "model.layers.1.mlp.gate_proj+up_proj" in names


def test_probe_leaves_no_hook(llama):
    model = model_of(llama)
    find_groups(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_mixture_of_experts_is_refused(tmp_path):
    model = model_of(make_tiny_moe(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"which experts the prompt picks.*num_local_experts is 4"):
        refuse_experts(model)
    model.config.num_local_experts = 1
    with pytest.raises(UnsupportedModelError, match="which experts the prompt picks"):
        refuse_experts(model)


def test_stacked_parameters_are_refused(llama):
    model = model_of(llama)
    refuse_experts(model)
    model.model.layers[0].mlp.bank = nn.Parameter(torch.zeros(4, 8, 8))
    with pytest.raises(UnsupportedModelError, match=r"'mlp\.bank' has 3 dimensions|'0\.mlp\.bank' has 3 dimensions"):
        refuse_experts(model)
