"""What waits for the same weights goes together, nobody starves, and nobody waits for nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.server import service
from sordino.server.scheduler import Scheduler, Stream
from sordino.shared.errors import LimitError, RangeError

Results = list[tuple[int, float]]


class Gate:
    """Computes negatives, one batch for each ``let``; notes the batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.threads: list[int] = []
        self._go = threading.Semaphore(0)

    def compute(self, key: Any, works: list[int]) -> list[int]:
        self.batches.append((key, works))
        self.threads.append(threading.get_ident())
        assert self._go.acquire(timeout=20)
        if -1 in works:
            raise RangeError("no")
        return [-work for work in works]

    def let(self, count: int = 1) -> None:
        self._go.release(count)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


async def submitted(
    scheduler: Scheduler[Any, int, int], *requests: tuple[Any, ...], **options: Any
) -> list[asyncio.Task[tuple[int, float]]]:
    """Tasks of requests (key, work, and a size), which have all come in this order; the first computes already."""
    tasks = []
    for key, work, *size in requests:
        more = options | ({"size": size[0]} if size else {})
        tasks.append(asyncio.create_task(scheduler.run(key, work, **more)))
        await asyncio.sleep(0)
    return tasks


async def negatives(tasks: list[asyncio.Task[tuple[int, float]]]) -> list[int]:
    return [result for result, _ in await asyncio.wait_for(asyncio.gather(*tasks), 20)]


def test_a_brief_request_is_computed_in_the_loop(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        gate.let(2)
        brief = Scheduler(gate.compute, pool, brief=lambda key, size: size < 4)
        assert (await brief.run("a", 3))[0] == -3
        assert (await brief.run("a", 3, size=4))[0] == -3

    asyncio.run(main())
    assert gate.threads[0] == threading.get_ident() != gate.threads[1]


def test_an_error_of_a_brief_request_is_its_own(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        gate.let(2)
        brief = Scheduler(gate.compute, pool, brief=lambda key, size: True)
        with pytest.raises(RangeError):
            await brief.run("a", -1)
        assert (await brief.run("a", 3))[0] == -3

    asyncio.run(main())


def test_what_waits_for_the_same_key_goes_together(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool)
        tasks = await submitted(scheduler, ("a", 1), ("a", 2), ("b", 3), ("a", 4), ("b", 5))
        assert scheduler.waiting == 4
        gate.let(3)
        assert await negatives(tasks) == [-1, -2, -3, -4, -5]
        assert scheduler.waiting == 0

    asyncio.run(main())
    assert gate.batches == [("a", [1]), ("a", [2, 4]), ("b", [3, 5])]


def test_a_batch_has_a_size(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        tasks = await submitted(
            Scheduler(gate.compute, pool, most=4), *(("a", work, work) for work in (1, 3, 2, 1, 9, 1))
        )
        gate.let(4)
        assert await negatives(tasks) == [-1, -3, -2, -1, -9, -1]

    asyncio.run(main())
    # What does not fit waits for the next batch, and does not keep smaller ones from going.
    assert gate.batches == [("a", [1]), ("a", [3, 1]), ("a", [2, 1]), ("a", [9])]


def test_seconds_are_shared_by_size(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> Results:
        tasks = await submitted(Scheduler(gate.compute, pool), *(("a", work, work) for work in (1, 3, 1)))
        gate.let(2)
        return await asyncio.wait_for(asyncio.gather(*tasks), 20)

    _, (_, large), (_, small) = asyncio.run(main())
    assert large == pytest.approx(3 * small)


def test_alone_is_a_batch_each(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        tasks = await submitted(Scheduler(gate.compute, pool, together=False), ("a", 1), ("a", 2), ("a", 3))
        gate.let(3)
        assert await negatives(tasks) == [-1, -2, -3]

    asyncio.run(main())
    assert [works for _, works in gate.batches] == [[1], [2], [3]]


def test_holders_take_turns(gate: Gate, pool: ThreadPoolExecutor) -> None:
    """One holder with many streams does not keep another waiting for all of them."""

    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool)
        tasks = await submitted(scheduler, *((f"many-{k}", k) for k in range(6)), holder="many")
        tasks += await submitted(scheduler, *((f"few-{k}", 10 + k) for k in range(2)), holder="few")
        gate.let(8)
        await negatives(tasks)

    asyncio.run(main())
    assert [works[0] for _, works in gate.batches] == [0, 1, 10, 2, 11, 3, 4, 5]


def test_a_full_queue_is_said_at_once(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool, waiting=4)
        tasks = await submitted(scheduler, ("a", 1), ("a", 2, 3), ("b", 3))
        with pytest.raises(LimitError, match="try again later"):
            await scheduler.run("c", 4)
        gate.let(3)
        await negatives(tasks)
        gate.let()
        assert (await scheduler.run("c", 4))[0] == -4  # there is room again

    asyncio.run(main())


def test_one_request_larger_than_the_queue_still_waits_its_turn(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        tasks = await submitted(Scheduler(gate.compute, pool, waiting=4), ("a", 1), ("a", 2, 50))
        gate.let(2)
        assert await negatives(tasks) == [-1, -2]

    asyncio.run(main())


def test_nobody_computes_what_nobody_wants(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool, waiting=2)
        first, gone, last = await submitted(scheduler, ("a", 1), ("a", 2), ("a", 3))
        gone.cancel()
        await asyncio.sleep(0)
        assert scheduler.waiting == 1, "its place is free at once"
        (another,) = await submitted(scheduler, ("a", 4))
        gate.let(2)
        assert await negatives([first, last, another]) == [-1, -3, -4]
        assert gone.cancelled()
        assert scheduler.waiting == 0

    asyncio.run(main())
    assert gate.batches == [("a", [1]), ("a", [3, 4])]


def test_a_batch_goes_on_without_one_of_its_requests(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool)
        first, gone, last = await submitted(scheduler, ("b", 1), ("a", 2), ("a", 3))
        gate.let()
        await negatives([first])
        while len(gate.batches) < 2:
            await asyncio.sleep(0.001)
        gone.cancel()
        gate.let()
        assert await negatives([last]) == [-3]

    asyncio.run(main())
    assert gate.batches == [("b", [1]), ("a", [2, 3])]


def test_an_error_is_of_its_batch_alone(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool)
        tasks = await submitted(scheduler, ("a", 1), ("b", -1), ("b", 2), ("c", 3))
        gate.let(3)
        assert await negatives(tasks[:1]) == [-1]
        for task in tasks[1:3]:
            with pytest.raises(RangeError):
                await task
        assert await negatives(tasks[3:]) == [-3]
        gate.let()
        assert (await scheduler.run("b", 4))[0] == -4

    asyncio.run(main())


def test_as_many_batches_at_a_time_as_there_are_places(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool, places=2)
        tasks = await submitted(scheduler, ("a", 1), ("b", 2), ("b", 3), ("a", 4))
        while len(gate.batches) < 2:
            await asyncio.sleep(0.001)
        assert scheduler.waiting == 2
        gate.let(4)
        assert await negatives(tasks) == [-1, -2, -3, -4]

    asyncio.run(main())


def test_results_are_freed_without_the_garbage_collector(gate: Gate, pool: ThreadPoolExecutor) -> None:
    class Result:
        pass

    made: list[weakref.ref[Result]] = []

    def compute(key: str, works: list[int]) -> list[Result]:
        results = [Result() for _ in works]
        made.extend(map(weakref.ref, results))
        gate.compute(key, works)
        return results

    async def main() -> None:
        scheduler = Scheduler(compute, pool)
        tasks = await submitted(scheduler, ("a", 1), ("a", 2), ("a", 3))  # type: ignore[arg-type]
        gate.let(2)
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        del tasks
        deadline = time.monotonic() + 20
        while any(result() is not None for result in made):
            assert time.monotonic() < deadline, "a result is kept by a cycle"
            await asyncio.sleep(0.01)
        assert len(made) == 3

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.sampled_from("xyz")), min_size=1, max_size=40))
def test_every_request_has_its_own_result(requests: list[tuple[str, int, str]]) -> None:
    def compute(key: str, works: list[int]) -> list[str]:
        return [f"{key}{work}" for work in works]

    async def main() -> list[tuple[str, float]]:
        scheduler = Scheduler(compute, pool, places=2, most=8)
        found = await asyncio.gather(
            *(
                scheduler.run(key, number, size=size, holder=holder)
                for number, (key, size, holder) in enumerate(requests)
            )
        )
        assert (scheduler.waiting, scheduler._size, scheduler._running, scheduler._turns) == (0, 0, set(), {})
        return found

    with ThreadPoolExecutor(8) as pool:
        found = asyncio.run(main())
    assert [text for text, _ in found] == [f"{key}{number}" for number, (key, _, _) in enumerate(requests)]


# -- streams in step ---------------------------------------------------------------------------------------------------

GROUPS = 12
THINKS_S = 0.002


class Steps:
    """Products of nothing, in the loop; notes the batches, and how long each stream's tokens took."""

    def __init__(self, pool: ThreadPoolExecutor, **options: Any) -> None:
        self.sizes: list[int] = []
        self.scheduler: Scheduler[int, int, int] = Scheduler(self._compute, pool, brief=lambda *_: True, **options)

    def _compute(self, group: int, works: list[int]) -> list[int]:
        self.sizes.append(len(works))
        return works

    async def decode(self, tokens: int, *, begin_s: float = 0.0, thinks_s: float = THINKS_S) -> list[float]:
        """Seconds of each token of a client that thinks so long between two products."""
        await asyncio.sleep(begin_s)
        stream, seconds = self.scheduler.enter(), []
        for _ in range(tokens):
            start = time.monotonic()
            for group in range(GROUPS):
                await self.scheduler.run(group, 1, stream=stream)
                await asyncio.sleep(thinks_s)
            seconds.append(time.monotonic() - start)
        self.scheduler.leave(stream)
        return seconds


def decoding(steps: Steps, *clients: Coroutine[Any, Any, list[float]]) -> list[list[float]]:
    async def main() -> list[list[float]]:
        return await asyncio.gather(*clients)

    return asyncio.run(main())


def test_streams_come_in_step(pool: ThreadPoolExecutor) -> None:
    """They begin at different times; after some tokens they are one batch."""
    token_s = GROUPS * THINKS_S
    steps = Steps(pool)
    decoding(steps, *(steps.decode(40, begin_s=k * token_s / 4) for k in range(4)))
    late = steps.sizes[-len(steps.sizes) // 2 :]
    assert sum(late) / len(late) > 2.5
    apart = Steps(pool, together=False)
    decoding(apart, *(apart.decode(10, begin_s=k * token_s / 4) for k in range(4)))
    assert set(apart.sizes) == {1}


def test_a_stream_on_its_own_never_waits(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(pool)
    monkeypatch.setattr(steps.scheduler, "_look_again", lambda: pytest.fail("it waits"))

    async def main() -> None:
        idle = steps.scheduler.enter()  # one that says nothing, beside it
        await steps.decode(5)
        steps.scheduler.leave(idle)

    asyncio.run(main())
    assert steps.sizes == [1] * 5 * GROUPS


def test_nobody_waits_for_who_is_much_slower(pool: ThreadPoolExecutor) -> None:
    steps = Steps(pool)
    (alone,) = decoding(steps, steps.decode(40))
    beside, _ = decoding(steps, steps.decode(40), steps.decode(6, thinks_s=10 * THINKS_S))
    assert sum(beside) < 1.4 * sum(alone)


def test_what_a_stream_may_wait_is_bounded() -> None:
    """A quarter of the time that its tokens take without waiting, and three quarters of one token at once."""
    stream, now = Stream(), 100.0

    def token(takes_s: float = 0.2) -> None:
        nonlocal now
        stream.asks(0, now)
        stream.answered = now + takes_s / 4
        stream.asks(1, now + takes_s / 2)
        stream.answered = now = now + takes_s

    for number in range(10):
        token()
        assert stream.patience == pytest.approx(min(number * 0.25, 0.75) * 0.2)
    stream.departs(0.0)
    token()
    assert stream.patience == pytest.approx(0.25 * 0.05), "what it waited earns nothing"
    now += 60
    token()
    assert stream.patience < 0.2, "nor does what its user rested"
    for _ in range(3):
        token(600.0)
    assert stream.patience == 1.0


def test_who_is_ahead_waits_no_longer_than_it_may(pool: ThreadPoolExecutor) -> None:
    """For one that was expected and does not come."""

    async def main() -> tuple[float, float]:
        steps = Steps(pool)
        one, other = steps.scheduler.enter(), steps.scheduler.enter()
        for _ in range(4):
            for group in range(GROUPS):
                await asyncio.gather(*(steps.scheduler.run(group, 1, stream=each) for each in (one, other)))
                await asyncio.sleep(THINKS_S)
        start = time.monotonic()
        await steps.scheduler.run(0, 1, stream=one)
        return time.monotonic() - start, one.token_s

    waited, token_s = asyncio.run(main())
    assert waited < 0.5 * token_s + 0.05


def test_who_leaves_is_not_waited_for(pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        steps = Steps(pool)
        one, other = steps.scheduler.enter(), steps.scheduler.enter()
        for stream in (one, other):
            stream.asks(5, time.monotonic())
            stream.began, stream.token_s, stream.turn_s = time.monotonic(), 10.0, 10.0
        one.waiting, other.waiting = False, False
        one.answered = other.answered = time.monotonic()
        one.patience, one.group = 20.0, 6
        held = asyncio.create_task(steps.scheduler.run(7, 1, stream=one))
        await asyncio.sleep(0.02)
        assert not held.done(), "the other one is behind"
        steps.scheduler.leave(other)
        assert (await asyncio.wait_for(held, 5))[0] == 1

    asyncio.run(main())


def test_brief_requests_need_no_place(gate: Gate, pool: ThreadPoolExecutor) -> None:
    """A long prompt of one session does not hold up the tokens of others."""

    def compute(key: str, works: list[int]) -> list[int]:
        return gate.compute(key, works) if key == "wide" else [-work for work in works]

    async def main() -> None:
        scheduler = Scheduler(compute, pool, brief=lambda key, size: key != "wide")
        tasks = await submitted(scheduler, ("wide", 1), ("wide", 2))
        assert (await asyncio.wait_for(scheduler.run("a", 3), 20))[0] == -3
        assert scheduler.waiting == 1
        gate.let(2)
        assert await negatives(tasks) == [-1, -2]

    asyncio.run(main())


def test_without_a_place_a_batch_stays_brief(gate: Gate, pool: ThreadPoolExecutor) -> None:
    sizes: list[int] = []

    def compute(key: str, works: list[int]) -> list[int]:
        if key == "wide":
            return gate.compute(key, works)
        sizes.append(len(works))
        return works

    async def main() -> None:
        scheduler = Scheduler(compute, pool, brief=lambda key, size: key != "wide" and size <= 2)
        wide = await submitted(scheduler, ("wide", 1))
        held, scheduler._ready = scheduler._ready, list  # type: ignore[method-assign]
        tasks = await submitted(scheduler, *(("a", k) for k in range(5)))
        scheduler._ready = held  # type: ignore[method-assign]
        scheduler._start()
        await negatives(tasks)
        gate.let()
        await negatives(wide)

    asyncio.run(main())
    assert sizes == [2, 2, 1]


def test_a_closed_scheduler_starts_nothing(gate: Gate, pool: ThreadPoolExecutor) -> None:
    async def main() -> None:
        scheduler = Scheduler(gate.compute, pool)
        first, second = await submitted(scheduler, ("a", 1), ("b", 2))
        scheduler.close()
        gate.let()
        assert await negatives([first]) == [-1]
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert gate.batches == [("a", [1])]


def test_few_streams_wait_for_nobody_where_it_does_not_pay(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(pool, worth=4)
    monkeypatch.setattr(steps.scheduler, "_look_again", lambda: pytest.fail("one waits"))
    decoding(steps, *(steps.decode(10, begin_s=k * GROUPS * THINKS_S / 3) for k in range(3)))
    assert len(steps.sizes) >= 20 * GROUPS
    enough = Steps(pool, worth=4)
    decoding(enough, *(enough.decode(40, begin_s=k * GROUPS * THINKS_S / 4) for k in range(4)))
    assert max(enough.sizes) == 4


def test_from_how_many_streams_on_it_pays() -> None:
    def store(*shapes: tuple[int, int]) -> Any:
        return SimpleNamespace(
            matrices={i: SimpleNamespace(in_features=n, out_features=m) for i, (n, m) in enumerate(shapes)}
        )

    assert service._worth(store((576, 960), (576, 576), (576, 3072), (1536, 576))) == 12
    assert service._worth(store((2048, 6144), (2048, 2048))) == 2
    assert service._worth(store((4096, 14336))) == 2
