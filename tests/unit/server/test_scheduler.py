"""What waits for the same weights goes together, nobody starves, and nobody waits for nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.server.scheduler import Scheduler
from sordino.shared.errors import LimitError, RangeError, TransportError


class Gate:
    """Computes negatives, one batch for each ``let``; notes the batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.threads: list[int] = []
        self._go = threading.Semaphore(0)

    def compute(self, key: str, works: list[int]) -> list[int]:
        self.batches.append((key, works))
        self.threads.append(threading.get_ident())
        assert self._go.acquire(timeout=20)
        if -1 in works:
            raise RangeError("no")
        return [-work for work in works]

    def let(self, count: int = 1) -> None:
        self._go.release(count)


Submit = Callable[..., "Future[tuple[int, float]]"]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as threads:
        yield threads


def submitter(scheduler: Scheduler[str, int, int], pool: ThreadPoolExecutor, gate: Gate) -> Submit:
    """Submits, and returns when the request computes or waits: so the order of arrival is the test's."""

    def submit(key: str, work: int, **options: Any) -> Future[tuple[int, float]]:
        before = scheduler.waiting + len(gate.batches)
        future = pool.submit(scheduler.run, key, work, **options)
        deadline = time.monotonic() + 20
        while scheduler.waiting + len(gate.batches) == before and not future.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return future

    return submit


def test_a_lone_request_is_computed_in_its_own_thread(gate: Gate) -> None:
    scheduler = Scheduler(gate.compute)
    gate.let()
    assert scheduler.run("a", 3)[0] == -3
    assert gate.threads == [threading.get_ident()]


def test_what_waits_for_the_same_key_goes_together(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(scheduler := Scheduler(gate.compute), pool, gate)
    futures = [submit(key, work) for key, work in (("a", 1), ("a", 2), ("b", 3), ("a", 4), ("b", 5))]
    assert scheduler.waiting == 4
    gate.let(3)
    assert [future.result(20)[0] for future in futures] == [-1, -2, -3, -4, -5]
    assert gate.batches == [("a", [1]), ("a", [2, 4]), ("b", [3, 5])]
    assert scheduler.waiting == 0


def test_a_batch_has_a_size(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(Scheduler(gate.compute, most=4), pool, gate)
    futures = [submit("a", work, size=work) for work in (1, 3, 2, 1, 9, 1)]
    gate.let(4)
    assert [future.result(20)[0] for future in futures] == [-1, -3, -2, -1, -9, -1]
    # What does not fit waits for the next batch, and does not keep smaller ones from going.
    assert gate.batches == [("a", [1]), ("a", [3, 1]), ("a", [2, 1]), ("a", [9])]


def test_seconds_are_shared_by_size(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(Scheduler(gate.compute), pool, gate)
    futures = [submit("a", work, size=work) for work in (1, 3, 1)]
    gate.let(2)
    _, large, small = (future.result(20)[1] for future in futures)
    assert large == pytest.approx(3 * small)


def test_alone_is_a_batch_each(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(Scheduler(gate.compute, together=False), pool, gate)
    futures = [submit("a", work) for work in (1, 2, 3)]
    gate.let(3)
    assert [future.result(20)[0] for future in futures] == [-1, -2, -3]
    assert [works for _, works in gate.batches] == [[1], [2], [3]]


def test_holders_take_turns(gate: Gate, pool: ThreadPoolExecutor) -> None:
    """One holder with many streams does not keep another waiting for all of them."""
    submit = submitter(Scheduler(gate.compute), pool, gate)
    futures = [submit(f"many-{k}", k, holder="many") for k in range(6)]
    futures += [submit(f"few-{k}", 10 + k, holder="few") for k in range(2)]
    gate.let(8)
    for future in futures:
        future.result(20)
    order = [works[0] for _, works in gate.batches]
    assert order == [0, 1, 10, 2, 11, 3, 4, 5]


def test_a_full_queue_is_said_at_once(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(scheduler := Scheduler(gate.compute, waiting=4), pool, gate)
    futures = [submit("a", 1), submit("a", 2, size=3), submit("b", 3)]
    with pytest.raises(LimitError, match="try again later"):
        scheduler.run("c", 4)
    gate.let(3)
    for future in futures:
        future.result(20)
    gate.let()
    assert scheduler.run("c", 4)[0] == -4  # there is room again


def test_one_request_larger_than_the_queue_still_waits_its_turn(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(Scheduler(gate.compute, waiting=4), pool, gate)
    futures = [submit("a", 1), submit("a", 2, size=50)]
    gate.let(2)
    assert [future.result(20)[0] for future in futures] == [-1, -2]


def test_nobody_computes_what_nobody_wants(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(scheduler := Scheduler(gate.compute), pool, gate)
    gone = threading.Event()
    first = submit("a", 1)
    cancelled = submit("a", 2, active=lambda: not gone.is_set())
    last = submit("a", 3)
    gone.set()
    gate.let(2)
    assert (first.result(20)[0], last.result(20)[0]) == (-1, -3)
    with pytest.raises(TransportError, match="ended before"):
        cancelled.result(20)
    assert gate.batches == [("a", [1]), ("a", [3])]
    assert scheduler.waiting == 0


def test_an_error_is_of_its_batch_alone(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(scheduler := Scheduler(gate.compute), pool, gate)
    futures = [submit("a", 1), submit("b", -1), submit("b", 2), submit("c", 3)]
    gate.let(3)
    assert futures[0].result(20)[0] == -1
    for future in futures[1:3]:
        with pytest.raises(RangeError):
            future.result(20)
    assert futures[3].result(20)[0] == -3
    gate.let()
    assert scheduler.run("b", 4)[0] == -4


def test_as_many_batches_at_a_time_as_there_are_places(gate: Gate, pool: ThreadPoolExecutor) -> None:
    submit = submitter(scheduler := Scheduler(gate.compute, places=2), pool, gate)
    futures = [submit(key, work) for key, work in (("a", 1), ("b", 2), ("b", 3), ("a", 4))]
    assert (len(gate.batches), scheduler.waiting) == (2, 2)
    gate.let(4)
    assert [future.result(20)[0] for future in futures] == [-1, -2, -3, -4]


def test_results_are_freed_without_the_garbage_collector(gate: Gate, pool: ThreadPoolExecutor) -> None:
    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    def compute(key: str, works: list[int]) -> list[Result]:
        results = [Result() for _ in works]
        made.extend(map(weakref.ref, results))
        gate.compute(key, works)
        return results

    scheduler = Scheduler(compute)
    submit = submitter(scheduler, pool, gate)  # type: ignore[arg-type]
    gc.disable()
    try:
        futures = [submit("a", work) for work in (1, 2, 3)]
        gate.let(2)
        for future in futures:
            future.result(20)
        del future, futures
        deadline = time.monotonic() + 20
        while any(result() is not None for result in made):
            assert time.monotonic() < deadline, "a result is kept by a cycle"
            time.sleep(0.01)
        assert len(made) == 3
    finally:
        gc.enable()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.sampled_from("xyz")), min_size=1, max_size=40))
def test_every_request_has_its_own_result(requests: list[tuple[str, int, str]]) -> None:
    def compute(key: str, works: list[int]) -> list[str]:
        return [f"{key}{work}" for work in works]

    scheduler = Scheduler(compute, places=2, most=8)
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(scheduler.run, key, number, size=size, holder=holder)
            for number, (key, size, holder) in enumerate(requests)
        ]
        found = [future.result(20)[0] for future in futures]
    assert found == [f"{key}{number}" for number, (key, _, _) in enumerate(requests)]
    assert (scheduler.waiting, scheduler._running, scheduler._turns) == (0, 0, {})
