"""Sessions of the dealer: what is dealt is what both tapes read, once, to whom it belongs, and for no one else."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sordino.dealer.deal import deal, deal_with_cache
from sordino.dealer.layers import PassMaker
from sordino.dealer.metrics import Metrics
from sordino.dealer.press import Press
from sordino.dealer.service import DealerService
from sordino.dealer.sessions import Limits, Session, Sessions
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.shared.errors import FingerprintError, LimitError, ProtocolError, SessionLostError, SordinoError
from sordino.shared.twoparty.amounts import layer_bytes, size, steps_of
from sordino.shared.twoparty.numbers import LONGEST, SUM, Plan, Shape, Sizes
from sordino.shared.twoparty.passes import counters_of, ranges
from sordino.shared.twoparty.steps import WithCache
from sordino.shared.twoparty.tape import CLIENT, SERVER, Given, Tape, append_masks, layer_masks


def shape(layers: int, d: int, heads: int, groups: int, inner: int) -> Shape:
    """Of a Llama."""
    config = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": layers, "hidden_size": d}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": inner}
    return Shape.of(config | {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64})


SHAPE = shape(layers=2, d=8, heads=2, groups=1, inner=8)
PLAN = Plan(SHAPE, (Sizes(value=14, score_bits=8, gate_cell=0.1, cut_up=30),) * 2)
CLIENT_TOKEN, SERVER_TOKEN = "a" * 64, "b" * 64


def wanted(number: int, rows: int, first: int, kept: list[int] | None = None) -> pb.Pass:
    return pb.Pass(number=number, rows=rows, first_counter=first, kept=ranges(kept or []))


def dealer(program: Callable[[Sessions, bytes, Session], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Runs ``program`` with a session that both parties have."""

    async def run() -> None:
        with ThreadPoolExecutor(2) as threads:
            sessions = Sessions(Limits(**limits), threads)
            name, _ = sessions.begin(CLIENT_TOKEN, "model", PLAN.to_json())
            sessions.join(SERVER_TOKEN, name, "model", PLAN.to_json())
            await program(sessions, name, sessions.find(CLIENT_TOKEN, CLIENT, name))

    asyncio.run(run())


async def fetch(
    sessions: Sessions, session: Session, party: int, one: pb.Pass, layers: int = 99
) -> tuple[bytes, bytes]:
    """The first layers of a pass, joined."""
    got = []
    async with aclosing(sessions.layers(session, party, one)) as parts:
        async for part in parts:
            got.append(part)
            if len(got) == layers:
                break
    return b"".join(points for points, _ in got), b"".join(corrections for _, corrections in got)


def by_hand(keys: tuple[bytes, bytes], number: int, rows: int, counters: list[int]) -> tuple[bytes, bytes]:
    """The same without sessions: all steps in order, by one press."""
    press = Press(keys, number)
    shares = [append_masks(key, counters, 2, SHAPE.layers, SHAPE.groups, SHAPE.head) for key in keys]
    masks = shares[0] + shares[1]
    for layer in range(SHAPE.layers + 1):
        for step in steps_of(PLAN, layer, rows, len(counters)):
            if isinstance(step, WithCache):
                deal_with_cache(step, press, masks[:, int(step.values), layer])
            else:
                deal(step, press)
    return press.take()


@pytest.mark.parametrize(("rows", "kept"), [(1, 1), (3, 7), (2, 300)])
def test_sizes_are_what_steps_take(rows: int, kept: int) -> None:
    masks = np.zeros((kept, SHAPE.groups, SHAPE.head), np.uint64)
    for layer in (0, SHAPE.layers):
        total = 0
        for step in steps_of(PLAN, layer, rows, kept):
            press = Press((bytes(32), bytes(32)), 0)
            if isinstance(step, WithCache):
                deal_with_cache(step, press, masks)
            else:
                deal(step, press)
            points, corrections = press.take()
            assert size(step) == (len(points), len(corrections)), step
            total += len(points) + len(corrections)
        assert total == layer_bytes(PLAN, layer, rows, kept)


def test_both_parties_get_what_their_tapes_read() -> None:
    async def program(sessions: Sessions, name: bytes, session: Session) -> None:
        rows: list[int] = []
        # A prompt, two tokens, and after a crop to three rows a token under a new counter.
        for number, (count, first, kept) in enumerate([(4, 0, 0), (1, 4, 4), (1, 9, 5), (1, 10, 3)]):
            rows = rows[:kept]
            one = wanted(number, count, first, rows)
            rows += range(first, first + count)
            client, server = await asyncio.gather(
                fetch(sessions, session, CLIENT, one), fetch(sessions, session, SERVER, one)
            )
            expected = by_hand(session.keys, number, count, rows)
            assert client == (expected[0], b"")
            assert server == expected
            assert session.held_bytes == 0
        # Shares add up: of the first truncation, and of a product with what the cache holds.
        tapes = [Tape(i, session.keys[i], 3, Given(part[0], part[1])) for i, part in enumerate((client, server))]
        r = sum(tape.words(1, SHAPE.d) for tape in tapes)
        a, b = (sum(tape.given(1, SHAPE.d) for tape in tapes) for _ in range(2))
        assert np.array_equal(a, r >> np.uint64(SUM))
        assert np.array_equal(b, (r >> np.uint64(63)) << np.uint64(64 - SUM))

    dealer(program)


def test_a_product_with_the_cache_is_of_its_masks() -> None:
    keys = os.urandom(32), os.urandom(32)
    counters = [3, 5, 8]
    maker = PassMaker(keys, PLAN, 7, 1, counters)
    points, corrections = maker.make()
    tapes = [Tape(i, keys[i], 7, Given(points, corrections)) for i in (0, 1)]
    for tape in tapes:
        _read_until_dot(tape)
    a = sum(tape.words(1, SHAPE.heads, SHAPE.head) for tape in tapes)
    ab = sum(tape.given(1, SHAPE.heads, 3) for tape in tapes)
    shares = [append_masks(key, counters, 2, SHAPE.layers, SHAPE.groups, SHAPE.head) for key in keys]
    step = WithCache(1, SHAPE.heads, SHAPE.groups, SHAPE.head, 3, values=False)
    assert np.array_equal(ab, step.product(a, (shares[0] + shares[1])[:, 0, 0]))


def _read_until_dot(tape: Tape) -> None:
    """What the steps before the product read: TruncSquare, Curve, TruncMul, Trunc."""
    square, root, normed, turned, *_ = steps_of(PLAN, 0, 1, 3)
    tape.words(1, square.d)
    for _ in range(4):
        tape.given(1, square.d)
    tape.words(1)
    tape.points(1, size(root)[0])
    tape.words(1, normed.m)
    tape.words(1)
    for shape in ((1, normed.m), (1, normed.m), (1,), (1,), *(((1, normed.m),) * 4)):
        tape.given(*shape)
    tape.words(turned.n)
    tape.given(turned.n)
    tape.given(turned.n)


def test_who_may_enter_a_session() -> None:
    async def program(sessions: Sessions, name: bytes, session: Session) -> None:
        plan = PLAN.to_json()
        with pytest.raises(ProtocolError, match="second one cannot"):
            sessions.join(SERVER_TOKEN, name, "model", plan)
        fresh, key = sessions.begin(CLIENT_TOKEN, "model", plan)
        with pytest.raises(FingerprintError):
            sessions.join(SERVER_TOKEN, fresh, "another", plan)
        other = replace(PLAN, shape=replace(SHAPE, inner=16))
        with pytest.raises(ProtocolError, match="another plan"):
            sessions.join(SERVER_TOKEN, fresh, "model", other.to_json())
        assert len({key, sessions.join(SERVER_TOKEN, fresh, "model", plan), *session.keys}) == 4
        for holder, party, which in (
            (SERVER_TOKEN, CLIENT, name),
            (CLIENT_TOKEN, SERVER, name),
            ("c" * 64, CLIENT, name),
            (CLIENT_TOKEN, CLIENT, bytes(16)),
        ):
            with pytest.raises(SessionLostError, match="begin a new session"):
                sessions.find(holder, party, which)
        with pytest.raises(SessionLostError):
            sessions.join(SERVER_TOKEN, bytes(16), "model", plan)
        for bad in (b"{}", b"\xff", plan.replace(b'"heads":2', b'"heads":0')):
            with pytest.raises(ProtocolError):
                sessions.begin(CLIENT_TOKEN, "model", bad)
        with pytest.raises(ProtocolError, match="fingerprint"):
            sessions.begin(CLIENT_TOKEN, "", plan)

    dealer(program)


def test_numbers_and_counters_are_used_once() -> None:
    async def program(sessions: Sessions, name: bytes, session: Session) -> None:
        async def refused(party: int, one: pb.Pass, match: str) -> None:
            with pytest.raises(ProtocolError, match=match):
                await fetch(sessions, session, party, one)

        first = wanted(5, 3, 0)
        await fetch(sessions, session, CLIENT, first)
        await refused(CLIENT, first, "numbers go up")
        await refused(CLIENT, wanted(4, 1, 3, [0, 1, 2]), "numbers go up")
        await fetch(sessions, session, SERVER, first)
        await refused(SERVER, first, "numbers go up")
        await refused(CLIENT, wanted(6, 1, 2, [0, 1]), "used before")  # after a crop
        await refused(CLIENT, wanted(6, 1, 9, [0, 9]), "used before")
        await fetch(sessions, session, CLIENT, wanted(6, 1, 9, [0, 1]))
        for rows in (0, LONGEST - 2):
            await refused(CLIENT, wanted(7, rows, 10, [0, 1, 9]), "at most")
        huge = pb.Pass(number=7, rows=1, first_counter=1 << 40, kept=[pb.Counters(first=0, count=(1 << 32) - 1)])
        await refused(CLIENT, huge, "at most")

    dealer(program)


def test_a_pass_may_keep_what_one_asked_for_ahead_would_have_dropped() -> None:
    async def program(sessions: Sessions, name: bytes, session: Session) -> None:
        async def both(one: pb.Pass, rows: list[int]) -> None:
            for party in (CLIENT, SERVER):
                made = await fetch(sessions, session, party, one)
            assert made == by_hand(session.keys, one.number, one.rows, rows)

        await both(wanted(0, 3, 0), [0, 1, 2])
        await both(wanted(1, 1, 3, [0]), [0, 3])  # a guess, and another comes:
        await both(wanted(2, 1, 4, [0, 1, 2]), [0, 1, 2, 4])
        await both(wanted(3, 2, 5, [0, 1, 2, 4]), [0, 1, 2, 4, 5, 6])

    dealer(program)


@pytest.mark.parametrize(
    "sent",
    [
        [(0, 0)],
        [(0, 2), (5, 0)],
        [(0, 2), (2, 1)],
        [(0, 2), (1, 4)],
        [(4, 1), (0, 2)],
        [(0, 1 << 31)],
        [(0, 1), (2, LONGEST)],
    ],
)
def test_ranges_of_counters_are_as_few_as_can_be_and_go_up(sent: list[tuple[int, int]]) -> None:
    assert counters_of(ranges([3, 4, 6, 9, 10])) == [3, 4, 6, 9, 10]
    with pytest.raises(ProtocolError, match=r"ranges|at most"):
        counters_of(pb.Counters(first=first, count=count) for first, count in sent)


def test_masks_of_a_row_are_the_same_in_every_pass_and_no_two_are_alike() -> None:
    key, row = os.urandom(32), (SHAPE.groups, SHAPE.head)
    counters = [0, 1, 2, 7, 8, 1 << 40, (1 << 64) - 1]
    masks = append_masks(key, counters, 2, SHAPE.layers, *row)
    assert len(np.unique(masks)) == masks.size
    for some in ([0], [1, 2], [2, 8], [1 << 40, (1 << 64) - 1]):
        for kind, layer in np.ndindex(2, SHAPE.layers):
            where = [counters.index(counter) for counter in some]
            assert np.array_equal(layer_masks(key, some, kind, layer, *row), masks[where, kind, layer])


@pytest.mark.parametrize(
    ("other", "name"),
    [(wanted(0, 3, 0), "rows"), (wanted(0, 2, 1), "first_counter")],
)
def test_parties_that_ask_for_different_passes_both_get_the_difference(other: pb.Pass, name: str) -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        waiting = asyncio.Event()
        ended: list[SordinoError | None] = []

        async def client() -> None:
            stream = sessions.open(session, CLIENT)
            try:
                await fetch(sessions, session, CLIENT, wanted(0, 2, 0))
                waiting.set()
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append(stream.ended)

        task = asyncio.ensure_future(client())
        await waiting.wait()
        with pytest.raises(ProtocolError, match=f"number 0: {name};"):
            await fetch(sessions, session, SERVER, other)
        await task
        assert name in str(ended[0])
        assert session.held_bytes == 0
        for party in (CLIENT, SERVER):
            with pytest.raises(ProtocolError, match=name):
                await fetch(sessions, session, party, wanted(1, 1, 9))

    dealer(program)


def test_a_party_that_leaves_in_mid_pass_keeps_no_memory_and_the_other_gets_all() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        one = wanted(0, 2, 0)
        await fetch(sessions, session, CLIENT, one, layers=1)
        with pytest.raises(ProtocolError, match="numbers go up"):
            await fetch(sessions, session, CLIENT, one)
        assert await fetch(sessions, session, SERVER, one) == by_hand(session.keys, 0, 2, [0, 1])
        assert sessions.held_bytes == 0
        assert not session.dealings
        # One that never asks for a pass loses it with the next one that it asks for.
        await fetch(sessions, session, CLIENT, wanted(1, 1, 2))
        assert sessions.held_bytes > 0
        await fetch(sessions, session, SERVER, wanted(2, 1, 3))
        await fetch(sessions, session, CLIENT, wanted(2, 1, 3))
        assert sessions.held_bytes == 0

    dealer(program)


def test_a_party_cancelled_while_a_layer_is_made_takes_nothing_from_the_other() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        one = wanted(0, 2, 0)
        task = asyncio.ensure_future(fetch(sessions, session, CLIENT, one))
        while not session.dealings or next(iter(session.dealings.values())).making is None:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await fetch(sessions, session, SERVER, one) == by_hand(session.keys, 0, 2, [0, 1])

    dealer(program)


@pytest.mark.parametrize("how", ["both leave", "the session ends"])
def test_what_nobody_wants_any_more_is_not_made(how: str) -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        free, both, loop = threading.Event(), threading.Barrier(2), asyncio.get_running_loop()
        busy = [loop.run_in_executor(sessions._threads, free.wait, 60) for _ in range(2)]
        tasks = [asyncio.ensure_future(fetch(sessions, session, party, wanted(0, 1, 0))) for party in (CLIENT, SERVER)]
        while not session.dealings or session.dealings[0].making is None:
            await asyncio.sleep(0)
        for _ in range(3):  # it waits for a thread
            await asyncio.sleep(0)
        maker = session.dealings[0].maker
        if how == "both leave":
            for task in tasks:
                task.cancel()
        else:
            sessions.end(session)
        for _ in range(9):
            await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*tasks, *busy, return_exceptions=True)
        await asyncio.gather(*(loop.run_in_executor(sessions._threads, both.wait, 60) for _ in range(2)))
        assert maker._layer == 0
        assert not session.dealings

    dealer(program)


def test_limits_are_said() -> None:
    layer = layer_bytes(PLAN, 0, 1, 1)

    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        sessions.begin(CLIENT_TOKEN, "model", PLAN.to_json())
        with pytest.raises(LimitError, match="its 2 sessions: one ends"):
            sessions.begin(CLIENT_TOKEN, "model", PLAN.to_json())
        sessions.begin("c" * 64, "model", PLAN.to_json())
        with pytest.raises(LimitError, match="the dealer has its 3"):
            sessions.begin("d" * 64, "model", PLAN.to_json())
        with pytest.raises(LimitError, match="fewer rows"):
            await fetch(sessions, session, CLIENT, wanted(0, 8, 0))
        with pytest.raises(LimitError, match="has not fetched"):
            await fetch(sessions, session, CLIENT, wanted(1, 1, 8))
        # What is held goes when the other comes, and the pass goes on.
        both = [asyncio.ensure_future(fetch(sessions, session, party, wanted(2, 1, 9))) for party in (CLIENT, SERVER)]
        client, server = await asyncio.gather(*both)
        assert client[0] == server[0]

    dealer(program, sessions=3, sessions_each=2, held_bytes_each=2 * layer, wait_s=0.1)


def begun(sessions: Sessions, client: str) -> Session:
    """Another session that both parties have."""
    name, _ = sessions.begin(client, "model", PLAN.to_json())
    sessions.join(SERVER_TOKEN, name, "model", PLAN.to_json())
    return sessions.find(client, CLIENT, name)


NEXT = PassMaker((bytes(32), bytes(32)), PLAN, 0, 1, [0]).next_bytes


def test_sessions_that_ask_at_once_hold_no_more_than_there_may_be() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        every = [session, *(begun(sessions, f"{i:064}") for i in range(7))]
        asked = [fetch(sessions, one, CLIENT, wanted(0, 1, 0), layers=1) for one in every]
        made = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(one, LimitError) for one in made) == 5
        assert 0 < sessions.held_bytes <= 3 * NEXT

    dealer(program, held_bytes=3 * NEXT, wait_s=0.1)


def test_streams_that_wait_for_room_keep_no_layer_that_both_have() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        service = DealerService(sessions, Metrics())
        other = begun(sessions, "c" * 64)
        streams = [service._pass(session, party, wanted(0, 1, 0)) for party in (CLIENT, SERVER)]
        for stream in (*streams, streams[SERVER]):  # the server's corrections, too
            await anext(stream)
        points = session.dealings[0].layer(0, CLIENT)[0]
        maker = session.dealings[0].maker
        await fetch(sessions, other, CLIENT, wanted(0, 1, 0), layers=1)
        sessions._limits = Limits(held_bytes=NEXT)  # which the other session has
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        for _ in range(9):
            await asyncio.sleep(0)
        assert session.held_bytes == maker._layer - 1 == 0
        names = sys.getrefcount(points)
        assert names == 3, "the one here, the call's own, and the client's last part, which so small a layer is"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    dealer(program)


def test_one_client_cannot_hold_all() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        first, second = begun(sessions, CLIENT_TOKEN), begun(sessions, "c" * 64)
        await fetch(sessions, session, CLIENT, wanted(0, 1, 0), layers=1)
        with pytest.raises(LimitError, match="its client's token"):
            await fetch(sessions, first, CLIENT, wanted(0, 1, 0), layers=1)
        await fetch(sessions, second, CLIENT, wanted(0, 1, 0), layers=1)

    dealer(program, held_bytes=9 * NEXT, held_bytes_token=NEXT, wait_s=0.1)


def test_masks_count_while_a_layer_is_made() -> None:
    wide = replace(PLAN, shape=replace(SHAPE, heads=64, groups=64, head=512))
    made = layer_bytes(wide, 0, 1, 100)
    assert PassMaker((bytes(32), bytes(32)), wide, 0, 1, range(100)).next_bytes == made + 2 * 8 * 100 * 64 * 512


def test_nothing_is_dealt_before_a_server_has_joined() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        name, _ = sessions.begin(CLIENT_TOKEN, "model", PLAN.to_json())
        alone = sessions.find(CLIENT_TOKEN, CLIENT, name)
        with pytest.raises(ProtocolError, match="no server has joined"):
            await fetch(sessions, alone, CLIENT, wanted(0, 1, 0))
        sessions.join(SERVER_TOKEN, name, "model", PLAN.to_json())
        await fetch(sessions, alone, CLIENT, wanted(0, 1, 0))

    dealer(program)


def test_a_party_is_a_few_passes_ahead_and_then_waits() -> None:
    async def program(sessions: Sessions, _: bytes, session: Session) -> None:
        passes = [wanted(number, 1, number) for number in range(10)]
        for one in passes[:4]:
            await fetch(sessions, session, CLIENT, one)
        with pytest.raises(LimitError, match="not fetched 4 passes"):
            await fetch(sessions, session, CLIENT, passes[4])
        assert len(session.dealings) == 4
        waiting = asyncio.ensure_future(fetch(sessions, session, CLIENT, passes[5]))
        await asyncio.sleep(0)
        assert not waiting.done()
        await fetch(sessions, session, SERVER, passes[0])
        await waiting
        # One that asks for a later pass wants no more of those before it.
        await fetch(sessions, session, SERVER, passes[6])
        assert list(session.dealings) == [6]

    dealer(program, wait_s=0.3)


def test_a_session_ends_with_its_client_or_when_both_have_gone() -> None:
    async def program(sessions: Sessions, name: bytes, session: Session) -> None:
        await fetch(sessions, session, CLIENT, wanted(0, 1, 0))
        stream = sessions.open(session, CLIENT)
        session.left -= 100
        sessions.tend()
        assert len(sessions) == 1
        sessions.close(session, CLIENT, stream)
        sessions.tend()
        assert len(sessions) == 1  # it may come back
        session.left -= 100
        sessions.tend()
        assert len(sessions) == sessions.held_bytes == 0
        with pytest.raises(SessionLostError, match="came back"):
            session.check()
        name, _ = sessions.begin(CLIENT_TOKEN, "model", PLAN.to_json())
        sessions.end(sessions.find(CLIENT_TOKEN, CLIENT, name))
        assert len(sessions) == 0

    dealer(program)


def test_sessions_end_when_idle_or_when_a_token_goes() -> None:
    async def program(sessions: Sessions, name: bytes, session: Session) -> None:
        await fetch(sessions, session, CLIENT, wanted(0, 1, 0))
        assert sessions.held_bytes > 0
        sessions.end_all_but(({CLIENT_TOKEN}, {SERVER_TOKEN}))
        sessions.tend()
        assert len(sessions) == 1
        session.used -= 100
        sessions.tend()
        assert len(sessions) == sessions.held_bytes == 0
        with pytest.raises(SessionLostError, match="too long"):
            await fetch(sessions, session, SERVER, wanted(0, 1, 0))
        name, _ = sessions.begin(CLIENT_TOKEN, "model", PLAN.to_json())
        sessions.join(SERVER_TOKEN, name, "model", PLAN.to_json())
        sessions.end_all_but(({CLIENT_TOKEN}, set()))
        with pytest.raises(SessionLostError):
            sessions.find(CLIENT_TOKEN, CLIENT, name)

    dealer(program, idle_s=60.0)
