"""What is kept for the user's eyes: the newest row of a group looked at, and nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from sordino.client.gateway.page import _Looks
from sordino.client.kernels import mask
from sordino.client.watch import Watch, centred
from sordino.shared.manifest import GroupSpec, MemberSpec
from sordino.shared.ring import P

RNG = np.random.default_rng(3)


def group(name: str = "a", inputs: int = 64) -> GroupSpec:
    member = MemberSpec(name=name, out_features=8)
    return GroupSpec(name=name, layer=0, in_features=inputs, members=(member,), weight_bits=8, l1_max=1000, l2_max=1000)


def rows_of(count: int, inputs: int = 64) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.integers(-1000, 1001, (count, inputs), dtype=np.int32)
    u = np.empty(x.shape, np.uint32)
    mask(x, RNG.integers(0, P, x.shape, dtype=np.uint32), u)
    return x, u


def test_the_last_row_of_a_group_looked_at_is_kept_as_a_copy() -> None:
    watch, (x, u) = Watch(), rows_of(3)
    watch.look("a")
    assert watch.newest("a") is None
    for number in (1, 2):
        watch.see(group(), x, u)
        sight = watch.newest("a")
        assert sight is not None
        assert sight.number == number
    last, left = x[-1].copy(), u[-1].copy()
    x[:], u[:] = 0, 0
    assert (sight.true == last).all()
    assert isinstance(sight.sent, np.ndarray)
    assert (sight.sent == left).all()


def test_nothing_is_kept_of_other_groups_or_after_looking_away() -> None:
    watch, (x, u) = Watch(), rows_of(1)
    watch.see(group(), x, u)
    assert not watch.groups
    watch.look("a")
    watch.see(group("b"), x, u)
    assert watch.groups == {"a": None}
    watch.see(group(), x, u)
    watch.look("a")  # again: what is there stays
    assert watch.newest("a") is not None
    watch.look_away("a")
    watch.look_away("a")
    assert not watch.groups
    assert watch.newest("a") is None


def test_the_text_of_a_sight_has_no_values() -> None:
    watch, (x, u) = Watch(), rows_of(1)
    watch.look("a")
    watch.see(group(), x, u)
    assert repr(watch.newest("a")) == "Sight(number=1)"


def test_correlation() -> None:
    watch, (x, u) = Watch(), rows_of(1, inputs=4096)
    watch.look("a")

    def correlation(true: np.ndarray, sent: np.ndarray | bytes) -> float | None:
        watch.see(group(inputs=4096), true, sent)
        sight = watch.newest("a")
        assert sight is not None
        return sight.correlation()

    masked = correlation(x, u)
    assert masked is not None
    assert abs(masked) < 6 / 4096**0.5  # six standard deviations of rows that know nothing of each other
    assert masked == pytest.approx(np.corrcoef(x[0], centred(u[0]))[0, 1])
    assert correlation(x, (x.astype(np.int64) % P).astype(np.uint32)) == pytest.approx(1)
    assert correlation(x, (-x.astype(np.int64) % P).astype(np.uint32)) == pytest.approx(-1)
    assert correlation(np.zeros_like(x), u) is None
    assert correlation(x, np.full_like(u, 7)) is None
    assert correlation(x, b"ciphertext") is None


def test_the_page_looks_for_a_while_after_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.client.gateway.page._LOOK_S", 0.05)
    watch = Watch()

    async def ask_twice_and_leave() -> None:
        looks = _Looks(watch)
        for name in ("a", "b", "a"):
            looks.renew(name)
        assert set(watch.groups) == {"a", "b"}
        while watch.groups:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ask_twice_and_leave(), 60))
    assert not watch.groups


def test_centred() -> None:
    row = np.array([0, 1, (P - 1) // 2, (P + 1) // 2, P - 1], np.uint32)
    assert centred(row).tolist() == [0, 1, (P - 1) // 2, -(P - 1) // 2, -1]
