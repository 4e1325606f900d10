"""A transformers model whose layers are evaluated on shares."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from sordino.client.kvcache import CACHE_NAMES
from sordino.client.twoparty.session import PartySession
from sordino.shared.errors import RangeError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE: Final = next(
    name for name in CACHE_NAMES if name in {one.name for one in fields(BaseModelOutputWithPastAndCrossAttentions)}
)

_PLACES: Final = "wpe"
_EMBEDDINGS: Final = ("embed_tokens", "wte", _PLACES)  # of tokens, by families, and of positions


class PartyLayers(nn.Module):
    """Takes the place of a model's layers: embedded rows in, hidden states after the last norm out.

    A transformers cache holds, in its first layer, the counters under which its rows lie in the session's cache, and
    nothing else; so ``crop`` and a cache that is used again mean what they mean elsewhere.
    """

    def __init__(self, inner: nn.Module, session: PartySession) -> None:
        super().__init__()
        # By transformers' names for them.
        self._embeddings: dict[str, nn.Module] = {}
        for name in _EMBEDDINGS:
            if isinstance(embedding := getattr(inner, name, None), nn.Module):
                self._embeddings[name] = embedding
                self.add_module(name, embedding)
        self._session = session

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Raises:
            RangeError: several prompts at once, a padded one, or an empty one.
        """
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = next(iter(self._embeddings.values()))(input_ids)
        if inputs_embeds is None:
            raise RangeError("neither token ids nor embedded rows: nothing was sent")
        if inputs_embeds.shape[0] != 1:
            raise RangeError(f"{inputs_embeds.shape[0]} prompts at once: profile two-party answers one at a time")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise RangeError("a prompt with padding: profile two-party answers prompts without")
        if not inputs_embeds.shape[1]:
            raise RangeError("the prompt is empty: nothing was sent")
        cache = options.get(_CACHE)
        if cache is None:
            cache = DynamicCache()
        if _PLACES in self._embeddings:
            start = cache.get_seq_length()
            inputs_embeds = inputs_embeds + self._embeddings[_PLACES](
                torch.arange(start, start + inputs_embeds.shape[1])
            )
        rows = inputs_embeds[0].detach().to(device="cpu", dtype=torch.float64).numpy()
        hidden, counters = self._session.forward(rows, _counters(cache))
        stored = torch.tensor(counters, dtype=torch.float64).reshape(1, 1, -1, 1)
        cache.update(stored, stored, 0)
        out = torch.from_numpy(hidden).to(device=inputs_embeds.device, dtype=inputs_embeds.dtype)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=out[None], **{_CACHE: cache})


def _counters(cache: DynamicCache) -> list[int]:
    if not cache.get_seq_length():
        return []
    return [int(counter) for counter in cache.layers[0].keys.reshape(-1).tolist()]


def use_shares(model: PreTrainedModel, session: PartySession) -> None:
    """Has the model's layers evaluated by the session; embedding, head and generation stay transformers' own.

    Raises:
        UnsupportedModelError: the model keeps its layers elsewhere.
    """
    inner = getattr(model, model.base_model_prefix, None)
    if not isinstance(inner, nn.Module) or not any(hasattr(inner, name) for name in _EMBEDDINGS):
        raise UnsupportedModelError("profile two-party finds no embedding in this model")
    setattr(model, model.base_model_prefix, PartyLayers(inner, session))
