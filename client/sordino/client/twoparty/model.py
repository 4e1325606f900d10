"""A transformers model whose layers are evaluated on shares."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from sordino.client.kvcache import CACHE_NAMES
from sordino.client.twoparty.session import NO_TOKEN, PartySession
from sordino.shared.errors import LimitError, ProtocolError, RangeError, UnsupportedModelError
from sordino.shared.twoparty.forward import Sight
from sordino.shared.twoparty.numbers import LONGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import GenerationConfig, PreTrainedModel

_CACHE: Final = next(
    name for name in CACHE_NAMES if name in {one.name for one in fields(BaseModelOutputWithPastAndCrossAttentions)}
)

I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

# The places of a call for which logits are wanted, from the whole model to its layers; of each thread.
_WANTED: Final[ContextVar[slice | I64]] = ContextVar("wanted", default=slice(None))
_PADDING: Final = -1  # in the place of the counter of a row that was not sent
_TOP_K: Final = 50  # of transformers, where nobody asks for another: passed over
_PLACES: Final = "wpe"
_EMBEDDINGS: Final = ("embed_tokens", "wte", _PLACES)  # of tokens, by families, and of positions


class PartyLayers(nn.Module):
    """Takes the place of a model's layers: embedded rows in, hidden states after the last norm out, or tokens.

    A transformers cache holds, in its first layer, the counters under which its rows lie in the session's cache, and
    nothing else; so ``crop``, the reordering of beams and a cache that is used again mean what they mean elsewhere.
    Padding is not sent. Prompts of a batch share a pass, and its rounds; each sees its own rows of the cache alone.
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
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """
        Raises:
            RangeError: a prompt is empty, or a mask is of another shape, or shows a token that was padding when it was
                cached; hidden states of layers are asked for, or another kind of cache is given.
            LimitError: positions that the model has not. SordinoError: see :meth:`PartySession.forward`.
        """
        wanted = _WANTED.get()
        _WANTED.set(slice(None))
        if any(options.get(name) for name in ("output_hidden_states", "output_attentions")):
            raise RangeError("states of layers and attention are nowhere in profile two-party: they are shares")
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = next(iter(self._embeddings.values()))(input_ids)
        if inputs_embeds is None:
            raise RangeError("neither token ids nor embedded rows: nothing was sent")
        given = options.get(_CACHE)
        cache = DynamicCache() if given is None else given
        if not isinstance(cache, DynamicCache):
            raise RangeError(f"profile two-party takes a DynamicCache, not a {type(cache).__name__}")
        batch, new, past = *inputs_embeds.shape[:2], cache.get_seq_length()
        if not batch * new:
            raise RangeError("the prompt is empty: nothing was sent")
        shown = torch.ones(batch, past + new, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.shape != shown.shape:
                raise RangeError(
                    f"a mask {list(attention_mask.shape)} of {batch} prompts with {past + new} tokens: it has a place "
                    "for each, cached ones too"
                )
            shown = attention_mask.cpu().bool()
        if position_ids is None:
            position_ids = torch.arange(past, past + new)[None]
        positions = position_ids.cpu().expand(batch, new)
        most = self._session.plan.shape.positions
        first, last = int(positions.min()), int(positions.max())
        if not 0 <= first <= last < most:
            raise LimitError(f"positions {first} to {last}: this model has 0 to {most - 1}")
        if _PLACES in self._embeddings:
            inputs_embeds = inputs_embeds + self._embeddings[_PLACES](positions.to(inputs_embeds.device))
        embedded = inputs_embeds.detach().to(device="cpu", dtype=torch.float64).numpy()
        hidden = np.full((batch, new, 1), NO_TOKEN) if self._session.opens_tokens else np.zeros_like(embedded)
        counters = np.full((batch, past + new), _PADDING)
        if past:
            counters[:, :past] = cache.layers[0].keys.reshape(batch, past).long().numpy()
        # Place after place, so that what a crop leaves is what the session's cache begins with.
        places, rows = np.nonzero(shown.numpy()[:, past:].T)
        if len(rows):
            kept = _beginning(self._session.cached, int(counters.max()))
            sight = None
            # Without it a row sees all that is kept, and its place there is its position.
            plain = batch == 1 and bool(shown.all()) and counters[0, :past].tolist() == kept
            if not (plain and np.array_equal(positions[0], np.arange(past, past + new))):
                sight = _sight(counters, shown.numpy(), kept, rows, places, positions.numpy())
            opened = np.flatnonzero(np.isin(places, np.arange(new)[wanted])).tolist()
            found, taken = self._session.forward(embedded[rows, places], kept, sight, opened)
            hidden[rows, places] = found
            counters[rows, past + places] = taken
        stored = torch.from_numpy(counters[:, past:]).double().reshape(batch, 1, new, 1)
        cache.update(stored, stored, 0)
        out = torch.from_numpy(hidden).to(inputs_embeds.device)
        out = out if self._session.opens_tokens else out.to(inputs_embeds.dtype)
        left = None if given is None and use_cache is False else cache
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=out, **{_CACHE: left})


def _want(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
    """A hook before a whole model's call: for which places it will make logits."""
    kept = options.get("logits_to_keep", 0)
    _WANTED.set(slice(-kept, None) if isinstance(kept, int) else kept.cpu().numpy())


def _want_all(*_: Any) -> None:
    """A hook after it, however it ended."""
    _WANTED.set(slice(None))


class ChosenHead(nn.Module):
    """Takes the place of a head where the parties have chosen tokens: of each the logit is 0, and -inf of all others.
    Where none was chosen all are 0."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        """``[batch, rows, 1]`` to ``[batch, rows, V]``."""
        numbers = chosen.long()
        logits = torch.full((*chosen.shape[:-1], self._tokens), -torch.inf, device=chosen.device)
        logits.scatter_(-1, numbers.clamp(min=0), 0.0)
        return logits.masked_fill_(numbers < 0, 0.0)


def _draw_on_shares(model: PreTrainedModel, session: PartySession) -> None:
    """Has ``generate()`` tell the session its temperature, and refuse what needs logits."""
    prepare: Any = model._get_logits_processor

    def processors(generation_config: GenerationConfig, *arguments: Any, **options: Any) -> LogitsProcessorList:
        wanted = prepare(generation_config, *arguments, **options)
        refused = {type(one).__name__ for one in wanted if not isinstance(one, TemperatureLogitsWarper)}
        if generation_config.top_k == _TOP_K:
            refused.discard(TopKLogitsWarper.__name__)
        if generation_config.num_beams > 1:
            refused.add("beams")
        if generation_config.num_return_sequences > 1:
            refused.add("several answers to one prompt")
        if refused:
            raise RangeError(
                f"this provider opens the next token alone, and no logits: {', '.join(sorted(refused))} cannot be had "
                "(top_p=1.0, top_k=0 and repetition_penalty=1.0 are none); a temperature can"
            )
        session.temperature = generation_config.temperature if generation_config.do_sample else 0.0
        return LogitsProcessorList()

    model._get_logits_processor = processors


def _beginning(cached: Sequence[int], last: int) -> list[int]:
    """Of a session's cache, up to the row with this counter; nothing for ``_PADDING``.

    Raises:
        ProtocolError: it is gone.
    """
    if last == _PADDING:
        return []
    if last not in cached:
        raise ProtocolError("the cache's rows are gone, another prompt came since: begin with an empty one")
    return list(cached[: cached.index(last) + 1])


def _sight(counters: I64, shown: Bool, kept: list[int], rows: I64, places: I64, positions: I64) -> Sight:
    """What new rows see: those of their own prompt that were there before, unless they are masked.

    Args:
        counters, shown: ``[batch, past + new]``, and which of them are not masked. kept: counters of the cache.
        rows, places: of each new row, its prompt and its place among the new ones. positions: ``[batch, new]``.

    Raises:
        RangeError: a token is shown that was padding when it was cached. ProtocolError: a row of the cache is gone.
    """
    past, of_cache = counters.shape[1] - positions.shape[1], {counter: place for place, counter in enumerate(kept)}
    visible = np.zeros((len(rows), len(kept) + len(rows)), bool)
    for prompt in range(len(counters)):
        own = rows == prompt
        before = counters[prompt, :past][shown[prompt, :past]].tolist()
        if _PADDING in before:
            raise RangeError("the mask shows a token that was padding when it was cached, and so was never sent")
        if any(counter not in of_cache for counter in before):
            raise ProtocolError("the cache's rows are gone, another prompt came since: begin with an empty one")
        visible[np.ix_(own, [of_cache[counter] for counter in before])] = True
        own_places = np.flatnonzero(own)
        visible[np.ix_(own, len(kept) + own_places)] = own_places <= own_places[:, None]
    return Sight(positions[rows, places], visible)


def use_shares(model: PreTrainedModel, session: PartySession) -> None:
    """Has the model's layers evaluated by the session; embedding, head and generation stay transformers' own, but for
    the head where tokens alone are opened.

    Raises:
        UnsupportedModelError: the model keeps its layers elsewhere.
    """
    inner = getattr(model, model.base_model_prefix, None)
    if not isinstance(inner, nn.Module) or not any(hasattr(inner, name) for name in _EMBEDDINGS):
        raise UnsupportedModelError("profile two-party finds no embedding in this model")
    layers = PartyLayers(inner, session)
    setattr(model, model.base_model_prefix, layers)
    if hasattr(model.config, "max_position_embeddings"):  # where answers end, and prompts are refused
        model.config.max_position_embeddings = min(model.config.max_position_embeddings, LONGEST)
    model.register_forward_pre_hook(_want, with_kwargs=True)
    model.register_forward_hook(_want_all, always_call=True)
    if session.plan.choice is not None:
        model.set_output_embeddings(ChosenHead(session.plan.choice.tokens))
        _draw_on_shares(model, session)
