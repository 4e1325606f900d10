"""Which process this is, also across a fork into another PID namespace, where numbers begin anew."""

from __future__ import annotations

import os

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def this_process() -> tuple[int, int]:
    """Differs between a process and every process forked from it."""
    return os.getpid(), _forks
