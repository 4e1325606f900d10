"""Scripts under bench/ that no other test imports: they run, at the smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import planner
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


def test_planner() -> None:
    matrix = RingMatrix(torch.ones((60, 90), dtype=torch.int8), 1, choose_kernel(torch.device("cpu")))
    measured = [
        planner.measure("tiny", 8, parts, bits, matrix, 1)
        for bits in (0, planner.SWITCH_BITS)
        for parts in planner.neighbours(8, 90, 60, bits)
    ]
    assert len(measured) > 4
    assert all(one.seconds > 0 and one.total(1000) > one.seconds for one in measured)
    assert set(planner.fit(measured)) == {"encrypt", "answer", "answer_switched", "pair", "message"}
