"""The measurement of a server's start runs, at the smallest size, and tells the bytes that ranks read."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import start
from rich.console import Console

from sordino.server.slices import SLICES_NAME
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import ModelManifest


def test_one_start(bundles: Callable[..., Path], tmp_path: Path) -> None:
    bundle = bundles("llama")
    manifest = ModelManifest.load(bundle)
    held = sum(group.planes * group.out_features * group.in_features for group in manifest.groups) // 2
    files = sum(spec.size for spec in manifest.client_files.values()) + manifest.server_files[SLICES_NAME].size
    run = start.measure(bundle, tmp_path, (0, 0), 1, 1)
    assert run["ranks"] == [{"hashed_bytes": files + held, "held_bytes": held}]
    assert run["ready_less_import_s"] == pytest.approx(run["ready_s"] - run["import_s"], abs=0.002)
    assert min(run["ready_s"], run["import_s"], *run["parts_ms"].values()) > 0
    shown = StringIO()
    start.show({"runs": [run], "growth": start.growth([run])}, Console(file=shown, width=80))
    assert f"{(files + held) / 1e6:.1f}" in shown.getvalue()


def test_ranks_that_share_a_bundle(bundles: Callable[..., Path]) -> None:
    manifest = ModelManifest.load(bundles("llama"))
    ranks = start.loaded(bundles("llama"), None, 2, 1)["ranks"]
    sizes = [group.planes * group.out_features * group.in_features for group in manifest.groups]
    assert sum(rank["held_bytes"] for rank in ranks) == sum(sizes)
    assert ranks[1]["hashed_bytes"] == ranks[1]["held_bytes"] + manifest.server_files[SLICES_NAME].size


def test_libraries_that_cannot_be_imported() -> None:
    with pytest.raises(SordinoError, match="cannot be imported"):
        start.imported("import sordino.nothing", 2)


@pytest.mark.parametrize(("layers", "wanted"), [(1, [None]), (2, [(0, 0), None]), (30, [(0, 6), (0, 14), None])])
def test_stages(layers: int, wanted: list[Any]) -> None:
    assert start.stages(layers) == wanted


def test_growth() -> None:
    def run(hashed: int, seconds: float) -> dict[str, Any]:
        return {"ranks": [{"hashed_bytes": hashed}, {"hashed_bytes": 0}], "ready_s": seconds}

    found = start.growth([run(size, 2 + size / 2e9) for size in (1_000_000, 500_000_000, 4_000_000_000)])
    assert found == {"seconds_per_gb": 0.5, "seconds_without_bytes": 2.0, "farthest_from_line_ms": 0.0}
    bent = start.growth([run(10**9, 1.0), run(2 * 10**9, 2.0), run(3 * 10**9, 6.0)])
    assert bent is not None
    assert bent["farthest_from_line_ms"] == pytest.approx(1000, abs=1)
    assert start.growth([run(10**9, 1.0), run(10**9, 1.1)]) is None
