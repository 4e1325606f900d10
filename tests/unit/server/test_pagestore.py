"""The account of who keeps how many pages: limits, quotas, eviction, disk, and that nobody reads what another left."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from sordino.server import pagestore
from sordino.server.pagepool import SLOT_BYTES, PageFile, PageMemory
from sordino.server.pagestore import PageSession, PageStore, Policy
from sordino.shared.errors import KvEvictedError, LimitError, ProtocolError, RangeError
from sordino.shared.pages import KEYS, VALUES, Level, N

PAGE_BYTES = KEYS.page_bytes


def pages(count: int = 1, level: Level = KEYS, fill: int = 0) -> np.ndarray:
    return np.full((count, 2, level.primes, N), fill, np.uint32)


def content(store: PageStore, session: PageSession, numbers: list[int], level: Level = KEYS) -> np.ndarray:
    """``[count, primes, 2, N]``, as a product reads it."""
    residues, slots = store.find(session, numbers, level)
    return residues[slots]


def spilling(folder: Path, memory: int, disk: int) -> PageStore:
    """Pages of keys that fit, in memory and on disk."""
    file = PageFile(folder / "spill", disk * PAGE_BYTES)
    return PageStore(memory * PAGE_BYTES, 100 * PAGE_BYTES, 0, policy=Policy.SPILL, file=file)


# -- one session -------------------------------------------------------------------------------------------------------


def test_a_page_takes_what_is_accounted() -> None:
    assert pages().nbytes == KEYS.page_bytes == 3 * SLOT_BYTES == 98_304
    assert pages(level=VALUES).nbytes == VALUES.page_bytes == 2 * SLOT_BYTES == 65_536


def test_pages_are_numbered_in_order() -> None:
    store = PageStore(10 * PAGE_BYTES, 10 * PAGE_BYTES, 10)
    with store.session() as session:
        store.append(session, 0, pages(2))
        for wrong in (0, 1, 3):
            with pytest.raises(ProtocolError, match="twice or out of order"):
                store.append(session, wrong, pages())
        store.append(session, 2, pages())
        assert store.find(session, [0, 2], KEYS).slots.shape == (2, 3)
        with pytest.raises(ProtocolError, match="another level"):
            store.find(session, [0], VALUES)
        store.drop(session, [1])
        for gone in ([1], [7]):
            with pytest.raises(ProtocolError, match="never appended, or was dropped"):
                store.find(session, gone, KEYS)
            with pytest.raises(ProtocolError, match="never appended, or was dropped"):
                store.drop(session, gone)
        with pytest.raises(ProtocolError, match="twice"):
            store.append(session, 1, pages())
        assert store.used_bytes == 2 * PAGE_BYTES
    assert store.used_bytes == 0


def test_limits_of_a_session_a_holder_and_all() -> None:
    store = PageStore(6 * PAGE_BYTES, 2 * PAGE_BYTES, 10, per_holder=3 * PAGE_BYTES)
    with store.session("one") as first, store.session("one") as second, store.session("two") as other:
        store.append(first, 0, pages(2))
        with pytest.raises(LimitError, match="a session may keep"):
            store.append(first, 2, pages())
        store.append(second, 0, pages())
        with pytest.raises(LimitError, match="a token may keep"):
            store.append(second, 1, pages())
        store.append(other, 0, pages(2))
        store.drop(first, [0])
        store.append(second, 1, pages())
        assert (first.size, second.size, other.size) == (PAGE_BYTES, 2 * PAGE_BYTES, 2 * PAGE_BYTES)


def test_the_memory_is_a_limit_too() -> None:
    store = PageStore(3 * PAGE_BYTES, 3 * PAGE_BYTES, 10)
    with store.session() as one, store.session() as two:
        store.append(one, 0, pages(2))
        store.append(two, 0, pages())
        with pytest.raises(LimitError, match="in use"):
            store.append(two, 1, pages())
        store.drop(one, [0])
        store.append(two, 1, pages())
        assert store.used_bytes == store.limit_bytes == 3 * PAGE_BYTES


def test_without_memory_there_are_no_pages() -> None:
    store = PageStore(0, PAGE_BYTES, 0)
    with store.session() as session, pytest.raises(LimitError):
        store.append(session, 0, pages())


@pytest.mark.parametrize("limit", [1 << 60, 1 << 80])
def test_memory_that_no_system_has_is_refused_at_once(limit: int) -> None:
    with pytest.raises(LimitError, match="lower --kv-mib"):
        PageMemory(limit)


def test_any_free_slots_serve_a_page() -> None:
    """Pages of both levels come and go until no three slots that are free lie together."""
    store = PageStore(4 * PAGE_BYTES, 4 * PAGE_BYTES, 10)  # twelve slots
    with store.session() as session:
        store.append(session, 0, pages(6, VALUES, fill=1))
        store.drop(session, [0, 2, 4])
        store.append(session, 6, pages(2, KEYS, fill=2))
        assert store.used_bytes == store.limit_bytes
        assert (content(store, session, [6, 7]) == 2).all()
        assert (content(store, session, [1, 3, 5], VALUES) == 1).all()


# -- who makes room ----------------------------------------------------------------------------------------------------


def test_who_holds_more_than_a_share_makes_room_for_who_holds_less() -> None:
    """However busily; and never below the share, nor for somebody over it."""
    store = PageStore(8 * PAGE_BYTES, 8 * PAGE_BYTES, 1000)
    with (
        store.session("greedy") as first,
        store.session("greedy") as second,
        store.session("greedy") as third,
        store.session("modest") as modest,
    ):
        for session in (first, second, third):
            store.append(session, 0, pages(2))
        store.append(third, 2, pages(2))
        with store.using(third), pytest.raises(LimitError):
            store.append(third, 4, pages())
        store.append(modest, 0, pages(2))
        assert first.evicted
        assert not second.evicted
        store.append(modest, 2, pages(2))
        assert second.evicted
        assert third.size == modest.size == 4 * PAGE_BYTES
        assert store.evictions == 2
        with pytest.raises(LimitError, match="in use"):
            store.append(modest, 4, pages())


def test_the_least_recently_used_idle_session_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pagestore.time, "monotonic", lambda: now)
    store = PageStore(3 * PAGE_BYTES, 3 * PAGE_BYTES, 10)

    def use(session: PageSession, when: float) -> None:
        nonlocal now
        now = when
        with store.using(session):
            pass

    with store.session() as one, store.session() as two, store.session() as three:
        store.append(one, 0, pages())
        store.append(two, 0, pages(2))
        use(two, 1)
        use(one, 2)
        now = 5
        with pytest.raises(LimitError):
            store.append(three, 0, pages())  # nobody has rested for ten seconds
        now = 11.5
        with pytest.raises(LimitError):
            store.append(three, 0, pages(3))  # not even without two, which then keeps its pages
        assert store.used_bytes == 3 * PAGE_BYTES
        store.append(three, 0, pages())  # two has
        assert store.used_bytes == 2 * PAGE_BYTES
        use(one, 11.6)
        with pytest.raises(KvEvictedError, match="start anew"):
            use(two, 11.7)
        with store.using(one):
            now = 100
            store.append(three, 1, pages())
            with pytest.raises(LimitError):
                store.append(three, 2, pages())  # a session in the middle of a request keeps its pages
        use(one, 101)


def test_by_the_policy_refuse_nobody_loses_anything() -> None:
    store = PageStore(3 * PAGE_BYTES, 3 * PAGE_BYTES, 0, policy=Policy.REFUSE)
    with store.session("rests") as old, store.session("new") as new:
        store.append(old, 0, pages(3, fill=7))
        with pytest.raises(LimitError, match="in use"):
            store.append(new, 0, pages())
        with store.using(old):
            assert (content(store, old, [0, 1, 2]) == 7).all()
        store.drop(old, [1])
        store.append(new, 0, pages(fill=8))
        assert (content(store, new, [0]) == 8).all()
        assert store.evictions == 0


# -- disk --------------------------------------------------------------------------------------------------------------


def test_pages_go_to_disk_and_come_back_as_they_were(tmp_path: Path) -> None:
    """Three sessions where there is room for one and a half, in turns."""
    store = spilling(tmp_path, memory=3, disk=6)
    with store.session("a") as a, store.session("b") as b, store.session("c") as c:
        for value, session in enumerate((a, b, c), 1):
            store.append(session, 0, np.concatenate([pages(fill=10 * value), pages(fill=10 * value + 1)]))
        assert store.used_bytes == 3 * PAGE_BYTES
        assert store.spilled_bytes == 3 * PAGE_BYTES
        for _ in range(3):
            for value, session in enumerate((a, b, c), 1):
                with store.using(session):
                    found = content(store, session, [0, 1])
                    assert (found[0] == 10 * value).all()
                    assert (found[1] == 10 * value + 1).all()
        assert a.away + b.away + c.away == 3 * KEYS.primes
        store.drop(a, [0, 1])
        store.drop(b, [0])
        assert store.used_bytes + store.spilled_bytes == 3 * PAGE_BYTES
        assert (a.away + b.away + c.away) * SLOT_BYTES == store.spilled_bytes
    assert (store.used_bytes, store.spilled_bytes, store.evictions) == (0, 0, 0)


def test_a_session_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    store = spilling(tmp_path, memory=2, disk=6)
    with store.session() as session, store.using(session):
        for number in range(6):
            store.append(session, number, pages(fill=number))
        for number in range(6):
            assert (content(store, session, [number]) == number).all()
        assert [int(page[0, 0, 0]) for page in content(store, session, [5, 0])] == [5, 0]
        with pytest.raises(LimitError, match="in use"):
            store.find(session, [0, 1, 2], KEYS)  # more in one request than there is
        assert (content(store, session, [3]) == 3).all()


def test_a_session_in_the_middle_of_a_request_keeps_its_pages_in_memory(tmp_path: Path) -> None:
    store = spilling(tmp_path, memory=2, disk=6)
    with store.session() as busy, store.session() as rests, store.session() as new:
        store.append(busy, 0, pages(fill=1))
        store.append(rests, 0, pages(fill=2))
        with store.using(busy):
            residues, slots = store.find(busy, [0], KEYS)
            store.append(new, 0, pages(fill=3))
            assert (busy.away, rests.away) == (0, KEYS.primes)
            assert (residues[slots] == 1).all()


def test_room_is_waited_for_until_a_request_ends(tmp_path: Path) -> None:
    store = spilling(tmp_path, memory=1, disk=6)
    with store.session() as one, store.session() as two:
        store.append(one, 0, pages(fill=1))
        store.append(two, 0, pages(fill=2))  # sends the other's to disk
        assert one.away
        found: list[int] = []

        def read() -> None:
            with store.using(one):
                found.append(int(content(store, one, [0])[0, 0, 0, 0]))

        thread = threading.Thread(target=read)
        with store.using(two):
            thread.start()
            thread.join(0.1)
            assert not found
            with pytest.raises(LimitError, match="in use"):
                store.append(two, 1, pages(2))  # more than there ever will be is not waited for
        thread.join(20)
        assert found == [1]
        assert two.away == KEYS.primes


def test_more_than_there_ever_will_be_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = spilling(tmp_path, memory=2, disk=6)
    monkeypatch.setattr(store._changed, "wait", lambda _: pytest.fail("waits"))
    with store.session() as busy, store.session() as new, store.using(busy):
        store.append(new, 0, pages())
        with pytest.raises(LimitError, match="in use"):
            store.append(new, 1, pages(3))
        store.append(new, 1, pages(2))
        with pytest.raises(LimitError, match="in use"):
            store.find(new, [0, 1, 2], KEYS)


def test_pages_that_go_again_while_others_are_waited_for_come_back(tmp_path: Path) -> None:
    store = spilling(tmp_path, memory=4, disk=4)
    with store.session() as one, store.session() as two:
        for number in range(3):
            store.append(one, number, pages(fill=10 + number))
        store.append(two, 0, pages(2, fill=1))
        found: list[int] = []
        started = threading.Event()

        def read() -> None:
            with store.using(one):
                started.set()
                found.extend(int(page[0, 0, 0]) for page in content(store, one, [0, 1, 2]))

        thread = threading.Thread(target=read)
        with store.using(two):
            with store.using(one):
                store.find(one, [0], KEYS)  # for which page 1 goes
            thread.start()
            assert started.wait(20)
            while one.busy:
                thread.join(0.001)
            store.append(two, 2, pages(fill=1))
            assert one.pages[0].away
        thread.join(20)
        assert found == [10, 11, 12]


def test_who_waited_for_room_is_counted_with_those_who_came_meanwhile(tmp_path: Path) -> None:
    store = spilling(tmp_path, memory=2, disk=1)
    with store.session() as busy, store.session() as waits:
        refused: list[LimitError] = []
        started = threading.Event()

        def add() -> None:
            with store.using(waits):
                started.set()
                try:
                    store.append(waits, 0, pages())
                except LimitError as error:
                    refused.append(error)

        thread = threading.Thread(target=add)
        with store.using(busy):
            store.append(busy, 0, pages(2))
            thread.start()
            assert started.wait(20)
            while waits.busy:
                thread.join(0.001)
            store.append(busy, 2, pages())
        thread.join(20)
        assert refused
        assert store.used_bytes + store.spilled_bytes == 3 * PAGE_BYTES


def test_sessions_that_want_the_same_room_take_turns(tmp_path: Path) -> None:
    """Two of three pages each where there is room for four: each reads what it sent, however they meet."""
    store = spilling(tmp_path, memory=4, disk=4)
    wrong: list[object] = []

    def work(value: int) -> None:
        with store.session() as session:
            try:
                for number in range(3):
                    with store.using(session):
                        store.append(session, number, pages(fill=10 * value + number))
                for _ in range(40):
                    with store.using(session):
                        residues, slots = store.find(session, [0, 1, 2], KEYS)
                        for number in (2, 0, 1):
                            if not (residues[slots[number]] == 10 * value + number).all():
                                wrong.append(number)
            except LimitError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert (store.used_bytes, store.spilled_bytes, store.sessions) == (0, 0, 0)


def test_a_full_disk_refuses_the_newcomer_alone(tmp_path: Path) -> None:
    store = spilling(tmp_path, memory=2, disk=1)
    with store.session() as one, store.session() as two:
        store.append(one, 0, pages(2, fill=1))
        store.append(two, 0, pages(fill=2))
        with pytest.raises(LimitError, match="in use"):
            store.append(two, 1, pages(2))
        with store.using(one):
            assert (content(store, one, [0, 1]) == 1).all()
        assert (store.used_bytes, store.spilled_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize("how", ["error", "short"])
def test_a_disk_that_cannot_be_written_harms_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = spilling(tmp_path, memory=2, disk=6)
    real = os.pwrite

    def pwrite(handle: int, data: np.ndarray, offset: int) -> int:
        if how == "error":
            raise OSError(28, "No space left on device")
        return real(handle, data.tobytes()[:100], offset)

    with store.session() as one, store.session() as two:
        store.append(one, 0, pages(2, fill=1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(LimitError, match="disk for pages is full or fails"):
                store.append(two, 0, pages())
        assert (store.used_bytes, store.spilled_bytes, two.size) == (2 * PAGE_BYTES, 0, 0)
        with store.using(one):
            assert (content(store, one, [0, 1]) == 1).all()
        store.append(two, 0, pages(fill=2))  # it works again
        assert (content(store, one, [0, 1]) == 1).all()


@pytest.mark.parametrize("how", ["error", "zeros"])
def test_who_cannot_get_its_pages_back_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Zeros are what a system returns that could not write and has forgotten so."""
    store = spilling(tmp_path, memory=2, disk=6)

    def preadv(handle: int, buffers: list[np.ndarray], offset: int) -> int:
        if how == "error":
            raise OSError(5, "Input/output error")
        buffers[0][:] = 0
        return buffers[0].nbytes

    with store.session() as one, store.session() as two:
        store.append(one, 0, pages(fill=1))
        store.append(two, 0, pages(2, fill=2))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            with store.using(one), pytest.raises(KvEvictedError, match="start anew"):
                store.find(one, [0], KEYS)
        with pytest.raises(KvEvictedError, match="start anew"), store.using(one):
            pass
        assert (one.size, store.evictions) == (0, 1)
        with store.using(two):
            assert (content(store, two, [0, 1]) == 2).all()
        assert store.used_bytes + store.spilled_bytes == 2 * PAGE_BYTES


def test_the_file_has_no_name_and_no_rights_for_others(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    file = PageFile(folder, PAGE_BYTES)
    file.write(pages()[0].transpose(1, 0, 2).copy(), [0, 1, 2])
    assert not list(folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.fstat(file._handle).st_mode & 0o777 == 0o600
    assert os.fstat(file._handle).st_size == PAGE_BYTES
    file.free([0, 1, 2])
    assert os.fstat(file._handle).st_size == 0
    folder.chmod(0o750)
    with pytest.raises(RangeError, match="open to others"):
        PageFile(folder, PAGE_BYTES)
    (tmp_path / "file").touch()
    with pytest.raises(RangeError, match="cannot be written"):
        PageFile(tmp_path / "file" / "spill", PAGE_BYTES)


# -- what one left, no other reads -------------------------------------------------------------------------------------


def resident(memory: PageMemory) -> int:
    """Bytes of it that the system has given, by its own account."""
    start = memory.residues.__array_interface__["data"][0]
    with open("/proc/self/smaps", encoding="ascii") as file:
        lines = iter(file)
        for line in lines:
            if line.startswith(f"{start:x}-") or line.startswith(f"{start:012x}-"):
                return next(int(each.split()[1]) << 10 for each in lines if each.startswith("Rss:"))
    raise AssertionError("not mapped")


def test_what_is_given_back_holds_zeros() -> None:
    store = PageStore(4 * PAGE_BYTES, 4 * PAGE_BYTES, 0)
    with store.session() as session:
        store.append(session, 0, pages(4, fill=9))
        store.drop(session, [0, 2])
        residues, slots = store.find(session, [1, 3], KEYS)
        left = np.setdiff1d(np.arange(len(residues)), slots)
        assert left.size == 6
        assert not residues[left].any()
        assert (residues[slots] == 9).all()
    assert not residues.any()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="where the system tells")
def test_memory_is_given_back_slot_by_slot() -> None:
    store = PageStore(64 * PAGE_BYTES, 64 * PAGE_BYTES, 0)
    assert resident(store._memory) == 0
    with store.session() as one, store.session() as two:
        for number in range(16):
            store.append(one, number, pages(fill=1))
            store.append(two, number, pages(fill=2))
        assert resident(store._memory) == store.used_bytes == 32 * PAGE_BYTES
        store.drop(one, list(range(0, 16, 2)))
        assert resident(store._memory) == store.used_bytes == 24 * PAGE_BYTES
    assert resident(store._memory) == 0


class Account(RuleBasedStateMachine):
    """Any course of sessions: every page is its owner's and as it was sent, and the sums are those of the slots."""

    sessions: Bundle[PageSession] = Bundle("sessions")

    @initialize(target=sessions, policy=st.sampled_from(Policy))
    def begin(self, policy: Policy) -> object:
        file = PageFile(self.folder / "spill", 8 * SLOT_BYTES) if policy is Policy.SPILL else None
        self.policy = policy
        self.store = PageStore(
            14 * SLOT_BYTES, 10 * SLOT_BYTES, 0, per_holder=18 * SLOT_BYTES, policy=policy, file=file
        )
        self.open: dict[PageSession, object] = {}
        self.sent: dict[PageSession, dict[int, tuple[int, Level]]] = {}
        self.filled = 0
        return multiple(*(self.enter(holder) for holder in "aab"))

    @rule(target=sessions, holder=st.sampled_from("ab"))
    def enter(self, holder: str) -> PageSession:
        context = self.store.session(holder)
        session = context.__enter__()
        self.open[session], self.sent[session] = context, {}
        return session

    @rule(session=consumes(sessions), really=st.sampled_from([False, False, True]), target=sessions)
    def leave(self, session: PageSession, really: bool) -> object:
        if not really:
            return session
        self.open.pop(session).__exit__(None, None, None)  # type: ignore[attr-defined]
        del self.sent[session]
        return multiple()

    @rule(target=sessions, session=consumes(sessions), count=st.integers(1, 2), level=st.sampled_from([KEYS, VALUES]))
    def append(self, session: PageSession, count: int, level: Level) -> PageSession:
        first, others = session.appended, {other for other in self.open if not other.evicted}
        try:
            with self.store.using(session):
                self.store.append(session, first, self._new(count, level))
        except (LimitError, KvEvictedError):
            if self.policy is not Policy.EVICT:
                assert not any(other.evicted for other in others)
            return session
        tags = range(self.filled - count + 1, self.filled + 1)
        self.sent[session] |= {first + i: (tag, level) for i, tag in enumerate(tags)}
        return session

    def _new(self, count: int, level: Level) -> np.ndarray:
        new = [pages(level=level, fill=self.filled + 1 + i) for i in range(count)]
        self.filled += count
        return np.concatenate(new)

    @rule(session=sessions, which=st.integers(0, 4))
    def drop(self, session: PageSession, which: int) -> None:
        kept = sorted(self.sent[session])
        if kept and not session.evicted:
            number = kept[which % len(kept)]
            self.store.drop(session, [number])
            del self.sent[session][number]

    @rule(session=sessions)
    def read(self, session: PageSession) -> None:
        for level in (KEYS, VALUES):
            numbers = [number for number, (_, at) in self.sent[session].items() if at is level]
            try:
                with self.store.using(session):
                    found = content(self.store, session, numbers, level)
            except KvEvictedError:
                assert self.policy is Policy.EVICT
                return
            for page, number in zip(found, numbers, strict=True):
                assert (page == self.sent[session][number][0]).all()

    @invariant()
    def sums(self) -> None:
        here, away = [], []
        for session in self.open:
            if session.evicted:
                self.sent[session] = {}
            assert session.pages.keys() == self.sent[session].keys()
            assert session.slots == sum(len(page.slots) for page in session.pages.values())
            assert session.away == sum(len(page.slots) for page in session.pages.values() if page.away)
            assert session.size <= 10 * SLOT_BYTES
            for page in session.pages.values():
                (away if page.away else here).extend(page.slots)
        assert len(set(here)) == len(here)
        assert len(set(away)) == len(away)
        assert self.store.used_bytes == len(here) * SLOT_BYTES <= self.store.limit_bytes
        assert self.store.spilled_bytes == len(away) * SLOT_BYTES <= 10 * SLOT_BYTES  # two where pages changed places
        assert self.store.sessions == len(self.open)
        left = np.setdiff1d(np.arange(14), here)
        assert not self.store._memory.residues[left].any()


@pytest.fixture
def account(tmp_path: Path) -> type[Account]:
    return type("Account", (Account,), {"folder": tmp_path})


def test_any_course_of_sessions(account: type[Account]) -> None:
    run_state_machine_as_test(
        account,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
