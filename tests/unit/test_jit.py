"""Kernels where no folder can be written: compiled all the same, with one line that says why it takes long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import numpy as np
import sordino.client.pages, sordino.client.rlwe, sordino.server.pages, sordino.server.provision
from sordino.client.kernels import all_in_ring
from sordino.shared import jit

assert jit.__file__.startswith({place!r})
assert all_in_ring(np.zeros((2, 2), np.uint32))
"""


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    for side in ("client", "server", "shared", "proto"):
        shutil.copytree(
            ROOT / side, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "requirements.txt")
        )
    for source in [*tmp_path.rglob("*.py")]:
        (source.parent / "__pycache__").touch()  # a file where a folder belongs stops root too
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(tmp_path), "HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/cache"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(place=str(tmp_path))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = done.stderr.splitlines()
    assert "NUMBA_CACHE_DIR" in line
