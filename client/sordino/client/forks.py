"""Which process this is, also across a fork into another PID namespace, where numbers begin anew."""

from __future__ import annotations

import os

from sordino.shared.errors import SessionLostError

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def this_process() -> tuple[int, int]:
    """Differs between a process and every process forked from it."""
    return os.getpid(), _forks


class Owner:
    """The process that opened a session: of gRPC's threads and locks a forked child has but a dead copy."""

    def __init__(self) -> None:
        self._process = this_process()

    def here(self) -> bool:
        return this_process() == self._process

    def check(self) -> None:
        """Raises SessionLostError in a forked child, where every call would wait for ever."""
        if not self.here():
            raise SessionLostError(
                f"this session belongs to process {self._process[0]}, from which this one was forked: call "
                "sordino.connect in the child, and start that with multiprocessing's spawn, for torch may hang after a "
                "fork"
            )
