"""A transformers cache whose full pages lie encrypted with the server, and the attention function that reads it.

Of each layer the newest tokens are here in clear: those of the running forward pass, the page that is not full yet, and
one page behind it, so that ``crop`` can go back. What is older is with the server. A forward pass attends to its own
tokens and those of the open page at home; only its queries to older pages travel.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import eager_mask

from sordino.client.attend import EncryptedAttention, Page
from sordino.shared.errors import RangeError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

IMPLEMENTATION: Final = "sordino_rlwe"
CACHE_NAMES: Final = ("cache", "past_key_values")  # of the highest release, and of the lowest
# Arguments that change what attention computes, of models whose attention is another than is done here.
_UNKNOWN: Final = ("s_aux", "position_bias", "head_mask", "cu_seq_lens_q")


@dataclass(frozen=True, slots=True)
class Held:
    """What ``update`` hands to the attention function in the place of keys, and of values: the tokens in clear, and, by
    row of the batch, the pages of those before them."""

    keys: torch.Tensor
    values: torch.Tensor
    pages: list[list[Page | None]]
    tokens: int
    attention: EncryptedAttention

    @property
    def sealed(self) -> int:
        return self.tokens * len(self.pages[0])


class EncryptedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's cache: pages by row of the batch, oldest first; None where a sliding window has passed by."""

    is_croppable = True
    is_sliding = False
    keys: torch.Tensor  # in clear, from position `start` on
    values: torch.Tensor

    def __init__(self, attention: EncryptedAttention, window: int | None) -> None:
        super().__init__()
        self.attention = attention
        self.window = window
        self.is_sliding = window is not None
        self.reset()

    def __deepcopy__(self, memo: object) -> EncryptedLayer:
        """A copy goes on by itself from the same pages: a prompt's cache can serve several answers."""
        del memo
        other = copy.copy(self)
        other.keys, other.values = self.keys.clone(), self.values.clone()
        other.pages = [list(row) for row in self.pages]
        return other

    def reset(self) -> None:
        self.is_initialized = False
        self.keys = self.values = torch.empty(0)
        self.tokens = 0  # of a page
        self.length = 0  # of the whole cache
        self.start = 0
        self.pages: list[list[Page | None]] = []

    @property
    def sealed(self) -> int:
        """Tokens that are in pages."""
        return self.tokens * len(self.pages[0]) if self.pages else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.tokens = self.attention.tokens(key_states.shape[-1], value_states.shape[-1])
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.pages = [[] for _ in range(key_states.shape[0])]
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Held, Held]:
        """``[batch, KV heads, new tokens, size]``; seals what became full."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._let_go()
        sealed = self.sealed
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        self.length += key_states.shape[2]
        first = sealed - self.start
        rows = [list(row) for row in self.pages]
        held = Held(self.keys[:, :, first:], self.values[:, :, first:], rows, self.tokens, self.attention)
        self._seal()
        return held, held

    def _let_go(self) -> None:
        """Keeps one full page in clear besides the open one, and no page that no window can reach again."""
        start = max(self.start, self.sealed - self.tokens)
        self.keys, self.values = self.keys[:, :, start - self.start :], self.values[:, :, start - self.start :]
        self.start = start
        if self.window is not None:
            passed = max(0, start - self.window) // self.tokens
            for row in self.pages:
                row[:passed] = [None] * passed

    def _seal(self) -> None:
        count = (self.length - self.sealed) // self.tokens
        if not count:
            return
        first = self.sealed - self.start
        blocks = []
        for states in (self.keys, self.values):
            rows, heads, _, size = states.shape
            full = states[:, :, first : first + count * self.tokens].reshape(rows, heads, count, self.tokens, size)
            blocks.append(_numpy(full.transpose(1, 2).flatten(0, 1)))
        pages = self.attention.seal(*blocks)
        for i, row in enumerate(self.pages):
            row.extend(pages[i * count : (i + 1) * count])

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens (a number <= 0): as far as the tokens in clear go, or to the end of a page."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the number of tokens to remove, as a negative number")
        if not tokens_to_remove or not self.is_initialized:
            return
        length = max(0, self.length + tokens_to_remove)
        left = length // self.tokens if length < self.sealed else self.sealed // self.tokens
        if left * self.tokens < self.start and length > left * self.tokens:
            raise RangeError(
                f"the cache goes back to token {self.start}, or to the end of a page of {self.tokens}, not to {length}"
            )
        reached = 0 if self.window is None else max(0, length - self.window + 1) // self.tokens
        if any(None in row[reached:left] for row in self.pages):
            raise RangeError(f"at token {length} the sliding window would reach back to pages that were let go")
        self.pages = [row[:left] for row in self.pages]
        self.keys, self.values = (x[:, :, : max(0, length - self.start)] for x in (self.keys, self.values))
        self.start, self.length = min(self.start, left * self.tokens), length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens, also those that a sliding window has passed: the mask leaves them out."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._choose(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._choose(torch.arange(len(self.pages))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._choose(torch.arange(len(self.pages)).repeat_interleave(repeats))

    def _choose(self, rows: torch.Tensor) -> None:
        """Rows share pages: the server need not know that there are beams."""
        if self.is_initialized:
            self.keys, self.values = (x.index_select(0, rows.to(x.device)) for x in (self.keys, self.values))
            self.pages = [list(self.pages[row]) for row in rows.tolist()]


class EncryptedCache(Cache):  # type: ignore[misc]
    """``generate(cache=EncryptedCache(...))``; a connected model with attention ``rlwe`` makes its own.

    Raises:
        UnsupportedModelError: the model has layers that keep something else than keys and values.
    """

    def __init__(self, attention: EncryptedAttention, config: Any) -> None:
        layers = []
        for layer in DynamicCache(config=config).layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise UnsupportedModelError(f"encrypted attention does not know layers with a {type(layer).__name__}")
            layers.append(EncryptedLayer(attention, getattr(layer, "sliding_window", None)))
        super().__init__(layers=layers)


def encrypted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as ``transformers`` calls it: ``query [batch, heads, rows, d]``; keys in clear, or a :class:`Held`.

    Returns:
        ``[batch, rows, heads, d]``, and the weights.
    """
    if unknown := [name for name in _UNKNOWN if more.get(name) is not None]:
        raise UnsupportedModelError(f"encrypted attention does not know the argument {unknown[0]!r}")
    held = key if isinstance(key, Held) else None
    keys, values = (held.keys, held.values) if held else (key, value)
    groups = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(groups, dim=1).transpose(2, 3)
    sealed = held.sealed if held else 0
    mask = _additive(module, attention_mask, is_causal, sealed + keys.shape[2], scores)
    wanted = _wanted(mask, held) if held and sealed else []
    if held and sealed:
        old = scores.new_zeros(*scores.shape[:3], sealed)
        for row, numbers, pages in wanted:
            found = held.attention.scores(_numpy(query[row]), pages, held.tokens)
            _by_page(old[row], held.tokens)[:, :, numbers] = torch.from_numpy(found).to(old)
        scores = torch.cat([old, scores], dim=3)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    out = weights[..., sealed:] @ values.repeat_interleave(groups, dim=1)
    if held and sealed:
        for row, numbers, pages in wanted:
            old = _by_page(weights[row, :, :, :sealed], held.tokens)[:, :, numbers]
            out[row] += torch.from_numpy(held.attention.outputs(_numpy(old), pages, values.shape[3])).to(out)
    return out.transpose(1, 2).contiguous(), weights


def _additive(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    total: int,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """``[batch or 1, heads or 1, rows, total]`` to add to scores, or None."""
    rows, lowest = like.shape[2], torch.finfo(like.dtype).min
    if mask is not None:
        mask = mask[..., :total]
        return torch.where(mask, 0.0, lowest) if mask.dtype == torch.bool else mask
    if rows == 1 or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return None
    ahead = torch.ones(rows, total, dtype=torch.bool, device=like.device).triu(total - rows + 1)
    return like.new_zeros(rows, total).masked_fill(ahead, lowest)[None, None]


def _wanted(mask: torch.Tensor | None, held: Held) -> list[tuple[int, list[int], list[Page]]]:
    """The rows of the batch to which the mask leaves something of pages, and of which: it depends on lengths alone."""
    count, chosen = len(held.pages[0]), []
    seen = torch.ones(1, count, dtype=torch.bool)
    if mask is not None:
        parts = _by_page(mask[..., : held.sealed], held.tokens)
        seen = (parts > torch.finfo(mask.dtype).min / 2).flatten(1, 2).any(dim=3).any(dim=1)
    for row, have in enumerate(held.pages):
        numbers = torch.nonzero(seen[row if seen.shape[0] > 1 else 0]).flatten().tolist()
        pages = [page for number in numbers if (page := have[number]) is not None]
        if len(pages) < len(numbers):
            raise RangeError("the mask asks for tokens that the sliding window has passed")
        if pages:
            chosen.append((row, numbers, pages))
    return chosen


def _by_page(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """A view of ``[..., P * tokens]`` as ``[..., P, tokens]``."""
    return x.view(*x.shape[:-1], -1, tokens)


def _numpy(x: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(x.detach().to(device="cpu", dtype=torch.float32).numpy())


def use_encrypted_cache(model: PreTrainedModel, attention: EncryptedAttention) -> None:
    """Has ``generate`` and forward passes of the model make :class:`EncryptedCache` where they made a dynamic one.

    Raises:
        UnsupportedModelError: the model has layers that keep something else than keys and values.
    """
    EncryptedCache(attention, model.config)  # refused now rather than in the middle of an answer
    prepare: Callable[..., None] = model._prepare_cache_for_generation

    def own_cache() -> EncryptedCache:
        return EncryptedCache(attention, model.config)

    def prepared(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **more: Any) -> None:
        del self
        prepare(generation_config, model_kwargs, *args, **more)
        for name in CACHE_NAMES:
            made = model_kwargs.get(name)
            if type(made) is DynamicCache and not getattr(made, "_is_user_defined", False):
                model_kwargs[name] = own_cache()

    parameters = list(inspect.signature(model.forward).parameters)
    name_here = next(name for name in CACHE_NAMES if name in parameters)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = len(args) > parameters.index(name_here) or any(kwargs.get(name) is not None for name in CACHE_NAMES)
        use = kwargs.get("use_cache")
        if not given and (getattr(module.config, "use_cache", True) if use is None else use):
            kwargs = {name: item for name, item in kwargs.items() if name not in CACHE_NAMES}
            kwargs[name_here] = own_cache()
        return args, kwargs

    model._prepare_cache_for_generation = MethodType(prepared, model)
    model.register_forward_pre_hook(before, with_kwargs=True)


AttentionInterface.register(IMPLEMENTATION, encrypted_attention)
# Without this one the attention function would get no mask at all.
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
