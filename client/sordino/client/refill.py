"""Keeps a mask pool filled: a background batch below the low-water mark, a waiting one when it runs dry."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

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
    """What protocol ``masked`` asks for: masks, the check vectors in force, and an end."""

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks r and W r for ``rows`` rows of a group, given to nobody else ever."""
        ...

    def check(self, group: str) -> CheckVector | None: ...

    def raise_failure(self) -> None: ...

    def destroy(self) -> None: ...

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
        self._background_error: SordinoError | None = None
        self._cancelled = threading.Event()
        self._not_before = 0.0

    def prepare(self, count: int) -> None:
        """Fetches ``count`` check vectors per group unless the pool has them (0 turns integrity checks off)."""
        groups = self._connection.manifest.groups
        have = self.pool.check(groups[0].name)
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

    def raise_failure(self) -> None:
        """Raises the IntegrityError of a background batch, if there was one: nothing may be used after it."""
        if isinstance(self._background_error, IntegrityError):
            raise self._background_error

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks for ``rows`` rows of a group; see :meth:`MaskPool.take`.

        Raises:
            PoolExhaustedError: none are left and refilling is off.
            IntegrityError: a background batch failed its check.
        """
        self.raise_failure()
        while True:
            try:
                taken = self.pool.take(group, rows)
            except PoolExhaustedError:
                if not self._refill:
                    raise
                self._notify("out of masks: provisioning more, then the answer goes on")
                self._fill_until(group, rows)
                continue
            if self._refill and self._low_water and self.pool.available(group) < self._low_water:
                self.start_background()
            return taken

    def fill_now(self) -> None:
        """Provisions one batch and waits for it."""
        with self._filling:
            self._fill()

    def close(self) -> None:
        """Closes the connection, so that nobody waits for the server, drops a background batch and closes the pool."""
        self._cancelled.set()
        self._connection.close()
        if self._background is not None:
            self._background.join()
        self.pool.close()

    def destroy(self) -> None:
        """After a failed check: nothing made with this server survives. What cannot be erased is logged as an error,
        since raising would hide the failed check.
        """
        self._cancelled.set()
        try:
            self.pool.destroy()
        except PoolError as error:
            log.error("%s: delete its folder %s and use none of its masks", error, self.pool.path)

    def _fill_until(self, group: str, rows: int) -> None:
        with self._filling:  # a background batch that is under way is waited for here
            while self.pool.available(group) < rows:
                self._fill()

    def _fill(self) -> None:
        try:
            fill(self._connection, self.pool, self._checks, self._batch, self._progress, self._cancelled)
        except IntegrityError:
            self.destroy()
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
            fill(self._connection, self.pool, self._checks, self._batch, None, self._cancelled)
        except IntegrityError as error:
            self._background_error = error
            self.destroy()
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

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        if self.pool.available(group) >= rows:
            return self._keeper.take(group, rows)
        self._keeper.raise_failure()
        if self._fill and group in self._taken:
            self._keeper.start_background()
        self._taken.add(group)
        try:
            return self._just_in_time.take(group, rows)
        except IntegrityError:
            self.destroy()
            raise

    def check(self, group: str) -> CheckVector | None:
        return self._keeper.check(group)

    def raise_failure(self) -> None:
        self._keeper.raise_failure()
        self._just_in_time.raise_failure()

    def fill_now(self) -> None:
        self._keeper.fill_now()

    def destroy(self) -> None:
        self._just_in_time.close()
        self._keeper.destroy()

    def close(self) -> None:
        self._just_in_time.close()
        self._keeper.close()


Keeper = PoolKeeper | AutoKeeper
