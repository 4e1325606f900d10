"""``sordino bench serve`` on a tiny bundle: figures that add up, products that are checked, clients that check, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sordino.client import bench_serve
from sordino.client.bench_serve import (
    Recording,
    Server,
    Shape,
    llama_shapes,
    parse_size,
    record,
    run_serve,
    write_bundle,
)
from sordino.server.store import MatrixStore
from sordino.shared.errors import IntegrityError, SordinoError
from sordino.shared.manifest import ModelManifest

WIDE = 40_000  # a row of 160 kB, for which HTTP/2's first window has no room


def run(bundle: Path, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "synthetic": None,
        "concurrency": [1, 2],
        "tokens": 3,
        "repeats": 1,
        "json_path": None,
        "console": Console(quiet=True),
    }
    return run_serve(bundle, **{**chosen, **options})


def test_figures_add_up(bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "_LEAST_S", 1.0)
    monkeypatch.setattr(bench_serve, "_EMPTY_TOKENS", 200)
    path = tmp_path / "serve.json"
    result = run(bundles("llama"), json_path=path)
    assert json.loads(path.read_text()) == result
    groups = ModelManifest.load(bundles("llama")).groups
    assert result["messages_per_token"] == len(groups)
    for way, sizes in (("up", [g.in_features for g in groups]), ("down", [g.out_features for g in groups])):
        assert 0 < result[f"bytes_{way}_per_token"] - 4 * sum(sizes) < 20 * len(groups)
    entries = {(entry["concurrency"], entry["batching"]): entry for entry in result["results"]}
    assert list(entries) == [(1, True), (1, False), (2, True), (2, False)]
    for (clients, batching), entry in entries.items():
        assert entry["messages"] >= clients * 3 * len(groups)
        assert entry["tokens"] == round(entry["messages"] / len(groups), 2)
        assert entry["tokens_per_s"] == pytest.approx(entry["tokens"] / entry["seconds"], rel=0.01)
        assert entry["messages_per_s"] == pytest.approx(entry["messages"] / entry["seconds"], rel=0.01)
        assert entry["tpot_ms_p99"] >= entry["tpot_ms_p50"] > 0
        # So many clients are busy with a token each, all the time.
        assert entry["kernel_ms_per_token"] < 1e3 * clients / entry["tokens_per_s"]
        per_message = entry["kernel_us_per_message"] + entry["wire_us_per_message"]
        cpu = entry["server_cpu_ms_per_token"] + entry["client_cpu_ms_per_token"]
        assert per_message * len(groups) == pytest.approx(1e3 * cpu, rel=0.01)
        assert 1 <= entry["batch_mean"] <= (clients if batching else 1)
    assert [entry["concurrency"] for entry in result["ratios"]] == [1, 2]
    for entry in result["ratios"]:
        joined, single = (entries[entry["concurrency"], batching] for batching in (True, False))
        assert entry["end_to_end"] == pytest.approx(joined["tokens_per_s"] / single["tokens_per_s"], rel=1e-3)
        for name, key in (("kernel", "kernel_ms_per_token"), ("server_cpu", "server_cpu_ms_per_token")):
            assert entry[name] == pytest.approx(single[key] / joined[key], rel=1e-3)
    empty = result["empty_message"]
    assert 32 < empty["bytes_up"] < 64
    assert empty["round_trip_us_p50"] > empty["kernel_us"] > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    """Messages, and answers, of several frames and above HTTP/2's first window."""
    folder = tmp_path_factory.mktemp("wide")
    bundle = write_bundle(folder / "bundle", "wide", [Shape(0, WIDE, {"in": 8}), Shape(0, 8, {"out": WIDE})])
    with bench_serve._server(bundle, folder / "server", batching=True) as server:
        yield bundle, server


def replay(recording: Recording, server: Server, clients: int) -> Any:
    from contextlib import ExitStack

    with ExitStack() as stack:
        started = [stack.enter_context(bench_serve._Client.started(recording, [server])) for _ in range(clients)]
        return bench_serve.measure([server], 0, started, len(recording.requests), tokens=3)


def test_wide_rows_and_answers_that_are_not_the_recorded_ones(
    wide: tuple[Path, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serve, "_LEAST_S", 0.0)
    bundle, server = wide
    recording = record(bundle, [server])
    assert recording.up > 4 * WIDE < recording.down
    load = replay(recording, server, 2)
    assert load.messages >= 2 * 3 * 2
    wrong = bytes([recording.answers[1][0] ^ 1]) + recording.answers[1][1:]
    with pytest.raises(SordinoError, match=r"a client of the benchmark ended: .*another answer than before"):
        replay(replace(recording, answers=[recording.answers[0], wrong]), server, 1)
    with pytest.raises(SordinoError, match=r"a client of the benchmark ended: .*the server ended the call"):
        replay(recording, replace(server, token="x" * 43), 1)


def test_a_server_with_other_matrices(wide: tuple[Path, Server], tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", "wide", [Shape(0, WIDE, {"in": 8}), Shape(0, 8, {"out": WIDE})])
    with pytest.raises(IntegrityError, match=r"group 'layers\.0\.in': the server's product is not the integer one"):
        record(other, [wide[1]])


def test_random_matrices_are_a_bundle_that_a_server_takes(tmp_path: Path) -> None:
    store = MatrixStore(write_bundle(tmp_path / "bundle", "64x2", llama_shapes(*parse_size("64x2"))))
    shapes = [(matrix.in_features, matrix.out_features) for matrix in store.matrices.values()]
    assert shapes == 2 * [(64, 192), (64, 64), (64, 512), (256, 64)]
    assert 60 < max(int(matrix.weights.abs().max()) for matrix in store.matrices.values()) <= 64


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"concurrency": []}, "numbers from 1 to 32, not nothing"),
        ({"concurrency": [1, 0]}, "numbers from 1 to 32, not 1,0"),
        ({"concurrency": [33]}, "numbers from 1 to 32, not 33"),
        ({"tokens": 1}, "2 tokens and 1 repeat"),
        ({"repeats": 0}, "2 tokens and 1 repeat"),
        ({"json_path": Path("nosuch/serve.json")}, "no such folder"),
        *(({"synthetic": size}, f"as in 2048x8, not '{size}'") for size in ("2048", "4x1", "64x0", "1e3x2", "64x2x2")),
    ],
)
def test_what_cannot_be_measured(bundles: Callable[..., Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(SordinoError, match=text):
        run(bundles("llama"), **options)


def test_concurrency_is_numbers(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from sordino.shared.cli import main

    monkeypatch.setattr("sys.argv", ["sordino", "bench", "serve", "--concurrency", "1,many"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "--concurrency takes numbers with commas between them, not '1,many'" in capfd.readouterr().err
