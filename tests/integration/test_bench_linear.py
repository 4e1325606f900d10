"""``sordino bench linear`` on a tiny bundle: figures, exactness, and one line for what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sordino.client import bench_linear
from sordino.client.bench_linear import load_matrices, run_linear, same_shapes
from sordino.client.transport import Traffic
from sordino.server.store import MatrixStore
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import ModelManifest


def run(bundle: Path, protocols: str, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"repeats": 2, "patience_s": 60.0, "json_path": None, "console": Console(quiet=True)}
    return run_linear(bundle, protocols=protocols.split(",") if protocols else [], **{**chosen, **options})


def test_figures_of_every_shape(bundles: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    result = run(bundles("llama"), "rlwe,masked,fp32", json_path=path)
    assert json.loads(path.read_text()) == result
    shapes = same_shapes(ModelManifest.load(bundles("llama")))
    groups = [layers[0] for layers in shapes]
    got = [(entry["group"], entry["rows"], entry["protocol"]) for entry in result["results"]]
    assert got == [(g.name, rows, name) for g in groups for rows in (1, 8, 32) for name in ("rlwe", "masked", "fp32")]
    for entry in result["results"]:
        assert entry["ms_p50"] > 0
        assert entry["repeats"] == 3 * len(shapes[0])  # three turns, each through the layers once
        assert entry["ms_first_p50"] > 0
        if entry["protocol"] == "fp32":
            assert entry["bytes_up"] == entry["bytes_down"] == 0
            continue
        assert entry["largest_error"] == 0
        elements = 4 * entry["rows"] * entry["in_features"]
        assert elements < entry["bytes_up"] < elements + (100 if entry["protocol"] == "masked" else 1 << 20)
        if entry["protocol"] == "rlwe":
            assert entry["ratio_to_rlwe"] == 1
            assert 0 < entry["predicted_without_network_ms"] < entry["predicted_ms"]
    assert result["one_of_each"]["masked"]["shapes"] == len(groups)
    assert result["setup"]["masked"]["bytes_down"] > result["setup"]["rlwe"]["bytes_down"] > 0


@pytest.mark.parametrize("bits", [8, 12])
def test_matrices_are_the_servers(bundles: Callable[..., Path], bits: int) -> None:
    bundle = bundles("llama", weight_bits=bits)
    manifest = ModelManifest.load(bundle)
    matrices = load_matrices(bundle, manifest, list(manifest.groups))
    for group, stored in zip(manifest.groups, MatrixStore(bundle).matrices.values(), strict=True):
        rows = np.eye(group.in_features, dtype=np.uint32)
        product = stored.matmul(rows).astype(np.int64).T
        assert np.array_equal(np.where(product > 2**31, product - (2**32 - 5), product), matrices[group.name])


class _Slow:
    """A peer that takes 2 s for a product, by its own account."""

    traffic = Traffic()

    def __init__(self, matrices: Any) -> None:
        self._matrices = matrices
        self.products = 0

    def apply(self, group: Any, rows: Any) -> Any:
        self.products += 1
        bench_linear.time.clock += 2.0  # type: ignore[attr-defined]
        return rows @ self._matrices[group.name].T.astype(np.int32)


class _Clock:
    clock = 0.0

    def perf_counter(self) -> float:
        return self.clock


def test_a_slow_peer_is_measured_once_and_left_out_where_it_takes_too_long(
    bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_Slow] = []

    class Module:
        @staticmethod
        def connect(matrices: Any) -> _Slow:
            made.append(_Slow(matrices))
            return made[-1]

    monkeypatch.setattr(bench_linear, "_peer", lambda name: Module)
    monkeypatch.setattr(bench_linear, "time", _Clock())
    result = run(bundles("llama"), "tenseal", patience_s=3.0)
    shapes = [layers[0] for layers in same_shapes(ModelManifest.load(bundles("llama")))]
    sizes = [group.in_features * group.out_features for group in shapes]
    kept = [size for size, before in zip(sizes, [sizes[0], *sizes], strict=False) if 2 * size / before <= 3]
    assert [entry["ms_p50"] for entry in result["results"]] == [2000.0] * len(result["results"])
    assert made[0].products == len(result["results"])
    assert 0 < len(result["results"]) <= len(kept) < len(shapes)
    assert any("left out, about" in note for note in result["notes"])
    assert all(entry["ratio_to_rlwe"] is None for entry in result["results"])


@pytest.mark.parametrize(
    ("protocols", "text"),
    [("", "not nothing"), ("rlwe,plain", "not plain"), ("auto", "--protocols takes rlwe, masked, clear, tenseal")],
)
def test_unknown_protocols_are_refused(bundles: Callable[..., Path], protocols: str, text: str) -> None:
    with pytest.raises(SordinoError, match=text):
        run(bundles("llama"), protocols)


def test_no_folder_for_the_figures(bundles: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match="no such folder"):
        run(bundles("llama"), "fp32", json_path=tmp_path / "no" / "figures.json")


def test_peers_are_in_a_checkout_alone(
    bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_linear, "_PEERS_FOLDER", tmp_path)
    with pytest.raises(SordinoError, match=r"in a checkout of Sordino \(bench/peers\)"):
        run(bundles("llama"), "tenseal")


@pytest.mark.parametrize(("protocol", "package"), [("tenseal", "tenseal"), ("concrete", "concrete_ml_extensions")])
def test_a_peer_that_is_not_installed(
    bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, protocol: str, package: str
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, package, None)  # importing it is a ModuleNotFoundError
    monkeypatch.delitem(sys.modules, f"peers.{protocol}", raising=False)
    with pytest.raises(SordinoError, match=rf"needs {package}: run pip install -c constraints.txt -e '\.\[peers\]'"):
        run(bundles("llama"), protocol)
