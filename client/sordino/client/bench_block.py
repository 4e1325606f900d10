"""``sordino bench block``: one transformer block on shares, by profile ``two-party`` (``mpc``) and by CrypTen.

One new row goes through a layer of a bundle and with its own sees so many rows, the others being in a cache in shares.
Client, server and dealer are processes, with TLS on loopback; figures are of payloads. A pass of mpc ends with the last
norm and the opening of its result; so a block is what it takes longer with three layers than with one. Half of mpc's
passes are before CrypTen's and half after them, so that a drifting machine drifts for both. CrypTen and the layer in
float64 are in ``bench/peers/crypten`` of a checkout.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from sordino.client.bench import machine
from sordino.client.bench_linear import load_matrices
from sordino.client.local_server import server_process
from sordino.client.terminal import progress_bar
from sordino.client.transport import Connection
from sordino.client.twoparty.session import MOST_ROWS, PartySession
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.shared.errors import RangeError, SordinoError
from sordino.shared.manifest import CLIENT_DIR, MANIFEST_NAME, SERVER_DIR, ModelManifest, sha256_file
from sordino.shared.transport import error_of
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.passes import ranges
from sordino.shared.twoparty.source import Dealer
from sordino.shared.twoparty.tape import CLIENT, SERVER

F64 = NDArray[np.float64]

PROTOCOLS: Final = ("mpc", "crypten")
LAST_NORM_ROUNDS: Final = 3  # docs/two-party.md, §6
_PEERS_FOLDER: Final = Path(__file__).parents[3] / "bench"
_START_S: Final = 120
_WARM_UP: Final = 2
_SERVER_S: Final = 0.05  # for the server to have all that the dealer sends it, when the client has all of its own
_MORE_LAYERS: Final = 3  # of the longer model, to tell what a layer adds
_COMPARED: Final = {"ms_p50": "ms", "bytes": "MB", "dealer_bytes": "dealer MB", "rounds": "rounds"}  # and its name


def run_block(
    bundle: Path, *, protocols: list[str], context: int, repeats: int, json_path: Path | None, console: Console
) -> dict[str, Any]:
    """Runs the benchmark; returns what is written to ``json_path``.

    Args:
        context: rows that the new one sees, itself among them. repeats: passes that count, of each protocol.

    Raises:
        RangeError: too few rows or passes.
        SordinoError: an unknown protocol, no checkout, CrypTen is not there, another kind of model, or one layer.
    """
    unknown = set(protocols) - set(PROTOCOLS)
    if unknown or not protocols:
        raise SordinoError(f"--protocols takes {', '.join(PROTOCOLS)}, not {', '.join(sorted(unknown)) or 'nothing'}")
    if context < 2 or repeats < 1:
        raise RangeError(f"the benchmark needs a context of 2 and 1 repeat at least, not {context} and {repeats}")
    if json_path and not json_path.absolute().parent.is_dir():
        raise SordinoError(f"--json {json_path}: there is no such folder")
    peer = _peer(crypten="crypten" in protocols)
    layer, rows = peer.load_layer(bundle, context)
    case = peer.make_case(layer, rows)
    manifest = ModelManifest.load(bundle)
    load = round(psutil.getloadavg()[0], 2)
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        done = stack.enter_context(progress_bar("passes of one block"))
        own: list[Passes] = []
        if "mpc" in protocols:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-block-")))
            dealer = stack.enter_context(dealer_process(work / "dealer"))
            layers = 1 + max(group.layer for group in manifest.groups)
            if layers == 1:
                raise SordinoError("the bundle has one layer: what a block takes is told from a pass of two or three")
            for count in (1, min(layers, _MORE_LAYERS)):
                own.append(stack.enter_context(sharing(bundle, work, dealer, count, rows.numpy(), repeats)))
            _measure(own, repeats - repeats // 2)
        if "crypten" in protocols:
            results["crypten"] = peer.measure(case, repeats, done)
        if own:
            _measure(own, repeats // 2)
            results["mpc"] = block(*own) | {"whole_pass": own[0].figures(case.expected[0].numpy(), layer.eps)}
    result: dict[str, Any] = {
        "machine": machine() | {"threads": 1, "load_before": load},
        "model": manifest.model_name,
        "context": context,
        "repeats": repeats,
        "results": [results[name] for name in dict.fromkeys(protocols)],
        "ratios": _ratios(results) if len(results) > 1 else {},
        "notes": [
            "three processes with TLS on loopback, one thread for each party's products; bytes are payloads, both ways",
            "the dealer is done before a pass begins: its time is not in that of the pass",
            *(_NOTES if "mpc" in results else ()),
        ],
    }
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _show(result, console)
    return result


_NOTES: Final = (
    "mpc: a block is what one more layer adds to a pass",
    f"mpc: a whole pass has one layer, {LAST_NORM_ROUNDS} rounds of the last norm, and the opening of the result",
    "mpc: after each pass the cache is cropped, so that every pass sees the same rows",
    "mpc: ahead are the encrypted products that a row needs, made for all passes at once",
    "mpc: what comes out is divided by its root mean square; errors are of its product with that of float64",
)


def _measure(own: list[Passes], repeats: int) -> None:
    for _ in range(repeats):
        for passes in own:
            passes.measure()


def _ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    crypten, mpc = results["crypten"], results["mpc"]
    below = {"crypten/mpc": mpc, "crypten/mpc, a whole pass of one layer": mpc["whole_pass"]}
    return {name: {key: round(crypten[key] / entry[key], 2) for key in _COMPARED} for name, entry in below.items()}


def _peer(*, crypten: bool) -> Any:
    """The module ``block`` of the checkout."""
    if not (_PEERS_FOLDER / "peers").is_dir():
        raise SordinoError(
            "the block in float64 is not in the package: run this in a checkout of Sordino (bench/peers)"
        )
    if crypten and not all(importlib.util.find_spec(name) for name in ("crypten", "omegaconf")):
        raise SordinoError(
            "CrypTen is not installed: run pip install -c constraints.txt --no-deps crypten omegaconf in the checkout"
        )
    if str(_PEERS_FOLDER) not in sys.path:
        sys.path.append(str(_PEERS_FOLDER))
    return importlib.import_module("peers.crypten.block")


# -- what the two-party profile does -----------------------------------------------------------------------------------


def first_layers(bundle: Path, folder: Path, count: int) -> None:
    """Makes ``folder`` a bundle of the first layers of another, without embedding, the last norm with weights 1."""
    manifest = ModelManifest.load(bundle)
    groups = tuple(group for group in manifest.groups if group.layer < count)
    client, server = folder / CLIENT_DIR, folder / SERVER_DIR
    client.mkdir(parents=True)
    server.mkdir()
    config = json.loads((bundle / CLIENT_DIR / "config.json").read_bytes())
    (client / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    kept = tuple(f"model.layers.{layer}." for layer in range(count))
    with safe_open(bundle / CLIENT_DIR / "client.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith(kept)}  # noqa: SIM118
    tensors["model.norm.weight"] = np.ones(config["hidden_size"], np.float32)
    save_file(tensors, client / "client.safetensors")
    save_file(load_matrices(bundle, manifest, list(groups)), server / "weights.safetensors")
    files = [{path.name: sha256_file(path) for path in sorted(side.iterdir())} for side in (client, server)]
    less = replace(manifest, groups=groups, client_files=files[0], server_files=files[1])
    (folder / MANIFEST_NAME).write_bytes(less.to_json())


@dataclass(slots=True)
class Passes:
    """A session of profile two-party whose cache has all rows but the last, and passes of that one.

    Attributes:
        layers: of its model. rows: float64 ``[context, d]``. kept: counters of those in the cache.
        dealt: bytes that the dealer sends to client and server for the last row.
        times: of passes, in ms. dealing: of the dealer before each, in ms. outputs: ``[d]`` each.
        costs: rounds, bytes up and bytes down.
    """

    session: PartySession
    layers: int
    rows: F64
    dealt: tuple[int, int]
    kept: list[int]
    times: list[float] = field(default_factory=list)
    dealing: list[float] = field(default_factory=list)
    outputs: list[F64] = field(default_factory=list)
    costs: list[tuple[int, int, int]] = field(default_factory=list)

    def measure(self) -> None:
        """One pass, after which the cache is as before."""
        spent = self.session.spent
        before = spent.rounds, spent.sent, spent.received
        start = time.perf_counter()
        self.session.ask_ahead(1, self.kept)
        self.dealing.append(1e3 * (time.perf_counter() - start))
        time.sleep(_SERVER_S)
        start = time.perf_counter()
        hidden, _ = self.session.forward(self.rows[-1:], self.kept)
        self.times.append(1e3 * (time.perf_counter() - start))
        self.costs.append((spent.rounds - before[0], spent.sent - before[1], spent.received - before[2]))
        self.outputs.append(hidden[0])

    def totals(self) -> dict[str, float]:
        """Of a pass.

        Raises:
            SordinoError: passes cost different amounts.
        """
        if len(set(self.costs)) != 1:
            raise SordinoError("passes of the same rows cost different amounts: the figures would be worth nothing")
        rounds, up, down = self.costs[0]
        ms = statistics.median(self.times)
        return {"ms_p50": ms, "bytes": up + down, "dealer_bytes": sum(self.dealt), "rounds": rounds}

    def figures(self, expected: F64, eps: float) -> dict[str, Any]:
        """For a model of one layer, whose output in float64 is ``expected [d]``. Raises as :meth:`totals`."""
        totals = self.totals()
        _, up, down = self.costs[0]
        root = float(np.sqrt(np.square(expected).mean() + eps))
        errors = [float(np.abs(output * root - expected).max()) for output in self.outputs]
        spent, made = self.session.spent, len(self.rows) - 1 + _WARM_UP + len(self.times)
        return {
            "ms_p50": round(totals["ms_p50"], 1),
            "ms": [round(ms, 1) for ms in self.times],
            "rounds": totals["rounds"],
            "rounds_of_the_last_norm": LAST_NORM_ROUNDS,
            "bytes": totals["bytes"],
            "bytes_up": up,
            "bytes_down": down,
            "dealer_bytes": totals["dealer_bytes"],
            "dealer_bytes_client": self.dealt[CLIENT],
            "dealer_bytes_server": self.dealt[SERVER],
            "dealer_ms_p50": round(statistics.median(self.dealing), 1),
            "ahead_bytes": round((spent.ahead_sent + spent.ahead_received) / made),
            "ahead_bytes_up": round(spent.ahead_sent / made),
            "ahead_bytes_down": round(spent.ahead_received / made),
            "ahead_ms": round(1e3 * spent.ahead_s / made, 1),
            "ahead_rows": made,
            "max_error": max(errors),
            "max_errors": errors,
            "max_output": float(np.abs(expected).max()),
        }


def block(one: Passes, more: Passes) -> dict[str, Any]:
    """What a further layer adds to a pass: of bytes and rounds, and of the times of passes one after the other.

    Raises:
        SordinoError: as :meth:`Passes.totals`.
    """
    less, all_in_all = one.totals(), more.totals()
    added = more.layers - one.layers
    each = {key: round((all_in_all[key] - less[key]) / added) for key in _COMPARED if key != "ms_p50"}
    times = [(b - a) / added for a, b in zip(one.times, more.times, strict=True)]
    dealing = [(b - a) / added for a, b in zip(one.dealing, more.dealing, strict=True)]
    return {
        "protocol": "mpc",
        "layers": [one.layers, more.layers],
        "ms_p50": round(statistics.median(times), 1),
        "ms": [round(ms, 1) for ms in times],
        **each,
        "dealer_ms_p50": round(statistics.median(dealing), 1),
    }


@contextmanager
def sharing(bundle: Path, work: Path, dealer: DealerProcess, layers: int, rows: F64, repeats: int) -> Iterator[Passes]:
    """A server of the first layers and a session, for ``repeats`` passes after some that do not count.

    Raises:
        SordinoError: the server does not start, or it or the dealer refuses the session.
    """
    folder, before = work / f"bundle-{layers}", len(rows) - 1
    first_layers(bundle, folder, layers)
    tensors = load_file(folder / CLIENT_DIR / "client.safetensors")
    options = ["--threads", "1", *dealer.server_options]
    with server_process(folder, work / f"server-{layers}", allow_clear=False, arguments=options) as (
        target,
        ca,
        token,
        _,
    ):
        connection = Connection(target, token=token.read_text().strip(), ca=ca)
        with PartySession(connection, tensors, dealer.connect(CLIENT)) as session:
            session.provision(len(rows) - 1 + _WARM_UP + repeats)
            passes = [min(MOST_ROWS, before - start) for start in range(0, before, MOST_ROWS)]
            dealt = dealt_bytes(dealer, connection.manifest.fingerprint, session.plan, [*passes, 1])[-1]
            _, kept = session.forward(rows[:-1], [])
            for _ in range(_WARM_UP):  # the first asks for a pass that does not come
                session.forward(rows[-1:], kept)
            yield Passes(session, layers, rows, dealt, kept)


# -- the dealer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DealerProcess:
    """Where a dealer is, and its process. tokens: files, of a client and of a server."""

    target: str
    ca: Path
    tokens: tuple[Path, Path]
    process: psutil.Process

    @property
    def server_options(self) -> list[str]:
        """Of ``sordino serve``."""
        return ["--dealer", self.target, "--dealer-ca", str(self.ca), "--dealer-token-file", str(self.tokens[SERVER])]

    def token(self, party: int) -> str:
        return self.tokens[party].read_text().strip()

    def connect(self, party: int) -> Dealer:
        return Dealer(self.target, self.ca, self.token(party))


@contextmanager
def dealer_process(state: Path) -> Iterator[DealerProcess]:
    """A ``sordino deal`` of its own with TLS, on loopback.

    Raises:
        SordinoError: it does not start.
    """
    state.mkdir(parents=True, exist_ok=True)
    port_file, log = state / "port", state / "dealer.log"
    command = [sys.executable, "-m", "sordino.shared.cli", "deal", "--port", "0", "--state", str(state)]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--port-file", str(port_file)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SordinoError(f"the dealer did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        tokens = state / "client" / "token", state / "server" / "token"
        target = f"grpcs://127.0.0.1:{int(port_file.read_text())}"
        yield DealerProcess(target, state / "ca.pem", tokens, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def dealt_bytes(dealer: DealerProcess, fingerprint: str, plan: Plan, passes: Sequence[int]) -> list[tuple[int, int]]:
    """Payloads that the dealer sends to client and server for passes of so many rows, each after those before it.

    They are asked for in a session of their own, by both parties' tokens: amounts depend on sizes alone.

    Raises:
        SordinoError: the dealer refuses.
    """
    asking: dict[int, SimpleQueue[pb.DealRequest | None]] = {SERVER: SimpleQueue(), CLIENT: SimpleQueue()}
    found = []
    with dealer.connect(CLIENT) as client, dealer.connect(SERVER) as server:
        session, _ = client.begin(fingerprint, plan)
        server.join(session, fingerprint, plan)
        calls = {party: {CLIENT: client, SERVER: server}[party].call(session, asking[party]) for party in asking}
        try:
            kept = 0
            for number, rows in enumerate(passes):
                wanted = pb.Pass(number=number, rows=rows, first_counter=kept, kept=ranges(range(kept)))
                kept += rows
                sent = dict.fromkeys(asking, 0)
                for party, call in calls.items():
                    request = pb.DealRequest()
                    getattr(request, "pass").CopyFrom(wanted)
                    asking[party].put(request)
                    for part in call:
                        sent[party] += len(part.points) + len(part.corrections)
                        if part.last:
                            break
                found.append((sent[CLIENT], sent[SERVER]))
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            for party, call in calls.items():
                asking[party].put(None)
                call.cancel()
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['ms_p50']:.1f}",
        str(row["rounds"]),
        *(f"{row[name] / 1e6:.3f}" if name in row else "" for name in ("bytes", "dealer_bytes", "ahead_bytes")),
        f"{row['dealer_ms_p50']:.1f}",
        f"{row['max_error']:.4f} of {row['max_output']:.2f}" if "max_error" in row else "",
    ]


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"one row through the first layer of {result['model']}, {result['context']} rows in sight")
    columns = ("protocol", "ms", "rounds", "MB", "dealer MB", "ahead MB", "dealer ms", "largest error")
    for column in columns:
        table.add_column(column, justify="left" if column == "protocol" else "right")
    for entry in result["results"]:
        for name, row in ((entry["protocol"], entry), ("  whole pass", entry.get("whole_pass", {}))):
            if row:
                table.add_row(name, *_cells(row))
    console.print(table)
    for pair, ratios in result["ratios"].items():
        shown = ", ".join(f"{_COMPARED[key]} {ratio:,.1f}" for key, ratio in ratios.items())
        console.print(f"{pair}: {shown}", highlight=False)
    for note in result["notes"]:
        console.print(note, style="dim", highlight=False)
