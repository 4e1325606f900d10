"""What a rank over Ray is told, what a node must have, and what is refused before anything is placed; without Ray."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from sordino.server.ray_engine import Fleet, Shared, command_line, joined, rank_environment
from sordino.shared.cli import build
from sordino.shared.errors import SordinoError
from sordino.shared.tls import make_certificates

WAIT_S = 60


def fleet(**options: Any) -> Fleet:
    plain: dict[str, Any] = {
        "arguments": ("serve", "/bundle", "--engine", "ray", "--replicas", "3", "--port", "7000", "--no-batching"),
        "replicas": 3,
        "ranks": 2,
        "threads": 0,
        "gpu": False,
        "port": 7000,
        "metrics_port": 0,
        "bundle": Path("/bundle"),
        "state": Path("/state"),
        "grace_s": 10.0,
    }
    return Fleet(**plain | options)


def last(arguments: list[str], option: str) -> str:
    """The value that the command line's parser takes: of several, the last."""
    at = max(index for index, argument in enumerate(arguments) if argument == option)
    return arguments[at + 1]


def test_a_rank_runs_the_command_as_it_was_given_as_a_server_of_its_node() -> None:
    plain = fleet(metrics_port=9000)
    arguments = command_line(plain, 2, "192.0.2.7", 7002)
    assert arguments[: len(plain.arguments)] == list(plain.arguments)
    values = {name: last(arguments, name) for name in ("--engine", "--replicas", "--host", "--port", "--threads")}
    assert values == {
        "--engine": "local",
        "--replicas": "1",
        "--host": "192.0.2.7",
        "--port": "7002",
        "--threads": "1",
    }
    assert last(arguments, "--metrics-port") == "9002"
    assert last(command_line(fleet(threads=4), 1, "192.0.2.7", 0), "--threads") == "4"
    assert last(command_line(fleet(), 1, "192.0.2.7", 0), "--metrics-port") == "0"


def test_a_rank_has_the_environment_that_torchrun_gives() -> None:
    assert rank_environment(1, 4, ("192.0.2.7", 41000)) == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "192.0.2.7",
        "MASTER_PORT": "41000",
    }
    assert rank_environment(0, 1, ("192.0.2.7", 41000)) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": Path("state")}, "whole paths"),
        ({"bundle": Path("bundle")}, "whole paths"),
        ({"others": (Path("/spill"), Path("key.pem"))}, "key.pem is a path of this folder"),
        ({"port": 65_534}, "--port 65534 leaves no room"),
        ({"metrics_port": 65_534}, "--metrics-port 65534 leaves no room"),
        ({"threads": -1}, "--threads"),
    ],
)
def test_what_fits_nowhere_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SordinoError, match=said):
        fleet(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port-file", "/tmp/port"), "--port-file"),
        (("--insecure",), "TLS and tokens"),
        (("--no-auth",), "TLS and tokens"),
        (("--host", "0.0.0.0"), "leave --host out"),
        (("--device", "cuda:1"), "not cuda:1"),
        (("--state", "state"), "whole paths"),
    ],
)
def test_options_that_a_fleet_has_not(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    given = ("serve", str(tmp_path / "bundle"), "--engine", "ray", "--state", str(tmp_path / "state"), *options)
    result = CliRunner().invoke(build(), given)
    assert isinstance(result.exception, SordinoError)
    assert said in str(result.exception)
    assert not list(tmp_path.iterdir()), "nothing is written before all is looked at"


def test_replicas_want_a_cluster(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ("serve", str(tmp_path / "bundle"), "--replicas", "2"))
    assert isinstance(result.exception, SordinoError)
    assert "--engine ray" in str(result.exception)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray is told by the environment, and is not after a test."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX"):
        monkeypatch.setenv(name, "1")


@pytest.mark.usefixtures("environment")
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it is a ModuleNotFoundError
    with pytest.raises(SordinoError, match=r"pip install 'sordino\[ray\]'"), joined("auto"):
        pass
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0", "said before Ray could be imported"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("cluster", ["ray://192.0.2.7:10001", "192.0.2.7", "192.0.2.7:gcs", ":6379", "127.0.0.1:1"])
def test_a_cluster_that_is_none(monkeypatch: pytest.MonkeyPatch, cluster: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # one that can do nothing: it is not asked
    said = "no Ray cluster at" if cluster.startswith("127.") else "host:port"
    with pytest.raises(SordinoError, match=said), joined(cluster):
        pass


@pytest.fixture
def shared(bundles: Callable[..., Path], tmp_path: Path) -> Shared:
    """What a command finds on its own machine."""
    state = tmp_path / "state"
    make_certificates(state, ["192.0.2.7"])
    (state / "tokens.json").write_text("[]")
    return Shared.of(fleet(bundle=bundles("llama"), state=state))


def test_a_node_with_everything(shared: Shared) -> None:
    make_certificates(shared.trusted.parent, ["192.0.2.8"])  # for another node, under the same authority
    shared.check("192.0.2.7")


def test_a_node_with_a_state_of_its_own(shared: Shared, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_certificates(other, ["192.0.2.7"])
    (other / "tokens.json").write_text("[]")
    for changed in (
        dataclasses.replace(shared, trusted=other / "ca.pem"),
        dataclasses.replace(shared, trusted=tmp_path / "ca.pem"),
        dataclasses.replace(shared, tokens=tmp_path / "tokens.json"),
    ):
        with pytest.raises(SordinoError, match=r"node 192\.0\.2\.7 .* folder that all nodes share"):
            changed.check("192.0.2.7")


def test_a_node_with_another_bundle(shared: Shared, bundles: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match=r"node 192\.0\.2\.7 has no"):
        dataclasses.replace(shared, bundle=tmp_path / "bundle").check("192.0.2.7")
    shutil.copytree(bundles("llama", weight_bits=12), tmp_path / "bundle")
    with pytest.raises(SordinoError, match="another model"):
        dataclasses.replace(shared, bundle=tmp_path / "bundle").check("192.0.2.7")


CHILD = """
import os, signal
from sordino.server.parent import end_with_parent
end_with_parent(os.getppid())
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_a_process_ends_with_the_one_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs([child], timeout=WAIT_S)
    assert gone, alive


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
@pytest.mark.parametrize(("alive", "code"), [(True, 0), (False, 1)])
def test_a_rank_whose_actor_has_ended_already_ends_at_once(alive: bool, code: int) -> None:
    command = [sys.executable, "-m", "sordino.server.ray_engine", "--version"]
    ended = subprocess.run(
        command,
        env={**os.environ, "SORDINO_PARENT": str(os.getpid() if alive else 1 << 22)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (ended.returncode, bool(ended.stdout)) == (code, code == 0), ended.stderr
