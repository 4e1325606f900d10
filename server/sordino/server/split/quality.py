"""What quantisation costs: the same text through the original and through exact integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sordino.server.split.discovery import Group, Linear
from sordino.server.split.quantise import Quantised
from sordino.shared.errors import BundleError

_ROWS_AT_ONCE = 64
_FLAT = 1e-4


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over ``tokens`` predicted tokens. ``kl`` is KL(original || quantised) in nats; agreement is a share."""

    perplexity_reference: float
    perplexity_quantised: float
    kl: float
    top1_agreement: float
    tokens: int


def check_logits(model: Any, window: torch.Tensor) -> None:
    """Refuses a model whose logits say nothing, as after a load that left weights out.

    Raises:
        BundleError: at every position all tokens are equally likely (-ln V each), or a logit is not finite.
    """
    with torch.no_grad():
        logits = model(input_ids=window, use_cache=False).logits[0].to(torch.float32)
    if not bool(torch.isfinite(logits).all()):
        raise BundleError("the original model's logits are not finite")
    if float((logits.amax(dim=-1) - logits.amin(dim=-1)).max()) < _FLAT:
        raise BundleError(f"flat logits: the original model finds all {logits.shape[-1]} tokens equally likely")


def quantise_activations(inputs: torch.Tensor, x_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row: integers of magnitude <= ``x_max`` as float64 ``[t, n]``, and scales float32 ``[t, 1]``."""
    scale = inputs.abs().amax(dim=-1, keepdim=True) / x_max
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (inputs / scale).round_().clamp_(-x_max, x_max).to(torch.float64), scale


@contextmanager
def simulated(groups: Sequence[Group], weights: Mapping[str, Quantised], x_max: Mapping[str, int]) -> Iterator[None]:
    """Inside the block the groups' modules compute as client and server will: integer rows times integer matrix.

    Float64 holds every partial sum exactly (below 2^53), so only the two roundings differ from the original.
    """
    patched: list[Any] = []
    try:
        for group in groups:
            start = 0
            for member in group.members:
                rows = slice(start, start + member.out_features)
                start = rows.stop
                part = Quantised(weights[group.name].values[rows], weights[group.name].scale[rows])
                module: Any = member.module
                module.forward = _integer_forward(member, part, x_max[group.name])
                patched.append(module)
        yield
    finally:
        for module in patched:
            del module.forward


def measure(
    model: Any,
    groups: Sequence[Group],
    weights: Mapping[str, Quantised],
    x_max: Mapping[str, int],
    windows: Sequence[torch.Tensor],
    advance: Callable[[float], None] = lambda _: None,
) -> Quality:
    """Compares original and quantised model on ``windows`` (int64 ``[1, t]``), predicting every token but the first."""
    loss_reference = loss_quantised = kl = agree = 0.0
    tokens = 0
    for index, window in enumerate(windows):
        with torch.no_grad():
            original = model(input_ids=window, use_cache=False).logits[0, :-1]
            with simulated(groups, weights, x_max):
                quantised = model(input_ids=window, use_cache=False).logits[0, :-1]
        targets = window[0, 1:]
        # In slices: float64 log-probabilities of a whole window over 256,000 tokens would take gigabytes.
        for start in range(0, len(targets), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            p = original[rows].to(torch.float64).log_softmax(dim=-1)
            q = quantised[rows].to(torch.float64).log_softmax(dim=-1)
            target = targets[rows, None]
            loss_reference -= float(p.gather(1, target).sum())
            loss_quantised -= float(q.gather(1, target).sum())
            kl += float((p.exp() * (p - q)).sum())
            agree += float((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        tokens += len(targets)
        advance((index + 1) / len(windows))
    return Quality(
        perplexity_reference=_exp(loss_reference / tokens),
        perplexity_quantised=_exp(loss_quantised / tokens),
        kl=kl / tokens,
        top1_agreement=agree / tokens,
        tokens=tokens,
    )


def _integer_forward(member: Linear, weights: Quantised, x_max: int) -> Callable[[torch.Tensor], torch.Tensor]:
    bias: Any = getattr(member.module, "bias", None)

    def forward(input: torch.Tensor) -> torch.Tensor:  # nn.Linear's own name: callers may pass it
        integers, scale = quantise_activations(input.reshape(-1, input.shape[-1]), x_max)
        product = (integers @ weights.values.to(torch.float64).T).to(torch.float32)
        output = product * scale * weights.scale
        return (output if bias is None else output + bias).reshape(*input.shape[:-1], -1)

    return forward


def _exp(mean_loss: float) -> float:
    return math.exp(mean_loss) if mean_loss < 700 else math.inf
