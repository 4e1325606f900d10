"""``sordino bench serve``: a server under the load of several clients, with continuous batching and without.

Two server processes, one started ``--no-batching``, hold the same bundle and take turns, so that a drifting machine
drifts for both; the other one is idle meanwhile. The clients are processes of one stream each that replay recorded
requests (:mod:`sordino.client.replay`): what limits is the server, not the model's client. Recorded is one masked row
for each group, as uniform as masked rows are; the answers are compared with the integer products first.

What a message costs besides its product is also measured alone: one client of a third server, whose only group is a
matrix of 8 x 8.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from sordino.client.bench import cpu_seconds, machine
from sordino.client.bench_linear import load_matrices
from sordino.client.local_server import server_process
from sordino.client.prg import uniform_mod_p
from sordino.client.replay import Run, Setup
from sordino.client.terminal import progress_bar
from sordino.client.transport import Connection, EvaluationStream
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, RangeError, SordinoError
from sordino.shared.manifest import (
    CLIENT_DIR,
    MANIFEST_NAME,
    SERVER_DIR,
    FileSpec,
    GroupSpec,
    MemberSpec,
    ModelManifest,
    sha256_file,
)
from sordino.shared.prg import random_key
from sordino.shared.ring import P

MOST_CLIENTS: Final = 32  # streams that a server allows one token
_LEAST_S: Final = 2.0  # of a turn: processor time is told in hundredths of a second
_WARM_TOKENS: Final = 2
_RAMP_TOKENS: Final = 16  # of each client, before the count
_EMPTY_TOKENS: Final = 4000  # of one message
_START_S: Final = 120.0


def run_serve(
    bundle: Path,
    *,
    synthetic: str | None,
    concurrency: Sequence[int],
    tokens: int,
    repeats: int,
    json_path: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Runs the benchmark; returns what is written to ``json_path``.

    Args:
        synthetic: ``HIDDENxLAYERS``: random matrices shaped like those of a Llama of this size, instead of ``bundle``.
        concurrency: numbers of clients.
        tokens: of every client in a turn, at least; a turn also takes two seconds at least.
        repeats: turns for each number.

    Raises:
        RangeError: nothing to measure, or more clients than a server takes.
        IntegrityError: a server's product is wrong.
        SordinoError: a server or a client does not start, or ends.
    """
    if tokens < 2 or repeats < 1:
        raise RangeError(f"the benchmark needs 2 tokens and 1 repeat at least, not {tokens} and {repeats}")
    if not concurrency or not all(1 <= clients <= MOST_CLIENTS for clients in concurrency):
        given = ",".join(map(str, concurrency)) or "nothing"
        raise RangeError(f"--concurrency takes numbers from 1 to {MOST_CLIENTS}, not {given}")
    if json_path and not json_path.absolute().parent.is_dir():
        raise SordinoError(f"--json {json_path}: there is no such folder")
    counts, load_before = list(dict.fromkeys(concurrency)), round(psutil.getloadavg()[0], 2)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-bench-")))
        if synthetic is not None:
            bundle = write_bundle(work / "bundle", synthetic, llama_shapes(*parse_size(synthetic)))
        manifest = ModelManifest.load(bundle)
        empty = _empty(work)
        servers = [
            stack.enter_context(_server(bundle, work / f"server-{number}", batching=batching))
            for number, batching in enumerate((True, False))
        ]
        recording = record(bundle, servers)
        clients = [stack.enter_context(_Client.started(recording, servers)) for _ in range(max(counts))]
        loads = {(count, batching): _Load() for count in counts for batching in (True, False)}
        with progress_bar("turns") as done:
            for turn in range(repeats):
                for count in counts:
                    done(turn * len(counts) + counts.index(count), repeats * len(counts))
                    for number in (0, 1) if turn % 2 else (1, 0):
                        load = measure(servers, number, clients[:count], len(manifest.groups), tokens)
                        loads[count, number == 0].add(load)
    result: dict[str, Any] = {
        "machine": machine() | {"load_before": load_before},
        "model": manifest.model_name,
        "weights": sum(group.planes * group.in_features * group.out_features for group in manifest.groups),
        "messages_per_token": len(manifest.groups),
        "bytes_up_per_token": recording.up,
        "bytes_down_per_token": recording.down,
        "tokens": tokens,
        "repeats": repeats,
        "results": [
            {"concurrency": count, "batching": batching} | load.figures(len(manifest.groups))
            for (count, batching), load in loads.items()
        ],
        "empty_message": empty,
        "notes": [
            "servers and clients are processes of one machine, TLS on loopback; each client one stream, one thread",
            "clients replay recorded rows by frames made before: their processor time is less than a model's client's",
            f"clients begin at groups as far from each other as can be, {_RAMP_TOKENS} tokens before the count",
            "kernel: time of the products by the server's clock, a request's share where it was one of several",
            "wire: processor time of both sides but for kernel time; too low where products waited for a processor",
            "ratios are of the figures over all turns; kernel and server_cpu without batching over with",
        ],
    }
    result["ratios"] = ratios(result["results"])
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _show(result, console)
    return result


# -- bundles of random matrices --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A group's inputs, and the outputs of its members by name."""

    layer: int
    in_features: int
    members: dict[str, int]


def parse_size(text: str) -> tuple[int, int]:
    """``2048x8``: hidden size and layers.

    Raises:
        RangeError: it is none, or no model of a size that a machine holds.
    """
    hidden, _, layers = text.partition("x")
    if not (hidden.isdecimal() and layers.isdecimal() and 8 <= int(hidden) <= 16384 and 1 <= int(layers) <= 256):
        raise RangeError(f"--synthetic takes a hidden size from 8 and layers, as in 2048x8, not {text[:40]!r}")
    return int(hidden), int(layers)


def llama_shapes(hidden: int, layers: int) -> list[Shape]:
    """Groups of a Llama whose heads share nothing; the inner size is 8/3 of the hidden one, up to a multiple of 256."""
    inner = -(-8 * hidden // (3 * 256)) * 256
    shapes = []
    for layer in range(layers):
        shapes += [
            Shape(layer, hidden, {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden}),
            Shape(layer, hidden, {"o_proj": hidden}),
            Shape(layer, hidden, {"gate_proj": inner, "up_proj": inner}),
            Shape(layer, inner, {"down_proj": hidden}),
        ]
    return shapes


def write_bundle(folder: Path, name: str, shapes: Sequence[Shape]) -> Path:
    """A server's bundle of random matrices, with nothing for a client; weights are 7 bits, as large as usual."""
    (folder / CLIENT_DIR).mkdir(parents=True)
    (folder / SERVER_DIR).mkdir()
    groups: list[GroupSpec] = []
    files: dict[str, FileSpec] = {}
    for number, shape in enumerate(shapes):
        size = sum(shape.members.values()), shape.in_features
        matrix = np.frombuffer(os.urandom(math.prod(size)), np.int8).reshape(size) >> 1
        path = folder / SERVER_DIR / f"weights-{number:05d}.safetensors"
        members = tuple(
            MemberSpec(name=f"layers.{shape.layer}.{key}", out_features=m) for key, m in shape.members.items()
        )
        save_file({members[0].name: matrix}, path)
        files[path.name] = sha256_file(path)
        groups.append(
            GroupSpec(
                name=members[0].name,
                layer=shape.layer,
                in_features=shape.in_features,
                members=members,
                weight_bits=8,
                l1_max=int(np.abs(matrix).sum(axis=1, dtype=np.int64).max()),
                l2_max=math.isqrt(int(np.square(matrix, dtype=np.int16).sum(axis=1, dtype=np.int64).max())) + 1,
            )
        )
    manifest = ModelManifest(
        model_name=f"synthetic-{name}",
        model_type="llama",
        weight_bits=8,
        groups=tuple(groups),
        client_files={},
        server_files=files,
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return folder


# -- servers, and what is recorded of them ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """A server process. ``metrics`` is the port of its metrics on loopback."""

    target: str
    ca: Path
    token: str
    process: psutil.Process
    metrics: int

    def products(self) -> tuple[float, float]:
        """Masked products so far, and the requests that they answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = {
            sample.name.rpartition("_")[2]: sample.value
            for family in text_string_to_metric_families(text)
            if family.name == "sordino_product_requests"
            for sample in family.samples
            if sample.labels.get("kind") == "masked" and not sample.name.endswith("_bucket")
        }
        return found.get("count", 0.0), found.get("sum", 0.0)


@contextmanager
def _server(bundle: Path, state: Path, *, batching: bool) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    arguments = ["--metrics-port", str(port), "--batching" if batching else "--no-batching"]
    with server_process(bundle, state, allow_clear=False, arguments=arguments) as (target, ca, token, process):
        yield Server(target, ca, token.read_text().strip(), process, port)


@dataclass(frozen=True, slots=True)
class Recording:
    """A token's messages in their order: serialised requests, and the ``data`` of their answers. Bytes of a token."""

    opening: bytes
    requests: list[bytes]
    answers: list[bytes]
    up: int
    down: int


def record(bundle: Path, servers: Sequence[Server]) -> Recording:
    """A masked row of each group, and its product: asked of all servers, compared with the matrix.

    Raises:
        IntegrityError: a wrong product.
    """
    manifest = ModelManifest.load(bundle)
    rows = [uniform_mod_p(random_key(), b"bench", group.in_features)[None] for group in manifest.groups]
    exact = [
        _product(load_matrices(bundle, manifest, [group])[group.name], row)
        for group, row in zip(manifest.groups, rows, strict=True)
    ]
    for server in servers:
        connection = Connection(server.target, token=server.token, ca=server.ca)
        try:
            stream = EvaluationStream(connection, pb.PROTOCOL_MASKED)
            for index, (group, row) in enumerate(zip(manifest.groups, rows, strict=True)):
                if not np.array_equal(stream.product(index, group, row), exact[index]):
                    raise IntegrityError(f"group {group.name!r}: the server's product is not the integer one")
            stream.close()
            traffic = connection.traffic
        finally:
            connection.close()
    opening = pb.EvaluateRequest(open=pb.Open(fingerprint=manifest.fingerprint, protocol=pb.PROTOCOL_MASKED))
    requests = [
        pb.EvaluateRequest(id=index + 1, group=index, rows=1, data=row.astype("<u4").tobytes()).SerializeToString()
        for index, row in enumerate(rows)
    ]
    answers = [product.astype("<u4").tobytes() for product in exact]
    down = traffic.down["online"] - pb.EvaluateResponse().ByteSize()
    return Recording(opening.SerializeToString(), requests, answers, sum(map(len, requests)), down)


def _product(matrix: NDArray[np.int8] | NDArray[np.int16], row: NDArray[np.uint32]) -> NDArray[np.uint32]:
    # Below 2^63: 2^11 * 2^32 * 2^20.
    return ((row.astype(np.int64) @ matrix.T.astype(np.int64)) % P).astype(np.uint32)


# -- clients, and what they measure ----------------------------------------------------------------------------------


class _Client:
    """A process of :mod:`sordino.client.replay` with a stream to each server."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process, self._errors = process, errors
        self.usage = psutil.Process(process.pid)

    @classmethod
    @contextmanager
    def started(cls, recording: Recording, servers: Sequence[Server]) -> Iterator[_Client]:
        """
        Raises:
            SordinoError: it does not start.
        """
        parts = [urlsplit(server.target) for server in servers]
        setup = Setup(
            [
                (str(part.hostname), int(part.port or 0), str(server.ca), server.token)
                for part, server in zip(parts, servers, strict=True)
            ],
            b64encode(recording.opening).decode(),
            [b64encode(request).decode() for request in recording.requests],
            [b64encode(answer).decode() for answer in recording.answers],
        )
        command = [sys.executable, "-m", "sordino.client.replay"]
        with tempfile.NamedTemporaryFile("w+", prefix="sordino-replay-") as errors:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            try:
                client = cls(process, Path(errors.name))
                client.tell(json.dumps(asdict(setup)))
                client.hear("open")
                yield client
            finally:
                process.kill()
                process.communicate()

    def tell(self, line: str) -> None:
        if self._process.stdin:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._gone()

    def hear(self, wanted: str = "") -> str:
        """The next line, which is ``wanted`` if that is given.

        Raises:
            SordinoError: the process ended.
        """
        line = self._process.stdout.readline().strip() if self._process.stdout else ""
        if not line or wanted not in ("", line):
            self._gone()
        return line

    def _gone(self) -> None:
        said = self._errors.read_text(errors="replace").strip().rpartition("\n")[2]
        raise SordinoError(f"a client of the benchmark ended: {said[:500] or 'it said nothing'}")


@dataclass(slots=True)
class _Load:
    """Sums over turns; ``tpot`` in milliseconds."""

    seconds: float = 0.0
    messages: int = 0
    kernel_us: int = 0
    server_cpu: float = 0.0
    client_cpu: float = 0.0
    products: float = 0.0
    requests: float = 0.0
    tpot: list[float] = field(default_factory=list)

    def add(self, other: _Load) -> None:
        self.seconds += other.seconds
        self.messages += other.messages
        self.kernel_us += other.kernel_us
        self.server_cpu += other.server_cpu
        self.client_cpu += other.client_cpu
        self.products += other.products
        self.requests += other.requests
        self.tpot += other.tpot

    def figures(self, groups: int) -> dict[str, Any]:
        """Args: groups: messages of a token."""
        tokens = self.messages / groups
        spent = {"kernel": self.kernel_us / 1e6, "server_cpu": self.server_cpu, "client_cpu": self.client_cpu}
        wire = self.server_cpu + self.client_cpu - spent["kernel"]
        p50, p99 = np.percentile(self.tpot, (50, 99))
        return {
            "tokens_per_s": _rounded(tokens / self.seconds),
            "tpot_ms_p50": _rounded(p50),
            "tpot_ms_p99": _rounded(p99),
            "messages_per_s": _rounded(self.messages / self.seconds),
            **{f"{key}_ms_per_token": _rounded(1e3 * value / tokens) for key, value in spent.items()},
            "kernel_us_per_message": _rounded(self.kernel_us / self.messages),
            "server_wire_us_per_message": _rounded(1e6 * (self.server_cpu - spent["kernel"]) / self.messages),
            "client_us_per_message": _rounded(1e6 * self.client_cpu / self.messages),
            "wire_us_per_message": _rounded(1e6 * wire / self.messages),
            "batch_mean": _rounded(self.requests / max(1.0, self.products)),
            "tokens": round(tokens, 2),
            "messages": self.messages,
            "seconds": round(self.seconds, 3),
        }


def measure(servers: Sequence[Server], number: int, clients: Sequence[_Client], groups: int, tokens: int) -> _Load:
    """One turn: all ``clients`` at server ``number``, from when all have some tokens until each has ``tokens`` more.

    Whoever is done goes on until the last one is, so that the load stays the same; what is counted are the messages
    answered meanwhile. Each begins at another group: nobody is in step with others who is not brought there.
    """
    server = servers[number]
    for place, client in enumerate(clients):
        client.tell(f"{number} {_WARM_TOKENS} {_RAMP_TOKENS} {tokens} {place * groups // len(clients)}")
    for client in clients:
        client.hear("warm")

    def spent() -> tuple[float, float]:
        return cpu_seconds(server.process), sum(cpu_seconds(client.usage) for client in clients)

    for client in clients:
        client.tell("")
    for client in clients:
        client.hear("ramped")
    products, requests = server.products()
    server_cpu, client_cpu = spent()
    start = time.monotonic()
    for client in clients:
        client.tell("")
    for client in clients:
        client.hear("done")
    time.sleep(max(0.0, start + _LEAST_S - time.monotonic()))
    end, after = time.monotonic(), spent()
    load = _Load(end - start, server_cpu=after[0] - server_cpu, client_cpu=after[1] - client_cpu)
    after = server.products()
    load.products, load.requests = after[0] - products, after[1] - requests
    for client in clients:
        client.tell("")
    for client in clients:
        run = Run(**json.loads(client.hear()))
        first, last = (int(np.searchsorted(run.ended, moment)) for moment in (start, end))
        load.messages += last - first
        load.kernel_us += sum(run.compute_us[first:last])
        tokens_ended = [moment for moment in run.ended[groups - 1 : last : groups] if moment >= start]
        load.tpot += [1e3 * seconds for seconds in np.diff(tokens_ended)]
    return load


def _empty(work: Path) -> dict[str, Any]:
    """What a message costs whose product is next to nothing: one client of an idle server."""
    bundle = write_bundle(work / "empty", "8", [Shape(0, 8, {"only": 8})])
    with _server(bundle, work / "server-empty", batching=True) as server:
        recording = record(bundle, [server])
        with _Client.started(recording, [server]) as client:
            load = measure([server], 0, [client], 1, _EMPTY_TOKENS)
    figures = load.figures(1)
    return {
        "bytes_up": recording.up,
        "bytes_down": recording.down,
        "round_trip_us_p50": _rounded(1e3 * figures["tpot_ms_p50"]),
        **{
            f"{key}_us": _rounded(1e3 * figures[f"{key}_ms_per_token"])
            for key in ("kernel", "server_cpu", "client_cpu")
        },
    }


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """What batching gains, by concurrency: above 1 it is less time, or more tokens."""
    found = {(entry["concurrency"], entry["batching"]): entry for entry in results}
    gained = []
    for count in dict.fromkeys(entry["concurrency"] for entry in results):
        joined, single = found[count, True], found[count, False]
        gained.append(
            {
                "concurrency": count,
                "end_to_end": _rounded(joined["tokens_per_s"] / single["tokens_per_s"]),
                "kernel": _rounded(single["kernel_ms_per_token"] / joined["kernel_ms_per_token"]),
                "server_cpu": _rounded(single["server_cpu_ms_per_token"] / joined["server_cpu_ms_per_token"]),
            }
        )
    return gained


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _show(result: dict[str, Any], console: Console) -> None:
    title = f"{result['model']} under load, {result['messages_per_token']} messages a token; times in ms a token"
    table = Table(title=title, box=None, collapse_padding=True, pad_edge=False)
    columns = {
        "tok/s": "tokens_per_s",
        "p50": "tpot_ms_p50",
        "p99": "tpot_ms_p99",
        "kernel": "kernel_ms_per_token",
        "server": "server_cpu_ms_per_token",
        "client": "client_cpu_ms_per_token",
        "wire µs": "wire_us_per_message",
        "batch": "batch_mean",
    }
    for column in ("clients", "batched", *columns):
        table.add_column(column, justify="right")
    for entry in result["results"]:
        figures = (f"{entry[key]:g}" for key in columns.values())
        table.add_row(str(entry["concurrency"]), "on" if entry["batching"] else "off", *figures)
    console.print(table)
    table = Table(title="what batching gains", box=SIMPLE)
    for column in ("clients", "end to end", "kernel", "server CPU"):
        table.add_column(column, justify="right")
    for entry in result["ratios"]:
        table.add_row(*(f"{value:g}" for value in entry.values()))
    console.print(table)
    console.print(f"an empty message: {result['empty_message']}", highlight=False)
    for note in result["notes"]:
        console.print(note, style="dim", highlight=False)
