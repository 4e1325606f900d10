"""Real servers and clients for end-to-end tests: processes with TLS and a token, connections below tmp."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import models
import numpy as np

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.split import split_model
from sordino.shared.manifest import ModelManifest
from sordino.shared.packing import plan
from sordino.shared.rlwe import PARAMS, pack

if TYPE_CHECKING:
    from sordino.client import Connected

START_S = 60.0
PROMPT = "the quick brown fox"


def split_tiny(family: str, folder: Path, **options: Any) -> Path:
    """Makes a tiny model of one of ``models.FAMILIES`` below ``folder`` and splits it; returns the bundle."""
    bundle = folder / "bundle"
    split_model(models.make_tiny(family, folder / "model"), bundle, rounding="nearest", **options)
    return bundle


class ServerProcess:
    """``sordino serve`` in a process of its own, with self-made certificates and one token.

    Args:
        bundle: what it serves.
        tmp: folder for its state (certificates, tokens) and log; a restart finds the same ones.
        allow_clear: also answer ``protocol=clear``.
        port: 0 takes a free one; a restart keeps it.
        arguments: further options of the command.
    """

    def __init__(
        self, bundle: Path, tmp: Path, *, allow_clear: bool = False, port: int = 0, arguments: tuple[str, ...] = ()
    ) -> None:
        self.state = tmp / "server-state"
        self.port = port
        self.bundle = bundle
        self._tmp = tmp
        self._arguments = (*(("--allow-clear",) if allow_clear else ()), *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        tmp.mkdir(parents=True, exist_ok=True)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        port_file = self._tmp / "port"
        port_file.unlink(missing_ok=True)
        command = [Path(sys.executable).with_name("sordino"), "serve", self.bundle, "--state", self.state]
        command += ["--port", str(self.port), "--port-file", port_file, "--threads", "1", *self._arguments]
        with (self._tmp / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"the server did not start:\n{self.log()[-2000:]}")
            time.sleep(0.02)
        self.port = int(port_file.read_text())

    def kill(self) -> None:
        """SIGKILL: no farewell, no flush."""
        self._alive.kill()
        self._alive.wait(10)

    def terminate(self, timeout_s: float = 20) -> int:
        """SIGTERM, and wait; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def signal(self, number: int) -> None:
        self._alive.send_signal(number)

    def wait(self, timeout_s: float = 20) -> int:
        return self._alive.wait(timeout_s)

    def restart(self) -> None:
        """Starts it again on the same port, with the same certificates and tokens; it must have ended."""
        assert self._alive.poll() is not None, "end the server before it is started again"
        self.start()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a client needs -----------------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        return f"grpcs://127.0.0.1:{self.port}"  # "localhost" has two addresses, and an error names the last one tried

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        return self.state / "ca.pem"

    @property
    def token(self) -> str:
        return (self.state / "token").read_text().strip()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of this server's own certificate: for a proxy that a client takes for the server."""
        pair = ((self.state / "server.key").read_bytes(), (self.state / "server.pem").read_bytes())
        return grpc.ssl_server_credentials([pair])

    def channel(self, *options: tuple[str, int]) -> grpc.Channel:
        """A plain channel, for messages that a Sordino client would never send."""
        fixed = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(
            self.address, grpc.ssl_channel_credentials(self.ca.read_bytes()), options=[*fixed, *options]
        )

    # -- what a test asks --------------------------------------------------------------------------------------------

    def log(self) -> str:
        path = self._tmp / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def manifest(self) -> ModelManifest:
        return ModelManifest.load(self.bundle)

    def rss(self) -> int:
        """Resident bytes of the process now."""
        pages = int(Path(f"/proc/{self._alive.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def serves(self) -> bool:
        """Whether a new client gets a right answer: group 0 times a row of ones, by the service's own stream."""
        with self.channel() as channel:
            stub = pb_grpc.SordinoStub(channel)
            manifest, group = self.manifest, self.manifest.groups[0]
            one = (1).to_bytes(4, "little")
            first = pb.Open(fingerprint=manifest.fingerprint, protocol=pb.PROTOCOL_MASKED)
            requests = [
                pb.EvaluateRequest(open=first, id=1),
                pb.EvaluateRequest(id=2, group=0, rows=1, data=one * group.in_features),
            ]
            answers = list(stub.Evaluate(iter(requests), metadata=self.metadata, timeout=20))
        return [answer.id for answer in answers] == [1, 2] and len(answers[1].data) == 4 * group.out_features

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _alive(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was never started"
        return self._process


def connect_to(server: ServerProcess, tmp: Path, **options: Any) -> Connected:
    """``sordino.client.connect`` with cache, pool and ledger below ``tmp``, few masks and short waits.

    Args:
        options: of ``connect``; ``target`` and ``ca`` (of a proxy, say) replace the server's.
    """
    from sordino.client import connect

    defaults: dict[str, Any] = {
        "target": server.target,
        "ca": server.ca,
        "token": server.token,
        "cache": tmp / "cache",
        "batch": 128,
        "low_water": 0,
        "timeout_s": 30,
        "retry_s": 30,
    }
    if options.get("protocol", "masked") == "masked":
        defaults |= {"pool": tmp / "pool", "state_dir": tmp / "client-state"}
    chosen = {**defaults, **options}
    return connect(chosen.pop("target"), **chosen)


def answer(connected: Connected, prompt: str = PROMPT, tokens: int = 6, **options: Any) -> list[int]:
    """Token ids of a greedy answer of exactly ``tokens`` tokens (the end token is not heeded)."""
    inputs = connected.tokenizer(prompt, return_tensors="pt")
    chosen = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **options}
    out = connected.model.generate(**inputs, **chosen)
    ids: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


# -- bytes that no Sordino client would send -------------------------------------------------------------------------


def send_raw(
    server: ServerProcess,
    method: str,
    messages: Iterable[bytes],
    *,
    channel: grpc.Channel | None = None,
    metadata: tuple[tuple[str, str], ...] | None = None,
    timeout_s: float = 20,
) -> tuple[list[bytes], grpc.StatusCode, str]:
    """Sends ``messages`` as they are on one call; returns the answers, the final status and its text."""
    with ExitStack() as stack:
        if channel is None:
            channel = stack.enter_context(server.channel(("grpc.max_send_message_length", -1)))
        call = channel.stream_stream(f"/sordino.proto.v1.Sordino/{method}")(
            iter(messages), metadata=server.metadata if metadata is None else metadata, timeout=timeout_s
        )
        answers: list[bytes] = []
        try:
            answers.extend(call)
        except grpc.RpcError as error:
            return answers, error.code(), error.details() or ""
        return answers, grpc.StatusCode.OK, ""


def opening(manifest: ModelManifest, protocol: int = pb.PROTOCOL_MASKED, fingerprint: str | None = None) -> bytes:
    """The first message of an evaluation stream."""
    wanted = manifest.fingerprint if fingerprint is None else fingerprint
    return pb.EvaluateRequest(id=1, open=pb.Open(fingerprint=wanted, protocol=protocol)).SerializeToString()


def rows_message(manifest: ModelManifest, of: int = 0, rows: int = 1, **fields: Any) -> bytes:
    """A valid request for ``rows`` rows of small elements of group ``of``, unless ``fields`` say otherwise."""
    data = np.arange(rows * manifest.groups[of].in_features, dtype="<u4").tobytes()
    return pb.EvaluateRequest(**{"id": 2, "group": of, "rows": rows, "data": data, **fields}).SerializeToString()


def masks_message(manifest: ModelManifest, group: int = 0, points: int = 64, **fields: Any) -> bytes:
    """A valid provisioning request of random residues, unless ``fields`` say otherwise."""
    shape = (2, points, manifest.groups[group].in_features)
    c0 = pack(np.random.default_rng(1).integers(0, min(PARAMS.primes), shape, dtype=np.uint32))
    filled = {"group": group, "seed": bytes(32), "c0": c0, "masks": pb.MaskBlock(block=0, points=points), **fields}
    return pb.ProvisionRequest(**filled).SerializeToString()


def check_message(manifest: ModelManifest, group: int = 0, **fields: Any) -> bytes:
    """A valid request for one check vector, unless ``fields`` say otherwise."""
    spec = manifest.groups[group]
    shape = plan(1, spec.out_features, spec.in_features)[0].shape
    size = (2, PARAMS.n, shape.input_blocks)
    c0 = pack(np.random.default_rng(2).integers(0, min(PARAMS.primes), size, dtype=np.uint32))
    block = pb.BlockProduct(rows=shape.rows, inputs=shape.inputs, outputs=shape.outputs, transposed=True)
    return pb.ProvisionRequest(
        **{"group": group, "seed": bytes(32), "c0": c0, "block": block, **fields}
    ).SerializeToString()
