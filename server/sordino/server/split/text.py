"""The texts that come with the package, and their cutting into windows of tokens."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import torch

WINDOW: Final = 512
_MAX_TOKENS: Final = 4096


def calibration_text() -> str:
    """The text that GPTQ and the scale search look at, about 3,500 tokens of mixed kinds of English and code."""
    return _read("calibration.txt")


def evaluation_text() -> str:
    """The text that quality is measured on, about 1,200 tokens; it shares no sentence with the calibration text."""
    return _read("evaluation.txt")


def windows(model: Any, tokenizer: Any, text: str, *, max_tokens: int = _MAX_TOKENS) -> list[torch.Tensor]:
    """Tokenises ``text`` and cuts it into windows that a model reads one by one.

    Returns:
        int64 ``[1, t]`` each, t between 2 and 512 (less if the model's context is shorter). Each starts with the BOS
        token where the tokenizer puts one before a text.
    """
    config = model.config.get_text_config()
    length = min(WINDOW, int(getattr(config, "max_position_embeddings", WINDOW)))
    prefix = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id][:1]
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
    step = length - len(prefix)
    chunks = [prefix + tokens[start : start + step] for start in range(0, len(tokens), step)]
    return [torch.tensor([chunk]) for chunk in chunks if len(chunk) > 1 + len(prefix)]


def _read(name: str) -> str:
    return (files("sordino.server.split") / name).read_text(encoding="ascii")
