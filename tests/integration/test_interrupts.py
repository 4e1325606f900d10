"""Ctrl-C at any moment, as notebooks send it: the answer stops, and the session is as good as before."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pairs import InProcessServer
from stack import ServerProcess, answer, connect_to

from sordino.client.interrupts import interrupts
from sordino.client.provision import fetch_check_vectors
from sordino.client.proxy import RecordingProxy
from sordino.client.transport import Connection


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
@pytest.mark.parametrize("protocol", ["masked", "auto", "rlwe"])
def test_interrupts_at_random_moments(server: ServerProcess, tmp_path: Path, protocol: str) -> None:
    pool = {"pool": tmp_path / "pool", "state_dir": tmp_path / "client-state"} if protocol == "auto" else {}
    link = connect_to(server, tmp_path, protocol=protocol, **pool)
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


def test_a_silent_server_is_not_waited_for(server: ServerProcess, tmp_path: Path) -> None:
    """The interrupt wakes who waits for an answer that does not come."""
    silent = threading.Event()

    def tamper(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if silent.is_set() and (method, direction) == ("Evaluate", "down"):
            time.sleep(20)
        return raw

    with RecordingProxy(server.target, ca=server.ca, tamper=tamper) as proxy:
        link = connect_to(server, tmp_path, target=proxy.target, ca=None)
        answer(link, tokens=2)
        silent.set()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt), interrupting(lambda: 0.5):
            answer(link, tokens=2)
        assert time.monotonic() - begin < 5
        link.session.close()


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
