"""A day of a server in ten minutes: does it keep what it no longer needs?

One ``sordino serve`` is asked by client processes that do, in any order, what clients do in a day: sessions of each
protocol, encrypted pages, provisioning, downloads, checks of health, calls that are cancelled, and calls that must be
refused. Now and then a client is killed. Every answer is compared with the first one to the same message. Beside them a
probe asks for one masked product after another on one stream.

The first fifth is for warming up. After it memory, descriptors, threads and the probe's time must stay as they are;
when all clients are gone, no call, no session and no page may be left. What is allowed, and why, is with
:func:`judge`.

    python bench/soak.py --bundle .demo/bundle --minutes 10 --json bench/results/soak-2-cores.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from scipy.stats import theilslopes

from sordino.client.bench import machine
from sordino.client.bench_serve import Recording, Server, record
from sordino.client.local_server import server_process
from sordino.client.replay import Stream, framed
from sordino.client.terminal import progress_bar
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.shared.errors import IntegrityError, RangeError, SordinoError
from sordino.shared.manifest import CLIENT_DIR, ModelManifest
from sordino.shared.packing import plan
from sordino.shared.pages import KEYS, N
from sordino.shared.rlwe import PAGE_PARAMS, PARAMS, SEED_BYTES, pack

MIB: Final = 1 << 20
MOST_GROWTH: Final = 48 * MIB
MOST_FILES: Final = 8
MOST_THREADS: Final = 8
MOST_P99: Final = 1.5
MOST_BUSY: Final = 0.05
_GROUPS: Final = 4  # that are asked encrypted products of: the server keeps encoded weights of each
_PAGES: Final = 4
_POINTS: Final = 64
_READ_BYTES: Final = 16 * MIB  # of a file; the rest is cancelled
_PAUSE_S: Final = 0.01  # of the probe, between an answer and the next request
_KILL_S: Final = 15.0
_GONE_S: Final = 60.0
_START_S: Final = 120.0
_CODE: Final = grpc.StatusCode
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Sordino"].full_name


# -- what a client does ----------------------------------------------------------------------------------------------


class Answers(Protocol):
    """The part of gRPC's call object that is used here."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes: ...

    def cancel(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Script:
    """What all clients know: the server, messages, and the first answers to them."""

    host: str
    port: int
    ca: Path
    token: str
    fingerprint: str
    masked: Recording
    blocks: list[tuple[bytes, bytes]]
    masks: list[tuple[bytes, bytes]]
    pages: list[tuple[bytes, bytes]]
    files: list[Path]

    def opening(self, protocol: pb.Protocol) -> bytes:
        return pb.EvaluateRequest(open=pb.Open(fingerprint=self.fingerprint, protocol=protocol)).SerializeToString()

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A connection of its own."""
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        with grpc.secure_channel(f"{self.host}:{self.port}", credentials, options=options) as channel:
            yield channel

    def call(self, channel: grpc.Channel, method: str, messages: Sequence[bytes], token: str = "") -> Answers:
        """Serialised messages on one call, and serialised answers."""
        call: Callable[..., Answers] = channel.stream_stream(f"/{_SERVICE}/{method}")
        metadata = (("authorization", f"Bearer {token or self.token}"),)
        return call(iter(messages), metadata=metadata, timeout=_GONE_S)


def write_script(bundle: Path, server: Server) -> Script:
    """Messages for this bundle, and what the server answers to them the first time.

    Raises:
        IntegrityError: a masked product is not the integer one.
    """
    manifest = ModelManifest.load(bundle)
    parts = urlsplit(server.target)
    script = Script(
        host=str(parts.hostname),
        port=int(parts.port or 0),
        ca=server.ca,
        token=server.token,
        fingerprint=manifest.fingerprint,
        masked=record(bundle, [server]),
        blocks=[],
        masks=[],
        pages=[],
        files=[bundle / CLIENT_DIR / name for name in manifest.client_files],
    )
    first = pb.Open(fingerprint=manifest.fingerprint, protocol=pb.PROTOCOL_RLWE)
    pages = [
        pb.AttendRequest(id=1, open=first),
        pb.AttendRequest(id=2, append=pb.PageAppend(first=0, pages=_ciphertexts(_PAGES))),
        pb.AttendRequest(
            id=3,
            products=pb.PageProducts(
                operands=_ciphertexts(_PAGES),
                sums=[pb.PageSum(operands=range(_PAGES), pages=range(_PAGES))],
                first=63,
                step=64,
                count=64,
            ),
        ),
        pb.AttendRequest(id=4, drop=pb.PageDrop(pages=range(_PAGES))),
    ]
    with script.channel() as channel:
        for group in range(min(_GROUPS, len(manifest.groups))):
            messages = [script.opening(pb.PROTOCOL_RLWE), _block(manifest, group)]
            script.blocks.append((messages[1], list(script.call(channel, "Evaluate", messages))[1]))
            masks = _masks(manifest, group)
            script.masks.append((masks, next(iter(script.call(channel, "Provision", [masks])))))
        raw = [message.SerializeToString() for message in pages]
        script.pages.extend(zip(raw, script.call(channel, "Attend", raw), strict=True))
    return script


def _residues(primes: Sequence[int], shape: tuple[int, ...]) -> bytes:
    return pack(np.random.default_rng().integers(0, min(primes), shape, dtype=np.uint32))


def _ciphertexts(count: int) -> pb.Ciphertexts:
    c0 = _residues(PAGE_PARAMS.primes, (KEYS.primes, count, N))
    return pb.Ciphertexts(count=count, seed=bytes(SEED_BYTES), c0=c0, primes=KEYS.primes)


def _block(manifest: ModelManifest, group: int) -> bytes:
    """One row."""
    spec = manifest.groups[group]
    shape = plan(1, spec.in_features, spec.out_features)[0].shape
    block = pb.BlockProduct(rows=1, inputs=shape.inputs, outputs=shape.outputs)
    c0 = _residues(PARAMS.primes, (2, PARAMS.n, shape.input_blocks))
    return pb.EvaluateRequest(id=2, group=group, seed=bytes(SEED_BYTES), data=c0, block=block).SerializeToString()


def _masks(manifest: ModelManifest, group: int) -> bytes:
    c0 = _residues(PARAMS.primes, (2, _POINTS, manifest.groups[group].in_features))
    masks = pb.MaskBlock(block=0, points=_POINTS)
    return pb.ProvisionRequest(group=group, seed=bytes(SEED_BYTES), c0=c0, masks=masks).SerializeToString()


class Client:
    """The deeds of a client, by name. Each opens what it needs, and leaves nothing open."""

    def __init__(self, script: Script, seed: int) -> None:
        self._script = script
        self._draw = random.Random(seed)
        self.deeds: dict[str, Callable[[], None]] = {
            "masked": partial(self._rows, pb.PROTOCOL_MASKED),
            "clear": partial(self._rows, pb.PROTOCOL_CLEAR),
            "encrypted rows": self._encrypted,
            "pages": self._pages,
            "provision": self._provision,
            "cancel": self._cancel,
            "refused": self._refused,
            "download": self._download,
            "health": self._health,
            "manifest": self._manifest,
        }

    def do(self) -> str:
        """One deed at random; its name, or ``busy`` where the server had no room.

        Raises:
            IntegrityError: another answer than the first time.
            grpc.RpcError, OSError, SordinoError: a call ended as it should not.
        """
        name = self._draw.choice(list(self.deeds))
        try:
            self.deeds[name]()
        except grpc.RpcError as error:
            if _status(error) is _CODE.RESOURCE_EXHAUSTED:
                return "busy"  # a product that was cancelled has its place until it is done
            raise
        return name

    def _rows(self, protocol: pb.Protocol) -> None:
        """A session of one to three tokens."""
        script, recorded = self._script, self._script.masked
        stream = Stream(script.host, script.port, script.ca, script.token, script.opening(protocol))
        try:
            for _ in range(self._draw.randint(1, 3)):
                for request, answer in zip(recorded.requests, recorded.answers, strict=True):
                    _same(stream.exchange(framed(request)).data, answer)
        finally:
            stream.close()

    def _encrypted(self) -> None:
        some = self._draw.choices(self._script.blocks, k=3)
        opening = self._script.opening(pb.PROTOCOL_RLWE)
        with self._script.channel() as channel:
            answers = list(self._script.call(channel, "Evaluate", [opening, *(request for request, _ in some)]))
        for answer, (_, first) in zip(answers[1:], some, strict=True):
            one, other = map(pb.EvaluateResponse.FromString, (answer, first))
            _same(one.data + one.c1, other.data + other.c1)

    def _pages(self) -> None:
        """Pages that come, are asked, and go: by a drop, or with their stream."""
        length = self._draw.choice((len(self._script.pages), len(self._script.pages) - 1))
        some = self._script.pages[:length]
        with self._script.channel() as channel:
            answers = list(self._script.call(channel, "Attend", [request for request, _ in some]))
        for answer, (_, first) in zip(answers, some, strict=True):
            one, other = map(pb.AttendResponse.FromString, (answer, first))
            _same(one.c0 + one.c1 + one.c2, other.c0 + other.c1 + other.c2)

    def _provision(self) -> None:
        some = self._draw.choices(self._script.masks, k=2)
        with self._script.channel() as channel:
            answers = list(self._script.call(channel, "Provision", [request for request, _ in some]))
        for answer, (_, first) in zip(answers, some, strict=True):
            _same(answer, first)

    def _cancel(self) -> None:
        """At any moment of any kind of call."""
        script = self._script
        rows, blocks = ([script.opening(protocol)] for protocol in (pb.PROTOCOL_MASKED, pb.PROTOCOL_RLWE))
        method, messages = self._draw.choice(
            [
                ("Evaluate", rows + script.masked.requests),
                ("Evaluate", blocks + [request for request, _ in script.blocks]),
                ("Provision", [request for request, _ in script.masks]),
                ("Attend", [request for request, _ in script.pages]),
            ]
        )
        with script.channel() as channel:
            call = script.call(channel, method, messages)
            if self._draw.random() < 0.5:
                next(call)
            time.sleep(self._draw.random() * 0.02)
            call.cancel()

    def _refused(self) -> None:
        script, opening = self._script, self._script.opening(pb.PROTOCOL_MASKED)
        messages, token, wanted = self._draw.choice(
            [
                ([opening], "sord_wrong", _CODE.UNAUTHENTICATED),
                ([b"\xff"], "", _CODE.INVALID_ARGUMENT),
                ([opening, opening], "", _CODE.INVALID_ARGUMENT),
                ([opening, pb.EvaluateRequest(id=2, group=1 << 20).SerializeToString()], "", _CODE.NOT_FOUND),
            ]
        )
        with script.channel() as channel:
            try:
                for _ in script.call(channel, "Evaluate", messages, token):
                    pass
            except grpc.RpcError as error:
                if _status(error) is not wanted:
                    raise
            else:
                raise SordinoError(f"a call was answered that must end with {wanted.name}")

    def _download(self) -> None:
        path = self._draw.choice(self._script.files)
        offset = self._draw.randrange(path.stat().st_size)
        read = 0
        with self._script.channel() as channel, path.open("rb") as file:
            file.seek(offset)
            request = pb.FetchFileRequest(name=path.name, offset=offset)
            metadata = (("authorization", f"Bearer {self._script.token}"),)
            chunks = pb_grpc.SordinoStub(channel).FetchFile(request, metadata=metadata, timeout=_GONE_S)
            for chunk in chunks:
                _same(chunk.data, file.read(len(chunk.data)))
                read += len(chunk.data)
                if read >= _READ_BYTES:
                    chunks.cancel()
                    break

    def _health(self) -> None:
        with self._script.channel() as channel:
            check: Callable[..., bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            _same(check(b"", timeout=_GONE_S), b"\x08\x01")  # SERVING

    def _manifest(self) -> None:
        with self._script.channel() as channel:
            metadata = (("authorization", f"Bearer {self._script.token}"),)
            answer = pb_grpc.SordinoStub(channel).GetManifest(
                pb.GetManifestRequest(), metadata=metadata, timeout=_GONE_S
            )
        if ModelManifest.from_json(answer.manifest).fingerprint != self._script.fingerprint:
            raise IntegrityError("the server has another manifest than before")


def _status(error: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode = error.code()
    return code


def _same(got: bytes, wanted: bytes) -> None:
    if got != wanted:
        raise IntegrityError("the server gave another answer than before")


def live(seed: int, pipe: Pipe) -> None:
    """Of a client's process: one deed after another, each told, until the other end says something more than the
    script."""
    client = Client(pipe.recv(), seed)
    try:
        pipe.send(("ready", ""))
        while not pipe.poll():
            pipe.send(("done", client.do()))
    except (grpc.RpcError, OSError, SordinoError, StopIteration) as error:
        status = f" {_status(error).name}: {error.details()}" if isinstance(error, grpc.RpcError) else f": {error}"
        pipe.send(("failed", f"{type(error).__name__}{status}"))


class Clients:
    """Client processes, and what they told.

    Raises:
        SordinoError: one does not start.
    """

    def __init__(self, script: Script, count: int) -> None:
        self._script = script
        self._context = multiprocessing.get_context("spawn")
        self._draw = random.Random(0)
        self._started = 0
        self._pipes: list[Pipe] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.killed = 0
        for _ in range(count):
            self._start()
        for pipe in self._pipes:
            if not pipe.poll(_START_S):
                raise SordinoError(f"a client did not start within {_START_S:.0f} s")

    def _tell(self, pipe: Pipe) -> None:
        with suppress(OSError):  # killed before it read
            pipe.send(self._script)

    def _start(self) -> None:
        mine, other = self._context.Pipe()
        process = self._context.Process(target=live, args=(self._started, other), daemon=True)
        process.start()
        other.close()
        threading.Thread(target=self._tell, args=(mine,), daemon=True).start()  # until the child reads, seconds later
        self._started += 1
        self._pipes.append(mine)
        self._processes.append(process)

    def hear(self) -> None:
        for pipe in self._pipes:
            while _hears(pipe) and (told := _told(pipe)):
                kind, text = told
                if kind == "done":
                    self.done[text] += 1
                elif kind == "failed":
                    self.failures.append(text)

    def kill_one(self) -> None:
        """Any of them, at once; another takes its place."""
        self.hear()
        number = self._draw.randrange(len(self._processes))
        process, pipe = self._processes.pop(number), self._pipes.pop(number)
        process.kill()
        process.join()
        pipe.close()
        self.killed += 1
        self._start()

    def close(self) -> None:
        """Lets each finish what it does."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                pipe.send("stop")
            except OSError:
                self.failures.append("a client ended before its time")
            deadline = time.monotonic() + _GONE_S
            while process.is_alive() and time.monotonic() < deadline:
                self.hear()  # a full pipe would hold it
                process.join(0.05)
            if process.is_alive():
                self.failures.append(f"a client did not finish its call within {_GONE_S:.0f} s")
                process.kill()
                process.join()
        self.hear()
        for pipe in self._pipes:
            pipe.close()


def _hears(pipe: Pipe) -> bool:
    try:
        return pipe.poll()
    except OSError:
        return False


def _told(pipe: Pipe) -> tuple[str, str] | None:
    try:
        told: tuple[str, str] = pipe.recv()
    except (EOFError, OSError):
        return None
    return told


class Probe:
    """A stream that asks for one masked product after another; ``times`` are (when, seconds), from ``start``."""

    def __init__(self, script: Script) -> None:
        self.times: list[tuple[float, float]] = []
        self.failure = ""
        self._stop = threading.Event()
        opening = script.opening(pb.PROTOCOL_MASKED)
        self._stream = Stream(script.host, script.port, script.ca, script.token, opening)
        self._requests = [framed(request) for request in script.masked.requests]
        self._answers = script.masked.answers
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.wait(_PAUSE_S):
                begin = time.monotonic()
                answer = self._stream.exchange(self._requests[number]).data
                end = time.monotonic()
                _same(answer, self._answers[number])
                self.times.append((end, end - begin))
                number = (number + 1) % len(self._requests)
        except (OSError, SordinoError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._stream.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


# -- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at ``at_s`` after the start; ``p50_ms`` and ``p99_ms`` of the probe since the last sample."""

    at_s: float
    rss: int
    files: int
    threads: int
    calls: int
    page_sessions: int
    page_bytes: int
    waiting: int
    p50_ms: float
    p99_ms: float


def figures(port: int) -> Counter[tuple[str, str]]:
    """The server's figures: ``(name without prefix, method)`` to their sum."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name.removeprefix("sordino_"), sample.labels.get("method", "")] += int(sample.value)
    return found


def take(server: Server, start: float, times: Sequence[float]) -> Sample:
    """
    Args:
        times: of the probe, in seconds.

    Raises:
        SordinoError: the server is gone.
    """
    if not server.process.is_running():
        raise SordinoError("the server ended")
    now = figures(server.metrics)
    with server.process.oneshot():
        rss, threads = server.process.memory_info().rss, server.process.num_threads()
    p50, p99 = np.percentile(times, (50, 99)) if times else (0.0, 0.0)
    return Sample(
        at_s=round(time.monotonic() - start, 2),
        rss=rss,
        files=server.process.num_fds(),
        threads=threads,
        calls=sum(value for (name, _), value in now.items() if name == "calls_open"),
        page_sessions=now["page_sessions", ""],
        page_bytes=now["page_bytes", ""],
        waiting=now["queue_depth", ""],
        p50_ms=round(1e3 * float(p50), 3),
        p99_ms=round(1e3 * float(p99), 3),
    )


@dataclass(frozen=True, slots=True)
class Course:
    """What a run showed. ``before`` is the server at rest after its first calls, ``after`` when all clients
    were gone."""

    seconds: float
    samples: list[Sample]
    probe: list[tuple[float, float]]
    before: Sample
    after: Sample
    done: Counter[str]
    failures: list[str]
    unended: list[str]


def judge(course: Course) -> tuple[dict[str, float], list[str]]:
    """Figures of the time after the warm-up, and what is wrong.

    Memory may grow by 48 MiB between its first and last third, and as much by a line through all of it (Theil and Sen:
    the median of all slopes, which a few peaks do not move). That is what a heap of many threads takes and returns by
    chance; in ten minutes of some thousand sessions it is less than a tenth of a page for each, so that a page, a
    buffer of a message or a thread that stays behind shows.

    Descriptors and threads may differ by 8, the clients that are there at the moment and threads that gRPC keeps. The
    probe's 99th percentile may grow by half. One deed in twenty may find no room.
    """
    samples = [one for one in course.samples if one.at_s > course.seconds / 5]
    if len(samples) < 6 or len(course.probe) < 6:
        return {}, ["the run was too short to tell anything", *course.failures]
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]

    def moved(read: Callable[[Sample], int]) -> float:
        return statistics.median(map(read, last)) - statistics.median(map(read, first))

    at = np.array([one.at_s for one in samples])
    slope = float(theilslopes(np.array([one.rss for one in samples], float), at)[0])
    span = float(at[-1] - at[0])
    times = [(when, seconds) for when, seconds in course.probe if when > course.seconds / 5]
    bounds = [course.seconds * (1 + 4 * part / 3) / 5 for part in (1, 2)]
    early = [seconds for when, seconds in times if when <= bounds[0]]
    late = [seconds for when, seconds in times if when > bounds[1]]
    if not early or not late:
        return {}, ["the probe was not answered", *course.failures]
    p99 = [1e3 * float(np.percentile(some, 99)) for some in (early, late)]
    total = sum(course.done.values())
    found = {
        "growth_mib_by_thirds": moved(lambda one: one.rss) / MIB,
        "growth_mib_by_line": slope * span / MIB,
        "growth_mib_per_hour": 3600 * slope / MIB,
        "bound_mib_per_hour": 3600 * MOST_GROWTH / span / MIB,
        "files_moved": moved(lambda one: one.files),
        "files_kept": course.after.files - course.before.files,
        "threads_moved": moved(lambda one: one.threads),
        "p50_ms": 1e3 * float(np.median([seconds for _, seconds in times])),
        "p99_ms_first_third": p99[0],
        "p99_ms_last_third": p99[1],
        "p99_ratio": p99[1] / p99[0],
        "busy": course.done["busy"] / max(1, total),
    }
    allowed = {
        "growth_mib_by_thirds": MOST_GROWTH / MIB,
        "growth_mib_by_line": MOST_GROWTH / MIB,
        "files_moved": MOST_FILES,
        "files_kept": MOST_FILES,
        "threads_moved": MOST_THREADS,
        "p99_ratio": MOST_P99,
        "busy": MOST_BUSY,
    }
    reasons = [f"{name} is {found[name]:.2f}, allowed {most:g}" for name, most in allowed.items() if found[name] > most]
    left = {"calls": course.after.calls, "sessions with pages": course.after.page_sessions}
    left |= {"bytes of pages": course.after.page_bytes, "requests that wait": course.after.waiting}
    reasons += [f"{count} {what} left when all clients were gone" for what, count in left.items() if count]
    return {name: round(value, 3) for name, value in found.items()}, [*reasons, *course.unended, *course.failures]


@contextmanager
def serving(bundle: Path, state: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    arguments = ["--metrics-port", str(port)]
    with server_process(bundle, state, allow_clear=True, arguments=arguments) as (target, ca, token, process):
        yield Server(target, ca, token.read_text().strip(), process, port)


def run(bundle: Path, minutes: float, count: int) -> tuple[Course, int]:
    """What the server showed under the load of ``count`` clients, and how many of them were killed.

    Raises:
        SordinoError: the server does not start, or ends.
    """
    seconds = 60 * minutes
    pause, kills = min(2.0, seconds / 120), min(_KILL_S, seconds / 2)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-soak-")))
        server = stack.enter_context(serving(bundle, work))
        script = write_script(bundle, server)
        before, _ = at_rest(server, time.monotonic())
        with closing(Clients(script, count)) as clients, closing(Probe(script)) as probe:
            start, samples, seen = time.monotonic(), list[Sample](), 0
            kill_at = start + kills
            with progress_bar("seconds") as shown:
                while (passed := time.monotonic() - start) < seconds and not (clients.failures or probe.failure):
                    shown(int(passed), int(seconds) + 1)
                    time.sleep(pause)
                    clients.hear()
                    times = [took for _, took in probe.times[seen:]]
                    seen += len(times)
                    samples.append(take(server, start, times))
                    if time.monotonic() > kill_at:
                        clients.kill_one()
                        kill_at = time.monotonic() + kills
        after, unended = at_rest(server, start)
        failures = clients.failures + ([f"the probe: {probe.failure}"] if probe.failure else [])
        times_of_probe = [(when - start, took) for when, took in probe.times]
        course = Course(seconds, samples, times_of_probe, before, after, clients.done, failures, unended)
        return course, clients.killed


def at_rest(server: Server, start: float) -> tuple[Sample, list[str]]:
    """The server when nobody asks anything, or after a minute; and what does not add up then."""
    deadline = time.monotonic() + _GONE_S
    sample = take(server, start, [])
    while (sample.calls or sample.page_sessions or sample.page_bytes) and time.monotonic() < deadline:
        time.sleep(0.2)
        sample = take(server, start, [])
    now, wrong = figures(server.metrics), []
    for (name, method), started in now.items():
        ended = now["calls_ended_total", method]
        if name == "calls_started_total" and started != ended:
            wrong.append(f"of {method} {started} calls started and {ended} ended")
    return sample, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, default=Path(".demo/bundle"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    try:
        if options.minutes <= 0 or not 1 <= options.clients <= 4:
            raise RangeError("a soak takes some time and 1 to 4 clients: more find no room for a stream of masks")
        course, killed = run(options.bundle, options.minutes, options.clients)
    except SordinoError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")
    found, reasons = judge(course)
    result: dict[str, Any] = {
        "machine": machine(),
        "model": ModelManifest.load(options.bundle).model_name,
        "minutes": options.minutes,
        "clients": options.clients,
        "clients_killed": killed,
        "deeds": dict(sorted(course.done.items())),
        "probe_round_trips": len(course.probe),
        "figures": found,
        "before": asdict(course.before),
        "after": asdict(course.after),
        "reasons": reasons,
        "samples": [asdict(one) for one in course.samples],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    sys.exit(1 if reasons else 0)


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("", "", box=SIMPLE, show_header=False)
    for name, value in {**result["deeds"], "clients killed": result["clients_killed"], **result["figures"]}.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    console.print(table)
    console.print("; ".join(result["reasons"]) or "nothing grew, nothing is left", highlight=False)


if __name__ == "__main__":
    main()
