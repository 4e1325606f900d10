"""Tiny random models of every family Sordino is tested with, written as ``save_pretrained`` folders.

Each has 2 layers, hidden size 64, intermediate size 128, 4 heads (2 key/value heads where the family has them), a
vocabulary of 300 and a byte-level tokenizer with a chat template. Weights are normal with standard deviation 0.2, so
that logits are far from flat and a wrong product changes the greedy token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 300
HIDDEN = 64
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GQA, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_GQA, "head_dim": 16, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", {**_GQA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_GQA, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GQA,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", {**_GQA, "sliding_window": 16}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_inner": 128, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "gpt_neox": ("GPTNeoXConfig", dict(_COMMON)),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
}
FAMILIES: tuple[str, ...] = tuple(_CONFIGS)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges: ids 0..2 are bos, eos and pad, then 256 bytes, then words no text gives."""
    symbols = [BOS, EOS, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<unused{index}>" for index in range(VOCABULARY - len(symbols))]
    core = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=128
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(family: str, folder: Path | str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a tiny random model of one of :data:`FAMILIES` and its tokenizer; returns the folder.

    Args:
        family: a name of :data:`FAMILIES`.
        folder: is made if missing.
        seed: of the weights; the same seed gives the same model.
        overrides: fields of the family's ``transformers`` config, such as ``tie_word_embeddings``.
    """
    config_class, fields = _CONFIGS[family]
    return _write(config_class, {**fields, **overrides}, Path(folder), seed)


def make_tiny_moe(folder: Path | str, *, seed: int = 0) -> Path:
    """Writes a tiny Mixtral with four experts: a model that must be refused."""
    return _write("MixtralConfig", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2}, Path(folder), seed)


def _write(config_class: str, fields: dict[str, Any], folder: Path, seed: int) -> Path:
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = getattr(transformers, config_class)(**{**special, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scaled = {module.weight for module in model.modules() if hasattr(module, "embed_scale")}
    with torch.no_grad():
        for parameter in model.parameters():
            # Gemma multiplies its tied embedding by sqrt(hidden): at full size every token would predict itself.
            std = 0.05 if parameter in scaled else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * std
            # Norm gains and biases stay near their defaults (one, or zero where the family adds one) but not on them,
            # so that a lost bias or norm is seen.
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
