"""Continuous batching: work of several streams that waits for the same weights is done as one.

All of it runs in the server's event loop; what computes for long is handed to a thread. While a place is free a
request is computed at once. While all are taken requests wait, and whoever ends hands its place on: to the oldest
request of the holder whose turn is longest ago, and with it go all that wait for the same weights, as far as a batch
holds. So nobody starves: between two turns of a holder every other holder that waits has one, whatever their numbers of
streams.

Streams of small products are rarely at the same weights by themselves, so they are brought in step. Before its first
product of a token a stream waits for others that are about to begin one too, and those that begin together wait for
each other before each further product. A stream waits for a quarter of its time at most on average, for three quarters
of a token at once, and only for others that are expected within that and not much slower: in step nobody waits for
long, and a stream on its own never does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sordino.shared.errors import LimitError

K = TypeVar("K", bound=Hashable)
W = TypeVar("W")
R = TypeVar("R")

_SHARE: Final = 0.25  # of a token's time, for which a stream may wait for others
# Of a token's time, that it may save up: two that are half a token apart must be able to meet, or they stay apart.
_SAVED: Final = 0.75
_MOST_S: Final = 1.0
_SLOWER: Final = 1.5
_LATE: Final = 3.0  # times of a client between an answer and its next request; after that it is not expected
_TICK_S: Final = 0.002  # at which waits for others end


@dataclass(slots=True, eq=False)
class _Request(Generic[K, W, R]):
    key: K
    work: W
    size: int
    holder: str
    stream: Stream | None
    ended: asyncio.Future[tuple[R, float]]
    patience_ends: float = 0.0


class Stream:
    """Where a stream of products is in the model, whose groups it asks for in their order, token after token.

    Attributes:
        group: asked for last. first: it is the first of a token.
        wave: the number of those that it is in step with.
        waiting: its request has no answer yet; answered: when the last one had.
        began, token_s: its token, and how long the one before took.
        turn_s: from an answer to the next request, smoothed.
        patience: seconds for which it may still wait for others. waited: for which it has, in this token.
    """

    __slots__ = ("answered", "began", "first", "group", "patience", "token_s", "turn_s", "waited", "waiting", "wave")

    def __init__(self) -> None:
        self.group, self.first, self.wave = -1, False, 0
        self.waiting = False
        self.began = self.answered = self.patience = self.turn_s = self.waited = 0.0
        self.token_s = math.inf

    def asks(self, group: int, now: float) -> None:
        self.first = group <= self.group
        if self.first:
            # Without what its client rests between two answers.
            self.token_s = min(now, self.answered + self.turn_s) - self.began
            own = max(0.0, self.token_s - self.waited)
            self.patience = min(self.patience + _SHARE * own, _SAVED * own, _MOST_S)
            self.began, self.waited = now, 0.0
        elif not self.began:
            self.began = now
        else:
            self.turn_s += 0.2 * (now - self.answered - self.turn_s)
        self.group, self.waiting = group, True

    def departs(self, patience: float) -> None:
        """Its request is computed now, with so much patience left."""
        self.waited += self.patience - patience
        self.patience = patience

    def expected(self, now: float) -> bool:
        return self.waiting or now - self.answered < _LATE * self.turn_s + _TICK_S


class Scheduler(Generic[K, W, R]):
    """Runs ``compute(key, works)``, which gives a result for each of ``works``. All calls come from one event loop.

    Args:
        pool: whose threads compute.
        places: how many batches at a time, but for brief ones.
        most: the largest size of a batch of several requests; one on its own may be larger.
        waiting: the largest size of all that waits together.
        together: False gives each request a batch of its own.
        worth: how many streams must be at work for waiting for each other to pay.
        brief: whether a batch of this key and size takes no longer than a thread takes to begin; it is computed in the
            loop itself.
    """

    def __init__(
        self,
        compute: Callable[[K, list[W]], Sequence[R]],
        pool: Executor,
        *,
        places: int = 1,
        most: int = 256,
        waiting: int = 1 << 20,
        together: bool = True,
        worth: int = 2,
        brief: Callable[[K, int], bool] = lambda *_: False,
    ) -> None:
        self._compute = compute
        self._pool = pool
        self._places = places
        self._most = most
        self._room = waiting
        self._together = together
        self._worth = worth
        self._brief = brief
        self._running: set[asyncio.Future[Any]] = set()
        self._waiting: list[_Request[K, W, R]] = []  # in the order of their arrival
        self._size = 0  # of all that wait
        self._turns: dict[str, int] = {}  # of holders that wait: the number of their last turn
        self._turn = 0
        self._streams: set[Stream] = set()
        self._waves = 0
        self._closed = False
        self._tick: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def enter(self) -> Stream:
        """A stream that waits for others, and others for it, where its requests come with it."""
        stream = Stream()
        if self._together:
            self._streams.add(stream)
        return stream

    def leave(self, stream: Stream) -> None:
        self._streams.discard(stream)
        self._start()  # nobody waits for it any more

    def close(self) -> None:
        """Starts nothing any more; for the end of the server."""
        self._closed = True

    async def run(
        self, key: K, work: W, *, size: int = 1, holder: str = "", stream: Stream | None = None
    ) -> tuple[R, float]:
        """The result, and this request's share of the seconds that its batch took. When it is cancelled it frees its
        place in the queue at once; a batch that has begun goes on.

        Args:
            size: in the units of ``most`` and ``waiting``, such as rows.
            holder: who takes turns with others.
            stream: whose request it is, of a number of a group as ``key``.

        Raises:
            LimitError: too much waits already.
        """
        if self._waiting and self._size + size > self._room:
            raise LimitError("too many requests wait for this server's processor: try again later")
        request: _Request[K, W, R] = _Request(
            key, work, size, holder, stream, asyncio.get_running_loop().create_future()
        )
        if stream is not None and isinstance(key, int):
            now = time.monotonic()
            stream.asks(key, now)
            request.patience_ends = now + stream.patience
        self._waiting.append(request)
        self._size += size
        self._turns.setdefault(holder, 0)
        self._start()
        try:
            return await request.ended
        finally:
            if not request.ended.done() or request.ended.cancelled():
                self._forget([request])
            if stream is not None:
                stream.waiting, stream.answered = False, time.monotonic()

    def _forget(self, requests: Sequence[_Request[K, W, R]]) -> None:
        for request in requests:
            if request in self._waiting:
                self._waiting.remove(request)
                self._size -= request.size
        if not self._waiting:
            self._turns.clear()

    def _start(self) -> None:
        """Starts what may start."""
        while not self._closed and (batch := self._next()):
            key, works = batch[0].key, [request.work for request in batch]
            if self._brief(key, sum(request.size for request in batch)):
                try:
                    done, error = self._timed(key, works), None
                except Exception as raised:
                    done, error = ([], 0.0), raised
                self._end(batch, done, error)
                continue
            job = asyncio.get_running_loop().run_in_executor(self._pool, self._timed, key, works)
            self._running.add(job)
            job.add_done_callback(lambda job, batch=batch: self._end_job(batch, job))  # type: ignore[misc]

    def _timed(self, key: K, works: list[W]) -> tuple[Sequence[R], float]:
        start = time.perf_counter()
        results = self._compute(key, works)
        return results, time.perf_counter() - start

    def _end_job(self, batch: list[_Request[K, W, R]], job: asyncio.Future[Any]) -> None:
        self._running.discard(job)
        error = job.exception()
        self._end(batch, ([], 0.0) if error else job.result(), error)
        self._start()

    def _end(
        self, batch: list[_Request[K, W, R]], done: tuple[Sequence[R], float], error: BaseException | None
    ) -> None:
        results, seconds = done
        total = sum(request.size for request in batch)
        for i, request in enumerate(batch):
            if request.ended.done():  # cancelled
                continue
            if error is not None:
                request.ended.set_exception(error)
            else:
                request.ended.set_result((results[i], seconds * request.size / total))

    def _next(self) -> list[_Request[K, W, R]]:
        ready = self._ready()
        if not ready:
            return []
        placed = len(self._running) < self._places
        first = min(ready, key=lambda request: self._turns[request.holder])  # of equals the oldest
        self._turn += 1
        self._turns[first.holder] = self._turn
        batch, size = [first], first.size
        for request in self._waiting if self._together and len(self._waiting) > 1 else ():
            if request is first or request.key != first.key or size + request.size > self._most:
                continue
            if placed or self._brief(request.key, size + request.size):
                batch.append(request)
                size += request.size
        self._forget(batch)
        if self._streams:
            self._depart(batch)
        return batch

    def _depart(self, batch: list[_Request[K, W, R]]) -> None:
        """From here on its streams are in step."""
        now = time.monotonic()
        streams = [request.stream for request in batch if request.stream is not None]
        if any(stream.first for stream in streams):
            self._waves += 1
            wave = self._waves
        else:
            wave = max((stream.wave for stream in streams), default=0)
        for request in batch:
            if (stream := request.stream) is not None:
                stream.wave = wave
                stream.departs(max(0.0, request.patience_ends - now))

    def _ready(self) -> list[_Request[K, W, R]]:
        """Those that wait for no place, and for no other stream."""
        waiting = self._waiting
        if len(self._running) >= self._places:
            waiting = [request for request in waiting if self._brief(request.key, request.size)]
        if len(self._streams) < self._worth or not waiting:
            return waiting
        now = time.monotonic()
        active = [stream for stream in self._streams if stream.expected(now)]
        if len(active) < self._worth:
            return waiting
        slowest = _SLOWER * min((stream.token_s for stream in active), default=0.0)
        soonest, behind = math.inf, dict[int, int]()
        for stream in active:
            if stream.first and stream.waiting:  # before a token: it is in step with nobody yet
                continue
            if stream.token_s <= slowest:
                soonest = min(soonest, stream.began + stream.token_s)
            behind[stream.wave] = min(behind.get(stream.wave, stream.group), stream.group)

        def waits(own: Stream, patience_ends: float) -> bool:
            if patience_ends <= now:
                return False
            return soonest <= patience_ends if own.first else behind[own.wave] < own.group

        ready = [one for one in waiting if one.stream is None or not waits(one.stream, one.patience_ends)]
        if not ready and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._look_again)
        return ready

    def _look_again(self) -> None:
        self._tick = None
        self._start()
