"""One forward pass through Concrete ML's HybridFHEModel, in an environment of its own: see ``compare.py``.

All linear layers of the decoder are remote modules; the rest of the model runs in the clear. Client and server halves
run in this process (the package's ``execute`` mode: real keys, encryption, products and decryption).

    python hybrid.py FOLDER     # reads weights.safetensors, config.json and ids.json there, writes hybrid.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from concrete.ml.torch.hybrid_model import HybridFHEModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM


class Logits(torch.nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits


def main(folder: Path) -> None:
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    model.tie_weights()
    ids = torch.tensor(json.loads((folder / "ids.json").read_text()))
    names = [
        f"model.{name}"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    with torch.inference_mode():
        plain = Logits(model)(ids)
    hybrid = HybridFHEModel(Logits(model), names)
    start = time.perf_counter()
    with torch.no_grad():
        hybrid.compile_model(ids, n_bits=8, use_dynamic_quantization=True)
        compiled = time.perf_counter() - start
        spent = {}
        for mode in ("disable", "execute"):
            start = time.perf_counter()
            logits = hybrid(ids, fhe=mode)
            spent[mode] = time.perf_counter() - start
            spent[f"error_{mode}"] = float((logits - plain).abs().max() / plain.abs().max())
            spent[f"top1_{mode}"] = float((logits.argmax(-1) == plain.argmax(-1)).float().mean())
        start = time.perf_counter()
        hybrid(ids, fhe="execute")  # the first one made the keys
        spent["execute"] = time.perf_counter() - start
    (folder / "hybrid.json").write_text(json.dumps({"modules": len(names), "compile_seconds": compiled, **spent}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
