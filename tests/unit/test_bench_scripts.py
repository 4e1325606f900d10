"""Scripts under bench/ that no other test imports: they run, at the smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import planner
import pytest
import soak
import torch

from sordino.server.kernel import RingMatrix, choose_kernel

ROOT = Path(__file__).parents[2]


def test_cold_start(bundles: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "bench" / "cold_start.py"), "--bundle", str(bundles("llama"))]
    done = subprocess.run(
        [*command, "--tokens", "4", "--json", str(out)], env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(out.read_text())["runs"]
    assert [run["tokens_equal_clear"] for run in runs] == [True] * 4
    assert runs[1]["masks_left"] == 0


def test_collectives(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "bench" / "collectives.py"), "--ranks", "2", "--repeats", "2"]
    done = subprocess.run([*command, "--json", str(out)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())["results"]
    assert [result["ranks"] for result in results] == [2] * 5
    assert all(result["ratio"] > 0 for result in results)
    assert list(tmp_path.iterdir()) == [out]


def test_planner() -> None:
    matrix = RingMatrix(torch.ones((60, 90), dtype=torch.int8), 1, choose_kernel(torch.device("cpu")))
    measured = [
        planner.measure("tiny", 8, parts, bits, matrix, 1)
        for bits in (0, planner.SWITCH_BITS)
        for parts in planner.neighbours(8, 90, 60, bits)
    ]
    assert len(measured) > 4
    assert all(one.seconds > 0 and one.total(1000) > one.seconds for one in measured)
    assert set(planner.fit(measured)) == {"encrypt", "answer", "answer_switched", "answer_folded", "pair", "message"}


def course(**more: float) -> soak.Course:
    """A quiet run of ten minutes, to which ``more`` (fields of a sample, or ``seconds`` of the probe) is added by its
    end; a little at a time, from the beginning."""
    quiet = soak.Sample(0.0, 600 * soak.MIB, 40, 60, 3, 1, 1 << 20, 0, 1.0, 3.0)
    samples = []
    for at in range(0, 600, 2):
        play = (at % 7 - 3) * soak.MIB
        grown = {
            name: getattr(quiet, name) + round(most * at / 600) for name, most in more.items() if name != "seconds"
        }
        samples.append(replace(quiet, at_s=float(at), **{"rss": quiet.rss, **grown}))
        samples[-1] = replace(samples[-1], rss=samples[-1].rss + play)
    seconds = more.get("seconds", 0.0)
    probe = [(at / 10, 0.001 + (0.002 if at % 50 == 0 else 0.0) + seconds * at / 6000) for at in range(6000)]
    rest = replace(quiet, calls=0, page_sessions=0, page_bytes=0)
    return soak.Course(600.0, samples, probe, rest, rest, Counter({"masked": 1000, "busy": 10}), [], [])


def test_a_soak_without_growth() -> None:
    figures, reasons = soak.judge(course())
    assert reasons == []
    assert figures["p99_ratio"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"rss": 120 * soak.MIB}, "growth_mib_by_line"),
        ({"files": 30}, "files_moved"),
        ({"threads": 30}, "threads_moved"),
        ({"seconds": 0.03}, "p99_ratio"),
    ],
)
def test_a_soak_with_growth(more: dict[str, float], reason: str) -> None:
    _, reasons = soak.judge(course(**more))
    assert reasons
    assert any(one.startswith(f"{reason} is ") for one in reasons)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_bytes": 4096}, "4096 bytes of pages left"),
        ({"page_sessions": 1}, "1 sessions with pages left"),
        ({"calls": 2}, "2 calls left"),
        ({"files": 60}, "files_kept is 20"),
    ],
)
def test_a_soak_that_leaves_something(change: dict[str, int], reason: str) -> None:
    quiet = course()
    [told] = soak.judge(replace(quiet, after=replace(quiet.after, **change)))[1]
    assert told.startswith(reason)


def test_a_soak_of_seconds(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """No deed goes wrong, and nothing is left. Whether memory and time are flat shows in minutes."""
    seen, killed = soak.run(bundles("llama"), 0.1, 1)
    assert not seen.failures
    assert not seen.unended
    assert killed
    assert (seen.after.calls, seen.after.page_sessions, seen.after.page_bytes) == (0, 0, 0)
    assert len(seen.samples) > 2
    assert sum(seen.done.values()) > 0
    assert len(seen.probe) > 0
