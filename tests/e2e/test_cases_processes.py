"""Several processes and the world around them: pools kept between runs, restarts, message limits, proxies of the
environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import models
import numpy as np
import pytest
import torch
from safetensors import safe_open
from stack import ServerProcess, answer, connect_to

from sordino.client import connect
from sordino.client.bundle import fetch_bundle
from sordino.client.transport import Connection, EvaluationStream
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.split import split_model
from sordino.shared.errors import FingerprintError, LimitError, ProtocolError, SordinoError, TransportError

MIB = 1 << 20
PROXIES = (
    "http_proxy",
    "https_proxy",
    "grpc_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "no_proxy",
    "NO_PROXY",
    "no_grpc_proxy",
)
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def mortal(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that tests end; each leaves it running."""
    with ServerProcess(bundles("llama"), tmp_path_factory.mktemp("mortal"), allow_clear=True) as process:
        yield process


def sordino(server: ServerProcess, tmp: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a home below ``tmp``."""
    homes = {name: str(tmp / name) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    command = [str(Path(sys.executable).with_name("sordino")), *arguments, "--server", server.target]
    return subprocess.run(
        [*command, "--ca", str(server.ca), "--batch", "128"],
        env={**os.environ, **homes, "SORDINO_TOKEN": server.token, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# -- 1.6 and 1.22 ------------------------------------------------------------------------------------------------------


def test_a_pool_outlives_its_process_and_the_server(
    mortal: ServerProcess, bundles: Callable[..., Path], tmp_path: Path
) -> None:
    """Case 1.6: nothing in a pool is tied to a process or a connection: another process uses it with a fresh server,
    and makes nothing anew; with another split it is refused by name. (The KV cache is transformers' own, and stays.)"""
    made = sordino(mortal, tmp_path, "provision")
    assert (made.returncode, "128 masks in the pool" in made.stderr) == (0, True), made.stderr
    mortal.kill()
    mortal.restart()
    [pool] = (tmp_path / "XDG_DATA_HOME" / "sordino" / "pools").iterdir()
    kept = {"pool": pool, "state_dir": tmp_path / "XDG_STATE_HOME" / "sordino" / "ledger"}
    with (masked := connect_to(mortal, tmp_path, **kept)).session as session:
        assert session.masks_left == 128
        hidden = answer(masked, "hello", tokens=4)
        assert "provision" not in session.traffic.up
    with (clear := connect_to(mortal, tmp_path, protocol="clear")).session:
        assert answer(clear, "hello", tokens=4) == hidden
    with ServerProcess(bundles("llama", weight_bits=12), tmp_path / "other") as other:
        with pytest.raises(FingerprintError, match="another split"):
            connect_to(other, tmp_path, **kept)
        # A stream that asks for the old split is no way round it either.
        connection = Connection(other.target, token=other.token, ca=other.ca)
        stream = EvaluationStream(connection, pb.PROTOCOL_MASKED)
        stream._open.open.fingerprint = mortal.manifest.fingerprint
        group = mortal.manifest.groups[0]
        with pytest.raises(FingerprintError, match="another split"):
            stream.product(0, group, np.ones((1, group.in_features), np.uint32))
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_restarted_between_two_calls(mortal: ServerProcess, tmp_path: Path, number: int) -> None:
    """Case 1.22: the next call opens a new stream by itself; nothing was under way, so nothing is sent twice."""
    with (link := connect_to(mortal, tmp_path)).session as session:
        before, rounds = answer(link), session.traffic.rounds
        mortal.signal(number)
        mortal.wait()
        mortal.restart()
        assert answer(link) == before
        assert session.traffic.rounds == 2 * rounds
        session.provision()


# -- 1.21 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that takes messages of 1 MiB at most, and holds a bundle whose files are larger."""
    folder = tmp_path_factory.mktemp("narrow")
    width = {"hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1}
    model = models.make_tiny("llama", folder / "model", **width)
    split_model(model, folder / "bundle", rounding="nearest", local_modules=("o_proj", "q_proj", "k_proj", "v_proj"))
    with ServerProcess(folder / "bundle", folder, allow_clear=True, arguments=("--max-message-mib", "1")) as process:
        yield process


def test_files_masks_and_answers_pass_a_server_of_small_messages(narrow: ServerProcess, tmp_path: Path) -> None:
    """Case 1.21: the bundle comes in chunks, ciphertexts in blocks of points, rows in parts."""
    assert max(spec.size for spec in narrow.manifest.client_files.values()) > MIB
    long = "z" * 300
    with (masked := connect_to(narrow, tmp_path, batch=320)).session as session:
        assert session._connection.max_message_bytes == MIB
        hidden = answer(masked, long, tokens=3)
    with (clear := connect_to(narrow, tmp_path, protocol="clear")).session:
        assert answer(clear, long, tokens=3) == hidden


@pytest.mark.parametrize("payload", [MIB, 4 * MIB, 64 * MIB])
@pytest.mark.parametrize("way", ["up", "down"])
def test_payloads_around_the_limit(narrow: ServerProcess, way: str, payload: int) -> None:
    """Case 1.21: one row less than the limit, just the limit, one row more; of the request, or of the answer."""
    manifest = narrow.manifest
    index, group = next(
        (i, g) for i, g in enumerate(manifest.groups) if (g.in_features > g.out_features) == (way == "up")
    )
    with safe_open(next((narrow.bundle / "server").glob("*.safetensors")), "pt") as file:
        weights = file.get_tensor(group.name).double()
    row_bytes = 4 * max(group.in_features, group.out_features)
    connection = Connection(narrow.target, token=narrow.token, ca=narrow.ca)
    stream = EvaluationStream(connection, pb.PROTOCOL_CLEAR)
    for rows in [payload // row_bytes + more for more in ((-1, 0, 1) if payload < 64 * MIB else (0,))]:
        x = np.random.default_rng(rows).integers(0, 50, (rows, group.in_features), dtype=np.uint32)
        y = stream.product(index, group, x)
        checked = np.unique(np.r_[0:4, rows // 2, rows - 4 : rows])
        exact = torch.from_numpy(x[checked].astype(np.float64)) @ weights.T
        assert (y[checked] == exact.numpy().astype(np.int64) % manifest.modulus).all()
    assert connection.traffic.rounds
    assert getattr(connection.traffic, way)["online"] >= payload
    stream.close()
    connection.close()


def test_one_row_over_the_limit_is_refused_by_name(narrow: ServerProcess) -> None:
    """Case 1.21: what cannot be cut is an error before anything is sent."""
    connection = Connection(narrow.target, token=narrow.token, ca=narrow.ca)
    connection.max_message_bytes = 4 * 64 - 1
    group = narrow.manifest.groups[0]
    stream = EvaluationStream(connection, pb.PROTOCOL_CLEAR)
    with pytest.raises((ProtocolError, LimitError), match=re.escape(group.name)):
        stream.product(0, group, np.zeros((1, group.in_features), np.uint32))
    assert "online" not in connection.traffic.up
    connection.close()


def test_a_message_over_the_servers_limit_names_both_sizes(narrow: ServerProcess) -> None:
    """Case 1.21: a client that does not cut gets the numbers, and the server serves on."""
    connection = Connection(narrow.target, token=narrow.token, ca=narrow.ca)
    connection.max_message_bytes = 8 * MIB
    stream = EvaluationStream(connection, pb.PROTOCOL_CLEAR)
    index, group = next((i, g) for i, g in enumerate(narrow.manifest.groups) if g.in_features >= g.out_features)
    rows = 2 * MIB // (4 * group.in_features)
    with pytest.raises(LimitError, match=r"\d{7}.*\d{7}"):
        stream.product(index, group, np.zeros((rows, group.in_features), np.uint32))
    assert stream.product(index, group, np.zeros((1, group.in_features), np.uint32)).shape == (1, group.out_features)
    stream.close()
    connection.close()


# -- 1.23 --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    for name in PROXIES[:3]:
        monkeypatch.setenv(name, DEAD)


@pytest.mark.parametrize("no_proxy", [None, "example.org", "localhost,127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_dead_proxy_does_not_stand_before_this_machine(
    mortal: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dead_proxy: None,
    no_proxy: str | None,
    host: str,
) -> None:
    """Case 1.23."""
    if no_proxy is not None:
        monkeypatch.setenv("no_proxy", no_proxy)
    connection = Connection(f"grpcs://{host}:{mortal.port}", token=mortal.token, ca=mortal.ca, retry_s=0)
    assert fetch_bundle(connection, cache=tmp_path).is_dir()
    connection.close()


def test_the_dead_proxy_is_one(mortal: ServerProcess, dead_proxy: None) -> None:
    """Case 1.23: without the client's care the same environment breaks the same call."""
    credentials = grpc.ssl_channel_credentials(mortal.ca.read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(mortal.address, credentials, options=options) as channel:
        call = channel.unary_unary("/sordino.proto.v1.Sordino/GetManifest")
        with pytest.raises(grpc.RpcError):
            call(b"", metadata=mortal.metadata, timeout=3)


def test_a_dead_proxy_before_another_machine_is_named(dead_proxy: None) -> None:
    """Case 1.23: elsewhere a proxy of the environment is used, and its failure said."""
    with pytest.raises(TransportError) as caught:
        connect("grpcs://sordino.invalid:443", retry_s=0, timeout_s=5)
    assert "proxy" in str(caught.value).lower() or "127.0.0.1:9" in str(caught.value)


# -- a server that offers less -----------------------------------------------------------------------------------------


def test_clear_is_refused_by_a_server_started_normally(server: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="does not offer"):
        connect_to(server, tmp_path, protocol="clear")


@pytest.mark.parametrize("target", ["localhost:1", "http://localhost:1", "grpc://example.org:1", "grpcs://", ""])
def test_targets_that_are_none(target: str) -> None:
    with pytest.raises(SordinoError):
        connect(target, retry_s=0)
