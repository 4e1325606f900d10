"""Kernels where no folder can be written, or where the cache is damaged or its disk full: compiled all the same, with
one line that says why it takes long."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

from sordino.shared import jit

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
    for side in ("client", "dealer", "server", "shared", "proto"):
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


def double(value: int) -> int:
    return 2 * value


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """``kernel()``: the function above as a new process would compile it, with its cache in ``tmp_path``."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    jit._say_damaged.cache_clear()
    return lambda: jit.compiled(double)


def hits(kernel: Any) -> int:
    assert kernel(4) == 8
    return sum(kernel.stats.cache_hits.values())


@pytest.mark.parametrize("kept", [0, 5, 60])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_cache_is_made_anew(
    kernel: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, kept: int
) -> None:
    assert [hits(kernel()), hits(kernel())] == [0, 1]
    [file] = tmp_path.rglob(f"*.{kind}")
    file.write_bytes(file.read_bytes()[:kept])
    assert [hits(kernel()), hits(kernel())] == [0, 1]
    [record] = caplog.records
    assert f"kernels in {file.parent} cannot be read" in record.message


def test_a_full_disk_leaves_no_index(
    kernel: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would name a file that was not written, or worse: one of an older kernel."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    assert [hits(kernel()), hits(kernel())] == [0, 0]
    assert not [*tmp_path.rglob("*.nb?")]
    [record] = caplog.records
    assert "No space left on device" in record.message
