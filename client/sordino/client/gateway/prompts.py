"""Token ids of what is asked: conversations through the model's chat template, texts and tokens as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sordino.client.chat import Renderer
from sordino.client.gateway.faults import ApiError
from sordino.client.terminal import encode_prompt
from sordino.shared.errors import BundleError, RangeError

if TYPE_CHECKING:
    from sordino.client.session import Connected


class Prompts:
    """Keeps the process that renders chat templates: an answer does not wait for its start."""

    def __init__(self, link: Connected) -> None:
        self._link = link
        self.renderer = Renderer()

    @property
    def template(self) -> str:
        """The chat template's own text.

        Raises:
            ApiError: there is none, or several without a default.
        """
        try:
            return str(self._link.tokenizer.get_chat_template())
        except ValueError:
            raise ApiError(
                400, "the model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            ) from None

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Raises ApiError where the template refuses or fails."""
        try:
            text = self.renderer.render(self._link.tokenizer, messages, tools)
        except RangeError:
            text = "the model's chat template refuses these messages: it may want other roles, or another order of them"
            raise ApiError(400, text, param="messages", code="template_refuses") from None
        except BundleError as error:
            raise ApiError(500, str(error), code="template_fails") from None
        ids: list[int] = self._link.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._checked(ids)

    def plain(self, prompt: str | list[int]) -> list[int]:
        """A text, with what the tokenizer puts before it, or tokens.

        Raises:
            RangeError: nothing to send, too much, or tokens that the model does not have.
        """
        if isinstance(prompt, str):
            ids: list[int] = encode_prompt(self._link, prompt, raw=True)["input_ids"][0].tolist()
            return ids
        size = self._link.model.get_input_embeddings().weight.shape[0]
        if beyond := [token for token in prompt if not 0 <= token < size]:
            raise RangeError(f"prompt has token {beyond[0]}, the model has {size}")
        return self._checked(prompt)

    def inputs(self, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, ``[prompts, columns]``, padded on the left."""
        pad = self._link.tokenizer.pad_token_id or 0
        columns = max(len(ids) for ids in prompts)
        rows = [[pad] * (columns - len(ids)) + list(ids) for ids in prompts]
        masks = [[0] * (columns - len(ids)) + [1] * len(ids) for ids in prompts]
        return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}

    def _checked(self, ids: list[int]) -> list[int]:
        limit = getattr(self._link.model.config, "max_position_embeddings", None)
        if not ids:
            raise RangeError("the prompt is empty: there is nothing to send")
        if limit and len(ids) >= limit:
            text = f"the prompt has {len(ids)} tokens, the model takes {limit} with the answer: shorten it"
            raise ApiError(400, text, code="context_length_exceeded")
        return ids
