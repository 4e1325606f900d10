"""The folder of a mask pool together with its ledger entry: batches are added, and chunks reserved, durably.

The order of the writes is what makes masks single-use, see :mod:`sordino.client.pool`; ``crash_point`` names the gaps.
Everything here is called under :meth:`Store.locked`, the host-wide lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from sordino.client.ledger import LOCK_TIMEOUT_S, Ledger, Mark, crash_point, read_private, remove, stage
from sordino.client.poolfile import BATCH_NAME, OWN_FILE, U32, BatchKeys, ChunkKeys, DataFile, Layout, erase_batch
from sordino.client.poolwriter import BatchWriter, Commit, abandoned
from sordino.client.vault import Vault
from sordino.shared.errors import PoolError
from sordino.shared.ring import P

log = logging.getLogger(__name__)
_CHECK_NAME: Final = "check.bin"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckVector:
    """k secret vectors of one group and their products with its matrix, mod p: a secret, kept from every log.

    Attributes:
        v: ``[k, m]`` uint32. c: ``[k, n]`` uint32, v^T W.
    """

    v: U32
    c: U32

    def __repr__(self) -> str:
        return f"CheckVector(k={self.v.shape[0]})"


@dataclass(slots=True, repr=False, eq=False)
class Chunk:
    """64 slots that this process has reserved. ``waiting`` groups have not passed it yet."""

    file: DataFile
    index: int
    keys: ChunkKeys
    waiting: int


class Store:
    """Attributes:
    unreserved: chunks that nobody had reserved when this process last looked.
    checks: the check vectors in force here by group; empty without any. A process that has some takes no batch that
        was made under others: those products may belong to another matrix.
    """

    def __init__(self, folder: Path, layout: Layout, vault: Vault, ledger: Ledger, pool_id: str, tag: str) -> None:
        self.folder = folder
        self.layout = layout
        self.unreserved = 0
        self.checks: dict[str, CheckVector] = {}
        self._checks_id = ""
        self._vault = vault
        self._ledger = ledger
        self._id = pool_id
        self._tag = tag
        # One descriptor per batch, for as long as a chunk of it is in use.
        self._files: weakref.WeakValueDictionary[str, DataFile] = weakref.WeakValueDictionary()

    def locked(self, *, timeout_s: float = LOCK_TIMEOUT_S) -> contextlib.AbstractContextManager[None]:
        return self._ledger.locked(timeout_s=timeout_s)

    def refresh(self) -> None:
        """Looks at the folder and the ledger again.

        Raises:
            PoolForeignError: the ledger does not have the pool, or not any more.
            PoolError: a file of keys is damaged.
        """
        self._look()

    def _look(self) -> tuple[dict[str, Mark], list[BatchKeys]]:
        """The ledger's marks, and the batches here that have unreserved chunks, oldest first."""
        marks = self._ledger.marks(self._id, self._tag)
        _remove_leftovers(self.folder, marks)
        usable: list[BatchKeys] = []
        for name in sorted(file.stem for file in self.folder.glob("*.keys") if BATCH_NAME.match(file.stem)):
            state = BatchKeys.load(self.folder, name, self._vault)
            # Whichever is further: the ledger where this is an older copy of the pool, or a reservation was cut short.
            state = state.forward_to(marks[name].used)
            if state.used < state.chunks and self._checks_id in ("", state.checks):
                usable.append(state)
        self.unreserved = sum(state.chunks - state.used for state in usable)
        return marks, usable

    def reserve(self, count: int) -> list[Chunk]:
        """``count`` chunks, oldest batch first; none at all, and nothing changed, where fewer are left.

        When this returns, no other process, no copy of the pool and no later run gets them.
        """
        marks, usable = self._look()
        taken: list[Chunk] = []
        if self.unreserved < count:
            return taken
        for state in usable:
            if len(taken) == count:
                break
            file = self._files.get(state.name) or DataFile.open(self.folder, state.name, self.layout)
            self._files[state.name] = file
            while state.used < state.chunks and len(taken) < count:
                index = state.used
                keys, state = state.ratchet()
                taken.append(Chunk(file, index, keys, len(self.layout.groups)))
            self._advance(state, marks)
        self.unreserved -= count
        return taken

    def _advance(self, state: BatchKeys, marks: dict[str, Mark]) -> None:
        """Makes durable that all chunks before ``state.used`` are reserved: the ledger first, then the chain key."""
        spent = state.used == state.chunks
        # A batch that the ledger does not list is used up, so a spent one needs no mark.
        marks.pop(state.name)
        if not spent:
            marks[state.name] = Mark(state.used, state.chunks)
        crash_point("reserve: begin")
        # Both are written before either counts, so that a full disk costs no masks.
        chain = state.stage(self.folder, self._vault)
        try:
            crash_point("reserve: chain written")
            mark = self._ledger.stage_marks(self._id, marks)
        except BaseException:
            chain.discard()
            raise
        crash_point("reserve: mark written")
        mark.publish(overwrite_old=True)  # a hard link to it, as some backups make, must not bring it back
        crash_point("reserve: mark advanced")
        chain.publish(overwrite_old=True)
        crash_point("reserve: chain advanced")
        if spent:
            erase_batch(self.folder, state.name)  # its last chunks are read through the open file
            crash_point("reserve: batch erased")

    def new_batch(self, slots: int, commit: Commit) -> BatchWriter:
        """A batch that is bound to the check vectors in force.

        Raises:
            PoolError: the pool has others by now, or the batch cannot be made.
        """
        self.refresh()
        self._same_checks(self._checks_id)
        return BatchWriter(self.folder, self.layout, slots, self._checks_id, commit)

    def commit(self, keys: BatchKeys, publish_data: Callable[[], None]) -> None:
        """Makes a finished batch visible: its mark, its data file and, as the point of no return, its keys.

        Raises:
            PoolError: the pool got other check vectors than the batch was made under.
        """
        self._same_checks(keys.checks)
        marks = self._ledger.marks(self._id, self._tag)
        chain = keys.stage(self.folder, self._vault)
        try:
            mark = self._ledger.stage_marks(self._id, {**marks, keys.name: Mark(0, keys.chunks)})
            crash_point("commit: written")
            mark.publish()
            crash_point("commit: mark set")
            publish_data()
            crash_point("commit: data in place")
            chain.publish()
        except BaseException:
            chain.discard()
            raise
        crash_point("commit: keys in place")
        self.refresh()

    def destroy(self) -> None:
        """Erases the pool here and makes every copy on this host unusable."""
        try:
            self._ledger.forget(self._id)
        finally:
            if self.folder.is_dir():
                for file in self.folder.iterdir():
                    if OWN_FILE.match(file.name):
                        remove(file, overwrite=file.suffix not in (".data", ".part"))
                with contextlib.suppress(OSError):  # somebody else's file is in it: the folder stays
                    self.folder.rmdir()

    # -- check vectors -----------------------------------------------------------------------------------------------

    def save_checks(self, vectors: dict[str, CheckVector]) -> None:
        """Puts check vectors in force, unless another process has stored as many for each group: then those are.

        Raises:
            PoolError: a group is missing, or a shape, a type or a value is wrong, or there are masks that were made
                under others, or under none.
        """
        groups = self.layout.groups
        if set(vectors) != {group.name for group in groups}:
            raise PoolError("check vectors must cover every group and no other")
        k = int(vectors[groups[0].name].v.shape[0])
        parts = [k.to_bytes(4, "little")]
        for group in groups:
            check = vectors[group.name]
            for array, length in ((check.v, group.out_features), (check.c, group.in_features)):
                if not k or array.shape != (k, length) or array.dtype != np.uint32 or int(array.max()) >= P:
                    raise PoolError(f"check vectors of group {group.name!r} have a wrong shape, type or range")
                parts.append(np.ascontiguousarray(array, "<u4").tobytes())
        _, usable = self._look()  # raises where the pool was destroyed meanwhile
        blob = self._read_checks()
        if blob[:4] != parts[0]:
            if usable:
                raise PoolError(
                    f"the pool's masks were not made under {k} check vector(s): take another pool or remove this"
                )
            blob = b"".join(parts)
            stage(self.folder / _CHECK_NAME, self._vault.wrap(_CHECK_NAME, blob)).publish(overwrite_old=True)
        self._set_checks(blob)

    def load_checks(self) -> None:
        """Puts what :meth:`save_checks` kept in force.

        Raises:
            PoolError: the file is damaged.
        """
        self._set_checks(self._read_checks())

    def _read_checks(self) -> bytes:
        try:
            return self._vault.unwrap(_CHECK_NAME, read_private(self.folder / _CHECK_NAME))
        except FileNotFoundError:
            return b""

    def _same_checks(self, wanted: str) -> None:
        if _checks_id(self._read_checks()) != wanted:
            raise PoolError(
                "another process changed the pool's check vectors: masks made under the old ones are dropped. Connect "
                "again to go on with the new ones"
            )

    def _set_checks(self, blob: bytes) -> None:
        self.checks, self._checks_id = self._parse_checks(blob), _checks_id(blob)

    def _parse_checks(self, blob: bytes) -> dict[str, CheckVector]:
        if not blob:
            return {}
        k, vectors, at = int.from_bytes(blob[:4], "little"), {}, 0
        if len(blob) != 4 + 4 * k * sum(g.in_features + g.out_features for g in self.layout.groups):
            raise PoolError("the mask pool's check vectors have a wrong size")
        flat = np.frombuffer(blob, "<u4", offset=4).astype(np.uint32)
        for group in self.layout.groups:
            m, n = k * group.out_features, k * group.in_features
            v, c = flat[at : at + m], flat[at + m : at + m + n]
            vectors[group.name] = CheckVector(v=v.reshape(k, -1), c=c.reshape(k, -1))
            at += m + n
        return vectors


def _checks_id(blob: bytes) -> str:
    """Names check vectors. Lies beside them, in files kept as they are."""
    return hashlib.sha256(blob).hexdigest() if blob else ""


def _remove_leftovers(folder: Path, marks: dict[str, Mark]) -> None:
    """Deletes what processes that died have left, and batches that are used up."""
    names = {file.name for file in folder.iterdir() if OWN_FILE.match(file.name)}
    for name in names:
        stem, _, kind = name.partition(".")
        if name.endswith(".tmp"):
            remove(folder / name, overwrite=True)
        elif kind == "part":
            if abandoned(folder / name):
                remove(folder / name)
        elif kind == "keys":
            if stem not in marks:  # used up, by another copy perhaps
                erase_batch(folder, stem)
            elif f"{stem}.data" not in names:
                log.warning("batch %s of the mask pool has lost its data file: its masks are gone", stem)
                erase_batch(folder, stem)
        elif kind == "data" and f"{stem}.keys" not in names:  # a commit, or an erasure, was cut short
            remove(folder / name)
