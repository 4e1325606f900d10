"""A server that takes requests and never answers: every wait ends, and closing a session ends it at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stack import ServerProcess, answer, connect_to

from sordino.client import Connected
from sordino.client.proxy import RecordingProxy
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import SordinoError, TransportError


class Mute:
    """A proxy's ``tamper``: holds back the messages of one method and direction, all or ``left`` of them."""

    def __init__(self) -> None:
        self.method: str | None = None
        self.direction = "down"
        self.left = 1 << 30
        self.began = threading.Event()
        self.over = threading.Event()

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> bytes | list[bytes]:
        if (method, direction) != (self.method, self.direction) or not self.left:
            return raw
        self.left -= 1
        self.began.set()
        self.over.wait(60)
        return []


@pytest.fixture
def mute() -> Mute:
    return Mute()


@pytest.fixture
def proxy(server: ServerProcess, mute: Mute) -> Iterator[RecordingProxy]:
    with RecordingProxy(server.target, ca=server.ca, tamper=mute) as proxy:
        yield proxy
        mute.over.set()


def _connect(server: ServerProcess, tmp: Path, proxy: RecordingProxy, **options: Any) -> Connected:
    return connect_to(server, tmp, target=proxy.target, ca=None, **{"timeout_s": 1, "retry_s": 2, **options})


@pytest.mark.parametrize("direction", ["up", "down"])
def test_provisioning(server: ServerProcess, tmp_path: Path, proxy: RecordingProxy, mute: Mute, direction: str) -> None:
    with (connected := _connect(server, tmp_path, proxy)).session as session:
        before = answer(connected)
        left = session.masks_left
        mute.method, mute.direction = "Provision", direction
        start = time.monotonic()
        with pytest.raises(TransportError, match="sent nothing"):
            session.provision()
        assert 3 < time.monotonic() - start < 10, "one more attempt at least, but not without end"
        assert session.masks_left == left
        mute.method = None
        session.provision()
        assert session.masks_left == (left or 0) + 128
        assert answer(connected) == before


@pytest.mark.parametrize("method", ["FetchFile", "Provision"])
def test_connecting(server: ServerProcess, tmp_path: Path, proxy: RecordingProxy, mute: Mute, method: str) -> None:
    mute.method = method
    start = time.monotonic()
    with pytest.raises(TransportError, match="sent nothing"):
        _connect(server, tmp_path, proxy)
    assert time.monotonic() - start < 10
    mute.method = None
    _connect(server, tmp_path, proxy).session.close()


def test_closing_does_not_wait_for_a_refill(
    server: ServerProcess, tmp_path: Path, proxy: RecordingProxy, mute: Mute, caplog: pytest.LogCaptureFixture
) -> None:
    connected = _connect(server, tmp_path, proxy, timeout_s=60, retry_s=60, low_water=128)
    mute.method = "Provision"
    answer(connected)
    assert mute.began.wait(10)
    start = time.monotonic()
    connected.session.close()
    assert time.monotonic() - start < 3
    assert not [thread for thread in threading.enumerate() if thread.name == "sordino-refill"]
    said = [record.getMessage() for record in caplog.records]
    told = [text for text in said if not text.startswith("provisioning 128 tokens: ")]  # the plan, before it began
    assert not told, "a refill that was cut short on purpose is nothing to warn of"
    mute.method = None
    with connect_to(server, tmp_path).session as session:
        assert session.masks_left, "the pool is whole"


@pytest.mark.parametrize("method", ["Evaluate", "Provision"])
def test_closing_frees_other_threads(
    server: ServerProcess, tmp_path: Path, proxy: RecordingProxy, mute: Mute, method: str
) -> None:
    connected = _connect(server, tmp_path, proxy, timeout_s=60, retry_s=60)
    mute.method = method
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(*((answer, connected) if method == "Evaluate" else (connected.session.provision,)))
        assert mute.began.wait(10)
        start = time.monotonic()
        connected.session.close()
        with pytest.raises(SordinoError, match="closed"):
            waiting.result(10)
    assert time.monotonic() - start < 3


def test_an_answer_that_was_lost_is_asked_for_again(
    server: ServerProcess, tmp_path: Path, proxy: RecordingProxy, mute: Mute
) -> None:
    """Also where the wait for it took as long as a server may be away."""
    with (connected := _connect(server, tmp_path, proxy, retry_s=1)).session as session:
        undisturbed = answer(connected)
        mute.method, mute.left = "Evaluate", 1
        assert answer(connected) == undisturbed
        assert session.traffic.retries == 1


def test_a_server_that_is_slow_is_not_silent(
    server: ServerProcess, tmp_path: Path, proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction) == ("Provision", "down") and index % 8 == 0:
            time.sleep(0.5)
        return raw

    proxy.tamper = slow
    with _connect(server, tmp_path, proxy, retry_s=0).session as session:
        assert session.traffic.retries == 0
        assert session.masks_left == 128


def test_a_batch_that_moves_on_between_breaks_is_not_given_up(server: ServerProcess, tmp_path: Path) -> None:
    """A stream that breaks after every second group, and takes longer in all than a server may be away."""
    with (connected := connect_to(server, tmp_path, retry_s=1, provision=False)).session as session:
        connection = session._connection
        real = connection.provision

        def breaking(requests: Iterator[pb.ProvisionRequest]) -> Iterator[pb.ProvisionResponse]:
            first = None
            for response in (answers := real(requests)):
                first = response.group if first is None else first
                if response.group == first + 2:
                    answers.close()
                    raise TransportError("broken")
                time.sleep(0.05)
                yield response

        connection.provision = breaking  # type: ignore[assignment,method-assign]
        start = time.monotonic()
        session.provision()
        assert time.monotonic() - start > 2 * connection.retry_s
        assert session.traffic.retries == 3
        connection.provision = real  # type: ignore[method-assign]
        with (again := connect_to(server, tmp_path / "other")).session:
            assert answer(connected) == answer(again)
