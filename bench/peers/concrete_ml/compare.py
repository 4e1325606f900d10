"""Concrete ML's HybridFHEModel and Sordino on one tiny Llama: the same weights, the same tokens, one forward pass.

Concrete ML 1.9.0 pins torch 2.3.1, so it runs in an environment of its own (about 6 GB), which ``make bench-hybrid``
makes. Its fast path takes linear layers of 512 x 512 and more, so the model has one layer of that size.

    python bench/peers/concrete_ml/compare.py PYTHON [--tokens 4] [--json FILE]

where PYTHON is the interpreter of that environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sordino.client.bench import machine
from sordino.client.local_server import server_process
from sordino.client.terminal import connected
from sordino.server.split import split_model

CONFIG: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def make_model(folder: Path) -> LlamaForCausalLM:
    """Random weights, for both; saved as a model for Sordino and as plain tensors for the other environment."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    model.save_pretrained(folder / "model")
    letters = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(ByteLevel.alphabet())}, merges=[]))
    letters.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder / "model")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "weights.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return model


def sordino(folder: Path, ids: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    """A forward pass under each protocol, with a server process on loopback."""
    split_model(folder / "model", folder / "bundle", rounding="nearest")
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        target, ca, token, _ = stack.enter_context(
            server_process(folder / "bundle", folder / "server", allow_clear=False)
        )
        for name in ("masked", "rlwe"):
            options: dict[str, Any] = {
                "pool": folder / "pool",
                "state_dir": folder / "ledger",
                "cache": folder / "cache",
                "batch": 64,
            }
            link = stack.enter_context(
                connected(target, ca=ca, token_file=token, protocol=name, low_water=0, **options)
            )
            with torch.inference_mode():
                link.model(ids, use_cache=False)  # encodes the weights, compiles what is not yet
                start = time.perf_counter()
                logits = link.model(ids, use_cache=False).logits
            results[name] = {"seconds": round(time.perf_counter() - start, 4), **compared(logits, plain)}
    return results


def compared(logits: torch.Tensor, plain: torch.Tensor) -> dict[str, float]:
    return {
        "error": round(float((logits - plain).abs().max() / plain.abs().max()), 5),
        "top1": round(float((logits.argmax(-1) == plain.argmax(-1)).float().mean()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", type=Path)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sordino-hybrid-") as work:
        folder = Path(work)
        model = make_model(folder)
        ids = torch.arange(7, 7 + options.tokens)[None]
        (folder / "ids.json").write_text(json.dumps(ids.tolist()))
        with torch.inference_mode():
            plain = model(ids, use_cache=False).logits
        own = sordino(folder, ids, plain)
        subprocess.run([options.python, Path(__file__).with_name("hybrid.py"), folder], check=True)
        other = json.loads((folder / "hybrid.json").read_text())
        results: dict[str, Any] = {
            "concrete-ml hybrid": {
                "seconds": round(other["execute"], 3),
                "error": round(other["error_execute"], 5),
                "top1": round(other["top1_execute"], 3),
                "error_of_its_quantisation_alone": round(other["error_disable"], 5),
            }
        } | own
    for figures in results.values():
        figures["ratio_to_rlwe"] = round(figures["seconds"] / results["rlwe"]["seconds"], 2)
    report = {"machine": machine(), "model": CONFIG, "tokens": options.tokens, "results": results}
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
