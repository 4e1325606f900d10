"""Places and the queue behind them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sordino.client.gateway.desk import Desk, Job
from sordino.client.gateway.faults import ApiError

WAIT_S = 60.0


class Work:
    """Waits to be let go, and says that it ran."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.go = threading.Event()

    def __call__(self, job: Job) -> None:
        job.stop_with(self.go.set)
        self._log.append(self._name)
        assert self.go.wait(WAIT_S)
        job.emit(self._name)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT_S))


async def until(done: Callable[[], object]) -> None:
    while not done():
        await asyncio.sleep(0.001)


def test_first_come_first_served() -> None:
    async def test() -> None:
        log: list[str] = []
        desk, works = Desk(2, 3), [Work(log, name) for name in "abcde"]
        jobs = [desk.submit(work) for work in works]
        await until(lambda: len(log) == 2)
        assert (desk.working, desk.waiting) == (2, 3)
        with pytest.raises(ApiError) as caught:
            desk.submit(Work(log, "f"))
        assert (caught.value.status, caught.value.headers) == (429, {"retry-after": "1"})
        for number, work in enumerate(works):
            await until(lambda: len(log) >= min(number + 2, 5))  # noqa: B023
            work.go.set()
            assert [event async for event in jobs[number]] == [log[number]] == ["abcde"[number]]
        await until(lambda: not desk.working)

    run(test)


def test_leaving() -> None:
    async def test() -> None:
        log: list[str] = []
        desk = Desk(1, 2)
        first, second, third = (Work(log, name) for name in "abc")
        jobs = [desk.submit(work) for work in (first, second, third)]
        jobs[1].leave()
        jobs[1].leave()
        assert desk.waiting == 1
        with pytest.raises(ApiError):
            [event async for event in jobs[1]]
        await until(lambda: log)
        jobs[0].leave()  # it is told to end, and keeps its place until it has
        assert first.go.is_set()
        await until(lambda: log == ["a", "c"])
        third.go.set()
        assert [event async for event in jobs[2]] == ["c"]
        jobs[2].leave()

    run(test)


def test_work_that_begins_after_everybody_left_is_stopped_at_once() -> None:
    async def test() -> None:
        begin, stopped = threading.Event(), threading.Event()

        def work(job: Job) -> None:
            assert begin.wait(WAIT_S)
            job.stop_with(stopped.set)

        job = Desk(1, 0).submit(work)
        job.leave()
        begin.set()
        assert [event async for event in job] == []
        assert stopped.is_set()

    run(test)


def test_an_error_of_the_work_is_raised_where_it_is_waited_for() -> None:
    async def test() -> None:
        def fail(job: Job) -> None:
            job.emit(1)
            raise ValueError("why")

        desk = Desk(1, 0)
        events = aiter(desk.submit(fail))
        assert await anext(events) == 1
        with pytest.raises(ValueError, match="why"):
            await anext(events)
        await until(lambda: not desk.working)

    run(test)


def test_closing() -> None:
    async def test() -> None:
        log: list[str] = []
        desk = Desk(1, 1)
        working, waiting = (desk.submit(Work(log, name)) for name in "ab")
        await until(lambda: log)
        assert await desk.close(WAIT_S)
        assert [event async for event in working] == ["a"]
        for wait in (lambda: desk.submit(Work(log, "c")), lambda: anext(aiter(waiting))):
            with pytest.raises(ApiError, match="closing"):
                await wait()  # type: ignore[misc]
        stubborn = Desk(1, 0)
        go = threading.Event()
        stubborn.submit(lambda job: go.wait(WAIT_S) or None)
        assert not await stubborn.close(0.01)
        go.set()

    run(test)
