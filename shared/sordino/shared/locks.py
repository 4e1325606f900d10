"""A lock of a file that is waited for a stated time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def flocked(handle: int, *, wait_s: float, poll_s: float) -> Iterator[bool]:
    """Holds ``flock`` on an open file: threads with descriptors of their own exclude each other, too.

    Yields:
        False where somebody else held it all the time: then it is not held.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                yield False
                return
            time.sleep(poll_s)
    try:
        yield True
    finally:
        # By name, not by closing: a child forked meanwhile holds the same open file.
        fcntl.flock(handle, fcntl.LOCK_UN)
