"""The mask pool in one process: contents, single use over copies and restores, batches, limits."""

from __future__ import annotations

import contextlib
import copy
import linecache
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pool_tools import assert_no_repeats, digests, fill, manifest, products, take_checked

from sordino.client import ledger, poolstore, poolwriter
from sordino.client import pool as pool_code
from sordino.client.ledger import Ledger
from sordino.client.pool import CheckVector, MaskPool
from sordino.client.poolfile import ChunkKeys, DataFile
from sordino.shared.errors import FingerprintError, PoolError, PoolExhaustedError, PoolForeignError
from sordino.shared.ring import P

GROUPS = ("g0", "g1", "g2")
ROWS = st.sampled_from((1, 5, 63, 64, 65, 130))


@pytest.fixture
def open_pool(tmp_path: Path) -> Callable[..., MaskPool]:
    def opened(name: str = "pool", slots: int = 0) -> MaskPool:
        pool = MaskPool.open_or_create(tmp_path / name, manifest(), state_dir=tmp_path / "state")
        if slots:
            fill(pool, slots)
        return pool

    return opened


# -- contents --------------------------------------------------------------------------------------------------------


def test_rows_are_the_masks_that_were_provisioned(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool:
        with pool.new_batch(128) as writer:
            made = {group.name: writer.masks(group.name) for group in pool.groups}
            for group in pool.groups:
                assert np.array_equal(writer.masks(group.name), made[group.name])  # the same at a second try
                writer.write(group.name, products(group, made[group.name]))
            assert pool.available("g0") == 0  # nothing is visible before the commit
            writer.commit()
        taken = {name: np.concatenate([pool.take(name, rows)[0] for rows in (1, 62, 64, 1)]) for name in GROUPS}
    for name in GROUPS:
        assert np.array_equal(taken[name], made[name])
    assert len({made[name].tobytes()[:16] for name in GROUPS}) == 3


def test_rows_span_chunks_and_batches(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=64) as pool:
        fill(pool, 128)
        lines = take_checked(pool, "g1", 10) + take_checked(pool, "g1", 150)
        assert pool.available("g1") == 32
        assert pool.available("g0") == 192
        assert pool.slots_left == 32
        assert_no_repeats(lines)


def test_exhausted_takes_nothing(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=64) as pool:
        with pytest.raises(PoolExhaustedError, match="64 masks are left for group 'g0', 65 are needed"):
            pool.take("g0", 65)
        assert len(take_checked(pool, "g0", 64)) == 64
        with pytest.raises(PoolExhaustedError):
            pool.take("g0", 1)
        take_checked(pool, "g1", 64)  # the others can lag behind
        fill(pool)
        take_checked(pool, "g0", 64)


@pytest.mark.parametrize("rows", [0, -1])
def test_refuses_no_rows(rows: int, open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=64) as pool:
        with pytest.raises(ValueError, match="rows"):
            pool.take("g0", rows)
        pool.take("g0", 3)
        with pytest.raises(ValueError, match="rows"):
            pool.take("g0", -2)
        with pytest.raises(PoolError, match="no group 'g9'"):
            pool.take("g9", 1)


def test_a_taken_row_belongs_to_the_caller(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=64) as pool:
        r, wr = pool.take("g0", 1)
        r[:] = wr[:] = 0
        take_checked(pool, "g0", 40)


def test_take_is_fast(tmp_path: Path) -> None:
    """One row from a loaded chunk: no cryptography, target 15 us. Measured: 1 us; the bound is for busy machines."""
    spec = manifest([(576, 960)])
    with MaskPool.create(tmp_path / "pool", spec, state_dir=tmp_path / "state") as pool:
        fill(pool)
        pool.take("g0", 1)
        times = []
        for _ in range(60):
            start = time.perf_counter()
            pool.take("g0", 1)
            times.append(time.perf_counter() - start)
    assert sorted(times)[30] < 15e-6


# -- single use ------------------------------------------------------------------------------------------------------


class SingleUse(RuleBasedStateMachine):
    """Whatever is done to the folder on one host, no row comes twice and every product is right."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        SingleUse.count = getattr(SingleUse, "count", 0) + 1
        self.root = self.folder / str(SingleUse.count)
        self.seen: list[str] = []
        self.pools: list[MaskPool] = [self._open("a")]
        fill(self.pools[0], 512)
        self.backups = 0
        self.fresh = 0

    def _open(self, name: str) -> MaskPool:
        return MaskPool.open_or_create(self.root / name, manifest(), state_dir=self.root / "state")

    @rule(takes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(GROUPS), ROWS), min_size=1, max_size=8))
    def take(self, takes: list[tuple[int, str, int]]) -> None:
        for which, group, rows in takes:
            pool = self.pools[which % len(self.pools)]
            try:
                self.seen += take_checked(pool, group, rows)
            except PoolExhaustedError:
                assert pool.available(group) < rows
        assert_no_repeats(self.seen)

    @rule(which=st.integers(0, 9), chunks=st.integers(1, 6))
    def provision(self, which: int, chunks: int) -> None:
        fill(self.pools[which % len(self.pools)], 64 * chunks)

    @rule(which=st.integers(0, 9), clean=st.booleans())
    def reopen(self, which: int, clean: bool) -> None:
        old = self.pools[which % len(self.pools)]
        if clean:
            old.close()
        self.pools[which % len(self.pools)] = self._open(old.path.name)

    @rule()
    def second_handle(self) -> None:
        if len(self.pools) < 4:
            self.pools.append(self._open(self.pools[0].path.name))

    @rule(which=st.integers(0, 9))
    def copy_and_use(self, which: int) -> None:
        if len(self.pools) < 4:
            self.fresh += 1
            shutil.copytree(self.pools[which % len(self.pools)].path, self.root / f"copy{self.fresh}")
            self.pools.append(self._open(f"copy{self.fresh}"))

    @rule()
    def back_up(self) -> None:
        self.backups += 1
        shutil.copytree(self.pools[0].path, self.root / f"backup{self.backups}")

    @precondition(lambda self: self.backups)
    @rule(which=st.integers(0, 99), running=st.booleans())
    def restore(self, which: int, running: bool) -> None:
        """An older state is put back, under a process that runs or with all stopped."""
        path = self.pools[0].path
        if not running:
            for pool in self.pools:
                if pool.path == path:
                    pool.close()
        shutil.rmtree(path)
        shutil.copytree(self.root / f"backup{1 + which % self.backups}", path)
        self.pools = [self._open(path.name)] + [pool for pool in self.pools[1:] if running or pool.path != path]


def test_single_use_over_copies_and_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # durability has its own tests; this one wants many steps
    SingleUse.folder = tmp_path
    run_state_machine_as_test(
        SingleUse,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_threads(open_pool: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    real = DataFile.read

    def slow(self: DataFile, chunk: int, group: int, keys: ChunkKeys) -> np.ndarray:
        time.sleep(float(np.random.default_rng().uniform(0, 0.002)))  # lets the others in, where nothing holds them
        return real(self, chunk, group, keys)

    monkeypatch.setattr(DataFile, "read", slow)
    lines: list[str] = []
    errors: list[BaseException] = []
    together = threading.Barrier(6)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        together.wait()
        try:
            while True:
                lines.extend(take_checked(pool, "g1", int(rng.integers(1, 70))))
        except PoolExhaustedError:
            pass
        except BaseException as error:
            errors.append(error)

    with open_pool(slots=2048) as pool:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert len(lines) > 1600
    assert_no_repeats(lines)


def _in_fork(work: Callable[[], list[str]]) -> list[str]:
    """Runs ``work`` in a forked child and returns its lines."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(30)  # a child in a deadlock must not outlive the test
        try:
            os.write(write, "\n".join(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as file:
        lines = file.read().split("\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return lines


def test_fork(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=512) as pool:
        lines = take_checked(pool, "g0", 5)
        child = _in_fork(lambda: take_checked(pool, "g0", 5) + take_checked(pool, "g1", 100))
        lines += child + take_checked(pool, "g0", 100) + take_checked(pool, "g1", 5)
        assert len(child) == 105
        assert_no_repeats(lines)


def test_fork_without_hooks(open_pool: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library forked by itself, only the process id tells."""
    with open_pool(slots=512) as pool:
        lines = take_checked(pool, "g0", 5)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        lines += take_checked(pool, "g0", 5)
        assert_no_repeats(lines)
        assert pool.available("g0") == 512 - 64 - 5


def test_fork_while_a_thread_takes(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=256) as pool:
        with pool._lock:  # as if another thread were inside
            assert len(_in_fork(lambda: take_checked(pool, "g0", 3))) == 3
        take_checked(pool, "g0", 3)


def test_a_forked_child_leaves_the_parents_batch_alone(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool, pool.new_batch(64) as writer:

        def child() -> list[str]:
            writer.abort()
            try:
                writer.masks("g0")
            except PoolError as error:
                return [str(error)]
            return []

        assert "another process" in _in_fork(child)[0]
        for group in pool.groups:
            writer.write(group.name, products(group, writer.masks(group.name)))
        writer.commit()
        take_checked(pool, "g0", 64)


def test_cannot_be_copied_or_pickled(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PoolError, match="cannot be copied"):
                attempt(pool)


def test_an_interruption_loses_rows_and_repeats_none(
    open_pool: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt at every line of take() in turn."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    lines: list[str] = []
    interrupted = 0
    with open_pool(slots=2048) as pool:
        for stop in range(150):
            seen = 0

            def trace(frame: FrameType, event: str, arg: object, stop: int = stop) -> object:
                nonlocal seen
                name = frame.f_code.co_filename
                # Not at a line with "with": the tracer could strike before __exit__ runs, where no signal can.
                ours = event == "line" and name.endswith(("client/pool.py", "client/poolstore.py"))
                if ours and not linecache.getline(name, frame.f_lineno).strip().startswith("with "):
                    seen += 1
                    if seen == stop + 1:
                        raise KeyboardInterrupt
                return trace

            sys.settrace(trace)  # type: ignore[arg-type]
            try:
                r, _ = pool.take("g0", 63)
                lines += digests("g0", r)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            lines += take_checked(pool, "g0", 3)
            if pool.available("g0") < 300:
                fill(pool, 1024)
    assert interrupted > 80
    assert_no_repeats(lines)


def test_a_backup_of_hard_links_does_not_bring_masks_back(tmp_path: Path) -> None:
    """Also where the ledger was linked and put back: what it says of used masks was overwritten in place."""
    place = tmp_path / "pool", tmp_path / "ledger"
    with MaskPool.create(place[0], manifest(), state_dir=place[1]) as pool:
        fill(pool, 640)
        lines = take_checked(pool, "g0", 1)
    shutil.copytree(place[0], tmp_path / "pool.bak")
    shutil.copytree(place[1], tmp_path / "ledger.bak", copy_function=os.link)
    with MaskPool.open_or_create(place[0], manifest(), state_dir=place[1]) as pool:
        lines += take_checked(pool, "g0", 1)
    for folder in place:
        shutil.rmtree(folder)
        folder.with_suffix(".bak").rename(folder)
    with pytest.raises(PoolError):
        MaskPool.open_or_create(place[0], manifest(), state_dir=place[1])
    assert_no_repeats(lines)


def test_durable_before_handed_out(open_pool: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut needs: contents synced before the rename, the folder after it, the ledger before the pool."""
    events: list[str] = []
    real_sync, real_replace, real_dir = ledger.sync, Path.replace, ledger.sync_dir

    def kind(path: Path) -> str:
        return "ledger" if path.name.partition(".")[2].startswith("json") or path.name == "state" else "pool"

    def sync(fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink()
        events.append(f"sync {kind(name)} {'new' if name.name.endswith('.tmp') else 'old'}")
        real_sync(fd)

    def replace(self: Path, target: Path) -> Path:
        events.append(f"rename {kind(target)}")
        return real_replace(self, target)

    def sync_dir(path: Path) -> None:
        events.append(f"sync folder {kind(path)}")
        real_dir(path)

    with open_pool(slots=128) as pool:
        monkeypatch.setattr(ledger, "sync", sync)
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(ledger, "sync_dir", sync_dir)
        pool.take("g0", 1)
        assert events[:7] == [
            "sync pool new",
            "sync ledger new",
            "rename ledger",
            "sync folder ledger",
            "sync ledger old",  # overwritten, in case a hard link kept it
            "rename pool",
            "sync folder pool",
        ]
        events.clear()
        pool.take("g1", 64)
        pool.take("g0", 63)
        assert events == []  # one reservation serves all groups


# -- batches and disk ------------------------------------------------------------------------------------------------


def test_a_dropped_batch_leaves_nothing(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool:
        before = sorted(file.name for file in pool.path.iterdir())
        with contextlib.suppress(KeyboardInterrupt), pool.new_batch(64) as writer:
            writer.write("g0", products(pool.groups[0], writer.masks("g0")))
            assert sorted(file.name for file in pool.path.iterdir()) != before
            raise KeyboardInterrupt
        assert sorted(file.name for file in pool.path.iterdir()) == before
        with pytest.raises(PoolError, match="finished"):
            writer.write("g1", np.zeros((64, 3), np.uint32))


def test_a_batch_must_be_complete_and_written_once(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool, pool.new_batch(64) as writer:
        wr = products(pool.groups[0], writer.masks("g0"))
        writer.write("g0", wr)
        with pytest.raises(PoolError, match="written before"):
            writer.write("g0", wr)
        with pytest.raises(PoolError, match="2 groups"):
            writer.commit()
        for bad in (wr[:1], wr[:, :1], wr.astype(np.int64), np.full((64, 3), P, np.uint32)):
            with pytest.raises(PoolError, match="shape, type or range"):
                writer.write("g1", bad)
        with pytest.raises(PoolError, match="no group"):
            writer.masks("nope")


@pytest.mark.parametrize("slots", [0, -64, 63, 65, 1 << 21])
def test_refuses_a_size(slots: int, open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool, pytest.raises(PoolError, match="multiple of 64"):
        pool.new_batch(slots)


def test_used_space_is_given_back(tmp_path: Path) -> None:
    spec = manifest([(4, 4096), (4, 4096)])  # 1 MiB a chunk and group
    with MaskPool.create(tmp_path / "pool", spec, state_dir=tmp_path / "state") as pool:
        fill(pool, 256)
        full = pool.disk_bytes
        assert full > 8 << 20
        assert pool.bytes_per_slot * 256 >= 8 << 20
        pool.take("g0", 64)
        assert pool.disk_bytes > 7 << 20  # the other group still needs it
        pool.take("g1", 64)
        assert pool.disk_bytes < full - (1 << 20)
        for name in ("g0", "g1"):
            pool.take(name, 192)
        assert {file.name for file in pool.path.iterdir()} == {"pool.json"}
        assert pool.slots_left == 0


def test_closing_gives_back_what_was_reserved(open_pool: Callable[..., MaskPool]) -> None:
    pool = open_pool(slots=128)
    pool.take("g0", 1)
    pool.close()
    pool.close()
    assert pool.slots_left == 0
    for call in (lambda: pool.take("g0", 1), lambda: pool.available("g0"), lambda: pool.new_batch(64)):
        with pytest.raises(PoolError, match="closed"):
            call()
    with open_pool() as again:
        assert again.slots_left == 64


def test_a_batch_of_a_closed_pool_is_refused(open_pool: Callable[..., MaskPool]) -> None:
    pool = open_pool()
    with pool.new_batch(64) as writer:
        for group in pool.groups:
            writer.write(group.name, products(group, writer.masks(group.name)))
        pool.close()
        with pytest.raises(PoolError, match="closed"):
            writer.commit()
    with open_pool() as again:
        assert again.slots_left == 0
        assert {file.name for file in again.path.iterdir()} == {"pool.json"}


def test_no_room_is_seen_before_the_work(open_pool: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(slots=64) as pool:
        monkeypatch.setattr(poolwriter, "free_bytes", lambda path: 1000)
        with pytest.raises(PoolError, match=r"[\d,]+ bytes are needed, [\d,]+ bytes are free"):
            pool.new_batch(64)
        take_checked(pool, "g0", 64)


def test_a_full_disk(open_pool: Callable[..., MaskPool]) -> None:
    """By a limit on file size, in a child, since the limit is the process's."""

    def child() -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        texts = []
        for where in ("reserve space", "write"):
            if where == "write":
                poolwriter.fallocate = lambda *args: True
            try:
                fill(pool, 640)
            except PoolError as error:
                texts.append(str(error))
        assert not list(pool.path.glob("*.part"))
        take_checked(pool, "g0", 64)
        return texts

    with open_pool(slots=128) as pool:
        texts = _in_fork(child)
        assert len(texts) == 2
        for text in texts:
            assert "full" in text
            assert "bytes are needed" in text
            assert "bytes are free" in text
        take_checked(pool, "g0", 64)


def test_a_full_disk_costs_no_masks(open_pool: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(slots=128) as pool:
        real = ledger.write_all

        def full(fd: int, data: bytes, offset: int) -> None:
            if b'"marks"' in bytes(data):
                raise OSError(28, "No space left on device")
            real(fd, data, offset)

        monkeypatch.setattr(ledger, "write_all", full)
        for _ in range(3):
            with pytest.raises(PoolError, match="disk is full"):
                pool.take("g0", 1)
        monkeypatch.setattr(ledger, "write_all", real)
        assert pool.slots_left == 128
        assert not list(pool.path.glob("*.tmp"))
        assert_no_repeats(take_checked(pool, "g0", 128))


def test_leftovers_of_dead_writers_go_and_living_ones_stay(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool, pool.new_batch(64) as living:
        dead = pool.path / f"00000009-{'a' * 32}.part"
        dead.write_bytes(b"left behind")
        (pool.path / "mine.txt").write_text("somebody's")
        with open_pool():
            pass
        assert not dead.exists()
        assert (pool.path / "mine.txt").exists()
        for group in pool.groups:
            living.write(group.name, products(group, living.masks(group.name)))
        living.commit()
        assert pool.slots_left == 64


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_changed_record_is_named_and_skipped(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool(slots=128) as pool:
        data = next(pool.path.glob("*.data"))
        offset, size = pool._store.layout.record(0, 1)
        with data.open("r+b") as file:
            file.seek(offset + size - 3)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        take_checked(pool, "g0", 64)
        with pytest.raises(PoolError, match=rf"batch {data.stem}, chunk 0, group 'g1': damaged or changed file"):
            pool.take("g1", 1)
        take_checked(pool, "g1", 64)  # from the next chunk
        assert pool.available("g1") == 0


def test_records_cannot_be_swapped(tmp_path: Path) -> None:
    spec = manifest([(4, 4), (4, 4)])
    with MaskPool.create(tmp_path / "pool", spec, state_dir=tmp_path / "state") as pool:
        fill(pool, 64)
        data = next(pool.path.glob("*.data"))
        raw = bytearray(data.read_bytes())
        (a, size), (b, _) = pool._store.layout.record(0, 0), pool._store.layout.record(0, 1)
        raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]
        data.write_bytes(raw)
        for name in ("g0", "g1"):
            with pytest.raises(PoolError, match="damaged"):
                pool.take(name, 1)


def test_a_truncated_or_lost_data_file(open_pool: Callable[..., MaskPool], caplog: pytest.LogCaptureFixture) -> None:
    with open_pool(slots=64) as pool:
        data = next(pool.path.glob("*.data"))
        os.truncate(data, 10)
        with pytest.raises(PoolError, match="damaged"):
            pool.take("g0", 1)
        fill(pool, 64)
        next(pool.path.glob("*.data")).unlink()
        with pytest.raises(PoolExhaustedError):
            pool.take("g0", 1)
        assert "lost its data file" in caplog.text


@pytest.mark.parametrize("kind", ["keys", "bin", "json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_small_files(kind: str, damage: str, open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool:
        pool.store_check(_vectors(pool))
        fill(pool, 64)
        path = pool.path
    file = next(path.glob(f"*.{kind}"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x80
    file.write_bytes({"flip": bytes(raw), "cut": bytes(raw[: len(raw) // 3]), "empty": b""}[damage])
    with pytest.raises(PoolError):
        open_pool()


# -- identity --------------------------------------------------------------------------------------------------------


def test_another_split(open_pool: Callable[..., MaskPool], tmp_path: Path) -> None:
    open_pool().close()
    with pytest.raises(FingerprintError):
        MaskPool.open(tmp_path / "pool", manifest(name="other"), state_dir=tmp_path / "state")


def test_create_and_open_mean_what_they_say(open_pool: Callable[..., MaskPool], tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="no mask pool"):
        MaskPool.open(tmp_path / "pool", manifest(), state_dir=tmp_path / "state")
    open_pool().close()
    with pytest.raises(PoolError, match="folder of its own"):
        MaskPool.create(tmp_path / "pool", manifest(), state_dir=tmp_path / "state")
    other = tmp_path / "documents"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(PoolError, match="folder of its own"):
        MaskPool.create(other, manifest(), state_dir=tmp_path / "state")
    assert other.stat().st_mode & 0o077  # its mode was left alone
    with pytest.raises(PoolError, match="outside the pool"):
        MaskPool.create(tmp_path / "new", manifest(), state_dir=tmp_path / "new" / "state")


def test_destroyed_for_everybody(open_pool: Callable[..., MaskPool], tmp_path: Path) -> None:
    pool = open_pool()
    pool.store_check(_vectors(pool))
    fill(pool, 128)
    second = open_pool()
    shutil.copytree(pool.path, tmp_path / "copy")
    with pool.new_batch(64) as writer:
        pool.destroy()
        pool.destroy()
        with pytest.raises(PoolError, match="destroyed"):
            pool.take("g0", 1)
        assert pool.check("g0") is None
        assert not pool.path.exists()
        for group in pool.groups:
            writer.write(group.name, products(group, writer.masks(group.name)))
        with pytest.raises(PoolError, match="destroyed"):
            writer.commit()
    with pytest.raises(PoolForeignError, match="new pool"):
        second.take("g0", 1)
    with pytest.raises(PoolForeignError):
        open_pool("copy")
    with open_pool(slots=64) as fresh:
        take_checked(fresh, "g0", 1)


def test_a_stopped_process_does_not_save_a_pool(
    open_pool: Callable[..., MaskPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_code, "_DESTROY_WAIT_S", 0.1)
    pool = open_pool(slots=64)
    with Ledger(tmp_path / "state").locked():
        pool.destroy()
    assert not pool.path.exists()
    assert not list((tmp_path / "state").glob("*.json"))


def test_what_a_stopped_process_still_writes_revives_nothing(
    open_pool: Callable[..., MaskPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was between its two marks when somebody else destroyed the pool without waiting for it."""
    pool, other = open_pool(slots=192), open_pool()
    shutil.copytree(pool.path, tmp_path / "copy")

    def destroyed(step: str) -> None:
        if step == "reserve: mark written":
            with monkeypatch.context() as patched:
                patched.setattr(pool_code, "_DESTROY_WAIT_S", 0.0)
                other.destroy()

    monkeypatch.setattr(poolstore, "crash_point", destroyed)
    with contextlib.suppress(PoolError, FileNotFoundError):
        pool.take("g0", 1)
    monkeypatch.undo()
    with pytest.raises(PoolForeignError, match="was destroyed"):
        open_pool("copy")


# -- check vectors ---------------------------------------------------------------------------------------------------


def _vectors(pool: MaskPool, k: int = 2, *, seed: int = 5) -> dict[str, CheckVector]:
    rng = np.random.default_rng(seed)
    return {
        g.name: CheckVector(
            v=rng.integers(0, P, (k, g.out_features), dtype=np.uint32),
            c=rng.integers(0, P, (k, g.in_features), dtype=np.uint32),
        )
        for g in pool.groups
    }


@pytest.mark.parametrize("k", [1, 2])
def test_check_vectors_are_kept(k: int, open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool:
        assert pool.check("g0") is None
        wanted = _vectors(pool, k)
        pool.store_check(_vectors(pool, 3 - k))
        pool.store_check(wanted)
    with open_pool() as again:
        for name in GROUPS:
            got = again.check(name)
            assert got is not None
            assert np.array_equal(got.v, wanted[name].v)
            assert np.array_equal(got.c, wanted[name].c)


def test_the_first_check_vectors_are_everybodys(open_pool: Callable[..., MaskPool]) -> None:
    """Two sessions that begin a pool at once, perhaps with a server that answers each with another matrix."""
    first, second = open_pool(), open_pool()
    first.store_check(_vectors(first, seed=1))
    second.store_check(_vectors(second, seed=2))
    for name in GROUPS:
        mine, others = first.check(name), second.check(name)
        assert mine is not None
        assert others is not None
        assert np.array_equal(mine.v, others.v)
        assert np.array_equal(mine.c, others.c)


@pytest.mark.parametrize("k", [1, 2])
def test_masks_are_used_under_the_check_vectors_they_were_made_under(
    k: int, open_pool: Callable[..., MaskPool], tmp_path: Path
) -> None:
    old, without = open_pool(), open_pool()
    old.store_check(_vectors(old, 1, seed=1))
    fill(old, 64)
    with pytest.raises(PoolError, match="Connect again"):
        fill(without, 64)  # would be unchecked masks for those who check
    with pytest.raises(PoolError, match="not made under 2 check vector"):
        old.store_check(_vectors(old, 2))
    with old.new_batch(64) as writer:
        old.take(old.groups[0].name, 64)
        new = open_pool()
        if k == 2:
            new.store_check(_vectors(new, 2))
        else:  # as when another state of the folder is put back
            (tmp_path / "pool" / "check.bin").unlink()
            new.store_check(_vectors(new, 1, seed=2))
        for group in old.groups:
            writer.write(group.name, products(group, writer.masks(group.name)))
        with pytest.raises(PoolError, match="Connect again"):
            writer.commit()
    with pytest.raises(PoolError, match="Connect again"):
        old.new_batch(64)
    fill(new, 64)
    assert new.slots_left == 64
    assert old.slots_left == 0
    with pytest.raises(PoolExhaustedError):
        old.take(old.groups[0].name, 1)
    take_checked(new, "g0", 1)


def test_check_vectors_are_checked(open_pool: Callable[..., MaskPool]) -> None:
    with open_pool() as pool:
        good = _vectors(pool)
        bad = CheckVector(v=np.full((2, 5), P, np.uint32), c=good["g0"].c)
        for vectors in ({}, {"g0": good["g0"]}, {**good, "g0": bad}, {**good, "g0": good["g1"]}):
            with pytest.raises(PoolError, match="check vectors"):
                pool.store_check(vectors)
        assert pool.check("g0") is None


def test_the_steps_of_a_reservation_are_all_crash_tested() -> None:
    """A new crash point must be added to the list that tests/e2e/test_pool_crash.py walks."""
    text = "".join(Path(module.__file__).read_text() for module in (pool_code, poolstore))  # type: ignore[arg-type]
    named = set(re.findall(r'crash_point\("([^"]+)"\)', text))
    tested = (Path(__file__).parents[2] / "e2e" / "test_pool_crash.py").read_text()
    assert named
    assert all(f'"{step}"' in tested for step in named)
