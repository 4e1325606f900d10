"""Waits for a client have an end: who sends nothing, or reads nothing, holds no thread and no place for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from inprocess import InProcess
from stack import masks_message, opening, rows_message

from sordino.server import app
from sordino.server.app import SERVICE_NAME, ServerConfig, build_server
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import ModelManifest

LIMITS = Limits(first_message_s=0.2, idle_s=0.6, max_provisioning=1, max_downloads=1, max_streams=1)
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
CALLS = [
    *(f"/{SERVICE_NAME}/{name}" for name in ("GetManifest", "FetchFile", "Provision", "Evaluate")),
    f"/{HEALTH}/Check",
    f"/{REFLECTION}/ServerReflectionInfo",
]


class Served(NamedTuple):
    service: SordinoService
    channel: grpc.Channel
    manifest: ModelManifest
    hold: threading.Event

    def call(self, method: str, *messages: bytes) -> Any:
        """Sends ``messages`` and then neither another nor the end."""

        def requests() -> Iterator[bytes]:
            yield from messages
            self.hold.wait(60)

        path = method if "/" in method else f"/{SERVICE_NAME}/{method}"
        return self.channel.stream_stream(path)(requests(), timeout=20)


@pytest.fixture
def served(bundles: Callable[..., Path]) -> Iterator[Served]:
    bundle = bundles("llama")
    service = SordinoService(MatrixStore(bundle), LIMITS)
    server = InProcess(service, ServerConfig(bundle=bundle, tls=None, tokens=None, limits=LIMITS))
    ended, hold = threading.Event(), threading.Event()

    def tend() -> None:
        while not ended.wait(0.05):
            server.do(service.waits.end_overdue)

    tending = threading.Thread(target=tend)
    tending.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield Served(service, channel, ModelManifest.load(bundle), hold)
        hold.set()
    ended.set()
    tending.join()
    server.close()


def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    return error.value.code(), error.value.details()


@pytest.mark.parametrize("method", CALLS)
def test_a_call_without_its_message_ends(served: Served, method: str, caplog: pytest.LogCaptureFixture) -> None:
    begin = time.monotonic()
    for _ in range(2):  # the place of the first is free for the second
        code, details = end_of(served.call(method))
        while "try again" in details and time.monotonic() - begin < 5:  # as soon as its thread has left
            code, details = end_of(served.call(method))
        assert (code, "sent no message" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True), details
    assert time.monotonic() - begin < 5
    assert not caplog.records


def test_a_provisioning_stream_that_falls_silent_ends(served: Served) -> None:
    for _ in range(2):
        call = served.call("Provision", masks_message(served.manifest))
        next(call)
        assert end_of(call)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        time.sleep(0.2)  # its thread leaves the place after its client has heard


def test_an_open_evaluation_stream_may_rest(served: Served) -> None:
    def requests() -> Iterator[bytes]:
        yield opening(served.manifest)
        time.sleep(3 * LIMITS.idle_s)
        yield rows_message(served.manifest)

    assert len(list(served.channel.stream_stream(f"/{SERVICE_NAME}/Evaluate")(requests()))) == 2


def test_a_client_that_does_not_read_is_not_waited_for(served: Served) -> None:
    rows = [rows_message(served.manifest, of=2, rows=1000, id=number) for number in range(100)]
    call = served.call("Evaluate", opening(served.manifest), *rows)
    next(call)
    time.sleep(1.5)
    code, details = end_of(call)
    assert (code, "unread" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True), details


@pytest.mark.parametrize("method", CALLS)
def test_draining_ends_what_waits_and_says_so(served: Served, method: str) -> None:
    messages = (opening(served.manifest),) if method.endswith("Evaluate") else ()
    call = served.call(method, *messages)
    if messages:
        next(call)
    else:
        time.sleep(0.1)
    served.service.waits.drain()
    for ended in (call, served.call(method, *messages)):
        code, details = end_of(ended)
        assert (code, "shutting down" in details) == (grpc.StatusCode.UNAVAILABLE, True), details


def test_a_call_that_ends_without_its_message(served: Served) -> None:
    call = served.channel.stream_unary(f"/{SERVICE_NAME}/GetManifest")
    with pytest.raises(grpc.RpcError) as error:
        call(iter(()))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_is_checked_and_not_watched(served: Served) -> None:
    assert served.channel.unary_unary(f"/{HEALTH}/Check")(b"")
    for method in ("Watch", "List"):
        assert end_of(served.channel.unary_stream(f"/{HEALTH}/{method}")(b""))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_server_that_ends_by_itself_says_so(bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than live on, ready, and listen to nobody."""
    bundle, made = bundles("llama"), list[grpc.aio.Server]()

    def build(*arguments: Any) -> Any:
        made.append((built := build_server(*arguments))[0])
        return built

    ending: list[asyncio.Future[None]] = []

    def ended(port: int) -> None:
        ending.append(asyncio.ensure_future(made[0].stop(None)))

    monkeypatch.setattr(app, "build_server", build)
    config = ServerConfig(bundle=bundle, port=0, tls=None, tokens=None)
    with pytest.raises(SordinoError, match="has ended by itself"):
        app.serve(config, ready=ended)


def test_a_thread_is_waited_for_however_often_its_call_is_cancelled(served: Served) -> None:
    """It uses what the call gives back next."""
    done = threading.Event()

    def work() -> None:
        time.sleep(0.3)
        done.set()

    async def main() -> None:
        task = asyncio.create_task(served.service._in_thread(work))
        for _ in range(3):
            await asyncio.sleep(0.03)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done.is_set()
        with pytest.raises(ZeroDivisionError):
            await served.service._in_thread(lambda: 1 / 0)
        assert await served.service._in_thread(lambda: 3) == 3

    asyncio.run(main())
