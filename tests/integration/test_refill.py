"""Filling a pool: two sessions that begin it at once, an interrupt, a failed check while somebody holds the ledger."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from pairs import InProcessServer

from sordino.client import pool as pool_code
from sordino.client.ledger import Ledger
from sordino.client.pool import MaskPool
from sordino.client.poolstore import Store
from sordino.client.protocols import MaskedProtocol
from sordino.client.provision import Progress
from sordino.client.refill import PoolKeeper
from sordino.client.transport import Connection
from sordino.server.kernel import RingMatrix
from sordino.shared.errors import IntegrityError


class TwoFaced(InProcessServer):
    """Presents the same manifest, and holds another matrix."""

    def __init__(self, bundle: Path) -> None:
        super().__init__(bundle)
        self.turn()

    def turn(self) -> None:
        """From here on the matrices have the other sign."""
        for matrix in self.store.matrices.values():
            RingMatrix.__init__(matrix, -matrix.weights, matrix.planes, self.store.kernel)


@contextmanager
def keeping(
    server: InProcessServer, tmp: Path, progress: Progress | None = None
) -> Iterator[tuple[PoolKeeper, Connection]]:
    with (
        closing(Connection(f"grpc://127.0.0.1:{server.port}", retry_s=5)) as link,
        MaskPool.open_or_create(tmp / "pool", link.manifest, state_dir=tmp / "state") as pool,
    ):
        told: Callable[[str], None] = logging.getLogger(__name__).info
        keeper = PoolKeeper(link, pool, batch=64, low_water=0, refill=True, notify=told, progress=progress)
        with closing(keeper):
            yield keeper, link


def rows_of(keeper: PoolKeeper, link: Connection) -> None:
    """One row through the first group, as protocol ``masked`` sends it."""
    group = keeper.pool.groups[0]
    with closing(MaskedProtocol(link, keeper)) as protocol:
        protocol.apply(group, np.ones((1, group.in_features), np.int32))


def test_sessions_that_begin_a_pool_at_once_notice_a_server_with_two_matrices(
    bundles: Callable[..., Path], tmp_path: Path
) -> None:
    bundle, both = bundles("llama"), threading.Barrier(2)

    def wait_for_the_other(done: int, groups: int) -> None:
        if done == groups:  # both have fetched check vectors, neither has stored them
            both.wait(60)

    with (
        closing(InProcessServer(bundle)) as one,
        closing(TwoFaced(bundle)) as other,
        keeping(one, tmp_path, wait_for_the_other) as (first, _),
        keeping(other, tmp_path, wait_for_the_other) as (second, link),
    ):
        ahead = threading.Thread(target=first.prepare, args=(1,))
        ahead.start()
        second.prepare(1)
        ahead.join()
        first._progress = second._progress = None
        name = first.pool.groups[0].name
        mine, others = first.check(name), second.check(name)
        assert mine is not None
        assert others is not None
        assert np.array_equal(mine.v, others.v)

        def go_on() -> None:
            first.fill_now()  # fails here if the other one's vectors were stored first
            rows_of(second, link)

        with pytest.raises(IntegrityError):
            go_on()


def test_an_interrupt_while_a_refill_starts_leaves_one_that_works(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "sordino-refill":
            raise KeyboardInterrupt

    with closing(InProcessServer(bundles("llama"))) as server, keeping(server, tmp_path) as (keeper, _):
        keeper.prepare(1)
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.start_background()
        monkeypatch.undo()
        keeper.start_background()  # one is under way
        keeper.fill_now()  # waits for it
        assert keeper.pool.slots_left == 128
        assert keeper._background is not None
        keeper._background.join()
        assert not keeper._filling.locked()


def test_a_failed_check_is_told_and_the_pool_goes_though_the_ledger_is_held(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_code, "_DESTROY_WAIT_S", 0.1)
    with closing(TwoFaced(bundles("llama"))) as server, keeping(server, tmp_path) as (keeper, link):
        keeper.prepare(1)
        keeper.fill_now()
        rows_of(keeper, link)  # which reserves the masks of the next one
        server.turn()
        with Ledger(tmp_path / "state").locked(), pytest.raises(IntegrityError):
            rows_of(keeper, link)
        assert not keeper.pool.path.exists()


def test_what_cannot_be_erased_does_not_hide_a_failed_check(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with closing(TwoFaced(bundles("llama"))) as server, keeping(server, tmp_path) as (keeper, link):
        keeper.prepare(1)
        keeper.fill_now()
        server.turn()
        monkeypatch.setattr(Store, "destroy", refuse)
        with pytest.raises(IntegrityError):
            rows_of(keeper, link)
        monkeypatch.undo()
    assert f"delete its folder {tmp_path / 'pool'}" in caplog.text


def test_whoever_meets_what_a_failed_check_left_hears_of_the_check(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A background batch that fails between the beginning of a call and its masks: the pool is gone when it asks."""
    with closing(TwoFaced(bundles("llama"))) as server, keeping(server, tmp_path) as (keeper, link):
        keeper.prepare(1)
        keeper.fill_now()
        server.turn()
        take = keeper.take

        def meanwhile(group: str, rows: int) -> object:
            keeper.start_background()
            assert keeper._background is not None
            keeper._background.join()
            assert not keeper.pool.path.exists()  # before anybody asks
            return take(group, rows)

        monkeypatch.setattr(keeper, "take", meanwhile)
        with pytest.raises(IntegrityError) as first:
            rows_of(keeper, link)
        monkeypatch.undo()
        for again in (lambda: rows_of(keeper, link), keeper.fill_now):
            with pytest.raises(IntegrityError) as later:
                again()
            assert later.value is first.value


def test_a_failed_check_is_told_once_the_pool_is_gone(
    bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to another thread than found it: who ends the process then leaves no pool behind."""
    steps: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    with closing(InProcessServer(bundles("llama"))) as server, keeping(server, tmp_path) as (keeper, _):

        def destroy() -> None:
            begun.set()
            go_on.wait(60)
            steps.append("gone")

        def ask() -> None:
            with pytest.raises(IntegrityError):
                keeper.raise_failure()
            steps.append("told")

        monkeypatch.setattr(keeper.pool, "destroy", destroy)
        threads = [threading.Thread(target=keeper.fail, args=(IntegrityError("found"),)), threading.Thread(target=ask)]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        threads[1].join(0.2)  # time for what must not be
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert steps == ["gone", "told"]
