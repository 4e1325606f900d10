"""The client bundle: fetched once per fingerprint, hash-checked, resumable, and treated as a stranger's data."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from platformdirs import user_cache_path

from sordino.client.transport import Connection
from sordino.shared.errors import BundleError, TransportError
from sordino.shared.manifest import FileSpec, ModelManifest, sha256_file

BundleProgress = Callable[[int, int], None]
"""Called with (bytes there, bytes in all)."""

# Everything transformers may read from the folder; nothing that it would import or unpickle.
_ALLOWED_FILES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "client.safetensors",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_ALLOWED_MODEL_TYPES: Final = frozenset(
    {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3"}
)
# Keys that make transformers load or run code, or fetch something from elsewhere.
_FORBIDDEN_KEYS: Final = frozenset(
    {"auto_map", "custom_generate", "custom_pipelines", "quantization_config", "adapter"}
)
_MAX_JSON_BYTES: Final = 16 << 20
_MAX_TOKENIZER_BYTES: Final = 512 << 20  # the largest published ones have some 40 MB
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def fetch_bundle(connection: Connection, *, cache: Path | None = None, progress: BundleProgress | None = None) -> Path:
    """The folder of the client bundle, downloaded when the cache lacks it.

    Args:
        cache: where bundles are kept; None takes the user's cache folder.

    Raises:
        BundleError: a file is not what the manifest says, or one that a client does not accept; or the disk does not
            take it.
        TransportError: the server went away; the part that came is kept and the next call goes on from there.
    """
    files = connection.manifest.client_files
    refused = sorted(set(files) - _ALLOWED_FILES)
    if refused:
        raise BundleError(f"the client bundle lists files that are not accepted: {', '.join(refused[:5])}")
    for needed in ("config.json", "client.safetensors", "tokenizer_config.json"):
        if needed not in files:
            raise BundleError(f"the client bundle has no {needed}")
    folder = (cache or user_cache_path("sordino") / "bundles") / connection.manifest.fingerprint
    total, there = sum(spec.size for spec in files.values()), 0
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One download at a time: a second process waits, then finds the files.
        with open(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            _wait_for(lock, folder, connection.timeout_s)
            try:
                missing = {name for name, spec in files.items() if not _holds(folder / name, spec)}
                _check_room(folder, {name: files[name] for name in missing})
                # The config first: it says how large the weights can be.
                for name in sorted(files, key=lambda name: name != "config.json"):
                    if name in missing:
                        _check_size(name, files[name], folder, connection.manifest)
                        _download(connection, name, files[name], folder / name, _offset(progress, there, total))
                    there += files[name].size
                    if progress:
                        progress(there, total)
            finally:
                # By name, not by closing: a child forked meanwhile holds the same open file.
                fcntl.flock(lock, fcntl.LOCK_UN)
        _check_untrusted(folder)
    return folder


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the latter of a path with a NUL
        if isinstance(error, ValueError) and "null" not in str(error):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BundleError(f"the client bundle cannot be kept in {str(folder)[:200]!r}: {why}") from None


def _holds(path: Path, spec: FileSpec) -> bool:
    # By size first: only the right one is worth reading.
    return path.is_file() and path.stat().st_size == spec.size and sha256_file(path) == spec


def _check_room(folder: Path, files: Mapping[str, FileSpec]) -> None:
    parts = sum(min(_size(folder / f"{name}.part"), spec.size) for name, spec in files.items())
    needed, free = sum(spec.size for spec in files.values()) - parts, shutil.disk_usage(folder).free
    if needed > free:
        raise BundleError(
            f"the client bundle needs {needed / 1e6:,.0f} MB in {str(folder)!r}, of which {free / 1e6:,.0f} MB are free"
        )


def _check_size(name: str, spec: FileSpec, folder: Path, manifest: ModelManifest) -> None:
    """Refuses a file far larger than one of its kind can be: a server that lies must not fill the disk."""
    limit = _MAX_TOKENIZER_BYTES
    if name == "client.safetensors":
        limit = _most_weights(read_json(folder / "config.json"), manifest)
    elif name.endswith("config.json"):
        limit = _MAX_JSON_BYTES
    if spec.size > limit:
        raise BundleError(
            f"{name}: the manifest says {spec.size / 1e6:,.0f} MB, a sound one has at most {limit / 1e6:,.0f} MB"
        )


def _most_weights(config: Mapping[str, Any], manifest: ModelManifest) -> int:
    """Generous: two embeddings of tokens and positions, and eight square matrices a layer, all in float64."""

    def said(*names: str) -> int:
        return max((value for name in names if isinstance(value := config.get(name), int)), default=0)

    rows = 2 * said("vocab_size") + said("max_position_embeddings", "n_positions")
    wide = max(group.in_features for group in manifest.groups)
    wide = max(wide, said("hidden_size", "n_embd", "intermediate_size", "n_inner", "ffn_dim"))
    return 8 * wide * (rows + 8 * wide * said("num_hidden_layers", "n_layer")) + _MAX_JSON_BYTES


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # a holder of the lock renames what it has fetched
        return path.stat().st_size
    return 0


def _wait_for(lock: IO[str], folder: Path, timeout_s: float) -> None:
    """Takes the lock, or waits while its holder gets on: a stopped process must not hold up all others."""
    seen, deadline = -1, 0.0
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            there = sum(_size(path) for path in folder.iterdir())
            if there != seen:
                seen, deadline = there, time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise BundleError(
                    f"another process fetches this bundle and has got nowhere for {timeout_s:.0f} s: end it, or use "
                    "another cache folder"
                ) from None
            time.sleep(0.1)
        else:
            return


def _offset(progress: BundleProgress | None, base: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(base + done, total) if progress else None


def _download(connection: Connection, name: str, spec: FileSpec, path: Path, progress: Callable[[int], None]) -> None:
    part = path.with_name(path.name + ".part")

    def attempt() -> None:
        with part.open("ab") as file:
            if file.tell() > spec.size:
                file.truncate(0)
            while file.tell() < spec.size:
                before = file.tell()
                for data in connection.fetch(name, before):
                    if file.tell() + len(data) > spec.size:
                        raise BundleError(f"{name}: the server sends more than the {spec.size} bytes of the manifest")
                    file.write(data)
                    progress(file.tell())
                if file.tell() == before:
                    raise TransportError(f"the server sent {before} of {spec.size} bytes of {name}")

    try:
        connection.retrying(attempt)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        part.unlink(missing_ok=True)  # of use to nobody, while others need the room
        free = shutil.disk_usage(path.parent).free
        raise BundleError(
            f"{name} needs {spec.size / 1e6:,.0f} MB in {str(path.parent)!r}, of which {free / 1e6:,.0f} MB are free: "
            f"{error.strerror}"
        ) from None
    if not part.exists():
        part.touch()
    if sha256_file(part) != spec:
        part.unlink()
        raise BundleError(f"{name}: what the server sent does not match the manifest's SHA-256")
    part.replace(path)


def _check_untrusted(folder: Path) -> None:
    """Refuses settings that would load code, and model types that are not on the list."""
    for path in sorted(folder.glob("*.json")):
        if path.name == "tokenizer.json" or path.name == "vocab.json":
            continue
        _refuse_code(path.name, read_json(path))
    model_type = read_json(folder / "config.json").get("model_type")
    if not isinstance(model_type, str) or model_type not in _ALLOWED_MODEL_TYPES:
        raise BundleError(f"model type {str(model_type)[:40]!r} is not one that this client runs")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from the bundle.

    Raises:
        BundleError: it is too large, or no JSON object.
    """
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise BundleError(f"{path.name} is over {_MAX_JSON_BYTES} bytes")
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path.name} is not JSON") from error
    if not isinstance(body, dict):
        raise BundleError(f"{path.name} is not a JSON object")
    return body


def _refuse_code(name: str, body: Any) -> None:
    # No recursion: json.loads takes deeper nesting than Python calls may have.
    todo = [body]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            bad = _FORBIDDEN_KEYS & set(value)
            if bad:
                raise BundleError(f"{name} asks for code or another source ({', '.join(sorted(bad))}): refused")
            todo += value.values()
        elif isinstance(value, list):
            todo += value


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Whatever a library raises over a stranger's file becomes a BundleError that names the file.

    There is no list of kinds: tokenizers raises bare Exceptions and, where its Rust code panics, something that is not
    even one; the configs of transformers have errors of their own.
    """
    try:
        yield
    except BundleError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:200]
        raise BundleError(
            f"{what} of the bundle cannot be used ({type(error).__name__}: {text}): ask the provider for a sound bundle"
        ) from error
