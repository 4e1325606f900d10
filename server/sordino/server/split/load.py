"""Loads a model and its tokenizer for splitting: float32, safetensors or GGUF, never code from the checkpoint."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from sordino.shared.errors import BundleError, UnsupportedModelError

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from. ``place`` is a folder or a hub id, ``gguf_file`` a file name inside it or None."""

    place: str
    gguf_file: str | None
    name: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in float32 and in eval mode, and its tokenizer (both of ``transformers``, which has no types)."""

    source: Source
    model: Any
    tokenizer: Any


def locate(model: str | Path, gguf_file: str | None = None) -> Source:
    """Tells a folder, a hub id and a path that ends in ``.gguf`` apart.

    Raises:
        BundleError: a GGUF file does not exist, or is none.
    """
    path = Path(model)
    if gguf_file is None and path.suffix == ".gguf":
        path, gguf_file = path.parent, path.name
    if gguf_file is None and not path.exists() and not _HUB_ID.fullmatch(str(model)):
        raise BundleError(f"there is no folder or .gguf file {str(model)!r}")
    if gguf_file is None:
        return Source(str(model), None, path.resolve().name if path.is_dir() else str(model))
    if path.is_dir() and not (path / gguf_file).is_file():
        raise BundleError(f"no GGUF file {gguf_file!r} in {path.name!r}")
    if path.is_dir():
        with (path / gguf_file).open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BundleError(f"{gguf_file!r} is no GGUF file")
    return Source(str(path), gguf_file, Path(gguf_file).stem)


def load(source: Source) -> Loaded:
    """Loads model and tokenizer.

    Raises:
        UnsupportedModelError: the architecture is unknown, wants its own code, or the checkpoint is already quantised.
        BundleError: the checkpoint has missing, extra or misshapen tensors, or no tokenizer.
    """
    extra: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    folder = Path(source.place)
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError("the folder holds an adapter: merge it into its base model first")
    try:
        config = AutoConfig.from_pretrained(source.place, trust_remote_code=False, **extra)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{source.name!r}: transformers does not know this architecture: {error}"
        ) from error
    except (OSError, struct.error, IndexError) as error:
        missing = "" if Path(source.place).exists() else "there is no such path; "
        raise BundleError(f"{source.name!r} is no model folder, GGUF file or hub id: {missing}{error}") from error
    if getattr(config, "auto_map", None):
        raise UnsupportedModelError(f"{source.name!r} needs code of its own (auto_map), which is never run")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{source.name!r} is an encoder-decoder, only causal language models can be split")
    if getattr(config, "quantization_config", None) and not source.gguf_file:
        raise UnsupportedModelError(f"{source.name!r} is already quantised: split the checkpoint it was made from")
    with _no_bars():
        return Loaded(source, _load_model(source, extra), _load_tokenizer(source, extra))


@contextmanager
def _no_bars() -> Iterator[None]:
    """Progress is the caller's to show: transformers' own bars would be drawn across it."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_model(source: Source, extra: dict[str, Any]) -> Any:
    options = dict(extra) or {"use_safetensors": True}
    if source.gguf_file and (gguf_config := getattr(transformers, "GgufConfig", None)):
        # Else the weights of some architectures stay packed where a kernel for them is installed.
        options["quantization_config"] = gguf_config(dequantize=True)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.place,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModelError(f"{source.name!r} cannot be loaded as a causal language model: {error}") from error
    except (OSError, struct.error, IndexError) as error:
        raise BundleError(f"{source.name!r}: no readable weights: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in info.get(kind) or ()):
            raise BundleError(f"{source.name!r}: {len(names)} {kind.replace('_keys', '')} tensors: {_some(names)}")
    if source.gguf_file:
        _refuse_unmapped(model, Path(source.place) / source.gguf_file)
    return model.eval()


def _load_tokenizer(source: Source, extra: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source.place, trust_remote_code=False, **extra)
    except Exception as error:  # the tokenizers library raises bare Exception for a vocabulary it dislikes
        raise BundleError(f"{source.name!r} has no tokenizer that can be loaded: {error}") from error


def _refuse_unmapped(model: Any, path: Path) -> None:
    """``transformers`` drops a GGUF tensor that it has no name for without a word; here that is an error."""
    if not path.is_file():
        return  # a hub id: the file lies in the hub's cache, and its missing tensors were checked above
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    try:
        known = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{path.name!r}: no names are known for the tensors of {architecture!r}") from error
    if unmapped := sorted(tensor.name for tensor in reader.tensors if tensor.name not in known):
        raise BundleError(f"{path.name!r}: {len(unmapped)} tensors have no place in the model: {_some(unmapped)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
