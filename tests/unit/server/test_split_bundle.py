"""Whole splits of tiny models: what lies in the bundle, and what is refused."""

import dataclasses
import json
import sys

import pytest
import torch
from models import FAMILIES, make_tiny, make_tiny_moe
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sordino.server.split import CalibrationWarning, split_model, write
from sordino.server.split.calibrate import batches
from sordino.server.split.discovery import find_groups
from sordino.server.split.load import load, locate
from sordino.server.split.quality import simulated
from sordino.server.split.quantise import Quantised, from_planes
from sordino.shared.errors import BundleError, RangeError, UnsupportedModelError
from sordino.shared.manifest import ModelManifest, sha256_file


def split(folder, out, **options):
    return split_model(folder, out, **{"rounding": "nearest", **options})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bundle(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundles") / "llama"
    split(llama, out)
    return out


def read_server(out):
    tensors = {}
    for path in sorted((out / "server").glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def rebuilt_matrix(out, spec):
    """Float32 matrices by member name, from the server's integers and the client's scales."""
    values = from_planes(read_server(out)[spec.name], spec.weight_bits)
    client = load_file(out / "client" / "client.safetensors")
    parts = torch.split(values, [member.out_features for member in spec.members])
    return {
        m.name: part.float() * client[f"{m.name}.scale"][:, None] for m, part in zip(spec.members, parts, strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [8, 12])
def test_every_family_splits(family, bits, tmp_path):
    folder, out = make_tiny(family, tmp_path / "model"), tmp_path / "out"
    report = split(folder, out, weight_bits=bits)
    manifest = ModelManifest.load(out)
    original = AutoModelForCausalLM.from_pretrained(folder)
    client = load_file(out / "client" / "client.safetensors")
    state = original.state_dict()
    remote = set()
    for spec in manifest.groups:
        assert read_server(out)[spec.name].shape == (spec.planes * spec.out_features, spec.in_features)
        for name, matrix in rebuilt_matrix(out, spec).items():
            weight = state[f"{name}.weight"]
            weight = weight.T if family == "gpt2" else weight
            assert bool(((matrix - weight).abs() <= client[f"{name}.scale"][:, None] * 0.501).all())
            remote.add(f"{name}.weight")
    # What is not remote is with the client, bit for bit, or tied to something that is.
    for name, tensor in state.items():
        if name in client:
            assert torch.equal(client[name], tensor)
            assert name not in remote
        elif name not in remote:
            assert any(torch.equal(tensor, other) for other in client.values() if other.shape == tensor.shape)
    assert set(client) == {n for n in client if n in state} | {f"{n.removesuffix('.weight')}.scale" for n in remote}
    assert 0 < report.kl < (0.02 if bits == 8 else 0.002)
    assert report.groups == len(manifest.groups) == 8
    assert AutoConfig.from_pretrained(out / "client").model_type == manifest.model_type
    tokenizer = AutoTokenizer.from_pretrained(out / "client")
    assert tokenizer("Hello").input_ids == AutoTokenizer.from_pretrained(folder)("Hello").input_ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("<bos>[user]")


@pytest.mark.parametrize("rounding", ["search", "gptq"])
def test_better_rounding_is_better(rounding, llama, tmp_path):
    nearest = split(llama, tmp_path / "a")
    better = split(llama, tmp_path / "b", rounding=rounding)
    assert better.kl < nearest.kl
    console = Console(record=True, width=100, file=sys.stderr)
    console.print(better.table())
    assert "mean KL" in console.export_text()


def test_biases_stay_with_the_client(tmp_path):
    split(make_tiny("qwen2", tmp_path / "m"), tmp_path / "out")
    client = load_file(tmp_path / "out" / "client" / "client.safetensors")
    assert client["model.layers.0.self_attn.q_proj.bias"].shape == (64,)
    assert not any(name.endswith("q_proj.weight") for name in client)


def test_no_key_that_runs_code(llama, bundle):
    config = json.loads((bundle / "client" / "config.json").read_text())
    assert not {"auto_map", "quantization_config", "custom_generate"} & set(config)
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("remote_head", [True, False])
def test_head(tied, remote_head, tmp_path):
    folder = make_tiny("llama", tmp_path / "m", tie_word_embeddings=tied)
    split(folder, tmp_path / "out", remote_head=remote_head)
    client = load_file(tmp_path / "out" / "client" / "client.safetensors")
    manifest = ModelManifest.load(tmp_path / "out")
    assert client["model.embed_tokens.weight"].shape == (300, 64)
    assert ("lm_head.weight" in client) == (not tied and not remote_head)
    assert ("lm_head" in manifest.by_name) == remote_head
    config = json.loads((tmp_path / "out" / "client" / "config.json").read_text())
    assert config["tie_word_embeddings"] == (tied and not remote_head)
    if remote_head:
        assert manifest.by_name["lm_head"].layer == 2
        assert client["lm_head.scale"].shape == (300,)


def test_local_options(llama, tmp_path):
    split(llama, tmp_path / "out", local_layers=[1], local_modules=["o_proj"])
    client = load_file(tmp_path / "out" / "client" / "client.safetensors")
    assert "model.layers.0.self_attn.o_proj.weight" in client
    assert "model.layers.1.mlp.up_proj.weight" in client
    assert "model.layers.0.mlp.up_proj.weight" not in client
    assert len(ModelManifest.load(tmp_path / "out").groups) == 3


def test_half_precision_checkpoints(tmp_path):
    folder = make_tiny("llama", tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for dtype in (torch.float16, torch.bfloat16):
        model.to(dtype).save_pretrained(folder)
        out = tmp_path / str(dtype)
        split(folder, out)
        client = load_file(out / "client" / "client.safetensors")
        assert {tensor.dtype for tensor in client.values()} == {torch.float32}
        assert torch.equal(client["model.embed_tokens.weight"], model.model.embed_tokens.weight.float())
        assert json.loads((out / "client" / "config.json").read_text())["dtype"] == "float32"


def test_simulation_is_exact_integer_arithmetic(llama, bundle):
    model = load(locate(llama)).model
    manifest = ModelManifest.load(bundle)
    groups = find_groups(model)
    group, spec = groups[0], manifest.groups[0]
    client = load_file(bundle / "client" / "client.safetensors")
    values = read_server(bundle)[group.name].to(torch.int16)
    scale = torch.cat([client[f"{member.name}.scale"] for member in spec.members])
    x = torch.randn(2, 3, 64)
    with simulated([group], {group.name: Quantised(values, scale)}, {group.name: spec.x_max}):
        got = torch.cat([member.module(x) for member in group.members], dim=-1)
    row_scale = x.abs().amax(dim=-1, keepdim=True) / spec.x_max
    integers = (x / row_scale).round().clamp(-spec.x_max, spec.x_max).to(torch.int64)
    exact = integers @ values.to(torch.int64).T
    assert torch.equal(got, exact.to(torch.float32) * row_scale * scale)
    assert "forward" not in vars(group.members[0].module)


def test_server_files_are_split_at_the_limit(llama, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(write.write_bundle, "__kwdefaults__", {"max_shard_bytes": 20_000})
    split(llama, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out" / "server").glob("*.safetensors"))
    assert len(names) > 1
    assert names[0] == f"weights-00001-of-{len(names):05d}.safetensors"
    whole, parts = read_server(bundle), read_server(tmp_path / "out")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_manifest_round_trip_and_changes(bundle):
    raw = (bundle / "manifest.json").read_bytes()
    manifest = ModelManifest.from_json(raw)
    assert ModelManifest.from_json(manifest.to_json()) == manifest
    for name, spec in manifest.client_files.items():
        assert sha256_file(bundle / "client" / name) == spec
    for name, spec in manifest.server_files.items():
        assert sha256_file(bundle / "server" / name) == spec
    # Every digit of the first group's figures, one at a time.
    changed = 0
    for key in (b'"in_features": ', b'"l1_max": ', b'"l2_max": ', b'"out_features": ', b'"size": '):
        at = raw.index(key) + len(key)
        digit = b"1" if raw[at : at + 1] != b"1" else b"2"
        with pytest.raises(BundleError):
            ModelManifest.from_json(raw[:at] + digit + raw[at + 1 :])
        changed += 1
    assert changed == 5


def test_one_changed_byte_of_a_file_is_seen(llama, tmp_path):
    split(llama, tmp_path / "out")
    manifest = ModelManifest.load(tmp_path / "out")
    path = tmp_path / "out" / "server" / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert sha256_file(path) != manifest.server_files["weights.safetensors"]


def test_same_model_gives_same_fingerprint(llama, bundle, tmp_path):
    report = split(llama, tmp_path / "out")
    assert report.fingerprint == ModelManifest.load(bundle).fingerprint


@pytest.mark.parametrize("stage", ["_write_config", "_write_server", "_files"])
def test_crash_leaves_nothing(llama, tmp_path, monkeypatch, stage):
    def crash(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, stage, crash)
    with pytest.raises(KeyboardInterrupt):
        split(llama, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_existing_out_is_refused_and_kept(llama, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "keep").write_text("mine")
    with pytest.raises(BundleError, match="'out' exists and is not an empty folder"):
        split(llama, out)
    assert (out / "keep").read_text() == "mine"
    with pytest.raises(BundleError, match="does not exist"):
        split(llama, tmp_path / "no" / "where")


def test_empty_out_is_used(llama, tmp_path):
    (tmp_path / "out").mkdir()
    split(llama, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_experts_are_refused_before_anything_is_written(tmp_path):
    folder = make_tiny_moe(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="which experts the prompt picks"):
        split(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def damage(folder, change):
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def test_nan_is_refused_by_name(tmp_path):
    folder = make_tiny("llama", tmp_path / "m")
    damage(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[7:8].fill_(float("nan")))
    with pytest.raises(RangeError, match=r"model\.layers\.1\.mlp\.up_proj"):
        split(folder, tmp_path / "out")


def test_missing_tensor_is_named(tmp_path):
    folder = make_tiny("llama", tmp_path / "m")
    damage(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BundleError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        split(folder, tmp_path / "out")


def test_flat_logits_are_refused(tmp_path):
    folder = make_tiny("llama", tmp_path / "m", tie_word_embeddings=False)
    damage(folder, lambda tensors: tensors["lm_head.weight"].zero_())
    with pytest.raises(BundleError, match="flat logits"):
        split(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "nothing_known"}, UnsupportedModelError),
        ({"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}, UnsupportedModelError),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, UnsupportedModelError),
    ],
)
def test_configs_that_are_refused(tmp_path, change, error):
    folder = make_tiny("llama", tmp_path / "m")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error):
        split(folder, tmp_path / "out")


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(BundleError, match="no GGUF file"):
        split(tmp_path / "absent.gguf", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises((BundleError, UnsupportedModelError)):
        split(tmp_path / "empty", tmp_path / "out")


def test_no_tokenizer(tmp_path):
    folder = make_tiny("llama", tmp_path / "m")
    for path in folder.glob("token*"):
        path.unlink()
    with pytest.raises(BundleError, match="tokenizer"):
        split(folder, tmp_path / "out")


def test_short_calibration_warns(llama, tmp_path):
    with pytest.warns(CalibrationWarning, match="fewer than the widest input"):
        split(llama, tmp_path / "out", rounding="search", calibration_text="Too short.")


def test_noise_warns(llama, tmp_path, monkeypatch):
    losses = iter([9.0, 2.0])
    monkeypatch.setattr("sordino.server.split.calibrate._mean_loss", lambda *_: next(losses))
    with pytest.warns(CalibrationWarning, match="looks like noise"):
        split(llama, tmp_path / "out", rounding="search")


def test_batches_keep_the_budget(llama):
    groups = find_groups(load(locate(llama)).model)
    one = 4 * 128**2
    runs = list(batches(groups, budget=one))
    assert [group.name for run in runs for group in run] == [group.name for group in groups]
    assert len(runs) > 1
    assert all(sum(4 * g.in_features**2 for g in run) <= one for run in runs)


def test_report_is_complete(llama, tmp_path):
    stages = []
    report = split(llama, tmp_path / "out", progress=lambda stage, done: stages.append((stage, done)))
    fields = dataclasses.asdict(report)
    assert all(value for name, value in fields.items())
    assert report.tokens > 1000
    assert [stage for stage, _ in stages if _ == 1.0] == ["load", "discover", "quantise", "measure", "write"]
    assert all(0 <= done <= 1 for _, done in stages)


def test_bad_options(llama, tmp_path):
    with pytest.raises(ValueError, match="weight_bits"):
        split(llama, tmp_path / "out", weight_bits=4)
    with pytest.raises(ValueError, match="rounding"):
        split(llama, tmp_path / "out", rounding="up")


def test_a_caller_in_inference_mode(llama, bundle, tmp_path):
    with torch.inference_mode():
        split(llama, tmp_path / "again")
    assert ModelManifest.load(tmp_path / "again").fingerprint == ModelManifest.load(bundle).fingerprint
