"""GGUF files: read through transformers, dequantised, and refused where a tensor or the architecture is unknown."""

import json

import gguf
import numpy as np
import pytest
import torch
from models import CHAT_TEMPLATE, make_tiny, make_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sordino.server.split import split_model
from sordino.shared.errors import BundleError, UnsupportedModelError
from sordino.shared.manifest import ModelManifest

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS, KV_HEADS = 4, 2


def interleave(weight, heads):
    """llama.cpp keeps the two halves of a rotary head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder, path, *, architecture="llama", extra=(), missing=()):
    """Writes a tiny Llama folder as a Q8_0 GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(300)
    vocabulary = make_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.get)[:-1], "un"])
    writer.add_token_types([3 if index < 3 else 1 for index in range(300)])
    writer.add_token_merges(["u n"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    tensors = {"token_embd": state["model.embed_tokens.weight"], "output_norm": state["model.norm.weight"]}
    for layer in range(2):
        for ours, theirs in NAMES.items():
            tensor = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                tensor = interleave(tensor, HEADS if theirs == "attn_q" else KV_HEADS)
            tensors[f"blk.{layer}.{theirs}"] = tensor
    for name, tensor in tensors.items():
        if name in missing:
            continue
        if tensor.ndim == 1:
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor))
        else:
            raw = gguf.quantize(np.ascontiguousarray(tensor), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


def test_gguf_file(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.Q8_0.gguf")
    report = split_model(tmp_path / "tiny.Q8_0.gguf", tmp_path / "out", rounding="nearest")
    assert "GGUF" in report.reference
    assert "dequantised" in report.reference
    assert report.model_name == "tiny.Q8_0"
    manifest = ModelManifest.load(tmp_path / "out")
    assert manifest.model_type == "llama"
    assert manifest.groups[0].name == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    client = load_file(tmp_path / "out" / "client" / "client.safetensors")
    original = load_file(llama / "model.safetensors")
    assert torch.equal(client["model.norm.weight"], original["model.norm.weight"])
    assert torch.allclose(client["model.embed_tokens.weight"], original["model.embed_tokens.weight"], atol=5e-3)
    config = json.loads((tmp_path / "out" / "client" / "config.json").read_text())
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "client")
    assert tokenizer.decode(tokenizer("Hello, world").input_ids, skip_special_tokens=True) == "Hello, world"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    again = split_model(tmp_path, tmp_path / "two", gguf_file="tiny.Q8_0.gguf", rounding="nearest")
    assert again.fingerprint == report.fingerprint


def test_unmapped_tensor_is_named(llama, tmp_path):
    write_gguf(llama, tmp_path / "m.gguf", extra=["blk.0.mystery.weight", "rope_freqs.weight"])
    with pytest.raises(BundleError, match=r"2 tensors have no place .*: blk\.0\.mystery\.weight, rope_freqs\.weight"):
        split_model(tmp_path / "m.gguf", tmp_path / "out", rounding="nearest")


def test_missing_tensor_is_named(llama, tmp_path):
    write_gguf(llama, tmp_path / "m.gguf", missing=["blk.1.ffn_up"])
    with pytest.raises(BundleError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        split_model(tmp_path / "m.gguf", tmp_path / "out", rounding="nearest")


def test_unknown_architecture(llama, tmp_path):
    write_gguf(llama, tmp_path / "m.gguf", architecture="nonesuch")
    with pytest.raises(UnsupportedModelError, match="nonesuch"):
        split_model(tmp_path / "m.gguf", tmp_path / "out", rounding="nearest")


def test_damaged_gguf_file(llama, tmp_path):
    whole = write_gguf(llama, tmp_path / "whole.gguf").read_bytes()
    for name, raw in {
        "magic": b"x" + whole,
        "short": whole[:11],
        "head": whole[:900],
        "tensors": whole[:-9000],
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(raw)
        with pytest.raises((BundleError, UnsupportedModelError)):
            split_model(tmp_path / f"{name}.gguf", tmp_path / "out", rounding="nearest")
    assert not (tmp_path / "out").exists()
