"""Finds the linear modules of a model and groups those that read the same input.

Nothing here knows an architecture. One short probe forward runs with hooks; whatever linear module saw the very same
tensor as the one before it belongs to the same group (q, k, v; gate, up), because a masked input then serves them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sordino.shared.errors import UnsupportedModelError

PROBE_TOKENS: Final = 8
_EXPERT_KEYS: Final = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "expert_num",
)
_EXPERT_CLASS: Final = re.compile(r"Expert|MoE|Moe(?![a-z])|Router")
_ROUTING: Final = (
    "the model routes tokens between experts, and the groups it asks for would show the server which experts the "
    "prompt picks; mixture-of-experts models cannot be split"
)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear module by its path in the model. ``module`` is an ``nn.Linear`` or a ``Conv1D`` of ``transformers``."""

    name: str
    module: Any

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as float32 ``[out_features, in_features]`` (``Conv1D`` keeps it transposed)."""
        weight: torch.Tensor = self.module.weight.detach().to(torch.float32)
        return weight.T.contiguous() if isinstance(self.module, Conv1D) else weight

    @property
    def out_features(self) -> int:
        shape = self.module.weight.shape
        return int(shape[1] if isinstance(self.module, Conv1D) else shape[0])

    @property
    def in_features(self) -> int:
        shape = self.module.weight.shape
        return int(shape[0] if isinstance(self.module, Conv1D) else shape[1])


@dataclass(frozen=True, slots=True)
class Group:
    """Linear modules that read the same input, in the order in which the model calls them."""

    name: str
    layer: int
    members: tuple[Linear, ...]

    @property
    def in_features(self) -> int:
        return self.members[0].in_features

    @property
    def weight(self) -> torch.Tensor:
        """The members' matrices below each other, float32 ``[sum of out_features, in_features]``."""
        return torch.cat([member.weight for member in self.members])


def refuse_experts(model: nn.Module) -> None:
    """Refuses mixture-of-experts models.

    Raises:
        UnsupportedModelError: the config names more than one expert, a module's class is named after experts or a
            router, or a layer holds a parameter of three or more dimensions (stacked experts) outside a convolution.
    """
    config = _text_config(model)
    for key in _EXPERT_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 1:
            raise UnsupportedModelError(f"{_ROUTING} (config: {key} is {value})")
    for name, module in find_layers(model)[1].named_modules():
        if _EXPERT_CLASS.search(type(module).__name__):
            raise UnsupportedModelError(f"{_ROUTING} (layer module {name!r} is a {type(module).__name__})")
        if isinstance(module, nn.modules.conv._ConvNd):
            continue  # its kernel has three dimensions and routes nothing; it stays with the client
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter.dim() >= 3:
                raise UnsupportedModelError(
                    f"{_ROUTING} (parameter {parameter_name!r} has {parameter.dim()} dimensions, as stacked experts do)"
                )


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its path.

    Raises:
        UnsupportedModelError: there is not exactly one outermost ``ModuleList`` of ``num_hidden_layers`` modules.
    """
    count = getattr(_text_config(model), "num_hidden_layers", None)
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found.append((name, module))
    if len(found) != 1:
        raise UnsupportedModelError(f"expected one list of {count} decoder layers, found {[name for name, _ in found]}")
    return found[0]


def find_groups(
    model: nn.Module,
    *,
    local_layers: Sequence[int] = (),
    local_modules: Sequence[str] = (),
    remote_head: bool = False,
) -> list[Group]:
    """Finds the groups that go to the server, in the order in which the model evaluates them.

    Args:
        model: a causal language model of ``transformers`` in float32, on any real device.
        local_layers: indices of layers that stay with the client as a whole.
        local_modules: last path components (``o_proj``) of modules that stay with the client in every layer.
        remote_head: also make the output embedding a group of its own, with ``layer == num_hidden_layers``.

    Raises:
        UnsupportedModelError: a linear module is called never or more than once in a forward, an option names nothing
            in this model, or nothing is left for the server.
    """
    prefix, layers = find_layers(model)
    linears = _linears(prefix, layers, local_layers, local_modules)
    head = _head(model) if remote_head else None
    calls = _probe(model, [*linears, *([(len(layers), head)] if head else [])])
    groups: list[list[_Call]] = []
    for call in calls:
        last = groups[-1][-1] if groups else None
        if last and call.same_input(last) and call.layer == last.layer and call.layer < len(layers):
            groups[-1].append(call)
        else:
            groups.append([call])
    if not groups:
        raise UnsupportedModelError("no linear module is left for the server: loosen local_layers or local_modules")
    return [_group([call.linear for call in group], group[0].layer) for group in groups]


@dataclass(frozen=True, slots=True)
class _Call:
    linear: Linear
    layer: int
    # The tensor itself, not id(): a freed tensor's id is given to the next one.
    input: torch.Tensor
    version: int

    def same_input(self, other: _Call) -> bool:
        return self.input is other.input and self.version == other.version


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config()


def _linears(
    prefix: str, layers: nn.ModuleList, local_layers: Sequence[int], local_modules: Sequence[str]
) -> list[tuple[int, Linear]]:
    if wrong := [index for index in local_layers if not 0 <= index < len(layers)]:
        raise UnsupportedModelError(f"local_layers {wrong} do not exist: the model has layers 0 to {len(layers) - 1}")
    every = [
        (index, Linear(f"{prefix}.{index}.{name}", module))
        for index, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    known = {linear.name.rsplit(".", 1)[-1] for _, linear in every}
    if unknown := sorted(set(local_modules) - known):
        raise UnsupportedModelError(f"local_modules {unknown} do not exist: the layers have {sorted(known)}")
    return [
        (index, linear)
        for index, linear in every
        if index not in local_layers and linear.name.rsplit(".", 1)[-1] not in local_modules
    ]


def _head(model: nn.Module) -> Linear:
    getter: Any = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(f"the output embedding is no linear module but {type(head).__name__}")
    return Linear(next(name for name, module in model.named_modules() if module is head), head)


def _probe(model: nn.Module, linears: Sequence[tuple[int, Linear]]) -> list[_Call]:
    calls: list[_Call] = []
    handles = []

    def record(linear: Linear, layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            calls.append(_Call(linear, layer, value, value._version))

        return hook

    config = _text_config(model)
    ids = (torch.arange(PROBE_TOKENS) + 3) % int(config.vocab_size)
    was_training = model.training
    model.eval()
    try:
        for layer, linear in linears:
            handles.append(linear.module.register_forward_pre_hook(record(linear, layer), with_kwargs=True))
        # no_grad and not inference_mode: tensors of the latter have no _version.
        with torch.no_grad():
            model(input_ids=ids[None].to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    counts = {linear.name: 0 for _, linear in linears}
    for call in calls:
        counts[call.linear.name] += 1
    for name, count in counts.items():
        if count != 1:
            how = "never" if count == 0 else f"{count} times"
            raise UnsupportedModelError(f"linear module {name!r} is called {how} in one forward, it must be once")
    return calls


def _group(members: list[Linear], layer: int) -> Group:
    paths = [member.name.split(".") for member in members]
    shared = 0
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    tails = "+".join(".".join(path[shared:]) for path in paths)
    return Group(".".join([*paths[0][:shared], tails]), layer, tuple(members))


def iter_members(groups: Sequence[Group]) -> Iterator[Linear]:
    """Every linear module of the groups, in order."""
    for group in groups:
        yield from group.members
