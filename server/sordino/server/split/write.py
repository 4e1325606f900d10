"""Writes a bundle so that it is there whole or not at all.

::

    OUT/manifest.json            what both sides check
    OUT/client/                  config, tokenizer, client.safetensors
    OUT/server/weights.safetensors   one int8 tensor per group (more files above 2 GiB)
    OUT/server/slices.json       digests of each matrix's parts (sordino.server.slices)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from sordino.server.slices import slice_digests, write_slices
from sordino.server.split.discovery import Group, iter_members
from sordino.server.split.load import Loaded
from sordino.server.split.quantise import Quantised, norms, to_planes
from sordino.shared.errors import BundleError
from sordino.shared.manifest import (
    CLIENT_DIR,
    MANIFEST_NAME,
    SERVER_DIR,
    FileSpec,
    GroupSpec,
    MemberSpec,
    ModelManifest,
    WeightBits,
    sha256_file,
)

CLIENT_WEIGHTS: Final = "client.safetensors"
MAX_SHARD_BYTES: Final = 2 << 30
# They would have a client run code, or quantise what is quantised.
_DROPPED_KEYS: Final = ("auto_map", "quantization_config", "custom_generate", "custom_pipelines")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Gives a fresh folder beside ``out``; renames it to ``out`` at the end, or removes it on any error.

    Raises:
        BundleError: ``out`` exists and is no empty folder, or its parent does not exist.
    """
    refuse_existing(out)
    stage = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    stage.mkdir()
    try:
        yield stage
        refuse_existing(out)
        stage.replace(out)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    # The rename itself must survive a power cut.
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_existing(out: Path) -> None:
    """Raises BundleError unless a bundle may be made at ``out``."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BundleError(f"{out.name!r} exists and is not an empty folder: choose another one or remove it")
    if not out.absolute().parent.is_dir():
        raise BundleError(f"the folder that {out.name!r} should be made in does not exist")


def group_specs(groups: Sequence[Group], weights: Mapping[str, Quantised], bits: WeightBits) -> list[GroupSpec]:
    """The manifest's description of each group."""
    specs = []
    for group in groups:
        l1_max, l2_max = norms(weights[group.name].values, bits)
        members = tuple(MemberSpec(name=member.name, out_features=member.out_features) for member in group.members)
        specs.append(
            GroupSpec(
                name=group.name,
                layer=group.layer,
                in_features=group.in_features,
                members=members,
                weight_bits=bits,
                l1_max=l1_max,
                l2_max=l2_max,
            )
        )
    return specs


def write_bundle(
    out: Path,
    loaded: Loaded,
    groups: Sequence[Group],
    weights: Mapping[str, Quantised],
    specs: Sequence[GroupSpec],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ModelManifest:
    """Writes the bundle and returns its manifest.

    Raises:
        BundleError: see :func:`staged`.
    """
    bits = specs[0].weight_bits
    with staged(out) as stage:
        client, server = stage / CLIENT_DIR, stage / SERVER_DIR
        client.mkdir()
        server.mkdir()
        _write_config(client, loaded, groups)
        save_file(client_tensors(loaded.model, groups, weights), client / CLIENT_WEIGHTS, metadata={"format": "pt"})
        _write_server(server, groups, weights, bits, max_shard_bytes)
        manifest = ModelManifest(
            model_name=loaded.source.name,
            model_type=loaded.model.config.model_type,
            weight_bits=bits,
            groups=tuple(specs),
            client_files=_files(client),
            server_files=_files(server),
        )
        (stage / MANIFEST_NAME).write_bytes(manifest.to_json())
        _open_modes(stage)
    return manifest


def client_tensors(model: Any, groups: Sequence[Group], weights: Mapping[str, Quantised]) -> dict[str, torch.Tensor]:
    """Everything the client holds: what is no remote matrix, under its state-dict name, and each member's scales.

    Scales are ``<member>.scale``, float32 ``[out_features]``. A tensor that two names share is stored once, under the
    first of them.
    """
    remote = {f"{member.name}.weight" for member in iter_members(groups)}
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if name in remote or (tensor.numel() and key in seen):
            continue
        seen.add(key)
        tensors[name] = tensor.detach().contiguous()
    for group in groups:
        sizes = [member.out_features for member in group.members]
        for member, scale in zip(group.members, torch.split(weights[group.name].scale, sizes), strict=True):
            tensors[f"{member.name}.scale"] = scale.clone()
    return tensors


def _write_config(client: Path, loaded: Loaded, groups: Sequence[Group]) -> None:
    model, tokenizer = loaded.model, loaded.tokenizer
    model.config.save_pretrained(client)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        # Not save_pretrained: it refuses the sampling defaults that some checkpoints are published with.
        generation.to_json_file(client / "generation_config.json", use_diff=True)
    # Several named chat templates would become a folder of files; bundles are flat.
    tokenizer.save_pretrained(client, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    changes: dict[str, Any] = {}
    head = model.get_output_embeddings()
    if any(member.module is head for member in iter_members(groups)):
        # Else a client would tie the remote head back to the embedding.
        changes["tie_word_embeddings"] = False
    for path in sorted(client.glob("*.json")):
        if path.name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            _clean(path, changes if path.name == "config.json" else {})


def _clean(path: Path, changes: dict[str, Any]) -> None:
    body = _without_code(json.loads(path.read_text(encoding="utf-8"))) | changes
    path.write_text(json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_code(body: Any) -> Any:
    if isinstance(body, dict):
        return {key: _without_code(value) for key, value in body.items() if key not in _DROPPED_KEYS}
    return [_without_code(value) for value in body] if isinstance(body, list) else body


def _write_server(
    server: Path, groups: Sequence[Group], weights: Mapping[str, Quantised], bits: WeightBits, limit: int
) -> None:
    shards: list[list[Group]] = [[]]
    used = 0
    for group in groups:
        size = weights[group.name].values.numel() * (1 if bits == 8 else 2)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(group)
        used += size
    digests: dict[str, list[str]] = {}
    for index, shard in enumerate(shards, start=1):
        name = "weights.safetensors" if len(shards) == 1 else f"weights-{index:05d}-of-{len(shards):05d}.safetensors"
        matrices = {group.name: to_planes(weights[group.name].values, bits) for group in shard}
        save_file(matrices, server / name)
        digests |= {key: slice_digests(matrix, 1 if bits == 8 else 2) for key, matrix in matrices.items()}
    write_slices(server, digests)


def _open_modes(stage: Path) -> None:
    """Gives every file the mode of the manifest: safetensors makes its own readable by the owner alone."""
    mode = (stage / MANIFEST_NAME).stat().st_mode & 0o777
    for path in stage.glob("*/*"):
        path.chmod(mode)


def _files(folder: Path) -> dict[str, FileSpec]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
