"""Places for answers: so many at a time, a queue of limited length behind them, first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from sordino.client.gateway.faults import ApiError

_END: Final = object()


class Job:
    """A request for an answer, in the queue or at work in a thread of its own, which it tells of by events.

    Attributes:
        left: nobody waits for the answer any more.
    """

    def __init__(self, desk: Desk, work: Callable[[Job], None]) -> None:
        self._desk, self._work = desk, work
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._stop: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self.left = False

    def emit(self, event: object) -> None:
        """Hands an event on, from the thread at work."""
        self._tell(self._events.put_nowait, event)

    def stop_with(self, stop: Callable[[], None]) -> None:
        """What ends the work, from any thread; called at once where nobody waits any more."""
        with self._lock:
            self._stop = stop
            left = self.left
        if left:
            stop()

    def leave(self) -> None:
        """Gives up the place in the queue, or ends the work as soon as that can be; from the event loop. May be called
        again, and after the end."""
        with self._lock:
            self.left = True
            stop = self._stop
        if stop is not None:
            stop()
        self._desk.forget(self)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The events; an exception among them is raised."""
        while (event := await self._events.get()) is not _END:
            if isinstance(event, BaseException):
                raise event
            yield event

    def refuse(self, error: ApiError) -> None:
        """Ends it before it began; from the event loop."""
        self._events.put_nowait(error)

    def run(self, done: Callable[[], None]) -> None:
        """The thread."""
        try:
            self._work(self)
            self.emit(_END)
        except BaseException as error:  # raised again by whoever waits
            self.emit(error)
        finally:
            self._tell(done)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # of a loop that is closed: the process ends
            self._loop.call_soon_threadsafe(call, *arguments)


class Desk:
    """Gives out places. Used from the event loop alone.

    Args:
        places: jobs at work at a time. queue: jobs that may wait.
    """

    def __init__(self, places: int, queue: int) -> None:
        self._places, self._most_waiting = places, queue
        self._waiting: deque[Job] = deque()
        self._working: set[Job] = set()
        self._closed = False

    @property
    def working(self) -> int:
        return len(self._working)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, work: Callable[[Job], None]) -> Job:
        """Puts ``work`` in the queue, or to work where there is a place.

        Raises:
            ApiError: the queue is full, or the gateway is closing.
        """
        if self._closed:
            raise _closing()
        if len(self._working) >= self._places and len(self._waiting) >= self._most_waiting:
            text = f"{len(self._working)} answers are being made and {len(self._waiting)} wait: try again later"
            raise ApiError(429, text, code="too_many_waiting", retry=True)
        job = Job(self, work)
        self._waiting.append(job)
        self._next()
        return job

    def forget(self, job: Job) -> None:
        """Takes a job that waits out of the queue; one at work keeps its place until its thread has ended."""
        if job in self._waiting:
            self._waiting.remove(job)
            job.refuse(_closing())

    async def close(self, patience_s: float) -> bool:
        """Refuses what waits, ends what is at work. Whether all of it had ended after ``patience_s``."""
        self._closed = True
        while self._waiting:
            self.forget(self._waiting[0])
        for job in list(self._working):
            job.leave()
        until = asyncio.get_running_loop().time() + patience_s
        while self._working and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        return not self._working

    def _next(self) -> None:
        while self._waiting and len(self._working) < self._places:
            job = self._waiting.popleft()
            self._working.add(job)
            # A daemon: where the server keeps it waiting, the process ends all the same.
            threading.Thread(target=job.run, args=(lambda job=job: self._done(job),), daemon=True).start()

    def _done(self, job: Job) -> None:
        self._working.discard(job)
        self._next()


def _closing() -> ApiError:
    return ApiError(503, "the gateway is closing", code="closing")
