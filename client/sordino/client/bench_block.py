"""``sordino bench block``: one transformer block on shares, by profile ``two-party`` (``mpc``) and by CrypTen.

One new row goes through the first layer of a bundle and with its own sees so many rows, the others being in a cache in
shares. Client, server and dealer are processes, with TLS on loopback; figures are of payloads. Half of mpc's passes are
before CrypTen's and half after them, so that a drifting machine drifts for both. CrypTen and the layer in float64 are
in ``bench/peers/crypten`` of a checkout.
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
_COMPARED: Final = ("ms_p50", "bytes", "dealer_bytes", "rounds")


def run_block(
    bundle: Path, *, protocols: list[str], context: int, repeats: int, json_path: Path | None, console: Console
) -> dict[str, Any]:
    """Runs the benchmark; returns what is written to ``json_path``.

    Args:
        context: rows that the new one sees, itself among them. repeats: passes that count, of each protocol.

    Raises:
        RangeError: too few rows or passes.
        SordinoError: an unknown protocol, no checkout, CrypTen is not there, or another kind of model.
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
    load = round(psutil.getloadavg()[0], 2)
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        done = stack.enter_context(progress_bar("passes of one block"))
        own: Block | None = None
        if "mpc" in protocols:
            expected = case.expected[0].numpy()
            own = stack.enter_context(shared_block(bundle, rows.numpy(), expected, layer.eps, repeats))
            own.measure(repeats - repeats // 2)
        if "crypten" in protocols:
            results["crypten"] = peer.measure(case, repeats, done)
        if own is not None:
            own.measure(repeats // 2)
            results["mpc"] = own.figures()
    result: dict[str, Any] = {
        "machine": machine() | {"threads": 1, "load_before": load},
        "model": ModelManifest.load(bundle).model_name,
        "context": context,
        "repeats": repeats,
        "results": [results[name] for name in dict.fromkeys(protocols)],
        "ratios": {},
        "notes": [
            "three processes with TLS on loopback, one thread for each party's products; bytes are payloads, both ways",
            *(_NOTES if "mpc" in results else ()),
        ],
    }
    if len(results) > 1:
        pairs = {key: (results["crypten"][key], results["mpc"][key]) for key in _COMPARED}
        result["ratios"]["crypten/mpc"] = {key: round(a / b, 2) for key, (a, b) in pairs.items()}
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _show(result, console)
    return result


_NOTES: Final = (
    f"mpc: {LAST_NORM_ROUNDS} of its rounds, their bytes and their time are the last norm's, with which a pass ends",
    "mpc: it contains the opening of the result to the client, which CrypTen's figures do not",
    "mpc: after each pass the cache is cropped, so that every pass sees the same rows",
    "mpc: the dealer works during the pass, within ms_p50; CrypTen's works before it, and takes dealer_ms_p50",
    "mpc: ahead_ is of the encrypted products that a row needs, made in one block of ahead_rows rows",
    "mpc: what comes out is divided by its root mean square; errors are of its product with that of float64",
)


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


def first_layer(bundle: Path, folder: Path) -> None:
    """Makes ``folder`` a bundle of the first layer of another: without embedding, and with a last norm of weights 1."""
    manifest = ModelManifest.load(bundle)
    groups = tuple(group for group in manifest.groups if group.layer == 0)
    client, server = folder / CLIENT_DIR, folder / SERVER_DIR
    client.mkdir(parents=True)
    server.mkdir()
    config = json.loads((bundle / CLIENT_DIR / "config.json").read_bytes())
    (client / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with safe_open(bundle / CLIENT_DIR / "client.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith("model.layers.0.")}  # noqa: SIM118
    tensors["model.norm.weight"] = np.ones(config["hidden_size"], np.float32)
    save_file(tensors, client / "client.safetensors")
    save_file(load_matrices(bundle, manifest, list(groups)), server / "weights.safetensors")
    files = [{path.name: sha256_file(path) for path in sorted(side.iterdir())} for side in (client, server)]
    one = replace(manifest, groups=groups, client_files=files[0], server_files=files[1])
    (folder / MANIFEST_NAME).write_bytes(one.to_json())


@dataclass(slots=True)
class Block:
    """A session of profile two-party with one layer, whose cache has all rows but the last.

    Attributes:
        rows: float64 ``[context, d]``. expected: the layer's output for the last one, ``[d]``, in float64.
        dealt: bytes that the dealer sends to client and server for the last row. made: rows of products made ahead.
        kept: counters of the rows in the cache. costs: rounds, bytes up and bytes down of passes.
    """

    session: PartySession
    rows: F64
    expected: F64
    eps: float
    dealt: tuple[int, int]
    made: int
    kept: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    costs: set[tuple[int, int, int]] = field(default_factory=set)

    def measure(self, passes: int) -> None:
        for _ in range(passes):
            self.one()

    def one(self) -> None:
        spent = self.session.spent
        before = spent.rounds, spent.sent, spent.received
        start = time.perf_counter()
        hidden, _ = self.session.forward(self.rows[-1:], self.kept)
        self.times.append(1e3 * (time.perf_counter() - start))
        after = spent.rounds, spent.sent, spent.received
        self.costs.add((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
        root = float(np.sqrt(np.square(self.expected).mean() + self.eps))
        self.errors.append(float(np.abs(hidden[0] * root - self.expected).max()))

    def figures(self) -> dict[str, Any]:
        """
        Raises:
            SordinoError: passes cost different amounts.
        """
        if len(self.costs) != 1:
            raise SordinoError("passes of the same rows cost different amounts: the figures would be worth nothing")
        ((rounds, up, down),) = self.costs
        spent, rows = self.session.spent, self.made
        return {
            "protocol": "mpc",
            "ms_p50": round(statistics.median(self.times), 1),
            "ms": [round(ms, 1) for ms in self.times],
            "rounds": rounds,
            "rounds_of_the_last_norm": LAST_NORM_ROUNDS,
            "bytes": up + down,
            "bytes_up": up,
            "bytes_down": down,
            "dealer_bytes": sum(self.dealt),
            "dealer_bytes_client": self.dealt[CLIENT],
            "dealer_bytes_server": self.dealt[SERVER],
            "ahead_bytes": round((spent.ahead_sent + spent.ahead_received) / rows),
            "ahead_bytes_up": round(spent.ahead_sent / rows),
            "ahead_bytes_down": round(spent.ahead_received / rows),
            "ahead_ms": round(1e3 * spent.ahead_s / rows, 1),
            "ahead_rows": rows,
            "max_error": max(self.errors),
            "max_errors": self.errors,
            "max_output": float(np.abs(self.expected).max()),
        }


@contextmanager
def shared_block(bundle: Path, rows: F64, expected: F64, eps: float, repeats: int) -> Iterator[Block]:
    """Processes and a session for ``repeats`` passes, after one that does not count."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-block-")))
        folder = work / "bundle"
        first_layer(bundle, folder)
        dealer = stack.enter_context(dealer_process(work / "dealer"))
        options = ["--threads", "1", *dealer.server_options]
        target, ca, token, _ = stack.enter_context(
            server_process(folder, work / "server", allow_clear=False, arguments=options)
        )
        connection = Connection(target, token=token.read_text().strip(), ca=ca)
        session = stack.enter_context(
            PartySession(connection, load_file(folder / CLIENT_DIR / "client.safetensors"), dealer.connect(CLIENT))
        )
        made = len(rows) + repeats
        session.provision(made)
        before = len(rows) - 1
        passes = [min(MOST_ROWS, before - start) for start in range(0, before, MOST_ROWS)]
        dealt = dealt_bytes(dealer, connection.manifest.fingerprint, session.plan, [*passes, 1])[-1]
        block = Block(session, rows, expected, eps, dealt, made)
        _, block.kept = session.forward(rows[:-1], [])
        session.forward(rows[-1:], block.kept)
        yield block


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


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"one row through the first layer of {result['model']}, {result['context']} rows in sight")
    columns = ("protocol", "ms", "rounds", "MB", "dealer MB", "ahead MB", "largest error")
    for column in columns:
        table.add_column(column, justify="left" if column == "protocol" else "right")
    for entry in result["results"]:
        ahead = f"{entry['ahead_bytes'] / 1e6:.3f}" if "ahead_bytes" in entry else ""
        table.add_row(
            entry["protocol"],
            f"{entry['ms_p50']:.1f}",
            str(entry["rounds"]),
            f"{entry['bytes'] / 1e6:.3f}",
            f"{entry['dealer_bytes'] / 1e6:.3f}",
            ahead,
            f"{entry['max_error']:.4f} of {entry['max_output']:.2f}",
        )
    console.print(table)
    for pair, ratios in result["ratios"].items():
        shown = ", ".join(f"{key} {ratio:,.1f}" for key, ratio in ratios.items())
        console.print(f"{pair}: {shown}", highlight=False)
    for note in result["notes"]:
        console.print(note, style="dim", highlight=False)
