"""Masks made just in time: many who wait at once, makers that fail, failed checks that nobody waits for, the end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import InProcessServer

from sordino.client.blocks import prices
from sordino.client.justintime import JustInTime
from sordino.client.pool import CheckVector, MaskPool
from sordino.client.protocols import MaskedProtocol
from sordino.client.provision import fetch_check_vectors
from sordino.client.refill import AutoKeeper, PoolKeeper
from sordino.client.transport import Connection
from sordino.shared.errors import IntegrityError, SessionLostError, SordinoError, TransportError

CHOICES = prices(1e6)
LONG_S = 60  # far more than anything here takes


@pytest.fixture(scope="module")
def link(bundles: Callable[..., Path]) -> Iterator[Connection]:
    with (
        closing(InProcessServer(bundles("llama"))) as server,
        closing(Connection(f"grpc://127.0.0.1:{server.port}", retry_s=5)) as connection,
    ):
        yield connection


@pytest.fixture
def source(link: Connection) -> Iterator[JustInTime]:
    with closing(JustInTime(link, lambda _: None, CHOICES)) as made:
        yield made


class Gate:
    """Stands in for a stream's ``exchange``: what is asked waits until the gate opens, and may fail then."""

    def __init__(self, source: JustInTime, fail: SordinoError | None = None) -> None:
        self.groups: list[int] = []  # of the blocks, in the order in which they were asked
        self.open = threading.Event()
        self.fail = fail
        self._exchange = source._stream.exchange
        source._stream.exchange = self  # type: ignore[assignment,method-assign]

    def __call__(self, messages: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> Any:
        self.groups.append(messages[0].group)
        assert self.open.wait(LONG_S)
        if self.fail is not None:
            raise self.fail
        return self._exchange(messages, meanwhile)


class Taker(threading.Thread):
    """Takes masks in a thread of its own; when it was made, it has begun to wait."""

    def __init__(self, source: JustInTime, index: int, rows: int) -> None:
        super().__init__(daemon=True)
        self._work = lambda: source.take(source._groups[index].name, rows)
        self.got: tuple[Any, Any] | None = None
        self.error: SordinoError | None = None
        before = len(source._wishes)
        self.start()
        until(lambda: len(source._wishes) > before)

    def run(self) -> None:
        try:
            self.got = self._work()
        except SordinoError as error:
            self.error = error


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def over(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), "it waits for ever"


def test_all_who_wait_are_served_in_their_order(source: JustInTime) -> None:
    """Also several for one group, of more rows than are ever made ahead."""
    gate = Gate(source)
    takers = [Taker(source, index, rows) for index, rows in ((2, 90), (0, 90), (2, 90), (2, 1))]
    gate.open.set()
    over(*takers)
    assert gate.groups[:9] == [2, 2, 2, 0, 0, 0, 2, 2, 2], "blocks of 32 rows"
    rows = [row.tobytes() for taker in takers if taker.got for row in taker.got[0]]
    assert len(rows) == len(set(rows)) == 271


def test_a_maker_that_fails_tells_all_who_wait(source: JustInTime) -> None:
    gate = Gate(source, TransportError("away"))
    takers = [Taker(source, index, 200) for index in (0, 1, 1)]
    gate.open.set()
    over(*takers)
    assert [taker.error for taker in takers] == [gate.fail] * 3
    assert gate.groups == [0], "once, not once for each"
    gate.fail = None
    assert source.take(source._groups[1].name, 200)[0].shape[0] == 200


def test_a_maker_that_failed_and_is_not_gone_yet_is_replaced(
    source: JustInTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, leave = source._run, threading.Event()

    def lingering() -> None:
        run()
        leave.wait()

    monkeypatch.setattr(source, "_run", lingering)
    gate = Gate(source, TransportError("away"))
    first = Taker(source, 0, 1)
    gate.open.set()
    over(first)
    assert first.error is gate.fail
    dying = source._thread
    assert dying is not None
    gate.fail = None
    gate.open.clear()  # only so that the next one is seen waiting
    second = Taker(source, 0, 1)
    gate.open.set()
    try:
        over(second)
        assert dying.is_alive()
    finally:
        leave.set()
    assert second.got is not None


def test_an_error_of_earlier_is_not_told_to_who_comes_later(source: JustInTime) -> None:
    name = source._groups[0].name
    gate = Gate(source)
    gate.open.set()
    source.take(name, 1)
    until(lambda: all(stock.rows > 16 for stock in source._stocks))  # nothing more is made ahead
    gate.fail = TransportError("away")
    source.take(name, source._stocks[0].rows)
    until(lambda: not source._making)
    gate.fail = None
    assert source.take(name, 100)[0].shape[0] == 100


def test_an_interrupt_ends_the_wait_and_nothing_else(source: JustInTime) -> None:
    gate = Gate(source)

    def interrupt() -> None:
        until(lambda: source._wishes)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        source.take(source._groups[0].name, 200)
    over(sender)
    assert not source._wishes
    assert source._making
    gate.open.set()
    assert source.take(source._groups[0].name, 200)[0].shape[0] == 200


# -- with a pool -------------------------------------------------------------------------------------------------------


@contextmanager
def auto(
    server: InProcessServer, tmp: Path, *, wrong: str | None = None, retry_s: float = 5
) -> Iterator[tuple[AutoKeeper, JustInTime, Connection]]:
    """What protocol ``auto`` is made of, without refilling; answers for the group ``wrong`` fail their check."""
    connection = Connection(f"grpc://127.0.0.1:{server.port}", retry_s=retry_s)
    pool = MaskPool.open_or_create(tmp / "pool", connection.manifest, state_dir=tmp / "state")
    told: Callable[[str], None] = logging.getLogger(__name__).info
    keeper = PoolKeeper(connection, pool, batch=64, low_water=0, refill=False, notify=told)
    keeper.prepare(1)

    def check(name: str) -> CheckVector | None:
        vector = keeper.check(name)
        return CheckVector(v=vector.v, c=vector.c ^ 1) if vector is not None and name == wrong else vector

    source = JustInTime(connection, check, CHOICES)
    with closing(AutoKeeper(keeper, source, fill=False)) as made:
        yield made, source, connection


@pytest.fixture
def served(bundles: Callable[..., Path]) -> Iterator[InProcessServer]:
    with closing(InProcessServer(bundles("llama"))) as server:
        yield server


@pytest.mark.parametrize("somebody_waits", [True, False])
def test_a_wrong_block_ends_everything(served: InProcessServer, tmp_path: Path, somebody_waits: bool) -> None:
    wrong = served.store.manifest.groups[1]
    with auto(served, tmp_path, wrong=wrong.name) as (keeper, source, link), closing(MaskedProtocol(link, keeper)) as p:
        if somebody_waits:
            with pytest.raises(IntegrityError):
                p.apply(wrong, np.zeros((1, wrong.in_features), np.int32))
        else:
            source.take(served.store.manifest.groups[0].name, 1)
            until(lambda: source._closed)  # the next group's, made ahead
        assert not (tmp_path / "pool").exists()
        errors = []
        for group in served.store.manifest.groups[:3]:
            with pytest.raises(IntegrityError) as caught:
                p.apply(group, np.zeros((1, group.in_features), np.int32))
            errors.append(caught.value)
        with pytest.raises(IntegrityError) as caught:
            keeper.fill_now()
        assert {id(error) for error in errors} == {id(caught.value)}
        assert not any(stock.rows for stock in source._stocks)
        with pytest.raises(SessionLostError):  # nothing more is asked of this server
            link.retrying(lambda: fetch_check_vectors(link, 1))


def test_closing_waits_for_nobody_who_waits_for_the_server(served: InProcessServer, tmp_path: Path) -> None:
    with auto(served, tmp_path, retry_s=10 * LONG_S) as (keeper, source, link):
        served.close()
        taker = Taker(source, 0, 1)
        until(lambda: link.traffic.retries)
        closer = threading.Thread(target=keeper.close, daemon=True)
        closer.start()
        over(closer, taker)
        assert isinstance(taker.error, SessionLostError)


def test_masks_of_the_pool_that_another_takes_first_are_made_just_in_time(
    served: InProcessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with auto(served, tmp_path) as (keeper, _, _):
        monkeypatch.setattr(keeper.pool, "available", lambda group: 64)  # as it was a moment before
        group = served.store.manifest.groups[0]
        assert keeper.take(group.name, 3)[0].shape == (3, group.in_features)
