"""kill -9 at any moment, and a crash between any two steps on disk: no mask row is ever used twice (DESIGN §4.5.1)."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from pool_tools import assert_no_repeats, child_take, fill, manifest, read_log, take_checked

from sordino.client.pool import MaskPool

STEPS = [
    "create: entry made",
    "reserve: begin",
    "reserve: chain written",
    "reserve: mark written",
    "reserve: mark advanced",
    "reserve: chain advanced",
    "reserve: batch erased",
    "commit: written",
    "commit: mark set",
    "commit: data in place",
    "commit: keys in place",
]


@pytest.fixture(scope="module")
def start() -> Callable[..., BaseProcess]:
    """Starts ``child_take`` in a clean process: forked from a server that has imported everything, so quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pool_tools"])

    def begin(*args: Any, **options: Any) -> BaseProcess:
        process = context.Process(target=child_take, args=(*args, options))
        process.start()
        return process

    return begin


def _wait_for(path: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.is_alive(), "the child ended before it took a mask"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_sigkill_at_any_moment(tmp_path: Path, start: Callable[..., BaseProcess]) -> None:
    pool, state, log = tmp_path / "pool", tmp_path / "state", tmp_path / "log"
    rng = random.Random(1)
    for run in range(40):
        started = tmp_path / f"started-{run}"
        process = start(pool, state, log, run, refill=128, started=started)
        _wait_for(started, process)
        time.sleep(rng.uniform(0, 0.08))
        process.kill()
        process.join()
        assert process.exitcode == -9
    with MaskPool.open(pool, manifest(), state_dir=state) as after:
        left = after.slots_left
        lines = read_log(log) + [
            line for group in after.groups for _ in range(left) for line in take_checked(after, group.name, 1)
        ]
    assert len(lines) > 1000
    assert_no_repeats(lines)


@pytest.mark.parametrize("step", STEPS)
def test_crash_at_a_step(step: str, tmp_path: Path, start: Callable[..., BaseProcess]) -> None:
    pool, state, log = tmp_path / "pool", tmp_path / "state", tmp_path / "log"
    for passes in (0, 1, 2):
        # Again and again into the same gap, with runs between that go through.
        crashed = start(pool, state, log, passes, refill=192, crash=(step, 0 if "create" in step else passes), takes=90)
        crashed.join()
        assert crashed.exitcode == (9 if passes == 0 or "create" not in step else 0)
        clean = start(pool, state, log, 100 + passes, refill=192, takes=12)
        clean.join()
        assert clean.exitcode == 0
    assert_no_repeats(read_log(log))
    assert len(read_log(log)) > 100
    with MaskPool.open(pool, manifest(), state_dir=state):
        names = {file.name.partition(".")[2] for file in pool.iterdir()}
        assert names <= {"json", "keys", "data"}, "a crash left files that the next run did not remove"
        assert not list(state.glob("*.tmp"))


def test_processes_and_a_copy_share_one_pool(tmp_path: Path, start: Callable[..., BaseProcess]) -> None:
    pool, state, log = tmp_path / "pool", tmp_path / "state", tmp_path / "log"
    with MaskPool.create(pool, manifest(), state_dir=state) as made:
        fill(made, 2048)
    shutil.copytree(pool, tmp_path / "copy")
    children = [start(path, state, log, seed) for seed, path in enumerate((pool, pool, tmp_path / "copy"))]
    for child in children:
        child.join()
        assert child.exitcode == 0
    lines = read_log(log)
    assert_no_repeats(lines)
    assert len(lines) > 1000
    for path in (pool, tmp_path / "copy"):
        with MaskPool.open(path, manifest(), state_dir=state) as after:
            assert after.slots_left < 130
