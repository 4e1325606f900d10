"""What a hostile provider may put into a bundle, and moments at which checks must not go missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import InProcessServer
from stack import answer

from sordino.client import connect
from sordino.client.model import _own_fields
from sordino.client.protocols import MaskedProtocol
from sordino.shared.errors import IntegrityError, PoolError
from sordino.shared.manifest import CLIENT_DIR, MANIFEST_NAME, ModelManifest, sha256_file


def rewritten(bundle: Path, folder: Path, name: str, change: dict[str, Any]) -> Path:
    """A copy of a bundle with a JSON file of the client's part changed, and a manifest that agrees."""
    import shutil
    from dataclasses import replace

    out = folder / "hostile"
    shutil.copytree(bundle, out)
    path = out / CLIENT_DIR / name
    body = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(body | change))
    manifest = ModelManifest.load(bundle)
    files = {**manifest.client_files, name: sha256_file(path)}
    (out / MANIFEST_NAME).write_bytes(replace(manifest, client_files=files).to_json())
    return out


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 2},
        {"assistant_early_exit": 1},
        {"num_beams": 4},
        {"max_time": 0.001},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_bundle_cannot_change_how_many_rows_travel(
    bundles: Callable[..., Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    """One row a step and the whole answer, whatever generation_config.json asks for."""
    server = InProcessServer(rewritten(bundles("llama"), tmp_path, "generation_config.json", change))
    try:
        connected = connect(f"grpc://127.0.0.1:{server.port}", protocol="clear", cache=tmp_path / "cache")
        with connected.session:
            rows: list[int] = []
            protocol: Any = connected.session.protocol
            apply, first = protocol.apply, connected.session.manifest.groups[0].name

            def counted(group: Any, x: Any) -> Any:
                if group.name == first:
                    rows.append(x.shape[0])
                return apply(group, x)

            protocol.apply = counted
            ids = answer(connected, "abcabcabcabcabc", tokens=6)
        assert len(ids) == 6
        assert rows[1:] == [1] * 5
    finally:
        server.close()


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "experts_implementation", "use_kernels"]
)
def test_a_config_cannot_name_code(bundles: Callable[..., Path], tmp_path: Path, key: str) -> None:
    """transformers fetches and imports a kernel that a config names; such settings never reach it."""
    assert _own_fields("llama", {key: "someone/kernel", "hidden_size": 64}) == {"hidden_size": 64}
    server = InProcessServer(rewritten(bundles("llama"), tmp_path, "config.json", {key: "someone/kernel"}))
    try:
        connected = connect(f"grpc://127.0.0.1:{server.port}", protocol="clear", cache=tmp_path / "cache")
        with connected.session:
            assert "kernel" not in str(connected.model.config._attn_implementation)
            assert len(answer(connected, tokens=2)) == 2
    finally:
        server.close()


def masked(server: InProcessServer, folder: Path, **options: Any) -> Any:
    chosen = {"pool": folder / "pool", "state_dir": folder / "state", "cache": folder / "cache", "batch": 128}
    return connect(f"grpc://127.0.0.1:{server.port}", **{**chosen, "low_water": 0, **options})


def test_masks_made_without_checks_are_not_vouched_for_later(bundles: Callable[..., Path], tmp_path: Path) -> None:
    server = InProcessServer(bundles("llama"))
    try:
        masked(server, tmp_path, check_vectors=0).session.close()
        with pytest.raises(PoolError, match="check vector"):
            masked(server, tmp_path)
        # and the other way: a pool with vectors is checked, also for somebody who asks for none
        masked(server, tmp_path, pool=tmp_path / "other").session.close()
        with masked(server, tmp_path, pool=tmp_path / "other", check_vectors=0).session as session:
            keeper = session.protocol._keeper
            assert all(keeper.check(group.name) is not None for group in session.manifest.groups)
    finally:
        server.close()


def test_a_check_does_not_go_missing_with_the_pool(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A background batch that fails its check between taking a mask and using the answer: the answer is not used."""
    server = InProcessServer(bundles("llama"))
    try:
        with masked(server, tmp_path).session as session:
            protocol = session.protocol
            assert isinstance(protocol, MaskedProtocol)
            keeper, group = protocol._keeper, session.manifest.groups[0]
            product = protocol._stream.product

            def meanwhile(*arguments: Any, **options: Any) -> Any:
                y = product(*arguments, **options)
                keeper.fail(IntegrityError("a background batch failed"))
                return y

            monkeypatch.setattr(protocol._stream, "product", meanwhile)
            with pytest.raises(IntegrityError, match="background"):
                protocol.apply(group, np.zeros((1, group.in_features), np.int32))
            assert keeper.check(group.name) is not None, "a lie in that answer would have been found, too"
    finally:
        server.close()
