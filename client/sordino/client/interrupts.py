"""Keeps Ctrl-C out of locks of gRPC, and of pools of threads.

A KeyboardInterrupt can be raised between the taking of a Python lock and the block that gives it back (CPython runs
signal handlers between any two instructions of ``Condition.__enter__``). gRPC holds such a lock for every call: one
interrupt in the wrong place, and all threads of its channel wait for ever. So while the main thread is inside gRPC the
interrupt is noted, whoever waits is woken, and it is raised at the end. Futures and executors have such locks, too.
"""

from __future__ import annotations

import os
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
        self._thread = 0
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
            self._depth, self._thread, self._previous = 1, threading.get_ident(), previous
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
        previous, noted = self._end(self._previous)
        if noted and kind is not KeyboardInterrupt:
            previous(signal.SIGINT, None)

    def check(self) -> None:
        """Raises a KeyboardInterrupt that was noted in this thread, where no lock is held."""
        if self.noted and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def _end(self, previous: Handler) -> tuple[Handler, bool]:
        self._previous = None
        try:
            signal.signal(signal.SIGINT, previous)  # one that came before this is still noted
        finally:
            noted, self.noted = self.noted, False
        return previous, noted

    def _note(self, *_: object) -> None:
        self.noted = True

    def _forked(self) -> None:
        """In a child that another thread forked: here is nobody who would come out of the context."""
        if self._previous is not None and self._thread != threading.get_ident():
            self._end(self._previous)


interrupts: Final = Interrupts()
os.register_at_fork(after_in_child=interrupts._forked)
