"""Who may keep how many pages on the server, and what happens when there is no room.

Sessions share nothing, not even equal pages: what one appends costs the next as much again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from sordino.server.pagepool import SLOT_BYTES, PageFile, PageMemory, Pages
from sordino.shared.errors import KvEvictedError, LimitError, ProtocolError
from sordino.shared.pages import Level
from sordino.shared.rlwe import U32

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 10.0
_FULL: Final = "the server's memory for pages is in use: try again later"


class Policy(StrEnum):
    """What happens when memory is full and a session wants more."""

    EVICT = "evict"  # who rested or has more than a share loses all pages
    SPILL = "spill"  # pages of those who rest go to disk, and come back when they are used
    REFUSE = "refuse"  # the newcomer is refused


@dataclass(slots=True, eq=False)
class _Page:
    """Slots of the memory, one for each prime; or of the file."""

    slots: list[int]
    away: bool = False


@dataclass(slots=True, eq=False)
class PageSession:
    """The pages of one stream, by the numbers that its client gave them, in order. ``holder`` is whose it is.

    Attributes:
        slots: of all pages; ``away``: of those that are on disk.
        busy: a request is being answered, and does not wait for room: no other may take pages.
    """

    holder: str = ""
    pages: dict[int, _Page] = field(default_factory=dict)
    slots: int = 0
    away: int = 0
    appended: int = 0
    used: float = field(default_factory=time.monotonic)
    busy: bool = False
    evicted: bool = False

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return self.slots * SLOT_BYTES


class PageStore:
    """All sessions' pages, accounted in bytes.

    Args:
        total: limit of memory in bytes.
        per_session, per_holder: limits in bytes, of pages in memory and on disk; a holder may have many sessions.
        evict_after_s: by the policy ``EVICT``, a session that was not used for so long may lose its pages to others,
            the least recently used first; its next call says so. A holder of more than the holders' equal share may
            lose pages to one who has less, rested or not.
        file: where pages go by the policy ``SPILL``.

    Attributes:
        evictions: how many sessions lost their pages, to others or to a disk that failed.
    """

    def __init__(
        self,
        total: int,
        per_session: int,
        evict_after_s: float,
        *,
        per_holder: int | None = None,
        policy: Policy = Policy.EVICT,
        file: PageFile | None = None,
    ) -> None:
        self._memory = PageMemory(total)
        self._file = file
        self._policy = policy
        self._per_session = per_session
        self._per_holder = per_holder
        self._evict_after_s = evict_after_s
        # Notified when somebody needs less or no longer.
        self._changed = threading.Condition()
        self._sessions: list[PageSession] = []
        self.evictions = 0

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return self._memory.slots.used * SLOT_BYTES

    @property
    def limit_bytes(self) -> int:
        return self._memory.slots.count * SLOT_BYTES

    @property
    def spilled_bytes(self) -> int:
        with self._changed:
            return self._file.slots.used * SLOT_BYTES if self._file else 0

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @contextmanager
    def session(self, holder: str = "") -> Iterator[PageSession]:
        """Pages of a holder (a token, say) that are gone at the end."""
        session = PageSession(holder)
        with self._changed:
            self._sessions.append(session)
        try:
            yield session
        finally:
            with self._changed:
                self._sessions.remove(session)
                self._forget(session, list(session.pages))

    @contextmanager
    def using(self, session: PageSession) -> Iterator[None]:
        """While a request of the session is answered: what it appends or finds stays where it is.

        Raises:
            KvEvictedError: its pages went before.
        """
        with self._changed:
            if session.evicted:
                raise KvEvictedError("the pages of this session made room for others while it rested: start anew")
            session.busy = True
        try:
            yield
        finally:
            with self._changed:
                session.busy, session.used = False, time.monotonic()
                self._changed.notify_all()

    def append(self, session: PageSession, first: int, pages: U32) -> None:
        """Adds ``pages [count, 2, primes, N]`` under the numbers from ``first`` on.

        Raises:
            ProtocolError: these numbers are not the next ones.
            LimitError: there is no room.
        """
        if first != session.appended:
            raise ProtocolError(f"page {first} is appended twice or out of order: the next is {session.appended}")
        count, _, primes, _ = pages.shape
        deadline = time.monotonic() + _PATIENCE_S
        with self._changed:
            self._check_limits(session, count * primes)
            while not self._room(session, count * primes):
                self._wait(session, deadline)
                self._check_limits(session, count * primes)  # others may have come in between
            slots = np.array(self._memory.slots.take(count * primes), np.int64).reshape(count, primes)
            session.pages.update(enumerate((_Page(each) for each in slots.tolist()), first))
            session.slots += count * primes
            session.appended += count
        self._memory.residues[slots] = pages.transpose(0, 2, 1, 3)

    def find(self, session: PageSession, numbers: Sequence[int], level: Level) -> Pages:
        """The pages of these numbers, in memory until :meth:`using` ends.

        Raises:
            ProtocolError: a page is not there, or at another level.
            LimitError: pages are on disk, and there is no room for them to come back.
            KvEvictedError: or they cannot be read; the session loses all.
        """
        with self._changed:
            for number in numbers:
                if number not in session.pages:
                    raise ProtocolError(f"page {number} was never appended, or was dropped")
                if len(session.pages[number].slots) != level.primes:
                    raise ProtocolError(f"page {number} is at another level than the operands of {level.primes} primes")
            found = [session.pages[number] for number in numbers]
            while session.away and any(page.away for page in found):
                self._bring_back(session, found, set(numbers))
            slots = np.array([page.slots for page in found], np.int64).reshape(-1, level.primes)
        return Pages(self._memory.residues, slots)

    def drop(self, session: PageSession, numbers: Sequence[int]) -> None:
        """Forgets pages; each must be there.

        Raises:
            ProtocolError: one is not.
        """
        with self._changed:
            for number in numbers:
                if number not in session.pages:
                    raise ProtocolError(f"page {number} was never appended, or was dropped")
                self._forget(session, [number])

    def _forget(self, session: PageSession, numbers: Sequence[int]) -> None:
        gone = [session.pages.pop(number) for number in numbers]
        here = [slot for page in gone if not page.away for slot in page.slots]
        away = [slot for page in gone if page.away for slot in page.slots]
        self._memory.free(here)
        if self._file and away:
            self._file.free(away)
        session.slots -= len(here) + len(away)
        session.away -= len(away)
        self._changed.notify_all()

    def _evict(self, session: PageSession) -> None:
        self._forget(session, list(session.pages))
        session.evicted = True
        self.evictions += 1

    def _check_limits(self, session: PageSession, slots: int) -> None:
        held = sum(other.size for other in self._sessions if other.holder == session.holder)
        for have, limit, who in ((session.size, self._per_session, "session"), (held, self._per_holder, "token")):
            if limit is not None and have + slots * SLOT_BYTES > limit:
                most = f"a {who} may keep {limit >> 20} MiB of pages here"
                raise LimitError(f"{most}: use shorter prompts or answers")
        if (
            self._file
            and sum(each.slots for each in self._sessions) + slots > self._memory.slots.count + self._file.limit
        ):
            raise LimitError(_FULL)

    def _wait(self, session: PageSession, deadline: float) -> None:
        """For requests of others to end; meanwhile others may send the session's pages to disk, also those it found.

        Raises:
            LimitError: nothing comes of it.
        """
        if not self._file or not any(other.busy for other in self._sessions if other is not session):
            raise LimitError(_FULL)
        was, session.busy = session.busy, False
        try:
            if not self._changed.wait(deadline - time.monotonic()):
                raise LimitError(_FULL)
        finally:
            session.busy = was

    def _room(self, session: PageSession, slots: int, keep: Collection[int] = ()) -> bool:
        """Whether there are free slots of the memory, or could be made; of the session's own the numbers ``keep`` stay.

        Raises:
            LimitError: there never will be, or the disk fails.
        """
        if slots > self._memory.slots.count:
            raise LimitError(_FULL)
        over = slots - self._memory.slots.free
        if over <= 0:
            return True
        if self._policy is Policy.SPILL and self._file:
            return self._spill(self._file, session, over, keep)
        return self._policy is Policy.EVICT and self._evict_others(session.holder, slots, over)

    def _evict_others(self, holder: str, slots: int, over: int) -> bool:
        """All of those it takes, or none."""
        held = Counter({holder: 0})
        for session in self._sessions:
            held[session.holder] += session.slots
        share = self._memory.slots.count // len(held)
        before = time.monotonic() - self._evict_after_s
        going: list[PageSession] = []
        for other in sorted(self._sessions, key=lambda other: other.used):
            if over <= 0:
                break
            too_much = held[other.holder] > share and held[holder] + slots <= share
            if other.pages and not other.busy and (other.used <= before or too_much):
                going.append(other)
                held[other.holder] -= other.slots
                over -= other.slots
        if over <= 0:
            for other in going:
                self._evict(other)
        return over <= 0

    def _spill(self, file: PageFile, session: PageSession, over: int, keep: Collection[int]) -> bool:
        """Pages to disk: of sessions without a request, the least recently used first, then the session's own."""
        for other in sorted(self._sessions, key=lambda other: (other is session, other.used)):
            if (other.busy and other is not session) or other.slots == other.away:
                continue
            for number, page in other.pages.items():
                if over <= 0:
                    return True
                if page.away or (other is session and number in keep):
                    continue
                try:
                    places = file.write(self._memory.residues, page.slots)
                except OSError as error:
                    log.error("pages cannot be written to disk: %s", error.strerror)
                    raise LimitError("the server's disk for pages is full or fails: try again later") from error
                self._memory.free(page.slots)
                page.slots, page.away = places, True
                other.away += len(places)
                over -= len(places)
        return over <= 0

    def _bring_back(self, session: PageSession, pages: Sequence[_Page], keep: Collection[int]) -> None:
        """Into memory; while it waited for room, some may have gone again."""
        if not self._file or sum(len(page.slots) for page in pages) > self._memory.slots.count:
            raise LimitError(_FULL)
        deadline = time.monotonic() + _PATIENCE_S
        for page in pages:
            if not page.away:
                continue
            while not self._room(session, len(page.slots), keep):
                self._wait(session, deadline)
            slots = self._memory.slots.take(len(page.slots))
            try:
                self._file.read(page.slots, self._memory.residues, slots)
            except OSError as error:
                self._memory.free(slots)
                self._evict(session)
                log.error("pages cannot be read from disk: %s", error.strerror)
                raise KvEvictedError("pages of this session cannot be read back from disk: start anew") from error
            self._file.free(page.slots)
            session.away -= len(slots)
            page.slots, page.away = slots, False
