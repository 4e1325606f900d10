"""Keeps a mask pool filled: a background batch below the low-water mark, a waiting one when it runs dry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sordino.client.kernels import U32
from sordino.client.pool import MaskPool
from sordino.client.provision import Progress, fetch_check_vectors, fill
from sordino.client.transport import Connection
from sordino.shared.errors import IntegrityError, PoolExhaustedError, SordinoError

log = logging.getLogger(__name__)
Notify = Callable[[str], None]


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
        self._background: threading.Thread | None = None
        self._background_error: SordinoError | None = None
        self._cancelled = threading.Event()

    def prepare(self, count: int) -> None:
        """Fetches ``count`` check vectors per group unless the pool has them (0 turns integrity checks off)."""
        first = self._connection.manifest.groups[0].name
        have = self.pool.check(first)
        if count and (have is None or have.v.shape[0] != count):
            # An attempt that a broken stream ends begins anew, with other vectors and keys.
            vectors = self._connection.retrying(lambda: fetch_check_vectors(self._connection, count, self._progress))
            self.pool.store_check(vectors)

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks for ``rows`` rows of a group; see :meth:`MaskPool.take`.

        Raises:
            PoolExhaustedError: none are left and refilling is off.
            IntegrityError: a background batch failed its check.
        """
        if isinstance(self._background_error, IntegrityError):
            raise self._background_error
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
                self._start_background()
            return taken

    def fill_now(self) -> None:
        """Provisions one batch and waits for it."""
        with self._filling:
            self._fill()

    def close(self) -> None:
        """Stops a background batch (its masks are dropped) and closes the pool."""
        self._cancelled.set()
        if self._background is not None:
            self._background.join()
        self.pool.close()

    def destroy(self) -> None:
        """After a failed check: nothing made with this server survives."""
        self._cancelled.set()
        self.pool.destroy()

    def _fill_until(self, group: str, rows: int) -> None:
        with self._filling:  # a background batch that is under way is waited for here
            while self.pool.available(group) < rows:
                self._fill()

    def _fill(self) -> None:
        try:
            fill(self._connection, self.pool, self._batch, self._progress, self._cancelled)
        except IntegrityError:
            self.destroy()
            raise

    def _start_background(self) -> None:
        if self._background is not None and self._background.is_alive():
            return
        if not self._filling.acquire(blocking=False):
            return
        self._background = threading.Thread(target=self._run_background, name="sordino-refill", daemon=True)
        self._background.start()

    def _run_background(self) -> None:
        try:
            fill(self._connection, self.pool, self._batch, None, self._cancelled)
        except IntegrityError as error:
            self._background_error = error
            self.destroy()
        except SordinoError as error:
            # Not fatal: the pool still has masks, and a dry pool provisions in the foreground with the same error.
            log.warning("background provisioning stopped: %s", error)
        finally:
            self._filling.release()
