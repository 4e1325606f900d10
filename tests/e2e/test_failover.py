"""Stages and replicas as processes that are killed, drained, stopped and started again in the middle of answers.

Two servers hold the first layer and two the second, behind recording proxies. Whatever happens to them: the tokens are
those of an undisturbed answer, and what any of them saw of a mask is one row.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stack import ServerProcess, answer, connect_to

from sordino.client import Connected
from sordino.client.proxy import RecordingProxy
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import SessionLostError

TOKENS = 6
STAGES = ("0", "0", "1", "1")


class Fleet:
    """Servers with one authority and one token, and a proxy before each."""

    def __init__(self, bundle: Path, tmp: Path, proxies: ExitStack) -> None:
        self.servers = [
            ServerProcess(bundle, tmp / str(number), arguments=("--layers", layers), allow_clear=True)
            for number, layers in enumerate(STAGES)
        ]
        first, *others = self.servers
        first.start()
        for other in others:
            other.state = first.state
        with ThreadPoolExecutor() as pool:
            list(pool.map(ServerProcess.start, others))
        self.proxies = [proxies.enter_context(RecordingProxy(server.target, ca=server.ca)) for server in self.servers]

    def connect(self, tmp: Path, **options: Any) -> Connected:
        targets = ",".join(proxy.target for proxy in self.proxies)
        return connect_to(self.servers[0], tmp, target=targets, ca=None, **options)

    def in_use(self, connected: Connected) -> list[int]:
        """The numbers of the servers that are asked now, one of each stage."""
        return [number for number, state in enumerate(connected.session.targets()) if state.in_use]

    def restore(self, *numbers: int) -> None:
        """Starts those that have ended, all at the same time; of the ones named, if any are."""
        chosen = [self.servers[number] for number in numbers] or self.servers
        with ThreadPoolExecutor() as pool:
            list(pool.map(ServerProcess.restart, [server for server in chosen if not server.running]))

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def requests(self, begin: Sequence[int]) -> list[bytes]:
        """All evaluation requests that came to any of them since ``begin``, without the openings."""
        return [
            message.raw
            for proxy, mark in zip(self.proxies, begin, strict=True)
            for message in proxy.messages()[mark:]
            if (message.method, message.direction) == ("Evaluate", "up")
            if message.raw and not pb.EvaluateRequest.FromString(message.raw).HasField("open")
        ]


@pytest.fixture(scope="module")
def fleet(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as proxies:
        made = Fleet(bundles("llama"), tmp_path_factory.mktemp("fleet"), proxies)
        yield made
        made.close()


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> None:
    for proxy in fleet.proxies:
        proxy.tamper = None
    fleet.restore()


class Strike:
    """A proxy's ``tamper`` that does something to its server at one evaluation message, once."""

    def __init__(self, direction: str, after: int, deed: Callable[[], object]) -> None:
        self._direction = direction
        self._left = after + 1
        self._deed = deed
        self.done = threading.Event()

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> bytes | list[bytes]:
        if (method, direction) != ("Evaluate", self._direction) or self.done.is_set():
            return raw
        self._left -= 1
        if self._left:
            return raw
        self._deed()
        self.done.set()
        return raw if direction == "up" else []  # a request goes nowhere, an answer is lost


@pytest.mark.parametrize(
    "deeds",
    [
        (("up", 5, signal.SIGKILL), ("down", 10, signal.SIGTERM)),
        (("down", 12, signal.SIGTERM), ("down", 3, signal.SIGKILL)),
    ],
)
def test_a_replica_of_each_stage_ends_in_the_middle_of_an_answer(
    fleet: Fleet, tmp_path: Path, deeds: tuple[tuple[str, int, int], ...]
) -> None:
    with (connected := fleet.connect(tmp_path)).session as session:
        undisturbed = answer(connected, tokens=TOKENS)
        begin = [proxy.mark() for proxy in fleet.proxies]
        used = fleet.in_use(connected)
        assert [STAGES[number] for number in used] == ["0", "1"]
        strikes = []
        for number, (direction, after, deed) in zip(used, deeds, strict=True):
            strikes.append(Strike(direction, after, partial(fleet.servers[number].signal, deed)))
            fleet.proxies[number].tamper = strikes[-1]
        assert answer(connected, tokens=TOKENS) == undisturbed
        assert all(strike.done.is_set() for strike in strikes), "nothing happened: the test proves nothing"
        assert not set(used) & set(fleet.in_use(connected)), "others answer now"
        assert session.traffic.retries >= 2
        states = session.targets()
        assert all(states[number].failures and states[number].problem for number in used)
        assert not any(states[number].failures for number in fleet.in_use(connected))
        for number, (_, _, deed) in zip(used, deeds, strict=True):
            assert fleet.servers[number].wait() == (0 if deed == signal.SIGTERM else -deed)
    _used_once(fleet, begin, repeated=True)


def _used_once(fleet: Fleet, begin: Sequence[int], *, repeated: bool) -> None:
    """No two rows under one mask: none came twice, to whichever server, but in retries, which are the same bytes."""
    requests = fleet.requests(begin)
    once = set(requests)
    assert len(once) < len(requests) or not repeated, "nothing was retried"
    rows = []
    for raw in once:
        request = pb.EvaluateRequest.FromString(raw)
        size = len(request.data) // request.rows
        rows += [request.data[start : start + size] for start in range(0, len(request.data), size)]
    assert len(rows) > len(once), "a prompt has several rows"
    assert len(set(rows)) == len(rows)


def test_a_replica_that_stops_without_a_word(fleet: Fleet, tmp_path: Path) -> None:
    """Its connection stands, and nothing comes: the other one is asked when the answer is overdue."""
    with (connected := fleet.connect(tmp_path, timeout_s=1)).session as session:
        undisturbed = answer(connected, tokens=TOKENS)
        begin = [proxy.mark() for proxy in fleet.proxies]
        number = fleet.in_use(connected)[1]
        server = fleet.servers[number]
        fleet.proxies[number].tamper = strike = Strike("up", 9, lambda: server.signal(signal.SIGSTOP))
        try:
            assert answer(connected, tokens=TOKENS) == undisturbed
            assert strike.done.is_set()
            assert number not in fleet.in_use(connected)
            assert session.targets()[number].failures == 1
        finally:
            server.signal(signal.SIGCONT)
        assert answer(connected, tokens=TOKENS) == undisturbed, "what it answers now comes too late"
    _used_once(fleet, begin, repeated=True)


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_several_sessions_while_replicas_come_and_go(fleet: Fleet, tmp_path: Path, count: int) -> None:
    """One server of each stage is always there; it is the other one, once all sessions know of its return."""
    over, begin = threading.Event(), [proxy.mark() for proxy in fleet.proxies]

    def chat(connected: Connected) -> list[list[int]]:
        answers = []
        while not over.is_set():
            answers.append(answer(connected, tokens=TOKENS))
        return [*answers, answer(connected, tokens=TOKENS)]

    with ExitStack() as sessions, ThreadPoolExecutor(count) as pool:
        links = [fleet.connect(tmp_path / str(number), low_water=64) for number in range(count)]
        for link in links:
            sessions.enter_context(link.session)
        expected = answer(links[0], tokens=TOKENS)
        chats = [pool.submit(chat, link) for link in links]
        try:
            for pair in ((0, 3), (1, 2)):
                for number in pair:
                    fleet.servers[number].kill()
                if pair == (0, 3):
                    fleet.restore(*pair)
                    _until_known(links)
        finally:
            over.set()
        heard = [one for chat in chats for one in chat.result(120)]
        assert [fleet.in_use(link) for link in links] == [[0, 3]] * count
    assert len(heard) >= 2 * count
    assert all(one == expected for one in heard)
    _used_once(fleet, begin, repeated=False)


def _until_known(links: list[Connected]) -> None:
    deadline = time.monotonic() + 60
    while any(state.problem for link in links for state in link.session.targets()):
        assert time.monotonic() < deadline, [link.session.targets() for link in links]
        time.sleep(0.05)


def test_a_stage_that_is_lost_and_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    with (connected := fleet.connect(tmp_path, retry_s=1)).session:
        undisturbed = answer(connected, tokens=2)
        for server in fleet.servers[2:]:
            server.kill()
        start = time.monotonic()
        with pytest.raises(SessionLostError, match=r"all servers of these layers were away for 1 s") as told:
            answer(connected, tokens=2)
        assert time.monotonic() - start >= 1
        assert fleet.proxies[3].target in str(told.value)
        assert len(fleet.in_use(connected)) == 1
        fleet.restore(3)
        connected.session._connection.retry_s = 60
        assert answer(connected, tokens=2) == undisturbed, "the session goes on, under new masks"
