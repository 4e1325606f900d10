"""Keeps a mask pool filled: a background batch below the low-water mark, a waiting one when it runs dry."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sordino.client.interrupts import interrupts
from sordino.client.justintime import JustInTime
from sordino.client.kernels import U32
from sordino.client.pool import CheckVector, MaskPool
from sordino.client.provision import Progress, fetch_check_vectors, fill
from sordino.client.transport import Connection
from sordino.shared.errors import IntegrityError, PoolError, PoolExhaustedError, SordinoError

log = logging.getLogger(__name__)
Notify = Callable[[str], None]
_PAUSE_S = 30.0  # after a refill that failed, before the next one in the background


class MaskSource(Protocol):
    """What protocol ``masked`` asks for: masks, the check vectors in force, and an end.

    After a failed check it is over: whoever finds one calls :meth:`fail`, and every later call raises that error.
    """

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks r and W r for ``rows`` rows of a group, given to nobody else ever."""
        ...

    def check(self, group: str) -> CheckVector | None: ...

    def fail(self, error: IntegrityError) -> None: ...

    def raise_failure(self) -> None: ...

    def close(self) -> None: ...


class PoolKeeper:
    """Hands out masks and provisions more.

    Args:
        batch: slots per batch.
        low_water: below this many slots a batch is provisioned in the background; 0 waits until the pool is dry.
        refill: False raises PoolExhaustedError instead of provisioning.
        notify: told, in one line, when an answer has to wait for masks.
    """

    def __init__(
        self,
        connection: Connection,
        pool: MaskPool,
        *,
        batch: int,
        low_water: int,
        refill: bool,
        notify: Notify,
        progress: Progress | None = None,
    ) -> None:
        self.pool = pool
        self._connection = connection
        self._batch = batch
        self._low_water = low_water
        self._refill = refill
        self._notify = notify
        self._progress = progress
        self._filling = threading.Lock()
        self._checks: dict[str, CheckVector] = {}
        self._background: threading.Thread | None = None
        self._failure: IntegrityError | None = None
        self._failing = threading.Lock()
        self._cancelled = threading.Event()
        self._not_before = 0.0

    def prepare(self, count: int | None) -> None:
        """Fetches ``count`` check vectors per group unless the pool has them (0 turns integrity checks off).

        None takes as many as the pool has, or one.
        """
        groups = self._connection.manifest.groups
        have = self.pool.check(groups[0].name)
        if count is None:
            count = 1 if have is None else have.v.shape[0]
        if count and (have is None or have.v.shape[0] != count):
            # An attempt that a broken stream ends begins anew, with other vectors and keys.
            vectors = self._connection.retrying(lambda: fetch_check_vectors(self._connection, count, self._progress))
            self.pool.store_check(vectors)
        # Kept here: a check that began with vectors never ends without them, whatever becomes of the pool meanwhile.
        # A pool that has vectors is checked under them also by who asks for none.
        self._checks = {group.name: check for group in groups if (check := self.pool.check(group.name)) is not None}

    def check(self, group: str) -> CheckVector | None:
        """The check vectors in force for a group; None where the user turned checks off."""
        return self._checks.get(group)

    def fail(self, error: IntegrityError) -> None:
        """After a failed check, in whichever thread: nothing made with this server survives, nothing more is asked of
        it, and all later calls raise ``error``. What cannot be erased is logged as an error, since raising would hide
        the failed check.
        """
        with interrupts, self._failing:
            if self._failure is not None:
                return
            self._failure = error.with_traceback(None)  # whose frames hold keys and masks
            self._cancelled.set()
            self._connection.close()
            try:
                self.pool.destroy()
            except PoolError as left:
                log.error("%s: delete its folder %s and use none of its masks", left, self.pool.path)

    def raise_failure(self) -> None:
        """Raises the error of the check that failed, if one did: nothing may be used after it."""
        if self._failure is not None:
            with interrupts, self._failing:  # once it is told, the pool is gone
                raise self._failure.with_traceback(None)

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks for ``rows`` rows of a group; see :meth:`MaskPool.take`.

        Raises:
            PoolExhaustedError: none are left and refilling is off.
            IntegrityError: a batch made meanwhile failed its check.
        """
        while True:
            try:
                return self.take_ready(group, rows)
            except PoolExhaustedError:
                if not self._refill:
                    raise
                self._notify("out of masks: provisioning more, then the answer goes on")
                self._fill_until(group, rows)

    def take_ready(self, group: str, rows: int) -> tuple[U32, U32]:
        """:meth:`take` without waiting for more.

        Raises:
            PoolExhaustedError: fewer are left.
        """
        taken = self.pool.take(group, rows)
        if self._refill and self._low_water and self.pool.available(group) < self._low_water:
            self.start_background()
        return taken

    def fill_now(self) -> None:
        """Provisions one batch and waits for it."""
        with self._filling:
            self._fill(self._progress)

    def close(self) -> None:
        """Closes the connection, so that nobody waits for the server, drops a background batch and closes the pool."""
        self._cancelled.set()
        self._connection.close()
        if self._background is not None:
            self._background.join()
        self.pool.close()

    def _fill_until(self, group: str, rows: int) -> None:
        with self._filling:  # a background batch that is under way is waited for here
            while self.pool.available(group) < rows:
                self._fill(self._progress)

    def _fill(self, progress: Progress | None) -> None:
        self.raise_failure()
        try:
            fill(self._connection, self.pool, self._checks, self._batch, progress, self._cancelled)
        except IntegrityError as error:
            self.fail(error)
            raise

    def start_background(self) -> None:
        """Provisions a batch in the background, unless one is under way or has just failed."""
        if self._background is not None and self._background.is_alive():
            return
        if time.monotonic() < self._not_before:
            return
        self._background = threading.Thread(target=self._run_background, name="sordino-refill", daemon=True)
        self._background.start()

    def _run_background(self) -> None:
        # Taken here, not by who starts the thread: an interrupt inside start() leaves open whether it runs.
        if not self._filling.acquire(blocking=False):
            return
        try:
            self._fill(None)
        except IntegrityError as error:
            log.error("%s", error)  # it may be that nobody asks any more
        except SordinoError as error:
            # Not fatal: the pool still has masks, and a dry pool provisions in the foreground with the same error.
            if not self._cancelled.is_set():
                log.warning("background provisioning stopped: %s", error)
            self._not_before = time.monotonic() + _PAUSE_S
        finally:
            self._filling.release()


class AutoKeeper:
    """Masks without waiting: from the pool when it has them, made just in time until then (§5.2, ``auto``).

    Args:
        fill: provision a batch in the background, once the first prompt has its masks.
    """

    def __init__(self, keeper: PoolKeeper, just_in_time: JustInTime, *, fill: bool) -> None:
        self.pool = keeper.pool
        self._keeper = keeper
        self._just_in_time = just_in_time
        self._fill = fill
        self._taken: set[str] = set()
        just_in_time.on_failure = keeper.fail

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        if self.pool.available(group) >= rows:  # a cheap look: another thread may be faster
            with contextlib.suppress(PoolExhaustedError):
                return self._keeper.take_ready(group, rows)
        if self._fill and group in self._taken:
            self._keeper.start_background()
        self._taken.add(group)
        return self._just_in_time.take(group, rows)

    def check(self, group: str) -> CheckVector | None:
        return self._keeper.check(group)

    def fail(self, error: IntegrityError) -> None:
        self._keeper.fail(error)

    def raise_failure(self) -> None:
        self._keeper.raise_failure()

    def fill_now(self) -> None:
        self._keeper.fill_now()

    def close(self) -> None:
        self._keeper.close()  # first, for it closes the connection: who makes masks waits for the server
        self._just_in_time.close()


Keeper = PoolKeeper | AutoKeeper
