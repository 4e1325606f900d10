"""Collects H = X^T X of each group's input X over a calibration text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sordino.server.split.discovery import Group

# Bytes of float32 matrices held at once; more groups than fit take another forward over the text.
_BUDGET: Final = 2 << 30


class CalibrationWarning(UserWarning):
    """The calibration text is too short, or looks like noise to the model."""


def batches(groups: Sequence[Group], budget: int = _BUDGET) -> Iterator[list[Group]]:
    """Cuts the groups, in order, into runs whose matrices H fit into ``budget`` bytes together (at least one each)."""
    batch: list[Group] = []
    used = 0
    for group in groups:
        size = 4 * group.in_features**2
        if batch and used + size > budget:
            yield batch
            batch, used = [], 0
        batch.append(group)
        used += size
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a calibration text showed of a group's input rows x, as means over its tokens.

    Attributes:
        hessian: x^T x, float32 ``[in_features, in_features]``.
        peak: of max_j x_j^2.
    """

    hessian: torch.Tensor
    peak: float


def gather(model: Any, groups: Sequence[Group], windows: Sequence[torch.Tensor]) -> dict[str, Inputs]:
    """Runs the model over the text and looks at the input of each group; by group name.

    Args:
        windows: int64 ``[1, t]`` each.
    """
    sums = {group.name: torch.zeros(group.in_features, group.in_features) for group in groups}
    peaks = {group.name: 0.0 for group in groups}
    handles = []

    def accumulate(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            rows = value.detach().reshape(-1, value.shape[-1]).to(torch.float32)
            sums[name].addmm_(rows.T, rows)
            peaks[name] += float(rows.abs().amax(dim=1).square().sum())

        return hook

    try:
        for group in groups:
            hook = accumulate(group.name)
            # The members share their input: the first one sees it.
            handles.append(group.members[0].module.register_forward_pre_hook(hook, with_kwargs=True))
        with torch.no_grad():
            for window in windows:
                model(input_ids=window, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    tokens = max(1, sum(window.shape[1] for window in windows))
    return {name: Inputs(total / tokens, peaks[name] / tokens) for name, total in sums.items()}


def warn_if_poor(
    model: Any, groups: Sequence[Group], windows: Sequence[torch.Tensor], evaluation: Sequence[torch.Tensor]
) -> None:
    """Warns (:class:`CalibrationWarning`) of a text that would steer the rounding wrongly.

    Too short: fewer tokens than the widest input, so that H has directions it knows nothing of. Noise: the model finds
    the text far less likely than the evaluation text (ten times its perplexity), so its activations are not typical.
    """
    tokens = sum(window.shape[1] for window in windows)
    widest = max(group.in_features for group in groups)
    if tokens < widest:
        warnings.warn(
            f"the calibration text has {tokens} tokens, fewer than the widest input ({widest}): give a longer one",
            CalibrationWarning,
            stacklevel=3,
        )
    if not windows:
        return
    own, usual = _mean_loss(model, windows[0]), _mean_loss(model, evaluation[0])
    if own > usual + 2.3:  # ln 10
        warnings.warn(
            "the calibration text looks like noise: its perplexity is over ten times that of the evaluation text",
            CalibrationWarning,
            stacklevel=3,
        )


def _mean_loss(model: Any, window: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(input_ids=window, use_cache=False).logits[0, :-1].to(torch.float32)
    return float(torch.nn.functional.cross_entropy(logits, window[0, 1:]))
