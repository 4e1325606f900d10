"""Turns a checkpoint into a bundle: a client part anybody may hold and integer matrices for the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from sordino.server.split.balance import scale_floor
from sordino.server.split.calibrate import batches, gather, warn_if_poor
from sordino.server.split.discovery import Group, find_groups, refuse_experts
from sordino.server.split.gptq import quantise_gptq
from sordino.server.split.load import load, locate
from sordino.server.split.quality import check_logits, measure
from sordino.server.split.quantise import Quantised, check_finite, quantise_nearest, quantise_search
from sordino.server.split.report import SplitReport
from sordino.server.split.text import calibration_text as shipped_calibration
from sordino.server.split.text import evaluation_text, windows
from sordino.server.split.write import group_specs, refuse_existing, write_bundle
from sordino.shared.errors import BundleError
from sordino.shared.manifest import WeightBits

Rounding = Literal["gptq", "search", "nearest"]
Progress = Callable[[str, float], None]


def _silent(_stage: str, _done: float) -> None:
    pass


@torch.inference_mode(mode=False)  # its tensors count their changes, whatever mode the caller is in
def split_model(
    model: str | Path,
    out: Path,
    *,
    gguf_file: str | None = None,
    weight_bits: WeightBits = 8,
    local_layers: Sequence[int] = (),
    local_modules: Sequence[str] = (),
    remote_head: bool = False,
    rounding: Rounding = "gptq",
    calibration_text: str | None = None,
    progress: Progress = _silent,
) -> SplitReport:
    """Splits a causal language model of ``transformers`` into a bundle at ``out``, and measures what it costs.

    Args:
        model: a folder, a hub id, or the path of a ``.gguf`` file. Any float dtype; it is read as float32.
        out: the bundle's folder; it must not exist, or be empty. It appears whole at the end, or not at all.
        gguf_file: a GGUF file's name inside ``model``.
        weight_bits: 8, or 12 for higher quality at twice the server's work.
        local_layers: indices of layers that stay with the client as a whole.
        local_modules: last path components (``o_proj``) of modules that stay with the client: fewer rounds.
        remote_head: send the output embedding to the server, too. A tied embedding stays with the client as well.
        rounding: ``gptq`` (best), ``search`` (scales only) or ``nearest`` (no calibration, fastest).
        calibration_text: replaces the text that comes with the package; ignored by ``nearest``.
        progress: called with a stage ("load", "discover", "quantise", "measure", "write") and its done share in [0, 1].

    Raises:
        UnsupportedModelError: the model cannot be split; the text says why.
        BundleError: ``out`` is taken, the checkpoint is incomplete, or its logits are flat.
        RangeError: a tensor holds NaN or infinity.
    """
    started = time.perf_counter()
    out = Path(out).absolute()  # "." has no name to make a folder beside it
    if weight_bits not in (8, 12) or rounding not in ("gptq", "search", "nearest"):
        raise ValueError("weight_bits must be 8 or 12 and rounding one of 'gptq', 'search', 'nearest'")
    refuse_existing(out)
    progress("load", 0.0)
    loaded = load(locate(model, gguf_file))
    progress("load", 1.0)

    refuse_experts(loaded.model)
    groups = find_groups(loaded.model, local_layers=local_layers, local_modules=local_modules, remote_head=remote_head)
    for name, parameter in loaded.model.named_parameters():
        check_finite(name, parameter)
    evaluation = windows(loaded.model, loaded.tokenizer, evaluation_text())
    if not evaluation:
        raise BundleError("the tokenizer makes no tokens of the evaluation text")
    check_logits(loaded.model, evaluation[0][:, :16])
    progress("discover", 1.0)

    calibration: list[torch.Tensor] = []
    if rounding != "nearest":
        text = shipped_calibration() if calibration_text is None else calibration_text
        calibration = windows(loaded.model, loaded.tokenizer, text)
        warn_if_poor(loaded.model, groups, calibration, evaluation)
    weights = quantise_groups(loaded.model, groups, weight_bits, rounding, calibration, progress)
    specs = group_specs(groups, weights, weight_bits)
    x_max = {spec.name: spec.x_max for spec in specs}
    quality = measure(loaded.model, groups, weights, x_max, evaluation, advance=lambda done: progress("measure", done))

    progress("write", 0.0)
    manifest = write_bundle(out, loaded, groups, weights, specs)
    progress("write", 1.0)
    return SplitReport(
        model_name=manifest.model_name,
        reference="the GGUF file's weights, dequantised" if loaded.source.gguf_file else "the checkpoint, in float32",
        weight_bits=weight_bits,
        rounding=rounding,
        perplexity_reference=quality.perplexity_reference,
        perplexity_quantised=quality.perplexity_quantised,
        kl=quality.kl,
        top1_agreement=quality.top1_agreement,
        tokens=quality.tokens,
        groups=len(groups),
        weights_bytes=sum(spec.size for spec in manifest.server_files.values()),
        client_bytes=sum(spec.size for spec in manifest.client_files.values()),
        x_max_min=min(x_max.values()),
        seconds=time.perf_counter() - started,
        fingerprint=manifest.fingerprint,
    )


def quantise_groups(
    model: Any,
    groups: Sequence[Group],
    bits: WeightBits,
    rounding: Rounding,
    calibration: Sequence[torch.Tensor],
    progress: Progress = _silent,
) -> dict[str, Quantised]:
    """Quantises every group's matrix; values int16 ``[m, n]`` by group name.

    Args:
        calibration: windows of tokens, int64 ``[1, t]``; unused by ``nearest``.
    """
    done = 0
    result: dict[str, Quantised] = {}
    for batch in batches(groups):
        # The matrices H of one batch at a time: those of a large model do not fit into memory together.
        gathered = {} if rounding == "nearest" else gather(model, batch, calibration)
        for group in batch:
            weight, inputs = group.weight, gathered.get(group.name)
            floor = scale_floor(weight, inputs) if bits == 12 else None
            if inputs is None:
                result[group.name] = quantise_nearest(weight, bits, floor)
            elif rounding == "search":
                result[group.name] = quantise_search(weight, bits, inputs.hessian.diagonal(), floor)
            else:
                result[group.name] = quantise_gptq(weight, bits, inputs.hessian, floor)
            done += 1
            progress("quantise", done / len(groups))
    return result
