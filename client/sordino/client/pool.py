"""The mask pool: masks r and products W r for future rows, each used once.

A pool is a folder (0700, files 0600) bound to one split of one model and to one host. It holds batches of slots; a slot
is, for every group of the manifest, one mask row r and W r. Masks are expanded from keys and stored nowhere.

A mask is never handed out twice on one host (DESIGN §4.5.1):

- Chunks of 64 slots are reserved durably before any of their masks is handed out: under a host-wide lock the mark in
  the ledger is advanced and synced, then the batch's chain key in the pool is replaced by its successor and synced. A
  process that dies burns at most what it had reserved.
- The ledger's mark is shared by all copies of a pool on the host, and outlives a pool folder that is put back
  (:mod:`sordino.client.ledger`, which also says what no file can stop: a whole machine cloned or rolled back).
- A forked child drops what its parent had reserved and reserves for itself. Threads share one pool through a lock. A
  pool object can be neither copied nor pickled.

A pool stolen after use does not open recorded traffic: of a used chunk neither the mask key nor the key of its
products follows from what is left (:mod:`sordino.client.poolfile`). This holds for the files. The memory of a running
process, its swap and its core dumps hold the masks it took, as they hold the prompt. Old versions of the small key
files are overwritten, which a journal, a snapshot or a flash disk may defeat: seal the pool with a passphrase then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from sordino.client.forks import this_process
from sordino.client.ledger import (
    Ledger,
    LedgerBusyError,
    crash_point,
    default_state_dir,
    disk_errors,
    make_private_dir,
    remove,
)
from sordino.client.poolfile import CHUNK, OWN_FILE, BatchKeys, Layout
from sordino.client.poolstore import CheckVector, Chunk, Store
from sordino.client.poolwriter import BatchWriter
from sordino.client.vault import HEAD_NAME, Head
from sordino.shared.errors import FingerprintError, PoolError, PoolExhaustedError
from sordino.shared.manifest import GroupSpec, ModelManifest

__all__ = ["CHUNK", "BatchWriter", "CheckVector", "MaskPool"]

U32 = NDArray[np.uint32]
log = logging.getLogger(__name__)
_DESTROY_WAIT_S: Final = 5.0


@dataclass(slots=True, repr=False, eq=False)
class _Cursor:
    """How far one group is: ``row`` of the chunk at ``position``, counted over all chunks this process reserved."""

    index: int
    group: GroupSpec
    position: int = 0
    row: int = 0
    r: U32 | None = None
    wr: U32 | None = None


class MaskPool:
    """An open pool; a context manager. Made by :meth:`create`, :meth:`open` or :meth:`open_or_create`."""

    def __init__(self, manifest: ModelManifest, store: Store) -> None:
        self.path = store.folder
        self.groups = manifest.groups
        self.fingerprint = manifest.fingerprint
        self._store = store
        self._cursors = {group.name: _Cursor(index, group) for index, group in enumerate(manifest.groups)}
        self._chunks: dict[int, Chunk] = {}  # by position; dropped when every group has passed
        self._end = 0  # position after the newest chunk
        self._ended: str | None = None
        self._lock = threading.Lock()  # taken before the host-wide lock, never while holding it
        self._pid = this_process()
        _live.add(self)

    # -- opening and closing -----------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | Path,
        manifest: ModelManifest,
        *,
        passphrase: str | None = None,
        state_dir: str | Path | None = None,
    ) -> Self:
        """Makes an empty pool in a folder that does not exist, or is empty.

        Args:
            passphrase: seals keys and check vectors. state_dir: of the ledger; per user by default.

        Raises:
            PoolError: there is something in the folder, or it cannot be written.
            PoolSealedError: the passphrase is empty.
        """
        path, ledger = Path(path), _ledger(Path(path), state_dir)
        with ledger.locked():
            _make(path, manifest, passphrase, ledger)
        return cls.open(path, manifest, passphrase=passphrase, state_dir=state_dir)

    @classmethod
    def open_or_create(
        cls,
        path: str | Path,
        manifest: ModelManifest,
        *,
        passphrase: str | None = None,
        state_dir: str | Path | None = None,
    ) -> Self:
        """:meth:`open` if there is a pool, else :meth:`create`; processes that do so at once get the same pool."""
        path, ledger = Path(path), _ledger(Path(path), state_dir)
        with ledger.locked():
            if not (path / HEAD_NAME).exists():
                _make(path, manifest, passphrase, ledger)
        return cls.open(path, manifest, passphrase=passphrase, state_dir=state_dir)

    @classmethod
    def open(
        cls,
        path: str | Path,
        manifest: ModelManifest,
        *,
        passphrase: str | None = None,
        state_dir: str | Path | None = None,
    ) -> Self:
        """Opens a pool made on this host.

        Raises:
            FingerprintError: it was made for another split.
            PoolForeignError: it was made on another host, or was destroyed; make a new one.
            PoolSealedError: the passphrase is wrong, missing, or given for a pool that is not sealed.
            PoolError: there is none, or it is damaged.
        """
        path, ledger = Path(path), _ledger(Path(path), state_dir)
        with disk_errors("the mask pool cannot be opened", _existing(path)):
            head = Head.load(path)
            if head.fingerprint != manifest.fingerprint:
                raise FingerprintError(
                    "the mask pool was made for another split of a model: name another folder, or delete this one"
                )
            with ledger.locked():
                ledger.marks(head.pool_id, head.host)
                ledger.tidy()
                if not ledger.notices_restoring(head.pool_id):
                    log.warning(
                        "the file system of %s tells files apart by their inode number alone: delete the mask pool "
                        "after restoring that folder from a backup, its masks could be used twice",
                        ledger.path,
                    )
            vault = head.vault(passphrase)
            make_private_dir(path)
            store = Store(path, Layout.of(manifest.groups), vault, ledger, head.pool_id, head.host)
            with store.locked():
                store.load_checks()
                store.refresh()
        return cls(manifest, store)

    def close(self) -> None:
        """Forgets all that this process reserved; the slots it did not use are lost. May be called again."""
        self._end_with("the mask pool is closed")

    def destroy(self) -> None:
        """Erases the pool, on disk and for every process and copy on this host: after a failed integrity check.

        Waits for nobody for long: a process that was stopped while it held the ledger does not save the pool.

        Raises:
            PoolError: not all of it could be erased; this object is unusable all the same.
        """
        self._end_with("the mask pool was destroyed after a failed check")
        with disk_errors("the mask pool cannot be erased", _existing(self.path)), contextlib.ExitStack() as held:
            try:
                held.enter_context(self._store.locked(timeout_s=_DESTROY_WAIT_S))
            except LedgerBusyError as error:
                # Files that go away bring no mask back, so this is safe without the lock, too.
                log.warning("%s: the mask pool is erased all the same", error)
            self._store.destroy()

    def _end_with(self, reason: str) -> None:
        self._own_process()
        with self._lock:
            self._ended = self._ended or reason
            for chunk in self._chunks.values():
                with contextlib.suppress(OSError):  # best effort: the keys are what counts, and they go now
                    chunk.file.erase(chunk.index)
            self._drop_chunks()
            self._store.checks = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MaskPool({self.path.name!r}, {len(self.groups)} groups, {self._ended or 'open'})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Also what copy.copy and copy.deepcopy call. Two objects with the same cursors would use masks twice.
        raise PoolError("a mask pool cannot be copied or pickled: open it by its path")

    # -- what is left ------------------------------------------------------------------------------------------------

    @property
    def slots_left(self) -> int:
        """Rows that every group can still take; 0 after :meth:`close`. Reads the folder: other processes count."""
        self._own_process()
        with self._lock:
            if self._ended:
                return 0
            with disk_errors("the mask pool cannot be read", self.path), self._store.locked():
                self._store.refresh()
            return min(self._available(cursor) for cursor in self._cursors.values())

    def available(self, group: str) -> int:
        """Rows that one group can still take, as far as this process knows (cheap; :attr:`slots_left` looks again)."""
        self._own_process()
        with self._lock:
            return self._available(self._cursor(group))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes on disk that one slot takes."""
        return -(-self._store.layout.stride // CHUNK)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk that the folder takes now; those of used chunks are given back as all groups pass them."""
        with disk_errors("the mask pool cannot be read", _existing(self.path)):
            return sum(file.stat().st_blocks * 512 for file in self.path.iterdir())

    def _available(self, cursor: _Cursor) -> int:
        return (self._end + self._store.unreserved - cursor.position) * CHUNK - cursor.row

    def _cursor(self, group: str) -> _Cursor:
        if self._ended:
            raise PoolError(self._ended)
        try:
            return self._cursors[group]
        except KeyError:
            raise PoolError(f"the mask pool has no group {group!r}") from None

    # -- taking ------------------------------------------------------------------------------------------------------

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks for ``rows`` rows of one group, never handed out before: ``r [rows, n]`` and ``W r [rows, m]``, uint32.

        Both are contiguous and the caller's own. Safe for several threads. Rows may come from several batches.

        Raises:
            PoolExhaustedError: fewer are left for this group; none was taken.
            PoolError: a record is damaged (this group's masks of that chunk are skipped then, so a retry goes on), the
                disk is full, or the pool is closed.
            PoolForeignError: the ledger lost the pool meanwhile.
        """
        if self._pid != this_process():
            self._own_process()
        with self._lock:
            cursor = self._cursor(group)
            if rows < 1:
                raise ValueError(f"rows must be at least 1, got {rows}")
            r, wr, start = cursor.r, cursor.wr, cursor.row
            stop = start + rows
            if r is None or wr is None or stop > CHUNK:
                return self._take_across(cursor, rows)
            # The cursor moves before anybody sees the rows, whatever interrupts this.
            cursor.row = stop
            if stop == CHUNK:
                self._pass(cursor)
            return r[start:stop], wr[start:stop]

    def _take_across(self, cursor: _Cursor, rows: int) -> tuple[U32, U32]:
        """:meth:`take` where the chunk is not loaded, or is not enough."""
        missing = rows - (self._end - cursor.position) * CHUNK + cursor.row
        if missing > 0:
            self._reserve(-(-missing // CHUNK), cursor, rows)
        parts: list[tuple[U32, U32]] = []
        while rows:
            r, wr = self._loaded(cursor)
            start, stop = cursor.row, min(CHUNK, cursor.row + rows)
            cursor.row = stop
            if stop == CHUNK:
                self._pass(cursor)
            parts.append((r[start:stop], wr[start:stop]))
            rows -= stop - start
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([r for r, _ in parts]), np.concatenate([wr for _, wr in parts])

    def _reserve(self, count: int, cursor: _Cursor, rows: int) -> None:
        with disk_errors("masks could not be reserved", self.path), self._store.locked():
            taken = self._store.reserve(count)
        if not taken:
            raise PoolExhaustedError(
                f"{self._available(cursor)} masks are left for group {cursor.group.name!r}, {rows} are needed"
            )
        for chunk in taken:
            self._chunks[self._end] = chunk
            self._end += 1

    def _loaded(self, cursor: _Cursor) -> tuple[U32, U32]:
        """The arrays of the chunk under the cursor: ``[64, n]`` and ``[64, m]``."""
        if cursor.row >= CHUNK:  # an interruption came between the steps of _pass
            self._pass(cursor)
        if cursor.r is None or cursor.wr is None:
            chunk = self._chunks[cursor.position]
            try:
                cursor.wr = chunk.file.read(chunk.index, cursor.index, chunk.keys)
            except PoolError:
                self._pass(cursor)
                raise
            cursor.r = chunk.keys.masks(cursor.index, cursor.group)
        return cursor.r, cursor.wr

    def _pass(self, cursor: _Cursor) -> None:
        """Moves a group to its next chunk, and forgets the chunk if it was the last group there."""
        chunk, position = self._chunks[cursor.position], cursor.position
        # In this order an interruption (KeyboardInterrupt) can lose rows of the group, never repeat them.
        cursor.r = cursor.wr = None
        cursor.position = position + 1
        cursor.row = 0
        chunk.waiting -= 1
        if chunk.waiting <= 0:
            del self._chunks[position]
            try:
                chunk.file.erase(chunk.index)
            except OSError as error:
                log.warning("the space of used masks could not be given back: %s", os.strerror(error.errno or 0))

    # -- filling -----------------------------------------------------------------------------------------------------

    def new_batch(self, slots: int = 2048) -> BatchWriter:
        """Begins a batch of ``slots`` (a multiple of 64); see :class:`BatchWriter`.

        Raises:
            PoolError: ``slots`` is not one, the disk has no room for it, or another process changed the check vectors.
        """
        self._own_process()
        with self._lock, disk_errors("new masks cannot be made", self.path), self._store.locked():
            if self._ended:
                raise PoolError(self._ended)
            return self._store.new_batch(slots, self._commit)

    def _commit(self, keys: BatchKeys, publish_data: Callable[[], None]) -> None:
        self._own_process()
        with self._lock, self._store.locked():
            if self._ended:
                raise PoolError(self._ended)
            self._store.commit(keys, publish_data)

    # -- check vectors -----------------------------------------------------------------------------------------------

    def check(self, group: str) -> CheckVector | None:
        """The group's check vectors, None where none are stored."""
        return self._store.checks.get(group)

    def store_check(self, vectors: dict[str, CheckVector]) -> None:
        """Keeps check vectors, durably. Every group has one, all of the same k.

        Where another process has stored as many meanwhile, those are taken instead: ask :meth:`check`. A batch is
        bound to the vectors it was made under, and is used under no others.

        Raises:
            PoolError: a group is missing, a shape or a value is wrong, the disk is full, or the pool holds masks that
                were made under other vectors, or none.
        """
        self._own_process()
        with self._lock, disk_errors("check vectors cannot be stored", self.path), self._store.locked():
            if self._ended:
                raise PoolError(self._ended)
            self._store.save_checks(vectors)

    # -- fork --------------------------------------------------------------------------------------------------------

    def _own_process(self) -> None:
        """In a forked child: what the parent reserved is the parent's."""
        if self._pid != this_process():
            self._lock = threading.Lock()  # a thread that does not exist here may hold it
            self._drop_chunks()
            self._pid = this_process()

    def _drop_chunks(self) -> None:
        for cursor in self._cursors.values():
            cursor.r = cursor.wr = None
            cursor.position, cursor.row = self._end, 0
        self._chunks.clear()


_live: weakref.WeakSet[MaskPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_live):
        pool._own_process()


# At once, while the child has one thread. The process id that every call compares covers forks without Python's hooks.
os.register_at_fork(after_in_child=_after_fork)


def _make(path: Path, manifest: ModelManifest, passphrase: str | None, ledger: Ledger) -> None:
    """The folder and the ledger entry of an empty pool, under the host-wide lock."""
    with disk_errors("the mask pool cannot be made", _existing(path)):
        if path.exists() and (
            not path.is_dir() or (path / HEAD_NAME).exists() or not all(OWN_FILE.match(f.name) for f in path.iterdir())
        ):
            raise PoolError("the mask pool needs a folder of its own: what was named exists and is not empty")
        make_private_dir(path)
        for leftover in path.iterdir():  # of a pool whose making or destruction was cut short
            remove(leftover)
        pool_id = secrets.token_hex(16)
        tag = ledger.register(pool_id)
        crash_point("create: entry made")
        Head.make(path, pool_id, manifest.fingerprint, tag, passphrase)


def _existing(path: Path) -> Path:
    """The nearest folder that exists: where free space can be asked for."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _ledger(path: Path, state_dir: str | Path | None) -> Ledger:
    where = Path(state_dir) if state_dir is not None else default_state_dir()
    if where.resolve().is_relative_to(path.resolve()):
        raise PoolError("the ledger of used masks must lie outside the pool: a copy of the pool would bring its own")
    return Ledger(where)
