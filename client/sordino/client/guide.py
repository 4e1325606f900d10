"""Guided generation: what an answer must match decides, before each token, which tokens are left.

A guide is compiled by one of four libraries behind one interface. It runs here, on the client: the server sees nothing
of it but, where tokens are forced and go through in one pass, the rows of that pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor

from sordino.shared.errors import RangeError

if TYPE_CHECKING:
    from sordino.client.session import Connected

GuideKind = Literal["json", "json_schema", "regex", "choice", "grammar"]
Engine = Literal["xgrammar", "llguidance", "outlines", "lm-format-enforcer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSpec:
    """What an answer must match.

    Attributes:
        kind: any JSON object, JSON of a schema, a regular expression, one of several texts, or a grammar in EBNF.
        value: the schema (an object, or its text), the pattern, the texts, or the grammar; None for ``json``.
        engine: the library. jump: tokens that are forced go through in one pass.
    """

    kind: GuideKind
    value: Any = None
    engine: Engine = "xgrammar"
    jump: bool = True


class Guide(Protocol):
    """A compiled guide. Rows may come in any order and go back: what counts is the answer's tokens so far."""

    forces: bool

    def allowed(self, row: int, ids: Sequence[int]) -> NDArray[np.bool_]:
        """``[vocabulary]``: which tokens may follow the answer ``ids`` of a row."""
        ...

    def forced(self, ids: Sequence[int]) -> list[int]:
        """The tokens that must follow ``ids``, of row 0, one after the other; none where there is a choice."""
        ...


class GuideProcessor(LogitsProcessor):  # type: ignore[misc]
    """Takes the tokens away that the guide does not allow.

    Args:
        prompt: columns of the prompt, padding included.
    """

    def __init__(self, guide: Guide, prompt: int) -> None:
        self._guide, self._prompt = guide, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids [rows, columns]``, ``scores [rows, vocabulary]``."""
        out = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids[:, self._prompt :].tolist()):
            left = torch.from_numpy(self._guide.allowed(row, ids)).to(scores.device)
            out[row] = torch.where(left, scores[row], out[row])
        return out


def compile_guide(spec: GuideSpec, link: Connected) -> Guide:
    """Compiles a guide for the model's tokenizer.

    Raises:
        RangeError: it cannot be matched by anything, or is too large to compile.
    """
    del link
    raise RangeError(f"guides are not built yet: {spec.kind}")
