"""Continuous batching: work of several streams that waits for the same weights is done as one.

Whoever finds a place free computes at once, in its own thread, so a lone session pays no delay. While all places are
taken requests wait. Whoever ends hands its place on: to the oldest request of the holder whose turn is longest ago, and
with it go all that wait for the same weights, as far as a batch holds. So nobody starves: between two turns of a holder
every other holder that waits has one, whatever their numbers of streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sordino.shared.errors import LimitError, TransportError

K = TypeVar("K", bound=Hashable)
W = TypeVar("W")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class _Request(Generic[K, W, R]):
    key: K
    work: W
    size: int
    holder: str
    active: Callable[[], bool]
    batch: list[_Request[K, W, R]] = field(default_factory=list)  # given with the place
    results: list[R] = field(default_factory=list)
    seconds: float = 0.0
    error: BaseException | None = None
    turn: Any = field(default_factory=threading.Lock)  # held while it waits


class Scheduler(Generic[K, W, R]):
    """Runs ``compute(key, works)``, which gives a result for each of ``works``.

    Args:
        places: how many batches at a time.
        most: the largest size of a batch of several requests; one on its own may be larger.
        waiting: the largest size of all that waits together.
        together: False gives each request a batch of its own.
    """

    def __init__(
        self,
        compute: Callable[[K, list[W]], Sequence[R]],
        *,
        places: int = 1,
        most: int = 256,
        waiting: int = 1 << 20,
        together: bool = True,
    ) -> None:
        self._compute = compute
        self._places = places
        self._most = most
        self._room = waiting
        self._together = together
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: list[_Request[K, W, R]] = []  # in the order of their arrival
        self._turns: dict[str, int] = {}  # of holders that wait: the number of their last turn
        self._turn = 0

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def run(
        self, key: K, work: W, *, size: int = 1, holder: str = "", active: Callable[[], bool] = lambda: True
    ) -> tuple[R, float]:
        """The result, and this request's share of the seconds that its batch took.

        Args:
            size: in the units of ``most`` and ``waiting``, such as rows.
            holder: who takes turns with others.
            active: whether anybody still wants the result; asked before it is computed.

        Raises:
            LimitError: too much waits already.
            TransportError: nobody wants the result any more.
        """
        with self._lock:
            if free := self._running < self._places:
                self._running += 1
            else:
                if self._waiting and sum(other.size for other in self._waiting) + size > self._room:
                    raise LimitError("too many requests wait for this server's processor: try again later")
                request: _Request[K, W, R] = _Request(key, work, size, holder, active)
                request.turn.acquire()
                self._waiting.append(request)
                self._turns.setdefault(holder, 0)
        if free:
            start = time.perf_counter()
            try:
                (result,) = self._compute(key, [work])
            finally:
                self._hand_on()
            return result, time.perf_counter() - start
        request.turn.acquire()
        # Not kept: a request in a list of its own would be freed by the garbage collector alone, with its results.
        batch, request.batch = request.batch, []
        if batch:
            self._lead(batch)
        if request.error is not None:
            raise request.error
        return request.results[0], request.seconds

    def _lead(self, batch: list[_Request[K, W, R]]) -> None:
        start = time.perf_counter()
        try:
            results = self._compute(batch[0].key, [request.work for request in batch])
            seconds, total = time.perf_counter() - start, sum(request.size for request in batch)
            for request, result in zip(batch, results, strict=True):
                request.results, request.seconds = [result], seconds * request.size / total
        except BaseException as error:  # the others of the batch wait in their threads: it is theirs too
            for request in batch:
                request.error = error
        finally:
            self._hand_on()
            for request in batch[1:]:
                request.turn.release()

    def _hand_on(self) -> None:
        with self._lock:
            batch = self._next()
            if batch:
                batch[0].batch = batch
            else:
                self._running -= 1
        if batch:
            batch[0].turn.release()

    def _next(self) -> list[_Request[K, W, R]]:
        if not self._waiting:
            self._turns.clear()
            return []
        for request in [request for request in self._waiting if not request.active()]:
            self._waiting.remove(request)
            request.error = TransportError("the call ended before its turn came")
            request.turn.release()
        if not self._waiting:
            self._turns.clear()
            return []
        first = min(self._waiting, key=lambda request: self._turns[request.holder])  # of equals the oldest
        self._turn += 1
        self._turns[first.holder] = self._turn
        batch, size = [first], first.size
        for request in self._waiting if self._together else ():
            if request is not first and request.key == first.key and size + request.size <= self._most:
                batch.append(request)
                size += request.size
        for request in batch:
            self._waiting.remove(request)
        return batch
