"""Ctrl-C at any moment, as notebooks send it: the answer stops, and the session is as good as before."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import InProcessServer
from stack import ServerProcess, answer, connect_to

from sordino.client.attend import PageStream
from sordino.client.interrupts import interrupts
from sordino.client.provision import fetch_check_vectors
from sordino.client.proxy import RecordingProxy
from sordino.client.rlwe import SecretKey
from sordino.client.transport import Connection
from sordino.shared.packing import BlockShape
from sordino.shared.rlwe import PARAMS


@contextmanager
def interrupting(wait: Callable[[], float]) -> Iterator[None]:
    """Sends this process a SIGINT after each of the pauses that ``wait`` gives."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(wait()):
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        with interrupts:
            over.set()
            sender.join()


@pytest.mark.slow  # sixty interrupts each, at whatever moment the machine gives
@pytest.mark.parametrize("protocol", ["masked", "auto", "rlwe", "masked, with encrypted attention"])
def test_interrupts_at_random_moments(server: ServerProcess, tmp_path: Path, protocol: str) -> None:
    options: dict[str, Any] = {}
    if protocol == "auto":
        options = {"pool": tmp_path / "pool", "state_dir": tmp_path / "client-state"}
    elif "attention" in protocol:
        options = {"attention": "rlwe", "page_tokens": 4}
    link = connect_to(server, tmp_path, protocol=protocol.split(",")[0], **options)
    truth = answer(link, tokens=4)
    caught, rng = 0, random.Random(7)  # when, not what
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline and caught < 60:
        try:
            with interrupting(lambda: rng.uniform(0.001, 0.2)):
                while True:
                    assert answer(link, tokens=4) == truth
        except KeyboardInterrupt:
            caught += 1
    assert caught > 10
    assert answer(link, tokens=4) == truth
    begin = time.monotonic()
    link.session.close()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("method", ["Evaluate", "Attend"])
def test_a_silent_server_is_not_waited_for(server: ServerProcess, tmp_path: Path, method: str) -> None:
    """The interrupt wakes who waits for an answer that does not come."""
    speaks = threading.Event()
    speaks.set()

    def tamper(called: str, direction: str, index: int, raw: bytes) -> bytes:
        if (called, direction) == (method, "down"):
            speaks.wait(20)
        return raw

    with RecordingProxy(server.target, ca=server.ca, tamper=tamper) as proxy:
        link = connect_to(server, tmp_path, target=proxy.target, ca=None, attention="rlwe", page_tokens=4)
        truth = answer(link, tokens=2)
        speaks.clear()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt), interrupting(lambda: 0.5):
            answer(link, tokens=2)
        assert time.monotonic() - begin < 5
        speaks.set()
        assert answer(link, tokens=2) == truth
        link.session.close()


def interrupted_in(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """One SIGINT at the beginning of the next call of this method; the list says when that has run to its end."""
    real, ended, sent = getattr(owner, name), [], threading.Event()

    def method(*args: Any) -> Any:
        if sent.is_set():
            return real(*args)
        sent.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # where a handler runs
        try:
            return real(*args)
        finally:
            ended.append(name)

    monkeypatch.setattr(owner, name, method)
    return ended


@pytest.mark.parametrize(("owner", "name"), [(PageStream, "_exchange"), (PageStream, "_guarded"), (Future, "result")])
def test_pages_are_counted_right_and_let_go(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """An interrupt waits for the stream, and for the threads that encrypt; pages that nobody got are dropped."""
    with (link := connect_to(server, tmp_path, attention="rlwe", page_tokens=4)).session:
        truth = answer(link, tokens=2)
        ended = interrupted_in(monkeypatch, owner, name)
        with pytest.raises(KeyboardInterrupt):
            answer(link, tokens=2)
        assert ended
        assert answer(link, tokens=2) == truth
        gc.collect()
        assert link.session.attention is not None
        stream = link.session.attention.stream
        stream._collect()
        assert not stream._kept


def test_closing_is_not_cut_short(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = connect_to(server, tmp_path, attention="rlwe", page_tokens=4)
    answer(link, tokens=2)
    ended = interrupted_in(monkeypatch, PageStream, "_hang_up")
    with pytest.raises(KeyboardInterrupt):
        link.session.close()
    assert ended
    link.session.close()


def test_another_threads_turn_is_not_waited_for(server: ServerProcess, tmp_path: Path) -> None:
    link = connect_to(server, tmp_path, attention="rlwe", page_tokens=4)
    assert link.session.attention is not None
    stream, over = link.session.attention.stream, threading.Event()
    holds = threading.Event()

    def hold() -> None:
        with stream._turn():
            holds.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(5)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupting(lambda: 0.5):
        answer(link, tokens=2)
    assert time.monotonic() - begin < 5
    over.set()
    thread.join()
    link.session.close()


@pytest.mark.parametrize("step", ["encrypt", "decrypt", "decrypt_switched"])
def test_the_threads_of_the_transforms_are_waited_for(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    key, one, both = SecretKey(parallel=True), np.ones((PARAMS.n, 1), np.uint32), np.ones((2, PARAMS.n, 1), np.uint32)
    steps: dict[str, Callable[[], object]] = {
        "encrypt": lambda: key.encrypt(one, both),
        "decrypt": lambda: key.decrypt(both.copy(), both),
        "decrypt_switched": lambda: key.decrypt_switched(
            one[:1].astype(np.uint64), one.astype(np.uint64), BlockShape(1, PARAMS.n, 1, PARAMS.n, 1), 41
        ),
    }
    ended = interrupted_in(monkeypatch, Future, "result")
    with pytest.raises(KeyboardInterrupt):
        steps[step]()
    assert ended


def test_provisioning_stops(bundles: Callable[..., Path]) -> None:
    served = InProcessServer(bundles("llama"))
    connection = Connection(f"grpc://127.0.0.1:{served.port}", retry_s=2)
    try:
        with pytest.raises(KeyboardInterrupt), interrupting(lambda: 0.3):  # noqa: PT012 - again and again
            while True:
                fetch_check_vectors(connection, 1)
        assert fetch_check_vectors(connection, 1)
    finally:
        connection.close()
        served.close()


def test_the_handler_is_put_back_and_nothing_is_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts, interrupts:  # noqa: PT012 - a signal, and time for it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        assert interrupts.noted
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), interrupts:  # noqa: PT012 - the same
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        interrupts.check()
    assert not interrupts.noted
    with pytest.raises(ZeroDivisionError), interrupts:
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_other_handlers_are_kept() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    try:
        with interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            assert not got
        assert got == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
