"""Filling a mask pool: a batch is written group by group and becomes visible as a whole, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from sordino.client.forks import this_process
from sordino.client.ledger import (
    disk_errors,
    free_bytes,
    full_text,
    open_private,
    sync,
    sync_dir,
)
from sordino.client.poolfile import (
    BATCH_NAME,
    CHUNK,
    U32,
    BatchKeys,
    ChunkKeys,
    DataFile,
    Layout,
    data_path,
    fallocate,
)
from sordino.shared.errors import PoolError
from sordino.shared.manifest import GroupSpec
from sordino.shared.prg import random_key
from sordino.shared.ring import P

MAX_SLOTS: Final = 1 << 20
_SPARE_BYTES: Final = 1 << 20  # for the small files of a commit and the reservations after it

Commit = Callable[[BatchKeys, Callable[[], None]], None]


class BatchWriter:
    """A batch that is being made; a context manager that drops it unless :meth:`commit` was called.

    Its keys are in memory alone until then. Calls may come from several threads, one group in one thread at a time.
    """

    def __init__(self, folder: Path, layout: Layout, slots: int, checks: str, commit: Commit) -> None:
        """Called by :meth:`MaskPool.new_batch`, under the host-wide lock."""
        if slots % CHUNK or not 0 < slots <= MAX_SLOTS:
            raise PoolError(f"a batch has a positive multiple of {CHUNK} slots, at most {MAX_SLOTS}; not {slots}")
        self.slots = slots
        self._commit = commit
        self._groups: dict[str, tuple[int, GroupSpec]] = {g.name: (i, g) for i, g in enumerate(layout.groups)}
        self._written: set[str] = set()
        self._folder = folder
        self._pid = this_process()
        self._open = True
        self._bytes = slots // CHUNK * layout.stride
        self._keys: list[ChunkKeys] = []
        number = 1 + max((int(f.name[:8]) for f in folder.glob("*.keys") if BATCH_NAME.match(f.stem)), default=0)
        name = f"{number:08d}-{secrets.token_hex(16)}"
        self._state = state = BatchKeys(name, slots // CHUNK, 0, random_key(), checks)
        for _ in range(state.chunks):
            keys, state = state.ratchet()
            self._keys.append(keys)
        what = f"a batch of {slots} masks cannot be made"
        self._part = folder / f"{self._state.name}.part"
        if free_bytes(folder) < self._bytes + _SPARE_BYTES:
            raise PoolError(full_text(what, folder, self._bytes + _SPARE_BYTES))
        with disk_errors(what, folder, self._bytes):
            fd = open_private(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self._file = DataFile(fd, self._state.name, layout)
            try:
                # Tells others, until this process ends, that the file is not a leftover.
                fcntl.flock(fd, fcntl.LOCK_EX)
                # All space at once: better no batch than one that fails after minutes of work.
                if not fallocate(fd, 0, 0, self._bytes):
                    os.ftruncate(fd, self._bytes)
            except BaseException:
                self.abort()
                raise

    def masks(self, group: str) -> U32:
        """The masks of one group: ``[slots, n]`` uint32 in [0, p); the same at every call.

        Raises:
            PoolError: no such group, or the batch is finished.
        """
        index, spec = self._find(group)
        return np.concatenate([keys.masks(index, spec) for keys in self._keys])

    def write(self, group: str, wr: U32) -> None:
        """Stores the products of one group, ``[slots, m]`` uint32 in [0, p); once per group.

        Raises:
            PoolError: no such group, written before, a wrong shape, type or range, or the disk is full.
        """
        index, spec = self._find(group)
        if wr.shape != (self.slots, spec.out_features) or wr.dtype != np.uint32 or int(wr.max()) >= P:
            raise PoolError(f"products of group {group!r} have a wrong shape, type or range")
        if group in self._written:
            # A second record under the same key and nonce would break AES-GCM.
            raise PoolError(f"products of group {group!r} were written before")
        self._written.add(group)
        with disk_errors(f"the products of group {group!r} cannot be stored", self._folder, self._bytes):
            for chunk, keys in enumerate(self._keys):
                self._file.write(chunk, index, keys, wr[chunk * CHUNK : (chunk + 1) * CHUNK])

    def commit(self) -> None:
        """Adds the batch to the pool, durably.

        Raises:
            PoolError: a group has no products, the disk is full, or the pool was closed or destroyed meanwhile.
        """
        if missing := self._groups.keys() - self._written:
            raise PoolError(f"{len(missing)} groups of the batch have no products, one is {min(missing)!r}")
        self._find(next(iter(self._groups)))

        def publish() -> None:
            self._part.replace(data_path(self._folder, self._state.name))
            sync_dir(self._folder)

        with disk_errors("the new masks could not be added to the pool", self._folder, self._bytes):
            sync(self._file.fd)
        self._commit(self._state, publish)
        self._end()

    def abort(self) -> None:
        """Drops the batch. May be called again, and after :meth:`commit`, when it does nothing."""
        if self._open and self._pid == this_process():  # a forked child leaves its parent's file alone
            with contextlib.suppress(OSError):  # the next new batch removes what stays
                self._part.unlink(missing_ok=True)
        self._end()

    def _end(self) -> None:
        self._open = False
        self._keys = []
        self._file.close()

    def _find(self, group: str) -> tuple[int, GroupSpec]:
        if not self._open or self._pid != this_process():
            raise PoolError("the batch of masks is finished, or was begun by another process")
        try:
            return self._groups[group]
        except KeyError:
            raise PoolError(f"the mask pool has no group {group!r}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __repr__(self) -> str:
        return f"BatchWriter({self.slots} slots, {len(self._written)} of {len(self._groups)} groups)"


def abandoned(part: Path) -> bool:
    """Whether no process that lives is writing to it."""
    try:
        fd = open_private(part, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
