"""Memory and disk for pages of encrypted KV caches, in slots of one size: any free slot serves any page of any session.

A slot holds one prime's residues of a page, both halves: a page of keys takes three, of values two, wherever they lie.
So nothing is lost to fragments, and products read pages where they are.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import LimitError, RangeError
from sordino.shared.pages import N
from sordino.shared.rlwe import U32

I64 = NDArray[np.int64]

SLOT_BYTES: Final = 2 * N * 4
_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which mmap does not name before 3.13
# Pages of three slots change places with pages of two when memory and file are full.
_SPARE_SLOTS: Final = 8
# Linux takes such slots back one by one, and gives them out again as zeros.
_TAKEN_BACK: Final = sys.platform == "linux" and SLOT_BYTES % mmap.PAGESIZE == 0


class Pages(NamedTuple):
    """Pages where they lie: ``residues [slots, 2 halves, N]`` of a whole memory, ``slots [count, primes]`` of these."""

    residues: U32
    slots: I64


class Slots:
    """The numbers below ``count``, each held by one taker at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._fresh = 0  # this number and those above were never taken
        self._given_back: list[int] = []

    @property
    def used(self) -> int:
        return self._fresh - len(self._given_back)

    @property
    def free(self) -> int:
        return self.count - self.used

    def take(self, count: int) -> list[int]:
        """``count`` of those that are :attr:`free`; whoever asks for more is wrong."""
        if count > self.free:
            raise ValueError(f"{count} slots of {self.free}")
        again = max(0, len(self._given_back) - count)
        taken, self._given_back = self._given_back[again:], self._given_back[:again]
        first = self._fresh
        self._fresh += count - len(taken)
        return [*taken, *range(first, self._fresh)]

    def give_back(self, slots: Sequence[int]) -> None:
        self._given_back.extend(slots)
        if not self.used:
            self._fresh, self._given_back = 0, []


class PageMemory:
    """Slots in memory. The address space of all is had at once, memory slot by slot when it is written.

    A slot that is given back holds zeros, and takes no memory where the system can take it.

    Raises:
        LimitError: the system does not give this much address space.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.slots = Slots(limit_bytes // SLOT_BYTES)
        size = max(1, self.slots.count) * SLOT_BYTES
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError) as error:
            raise LimitError(f"the system has no room for {size >> 20} MiB of pages: lower --kv-mib") from error
        if advice := getattr(mmap, "MADV_NOHUGEPAGE", None):
            with suppress(OSError):  # a system without such pages
                self._map.madvise(advice)  # they are larger than a slot: nothing could be taken back
        self.residues: U32 = np.frombuffer(self._map, np.uint32).reshape(-1, 2, N)

    def free(self, slots: Sequence[int]) -> None:
        ordered = np.sort(np.array(slots, np.int64))
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
            if not run.size:
                continue
            if _TAKEN_BACK:
                self._map.madvise(mmap.MADV_DONTNEED, int(run[0]) * SLOT_BYTES, run.size * SLOT_BYTES)
            else:
                self.residues[run[0] : run[-1] + 1] = 0
        self.slots.give_back(slots)


class PageFile:
    """Slots in a file without a name, below a folder of the owner's: nothing stays when the process ends, however.

    Args:
        limit_bytes: of the file, but for a few slots where pages change places.

    Attributes:
        limit: the same in slots.

    Raises:
        RangeError: the folder is open to others, or is none that can be written to.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.limit = limit_bytes // SLOT_BYTES
        self.slots = Slots(self.limit + _SPARE_SLOTS)
        self._sums: dict[int, int] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o077:
                raise RangeError(f"--kv-spill {folder} is open to others: chmod 700, or name another folder")
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - mode 0600
        except OSError as error:
            raise RangeError(f"--kv-spill {folder} cannot be written to: {error.strerror}") from error
        self._handle = file.fileno()
        weakref.finalize(self, file.close)

    def write(self, memory: U32, slots: Sequence[int]) -> list[int]:
        """Copies slots of ``memory [slots, 2, N]``; returns where they are.

        Raises:
            OSError: the disk is full or fails; the file is as before.
        """
        places = self.slots.take(len(slots))
        try:
            for place, slot in zip(places, slots, strict=True):
                if os.pwrite(self._handle, memory[slot], place * SLOT_BYTES) != SLOT_BYTES:
                    raise OSError(0, "no room for a whole page")
                self._sums[place] = zlib.crc32(memory[slot])
        except OSError:
            self.free(places)
            raise
        return places

    def read(self, places: Sequence[int], memory: U32, slots: Sequence[int]) -> None:
        """Copies back into slots of ``memory``.

        Raises:
            OSError: the disk fails, or returns other bytes: what it could not write it may forget without a word.
        """
        for place, slot in zip(places, slots, strict=True):
            count = os.preadv(self._handle, [memory[slot]], place * SLOT_BYTES)
            if count != SLOT_BYTES or zlib.crc32(memory[slot]) != self._sums[place]:
                raise OSError(0, "other bytes than were written")

    def free(self, places: Sequence[int]) -> None:
        self.slots.give_back(places)
        for place in places:
            self._sums.pop(place, None)
        if not self.slots.used:
            with suppress(OSError):  # what it keeps is written over
                os.ftruncate(self._handle, 0)
