"""Files of a bundle that match its manifest and are damaged, or made to do harm: always a BundleError, and early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import InProcessServer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from sordino.client import connect
from sordino.client.bundle import _check_untrusted, blamed_on
from sordino.client.model import build_model, load_tokenizer
from sordino.client.timings import Timings
from sordino.client.transport import Connection
from sordino.shared.errors import BundleError
from sordino.shared.manifest import CLIENT_DIR, GroupSpec, ModelManifest, sha256_file

Damage = Callable[[Path], object]
WEIGHTS = "client.safetensors"
EMBEDDING = "model.embed_tokens.weight"


def copy_of(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle / CLIENT_DIR, folder / "client"))


def load(folder: Path, manifest: ModelManifest) -> None:
    _check_untrusted(folder)
    load_tokenizer(folder, build_model(folder, manifest, Timings()))


def changed(name: str, **values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        body = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(body | values))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS)

    return damage


def put(name: str, tensor: torch.Tensor) -> Damage:
    return tensors(lambda held: held.update({name: tensor}))


def tokens(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        body = json.loads((folder / "tokenizer.json").read_text())
        change(body)
        (folder / "tokenizer.json").write_text(json.dumps(body))

    return damage


def raw(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(share * len(whole))])

    return damage


SCALE = "model.layers.0.self_attn.q_proj.scale"
NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[str, Damage]] = {
    # Tensors.
    "weights empty": (WEIGHTS, raw(WEIGHTS, b"")),
    "weights garbage": (WEIGHTS, raw(WEIGHTS, bytes(range(256)) * 40)),
    "weights header of an exabyte": (WEIGHTS, raw(WEIGHTS, b"\xff" * 7 + b"\x0f" + b"{}" * 100)),
    "weights cut": (WEIGHTS, cut(WEIGHTS, 0.5)),
    "weights less a byte": (WEIGHTS, cut(WEIGHTS, 0.99999)),
    "tensor missing": ("lacks", tensors(lambda held: held.pop(NORM))),
    "scale missing": ("no finite scale", tensors(lambda held: held.pop(SCALE))),
    "tensor unexpected": ("the model does not", put("model.layers.9.mlp.weight", torch.zeros(3))),
    "tensor of another shape": ("shape", put(NORM, torch.zeros(65))),
    "tensor of integers": ("torch.int32", put(NORM, torch.ones(64, dtype=torch.int32))),
    "tensor of a float8": ("float8", put(NORM, torch.ones(64).to(torch.float8_e4m3fn))),
    "tensor of complex numbers": ("complex64", put(NORM, torch.ones(64, dtype=torch.complex64))),
    "tensor of nan": ("NaN", put(EMBEDDING, torch.full((300, 64), float("nan")))),
    "scale of integers": ("torch.int64", put(SCALE, torch.ones(64, dtype=torch.int64))),
    "scale of a float8": ("float8", put(SCALE, torch.ones(64).to(torch.float8_e5m2))),
    "scale of booleans": ("torch.bool", put(SCALE, torch.ones(64, dtype=torch.bool))),
    "scale of another shape": ("shape", put(SCALE, torch.ones(64, 1))),
    "scale infinite": ("finite", put(SCALE, torch.full((64,), float("inf")))),
    # The tokenizer.
    "tokenizer empty": ("tokenizer", raw("tokenizer.json", b"")),
    "tokenizer garbage": ("tokenizer", raw("tokenizer.json", bytes(range(256)) * 9)),
    "tokenizer of another kind": ("tokenizer", raw("tokenizer.json", b'{"version": 3, "model": {"type": "Rune"}}')),
    "tokenizer a list": ("tokenizer", raw("tokenizer.json", b"[" * 500 + b"]" * 500)),
    "tokenizer cut": ("tokenizer", cut("tokenizer.json", 0.7)),
    "vocabulary of strings": ("tokenizer", tokens(lambda body: body["model"]["vocab"].update(q="q"))),
    "vocabulary negative": ("tokenizer", tokens(lambda body: body["model"]["vocab"].update(q=-1))),
    "vocabulary over 32 bits": ("tokenizer", tokens(lambda body: body["model"]["vocab"].update(q=1 << 40))),
    "vocabulary too large": ("token 300", tokens(lambda body: body["model"]["vocab"].update(qqq=300))),
    "vocabulary of 4 billion": ("token 4294967295", tokens(lambda body: body["model"]["vocab"].update(a=2**32 - 1))),
    "merges of what is not there": ("tokenizer", tokens(lambda body: body["model"].update(merges=["xx yy"]))),
    "tokenizer class unknown": (
        "tokenizer",
        changed("tokenizer_config.json", tokenizer_class="Enigma", model_max_length=[]),
    ),
    "special token a number": ("tokenizer", changed("tokenizer_config.json", bos_token=7)),
    # The config.
    "hidden size a trillion": ("hidden_size", changed("config.json", hidden_size=10**12)),
    "hidden size 1e12": ("hidden_size", changed("config.json", hidden_size=1e12)),
    "hidden size a word": ("hidden_size", changed("config.json", hidden_size="abc")),
    "hidden size negative": ("config.json", changed("config.json", hidden_size=-64)),
    "hidden size zero": ("config.json", changed("config.json", hidden_size=0)),
    "hidden size null": ("hidden_size", changed("config.json", hidden_size=None)),
    "hidden size a list": ("hidden_size", changed("config.json", hidden_size=[64])),
    "hidden size another": ("manifest", changed("config.json", hidden_size=128)),
    "layers a billion": ("num_hidden_layers", changed("config.json", num_hidden_layers=10**9)),
    "layers negative": ("no such module", changed("config.json", num_hidden_layers=-2)),
    "a layer too many": ("lacks", changed("config.json", num_hidden_layers=3)),
    "heads zero": ("config.json", changed("config.json", num_attention_heads=0)),
    "heads do not divide": ("config.json", changed("config.json", num_attention_heads=5)),
    "key heads do not divide": ("cannot share", changed("config.json", num_key_value_heads=3)),
    "key heads zero": ("config.json", changed("config.json", num_key_value_heads=0)),
    "key heads negative": ("config.json", changed("config.json", num_key_value_heads=-2)),
    "head of odd size": ("config.json", changed("config.json", head_dim=7)),
    "vocabulary a trillion": ("vocab_size", changed("config.json", vocab_size=10**12)),
    "activation unknown": ("config.json", changed("config.json", hidden_act="eval")),
    "epsilon a word": ("config.json", changed("config.json", rms_norm_eps="small")),
    "rotation a list": ("config.json", changed("config.json", rope_parameters=[1])),
    "rotation unknown": (
        "config.json",
        changed("config.json", rope_parameters={"rope_type": "spin", "rope_theta": 1e4}),
    ),
    "rotation of a billion": (
        "partial_rotary_factor",
        changed(
            "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}
        ),
    ),
    "rotation null": (
        "config.json",
        changed("config.json", rope_parameters={"rope_type": "default", "rope_theta": None}),
    ),
    "not a number": ("config.json", changed("config.json", rms_norm_eps=float("nan"))),
    "config nested": (
        "config.json",
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().rstrip().removesuffix("}") + ', "a": ' + '{"a":' * 700 + "1" + "}" * 701
        ),
    ),
    "model type a list": ("model type", changed("config.json", model_type=["llama"])),
    "model type of another family": ("no such module", changed("config.json", model_type="gpt2")),
    # Generation.
    "temperature a word": ("generation_config", changed("generation_config.json", do_sample=True, temperature="hot")),
    "temperature negative": ("generation_config", changed("generation_config.json", do_sample=True, temperature=-1.0)),
    "top_k a list": ("generation_config", changed("generation_config.json", do_sample=True, top_k=[4])),
    "top_k negative": ("generation_config", changed("generation_config.json", do_sample=True, top_k=-4)),
    "top_p two": ("generation_config", changed("generation_config.json", do_sample=True, top_p=-2.0)),
    "penalty zero": ("generation_config", changed("generation_config.json", repetition_penalty=0.0)),
    "penalty a word": ("generation_config", changed("generation_config.json", repetition_penalty="x")),
    "end a word": ("generation_config", changed("generation_config.json", eos_token_id="abc")),
    "end of half a token": ("generation_config", changed("generation_config.json", eos_token_id=[1.5, {}])),
    "padding a word": ("generation_config", changed("generation_config.json", pad_token_id="abc")),
    "n-grams a word": ("generation_config", changed("generation_config.json", no_repeat_ngram_size="x")),
    "suppressed a word": ("generation_config", changed("generation_config.json", suppress_tokens="x")),
    "generation a list": ("generation_config", raw("generation_config.json", b"[]")),
    "generation not JSON": ("generation_config", raw("generation_config.json", b"{")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_a_bundle_error(bundles: Callable[..., Path], tmp_path: Path, name: str) -> None:
    text, damage = DAMAGES[name]
    folder = copy_of(bundles("llama"), tmp_path)
    damage(folder)
    with pytest.raises(BundleError) as caught:
        load(folder, ModelManifest.load(bundles("llama")))
    assert text in str(caught.value)
    assert len(str(caught.value)) < 600


def test_every_damage_is_one(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """The control: undamaged, the same bundle loads."""
    load(copy_of(bundles("llama"), tmp_path), ModelManifest.load(bundles("llama")))


def test_a_panic_is_blamed_and_an_interrupt_is_not() -> None:
    class PanicException(BaseException):
        pass

    with pytest.raises(BundleError, match="tokenizer"), blamed_on("tokenizer.json"):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), blamed_on("tokenizer.json"):
        raise KeyboardInterrupt


def test_the_trial_leaves_no_trace(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """Neither the user's random numbers nor the account of time show that the model was tried out."""
    folder, timings = copy_of(bundles("llama"), tmp_path), Timings()
    changed("generation_config.json", do_sample=True, temperature=2.0)(folder)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_model(folder, ModelManifest.load(bundles("llama")), timings)
    assert torch.equal(torch.rand(3), expected)
    assert not timings


# -- when it is found ------------------------------------------------------------------------------------------------


def larger(group: GroupSpec, inputs: int = 1, outputs: int = 1) -> GroupSpec:
    first, *others = group.members
    members = (replace(first, out_features=outputs * first.out_features), *others)
    return replace(group, in_features=inputs * group.in_features, members=members)


@pytest.mark.parametrize("case", ["inputs", "outputs", "name", "weights", "tokenizer"])
def test_nothing_is_provisioned_for_a_bundle_that_does_not_fit(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Groups of sizes that the model does not have, or a broken file: refused before a mask is made or asked for."""
    bundle = Path(shutil.copytree(bundles("llama"), tmp_path / "bundle"))
    server = InProcessServer(bundle)
    manifest = server.store.manifest
    last = manifest.groups[-1]
    hostile = {
        "inputs": larger(last, inputs=1 << 13),
        "outputs": larger(last, outputs=1 << 13),
        "name": replace(last, members=(replace(last.members[0], name="model.layers.0.nothing"), *last.members[1:])),
    }.get(case, last)
    damaged = {"weights": WEIGHTS, "tokenizer": "tokenizer.json"}.get(case)
    files = dict(manifest.client_files)
    if damaged is not None:
        cut(damaged, 0.5)(bundle / CLIENT_DIR)
        files[damaged] = sha256_file(bundle / CLIENT_DIR / damaged)
    server.store.manifest = replace(manifest, groups=(*manifest.groups[:-1], hostile), client_files=files)
    asked: list[object] = []
    monkeypatch.setattr(Connection, "provision", lambda *arguments: asked.append(arguments) or iter(()))
    folders = {"pool": tmp_path / "pool", "state_dir": tmp_path / "state", "cache": tmp_path / "cache"}
    try:
        with pytest.raises(BundleError):
            connect(f"grpc://127.0.0.1:{server.port}", batch=64, **folders)
        assert not asked
        assert not (tmp_path / "pool").exists()
        assert not (tmp_path / "state").exists()
    finally:
        server.close()


def test_no_tensor_is_read_before_the_groups_fit(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = ModelManifest.load(bundles("llama"))
    hostile = replace(manifest, groups=(*manifest.groups[:-1], larger(manifest.groups[-1], outputs=1 << 13)))
    monkeypatch.setattr("sordino.client.model.safe_open", lambda *_, **__: pytest.fail("read too early"))
    with pytest.raises(BundleError, match="the manifest says otherwise"):
        load(copy_of(bundles("llama"), tmp_path), hostile)


def test_layers_are_counted_before_one_is_built(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(bundles("llama"), tmp_path)
    changed("config.json", num_hidden_layers=10**9)(folder)
    build = AutoConfig.for_model
    monkeypatch.setattr(
        AutoConfig, "for_model", lambda kind, **given: build(kind) if not given else pytest.fail("late")
    )
    with pytest.raises(BundleError, match="num_hidden_layers is not 1024 or less"):
        load(folder, ModelManifest.load(bundles("llama")))
