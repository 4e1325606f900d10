"""The server's products of pages against exact integers, and its account of who keeps how much."""

from __future__ import annotations

import numpy as np
import pytest

from sordino.server import pages
from sordino.server.pages import PageSession, PageStore, evaluate
from sordino.shared.errors import KvEvictedError, LimitError, ProtocolError
from sordino.shared.pages import COARSE_BITS, KEYS, VALUES, Level, N, Read
from sordino.shared.rlwe import intt

PAGE_BYTES = KEYS.page_bytes


def residues(count: int, seed: int, level: Level) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, q, (count, 2, N), dtype=np.uint32) for q in level.params.primes]
    return np.ascontiguousarray(np.stack(parts, axis=2))


@pytest.mark.parametrize("level", [KEYS, VALUES], ids=["keys", "values"])
@pytest.mark.parametrize("terms", [1, 15, 16, 40])
def test_sums_are_those_of_exact_integers(terms: int, level: Level) -> None:
    """Rounded from q to the modulus of answers: off by one at most."""
    operands, stored, read = residues(terms, 1, level), residues(3, 2, level), Read(5, 7, 100)
    sums = [[(k, k % 3) for k in range(terms)], [(0, 2)]]
    got = evaluate(operands, stored, sums, read, level)
    q = level.params.q
    for r, pairs in enumerate(sums):
        for part in range(3):
            exact = []
            for i, prime in enumerate(level.params.primes):
                total = np.zeros(N, object)
                for a, b in pairs:
                    x, y = operands[a].astype(object), stored[b].astype(object)
                    if part == 1:
                        total += x[0, i] * y[1, i] + x[1, i] * y[0, i]
                    else:
                        total += x[part // 2, i] * y[part // 2, i]
                exact.append((total % prime).astype(np.uint32))
            coefficients = np.stack(exact)[:, :, None].copy()
            intt(coefficients, level.params)
            whole = sum(
                coefficients[i, :, 0].astype(object) * (q // prime) * pow(q // prime, -1, prime)
                for i, prime in enumerate(level.params.primes)
            )
            bits = level.bits - COARSE_BITS if part == 1 else level.bits
            wanted = ((whole % q << bits) + q // 2) // q % (1 << bits)
            if part == 0:
                wanted = wanted[read.first :: read.step][: read.count]
            off = (got[part][r].astype(object) - wanted) % (1 << bits)
            assert all(x in (0, 1, (1 << bits) - 1) for x in off)


def page() -> np.ndarray:
    return np.zeros((2, 3, N), np.uint32)


def test_a_page_takes_what_is_accounted() -> None:
    assert page().nbytes == KEYS.page_bytes == 98_304
    assert residues(1, 0, VALUES)[0].nbytes == VALUES.page_bytes == 65_536


def test_pages_are_numbered_in_order() -> None:
    store = PageStore(10 * PAGE_BYTES, 10 * PAGE_BYTES, 10)
    with store.session() as session:
        store.append(session, 0, [page(), page()])
        for wrong in (0, 1, 3):
            with pytest.raises(ProtocolError, match="twice or out of order"):
                store.append(session, wrong, [page()])
        store.append(session, 2, [page()])
        assert session.find([0, 2], KEYS).shape == (2, 2, 3, N)
        with pytest.raises(ProtocolError, match="another level"):
            session.find([0], VALUES)
        store.drop(session, [1])
        for gone in ([1], [7]):
            with pytest.raises(ProtocolError, match="never appended, or was dropped"):
                session.find(gone, KEYS)
            with pytest.raises(ProtocolError, match="never appended, or was dropped"):
                store.drop(session, gone)
        with pytest.raises(ProtocolError, match="twice"):
            store.append(session, 1, [page()])
        assert store.used_bytes == 2 * PAGE_BYTES
    assert store.used_bytes == 0


def test_limits_of_a_session_and_of_all() -> None:
    store = PageStore(3 * PAGE_BYTES, 2 * PAGE_BYTES, 10)
    with store.session() as one, store.session() as two:
        store.append(one, 0, [page(), page()])
        with pytest.raises(LimitError, match="a session may keep"):
            store.append(one, 2, [page()])
        store.append(two, 0, [page()])
        with pytest.raises(LimitError, match="in use"):
            store.append(two, 1, [page()])
        store.drop(one, [0])
        store.append(two, 1, [page()])
        assert one.size == PAGE_BYTES
        assert two.size == 2 * PAGE_BYTES


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
            store.append(session, 0, [page(), page()])
        store.append(third, 2, [page(), page()])
        with store.using(third), pytest.raises(LimitError):
            store.append(third, 4, [page()])
        store.append(modest, 0, [page(), page()])
        assert first.evicted
        assert not second.evicted
        store.append(modest, 2, [page(), page()])
        assert second.evicted
        assert third.size == modest.size == 4 * PAGE_BYTES
        with pytest.raises(LimitError, match="in use"):
            store.append(modest, 4, [page()])


def test_the_least_recently_used_idle_session_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pages.time, "monotonic", lambda: now)
    store = PageStore(3 * PAGE_BYTES, 3 * PAGE_BYTES, 10)

    def use(session: PageSession, when: float) -> None:
        nonlocal now
        now = when
        with store.using(session):
            pass

    with store.session() as one, store.session() as two, store.session() as three:
        store.append(one, 0, [page()])
        store.append(two, 0, [page(), page()])
        use(two, 1)
        use(one, 2)
        now = 5
        with pytest.raises(LimitError):
            store.append(three, 0, [page()])  # nobody has rested for ten seconds
        now = 11.5
        with pytest.raises(LimitError):
            store.append(three, 0, [page()] * 3)  # not even without two, which then keeps its pages
        assert store.used_bytes == 3 * PAGE_BYTES
        store.append(three, 0, [page()])  # two has
        assert store.used_bytes == 2 * PAGE_BYTES
        use(one, 11.6)
        with pytest.raises(KvEvictedError, match="start anew"):
            use(two, 11.7)
        with store.using(one):
            now = 100
            store.append(three, 1, [page()])
            with pytest.raises(LimitError):
                store.append(three, 2, [page()])  # a session in the middle of a request keeps its pages
        use(one, 101)
