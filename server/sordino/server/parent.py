"""A process that does not outlive the one that started it (Linux; elsewhere nothing happens)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def end_with_parent(parent: int | None = None) -> None:
    """From now on this process gets SIGTERM when the thread that started it ends.

    Args:
        parent: whose process it is; one that has ended meanwhile ends this one now.
    """
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if parent is not None and os.getppid() != parent:
            sys.exit(1)
