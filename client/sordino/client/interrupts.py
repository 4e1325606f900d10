"""Keeps Ctrl-C out of gRPC's locks.

A KeyboardInterrupt can be raised between the taking of a Python lock and the block that gives it back (CPython runs
signal handlers between any two instructions of ``Condition.__enter__``). gRPC holds such a lock for every call: one
interrupt in the wrong place, and all threads of its channel wait for ever. So while the main thread is inside gRPC the
interrupt is noted, whoever waits is woken, and it is raised at the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final

Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """A context of the main thread, in which SIGINT is deferred; in other threads, where none arrives, it does nothing.

    It may be entered again inside itself; the outermost one raises. A handler that is not Python's is left alone.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._previous: Handler | None = None
        self.noted = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._previous is not None:
            self._depth += 1
            return self
        previous = signal.signal(signal.SIGINT, self._note)  # from here on nothing is raised
        if callable(previous):
            self._depth, self._previous = 1, previous
        else:
            signal.signal(signal.SIGINT, previous)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread() or self._previous is None:
            return
        self._depth -= 1
        if self._depth:
            return
        previous, self._previous = self._previous, None
        noted, self.noted = self.noted, False
        signal.signal(signal.SIGINT, previous)
        if noted and kind is not KeyboardInterrupt:
            previous(signal.SIGINT, None)

    def check(self) -> None:
        """Raises a KeyboardInterrupt that was noted in this thread, where no lock is held."""
        if self.noted and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        self.noted = True


interrupts: Final = Interrupts()
