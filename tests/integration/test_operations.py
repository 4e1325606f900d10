"""A server in operation: figures that add up however calls end, probes, a log; clients that cancel, die, are many."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import ServerProcess, masks_message, opening, rows_message, send_raw

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server import service
from sordino.server.service import SERVICE_NAME, Limits
from sordino.shared.auth import TokenFile
from sordino.shared.pages import KEYS, N
from sordino.shared.rlwe import SEED_BYTES, packed_bytes

STREAMS = 8
HEALTH = "/grpc.health.v1.Health/Check"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
CODE = grpc.StatusCode


class Operated(ServerProcess):
    """A server with a metrics port and a log in JSON."""

    def __init__(self, bundle: Path, tmp: Path, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.metrics_port = free.getsockname()[1]
        own = ("--metrics-port", str(self.metrics_port), "--log-format", "json", "--max-streams", str(STREAMS))
        super().__init__(bundle, tmp, arguments=(*own, *arguments))

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def figures(self) -> Counter[tuple[str, ...]]:
        """``(name without prefix, *values of labels)`` to value."""
        found: Counter[tuple[str, ...]] = Counter()
        for family in text_string_to_metric_families(self.page("metrics")[1]):
            for sample in family.samples:
                labels = (sample.labels[key] for key in sorted(sample.labels))
                found[sample.name.removeprefix("sordino_"), *labels] += int(sample.value)
        return found

    def when_quiet(self) -> Counter[tuple[str, ...]]:
        """The figures when no call is open any more: what started has ended, for each method."""
        figures = until(self.figures, lambda now: not any(now[key] for key in now if key[0] == "calls_open"))
        for name, *labels in list(figures):
            if name == "calls_started_total":
                ended = sum(figures[key] for key in figures if key[:2] == ("calls_ended_total", labels[0]))
                assert figures[name, *labels] == ended, f"{labels}: {figures}"
        return figures

    def is_serving(self) -> bool:
        with self.channel() as channel:
            answer = channel.unary_unary(HEALTH)(b"", timeout=20)
        assert answer in (SERVING, NOT_SERVING)
        return bool(answer == SERVING)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines()]


def left(figures: Counter[tuple[str, ...]], method: str) -> int:
    """Calls whose client went away; where the server waited for a message, gRPC may say that this was the last one."""
    return sum(figures["calls_ended_total", method, status] for status in ("CANCELLED", "OK"))


def until(look: Callable[[], Any], enough: Callable[[Any], bool], seconds: float = 60) -> Any:
    """What ``look`` gives as soon as it is ``enough``."""
    deadline = time.monotonic() + seconds
    while not enough(seen := look()):
        assert time.monotonic() < deadline, f"still not so: {seen}"
        time.sleep(0.02)
    return seen


@pytest.fixture(scope="module")
def operated(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Operated(bundles("llama"), tmp_path_factory.mktemp("operated")) as server:
        yield server


@pytest.fixture(scope="module")
def channel(operated: Operated) -> Iterator[grpc.Channel]:
    with operated.channel(("grpc.max_send_message_length", -1)) as channel:
        yield channel


class Stream:
    """An evaluation stream that stays open until it is cancelled."""

    def __init__(self, server: ServerProcess, channel: grpc.Channel, *messages: bytes, token: str = "") -> None:
        self._end = threading.Event()
        metadata = (("authorization", f"Bearer {token}"),) if token else server.metadata
        self.call = channel.stream_stream(f"/{SERVICE_NAME}/Evaluate")(
            self._requests(opening(server.manifest), *messages), metadata=metadata, timeout=120
        )

    def _requests(self, *messages: bytes) -> Iterator[bytes]:
        yield from messages
        self._end.wait(120)

    def read(self) -> bytes:
        answer: bytes = next(self.call)
        return answer

    def close(self) -> None:
        self._end.set()
        self.call.cancel()


def open_streams(server: ServerProcess, channel: grpc.Channel, count: int) -> ExitStack:
    """``count`` streams that are open at the server."""
    stack = ExitStack()
    for _ in range(count):
        stream = Stream(server, channel)
        stack.callback(stream.close)
        stream.read()
    return stack


def test_200_cancels_at_any_point(operated: Operated, channel: grpc.Channel) -> None:
    before = operated.when_quiet()
    rng, manifest = random.Random(1), operated.manifest
    small, large = rows_message(manifest), rows_message(manifest, of=2, rows=4000)
    for number in range(200):
        point = ("upload", "decode", "between", "at once")[number % 4]
        stream = Stream(operated, channel, *{"upload": [large] * 4, "decode": [large, small]}.get(point, [small]))
        if point in ("decode", "between"):
            stream.read()
        if point == "between":
            stream.read()
        time.sleep(rng.random() * 0.004)
        stream.close()
        if number % STREAMS == STREAMS - 1:  # so that none is refused for want of a place
            operated.when_quiet()
    after = operated.when_quiet() - before
    started = after["calls_started_total", "Evaluate"]
    assert 100 <= started <= 200, "half of them have read an answer"
    assert after["calls_ended_total", "Evaluate", "CANCELLED"] > 50, "all that were cancelled within their work"
    assert left(after, "Evaluate") == started
    assert operated.serves()


_CLIENT = """
import sys, time, grpc
address, ca, token, first = sys.argv[1:]
credentials = grpc.ssl_channel_credentials(open(ca, "rb").read())
channel = grpc.secure_channel(address, credentials, options=[("grpc.enable_http_proxy", 0)])
def requests():
    yield bytes.fromhex(first)
    time.sleep(120)
call = channel.stream_stream("/sordino.proto.v1.Sordino/Evaluate")
answers = call(requests(), metadata=[("authorization", f"Bearer {token}")])
next(answers)
print("open", flush=True)
time.sleep(120)
"""


def test_a_client_that_is_killed(operated: Operated) -> None:
    before = operated.when_quiet()
    arguments = [operated.address, str(operated.ca), operated.token, opening(operated.manifest).hex()]
    with subprocess.Popen([sys.executable, "-c", _CLIENT, *arguments], stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout
            assert client.stdout.readline() == b"open\n"
            assert operated.figures()["calls_open", "Evaluate"] == 1
        finally:
            client.kill()
    after = operated.when_quiet() - before
    assert after["calls_started_total", "Evaluate"] == left(after, "Evaluate") == 1


def test_calls_that_are_refused(operated: Operated, channel: grpc.Channel) -> None:
    """And case 4.9: one stream too many is told so at once, while the others stay open and health answers."""
    before, first = operated.when_quiet(), opening(operated.manifest)
    bad = {"metadata": (("authorization", "Bearer sord_wrong"),), "channel": channel}
    assert [send_raw(operated, "Evaluate", [first], **bad)[1] for _ in range(3)] == [CODE.UNAUTHENTICATED] * 3
    assert send_raw(operated, "Evaluate", [b"\xff"], channel=channel)[1] is CODE.INVALID_ARGUMENT
    unknown = [first, rows_message(operated.manifest, group=99)]
    assert send_raw(operated, "Evaluate", unknown, channel=channel)[1] is CODE.NOT_FOUND
    assert send_raw(operated, "Nonsense", [b""], channel=channel)[1] is CODE.UNIMPLEMENTED
    with open_streams(operated, channel, STREAMS):
        _, code, text = send_raw(operated, "Evaluate", [first], channel=channel)
        assert (code, f"its {STREAMS} evaluation streams" in text) == (CODE.RESOURCE_EXHAUSTED, True)
        assert operated.is_serving()
        assert operated.page("readyz") == (200, "ready\n"), "a server that is full is no broken one"
        assert operated.figures()["calls_open", "Evaluate"] == STREAMS
    after = operated.when_quiet() - before
    assert left(after, "Evaluate") == STREAMS
    ended = {key[1:]: value for key, value in after.items() if key[0] == "calls_ended_total"}
    for status in ("CANCELLED", "OK"):
        ended.pop(("Evaluate", status), None)
    assert ended == {
        ("Evaluate", "UNAUTHENTICATED"): 3,
        ("Evaluate", "INVALID_ARGUMENT"): 1,
        ("Evaluate", "RESOURCE_EXHAUSTED"): 1,
        ("Evaluate", "NOT_FOUND"): 1,
        ("Check", "OK"): 1,
        ("other", "UNIMPLEMENTED"): 1,
    }
    assert after["client_calls_total", "(no token)"] == 4, "three that were refused, and a check of health"
    assert operated.serves()


def test_what_products_and_messages_are_counted(operated: Operated, channel: grpc.Channel) -> None:
    before, manifest = operated.when_quiet(), operated.manifest
    messages = [opening(manifest), *(rows_message(manifest, rows=3, id=number) for number in range(2, 7))]
    answers, code, _ = send_raw(operated, "Evaluate", messages, channel=channel)
    masks = masks_message(manifest, points=64)
    blocks, other, _ = send_raw(operated, "Provision", [masks, masks], channel=channel)
    assert (code, other, len(answers), len(blocks)) == (CODE.OK, CODE.OK, 6, 2)
    after = operated.when_quiet() - before
    assert after["product_requests_count", "masked"] == after["product_requests_sum", "masked"] == 5
    assert after["product_rows_total", "masked"] == 15
    assert after["product_rows_total", "masks"] == 128
    assert after["provision_blocks_total",] == 2
    assert after["received_bytes_total", "Evaluate"] == sum(map(len, messages))
    assert after["sent_bytes_total", "Evaluate"] == sum(map(len, answers))
    assert after["received_bytes_total", "Provision"] == 2 * len(masks)
    assert after["sent_bytes_total", "Provision"] == sum(map(len, blocks))


def test_a_token_is_known_by_its_name_and_withdrawn(operated: Operated, channel: grpc.Channel) -> None:
    before, tokens = operated.when_quiet(), TokenFile(operated.state / "tokens.json")
    stream = Stream(operated, channel, token=(secret := tokens.issue("alice")))
    stream.read()
    tokens.revoke("alice")
    with pytest.raises(grpc.RpcError) as error:
        stream.read()
    assert error.value.code() is CODE.UNAUTHENTICATED
    after = operated.when_quiet() - before
    assert after["client_calls_total", "alice"] == 1
    assert after["calls_ended_total", "Evaluate", "UNAUTHENTICATED"] == 1
    [line] = [line for line in operated.lines() if line.get("client") == "alice"]
    assert (line["method"], line["status"], line["peer"]) == ("Evaluate", "UNAUTHENTICATED", "ipv4:127.0.0.1")
    for text in (secret, operated.token):
        assert text not in operated.log()
        assert text not in operated.page("metrics")[1]


def test_twice_as_many_cancels_as_there_are_threads(operated: Operated, channel: grpc.Channel) -> None:
    """Case 4.8: a thread that waits for a client that left would be lost."""
    limits = Limits(max_streams=STREAMS)
    workers = limits.max_provisioning + limits.max_attention + limits.max_downloads + service._SPARE_THREADS
    large = rows_message(operated.manifest, of=2, rows=500)
    for _ in range(2 * workers // STREAMS + 1):
        streams = [Stream(operated, channel, large, large) for _ in range(STREAMS)]
        for stream in streams:
            stream.read()
        for stream in streams:
            stream.close()
        operated.when_quiet()
    assert operated.serves()


def test_a_client_of_asyncio_cancels(operated: Operated) -> None:
    """Case 4.10: its session and the pages of it are gone, whether the call or the task that reads is cancelled."""
    before, manifest = operated.when_quiet(), operated.manifest
    first = pb.Open(fingerprint=manifest.fingerprint, protocol=pb.PROTOCOL_RLWE)
    page = pb.Ciphertexts(count=1, seed=bytes(SEED_BYTES), c0=bytes(packed_bytes(KEYS.primes * N)), primes=KEYS.primes)
    messages = [pb.AttendRequest(id=1, open=first), pb.AttendRequest(id=2, append=pb.PageAppend(first=0, pages=page))]

    async def opened(channel: grpc.aio.Channel) -> Any:
        call = channel.stream_stream(f"/{SERVICE_NAME}/Attend")(metadata=operated.metadata, timeout=120)
        for message in messages:
            await call.write(message.SerializeToString())
            assert pb.AttendResponse.FromString(await call.read()).id == message.id
        return call

    async def cancelled(call: Any, *, task: bool) -> None:
        if task:
            reading = asyncio.create_task(call.read())
            await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            call.cancel()
        assert await call.code() is CODE.CANCELLED

    async def sessions() -> None:
        credentials = grpc.ssl_channel_credentials(operated.ca.read_bytes())
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.secure_channel(operated.address, credentials, options=options) as channel:
            calls = await asyncio.gather(*(opened(channel) for _ in range(8)))
            held = await asyncio.to_thread(operated.figures)
            assert (held["page_bytes",], held["page_sessions",]) == (8 * KEYS.page_bytes, 8)
            await asyncio.gather(*(cancelled(call, task=bool(i % 2)) for i, call in enumerate(calls)))
            assert (await asyncio.to_thread(operated.when_quiet))["page_sessions",] == 0

    asyncio.run(sessions())
    after = operated.when_quiet()
    assert (after["page_bytes",], after["page_sessions",]) == (0, 0)
    after -= before
    assert after["calls_started_total", "Attend"] == left(after, "Attend") == 8


def _run_sessions(server: Operated, count: int) -> tuple[int, int, int]:
    """Files, threads and resident MiB of the server after so many more sessions, each on a connection of its own."""
    for _ in range(count):
        assert server.serves()
    server.when_quiet()
    assert server._process
    folder = Path(f"/proc/{server._process.pid}")
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())), server.rss() >> 20


def _stays_flat(server: Operated, first: int, then: int) -> None:
    before = _run_sessions(server, first)
    after = _run_sessions(server, then)
    # Connections that were closed last, a thread that another of the pool made needless, and the heap's own play.
    assert [a - b <= most for a, b, most in zip(after, before, (8, 8, 48), strict=True)] == [True] * 3, (before, after)


def test_300_sessions_one_after_another(operated: Operated) -> None:
    """Case 4.4, and the plateau of 4.2: files, threads, memory."""
    _stays_flat(operated, 60, 240)


@pytest.mark.slow
def test_3000_sessions_one_after_another(operated: Operated) -> None:
    _stays_flat(operated, 500, 2500)


def test_a_server_that_lost_what_it_needs(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """Case 4.11: it is alive, and not ready, and says why; and it is ready again when all is back."""
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), bundle)
    with Operated(bundle, tmp_path) as server:
        weights = next((bundle / "server").glob("*.safetensors"))
        for path, reason in (
            (server.state / "tokens.json", "the token file cannot be read, so nobody new can enter\n"),
            (weights, f"server/{weights.name} of the bundle is gone, or has another size than when it was loaded\n"),
        ):
            assert server.page("readyz") == (200, "ready\n")
            assert server.is_serving()
            away = path.rename(path.with_suffix(".away"))
            assert until(lambda: server.page("readyz"), lambda page: page[0] != 200) == (503, reason)
            assert server.page("livez") == (200, "alive\n")
            assert not server.is_serving()
            away.rename(path)
            until(lambda: server.page("readyz"), lambda page: page == (200, "ready\n"))
        assert server.is_serving()
        assert server.serves()


def test_a_metrics_port_that_is_taken(operated: Operated, tmp_path: Path) -> None:
    """Nothing is written for a server that cannot run."""
    server = ServerProcess(operated.bundle, tmp_path, arguments=("--metrics-port", str(operated.metrics_port)))
    with pytest.raises(AssertionError, match="did not start") as error:
        server.start()
    [line] = str(error.value).splitlines()[1:]
    assert f"error: SordinoError: cannot listen on 127.0.0.1:{operated.metrics_port}: the port is taken" in line
    assert line.endswith("Pass another --metrics-port, or 0")
    assert not server.state.exists()


def _sent_twice(server: Operated) -> tuple[int, int]:
    """Bytes that were sent until now, and a moment later: the same when nobody reads."""
    before = server.figures()["sent_bytes_total", "Evaluate"]
    time.sleep(0.3)
    return before, server.figures()["sent_bytes_total", "Evaluate"]


def test_a_drain(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """A call whose client reads nothing lasts until the grace is over; the log has each call once, to the end."""
    with Operated(bundles("llama"), tmp_path, "--grace", "2") as server, server.channel() as channel:
        assert server.serves()
        resting = Stream(server, channel)
        resting.read()
        rows = rows_message(server.manifest, of=2, rows=4000)
        unread = Stream(server, channel, *[rows] * 100)
        unread.read()
        until(lambda: _sent_twice(server), lambda sent: sent[0] == sent[1])
        server.signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as error:
            resting.read()
        assert (error.value.code(), "shutting down" in error.value.details()) == (CODE.UNAVAILABLE, True)
        assert server.page("readyz") == (503, "the server is shutting down\n")
        assert server.page("livez") == (200, "alive\n")
        figures = server.figures()
        started, ended = figures["calls_started_total", "Evaluate"], 0
        for key, value in figures.items():
            ended += value if key[:2] == ("calls_ended_total", "Evaluate") else 0
        assert (started, ended, figures["calls_open", "Evaluate"]) == (3, 2, 1)
        assert server.wait() == 0
        resting.close()
        unread.close()
    said = Counter(line["status"] for line in server.lines() if line.get("method") == "Evaluate")
    assert said == {"OK": 1, "UNAVAILABLE": 1, "CANCELLED": 1}
    assert {frozenset(line) for line in server.lines()} >= {frozenset({"time", "level", "logger", "event"})}
