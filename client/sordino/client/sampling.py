"""Logits processors that ``transformers`` does not have: penalties by count, a record, and draws that a seed fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from transformers import LogitsProcessor

from sordino.client.prg import uniform_mod_p
from sordino.shared.prg import KEY_BYTES, derive, random_key
from sordino.shared.ring import P

_SEED_BYTES: Final = 9  # of a signed number that holds any 64 bits
_BELOW_ONE: Final = float(np.nextafter(1.0, 0.0))


class CountPenalty(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties over the answer so far, as OpenAI defines them.

    Args:
        prompt: columns of the prompt, padding included.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids [rows, columns]``, ``scores [rows, vocabulary]``."""
        said = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's logarithm of probability, and the likeliest alternatives with theirs, best first."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...]


class Record(LogitsProcessor):  # type: ignore[misc]
    """Keeps the model's own logits until the token after them is known. The first of all processors."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # A position that is drafted again is looked at again: the last time it comes after the tokens that stay.
        self._kept[input_ids.shape[1]] = scores.clone()
        return scores

    def take(self, row: int, position: int, token: int) -> Logprob:
        """Of the token at ``position``, once."""
        logs = torch.log_softmax(self._kept[position][row].float(), dim=-1)
        best = torch.topk(logs, self._alternatives) if self._alternatives else None
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else ()
        return Logprob(token, float(logs[token]), top)

    def forget(self, position: int) -> None:
        """Drops everything before ``position``."""
        for old in [at for at in self._kept if at < position]:
            del self._kept[old]


class Draw(LogitsProcessor):  # type: ignore[misc]
    """Turns sampling into an arg max: adds Gumbel noise, leaving the likeliest token of the sum the one that is drawn.

    arg max(logit + G) with independent G = -log(-log U) has exactly the softmax distribution (Gumbel 1954; Maddison,
    Tarlow and Minka, "A* sampling", 2014). The noise depends on the row's key and on the token's place in the answer
    alone: the same key gives the same tokens in any batch, and whether or not they were drafted first. U has 64 bits
    from AES in counter mode.

    Args:
        keys: of the rows, 32 bytes each. prompt: columns of the prompt, padding included.
    """

    def __init__(self, keys: Sequence[bytes], prompt: int) -> None:
        self._keys, self._prompt = keys, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids [rows, columns]``, ``scores [rows, vocabulary]``: the scores with noise."""
        place, noisy = input_ids.shape[1] - self._prompt, scores.double().cpu()
        for row, key in enumerate(self._keys):
            chosen = torch.isfinite(noisy[row]).nonzero().flatten()
            words = uniform_mod_p(key, b"draw/%d" % place, 2 * scores.shape[1]).reshape(-1, 2)[chosen.numpy()]
            u = np.minimum((words[:, 0] + (words[:, 1] + 0.5) / P) / P, _BELOW_ONE)
            noisy[row, chosen] += torch.from_numpy(-np.log(-np.log(u)))
        return noisy.to(scores)


def row_keys(seed: int | None, rows: int) -> list[bytes]:
    """A key for each answer to one prompt: from the seed, or from the operating system where there is none."""
    if seed is None:
        return [random_key() for _ in range(rows)]
    whole = seed.to_bytes(_SEED_BYTES, "little", signed=True).ljust(KEY_BYTES, b"\0")
    return [derive(whole, b"answer/%d" % row) for row in range(rows)]
