"""Two replicas of two ranks over a Ray cluster of two nodes, as processes of this machine: ``make test-slow``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from stack import ServerProcess, answer, connect_to

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

START_S = 180.0
TOKENS = 12
STRIKE_AT = 6
REPLICAS = RANKS = 2
_PIPE_BYTES = 100_000_000  # of Ray's object store, through which nothing large goes


class FleetProcess(ServerProcess):
    """``sordino serve --engine ray``; its target names all replicas."""

    def __init__(self, bundle: Path, tmp: Path, cluster: Cluster, ranks: int = RANKS) -> None:
        super().__init__(bundle, tmp)
        self._cluster = cluster
        self._ranks = ranks
        self.targets: list[str] = []

    def start(self) -> None:
        command = [Path(sys.executable).with_name("sordino"), "serve", self.bundle, "--state", self.state]
        command += ["--engine", "ray", "--ray-address", self._cluster.address, "--port", "0", "--threads", "1"]
        command += ["--grace", "1", "--replicas", str(REPLICAS), "--tensor-parallel", str(self._ranks)]
        with (self._tmp / "server.log").open("ab") as log:
            self._process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        self.wait_until_it_serves(1)

    def wait_until_it_serves(self, times: int) -> None:
        """Until it has said for so many times where it is."""
        deadline = time.monotonic() + START_S
        while len(said := re.findall(r"^serving on (\S+)$", self.log(), re.MULTILINE)) < times:
            if not self.running or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"the fleet does not serve:\n{self.log()[-4000:]}")
            time.sleep(0.1)
        self.targets = said[-1].split(",")

    @property
    def target(self) -> str:
        return ",".join(self.targets)

    def ranks(self) -> list[psutil.Process]:
        """The processes of all ranks of all replicas."""
        return [one for one in psutil.process_iter() if _rank(one) is not None and str(self.state) in one.cmdline()]

    def replica(self, target: str) -> dict[int, psutil.Process]:
        """The processes of the replica that answers there, by rank."""
        port = int(target.rpartition(":")[2])
        found = self.ranks()
        first = next(one for one in found if _rank(one) == 0 and port in _listens(one))
        group = first.environ()["MASTER_PORT"]
        return {_rank(one): one for one in found if one.environ()["MASTER_PORT"] == group}


def _rank(process: psutil.Process) -> int | None:
    """The number of a rank, None of any other process."""
    try:
        return int(process.environ().get("RANK", 0)) if "sordino.server.ray_engine" in process.cmdline() else None
    except psutil.Error:
        return None


def _node(rank: psutil.Process) -> int:
    """The process of a rank's node, which is its actor's parent."""
    return int(rank.parent().parent().pid)


def _drained() -> int:
    """How many servers have drained until now, by the logs of all nodes."""
    logs = Path(os.environ["RAY_TMPDIR"]).glob("ray/session_latest/logs/worker-*.err")
    return sum(path.read_text(errors="replace").count("draining: no new streams") for path in logs)


def _listens(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, each with room for all ranks, one with more: Ray alone would place them all there."""
    # Not below the folder of the tests: names of sockets are short.
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {
            "object_store_memory": _PIPE_BYTES,
            "include_dashboard": False,
        }
        room = REPLICAS * RANKS
        made = Cluster(initialize_head=True, head_node_args=options | {"num_cpus": 2 * room})
        try:
            made.add_node(**options, num_cpus=room)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def fleet(
    bundles: Callable[..., Path], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetProcess]:
    with FleetProcess(bundles("llama"), tmp_path_factory.mktemp("fleet"), cluster) as process:
        yield process


@pytest.fixture(scope="module")
def wanted(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The answer of one server alone."""
    with (connected := connect_to(server, tmp_path_factory.mktemp("alone"))).session:
        return answer(connected, tokens=TOKENS)


def test_replicas_lie_on_different_nodes_and_the_ranks_of_one_together(fleet: FleetProcess) -> None:
    assert len(fleet.targets) == REPLICAS
    nodes = []
    for target in fleet.targets:
        ranks = fleet.replica(target)
        assert sorted(ranks) == list(range(RANKS))
        (node,) = {_node(one) for one in ranks.values()}
        nodes.append(node)
    assert len(set(nodes)) == REPLICAS


def test_each_replica_answers_as_one_server_does(fleet: FleetProcess, wanted: list[int], tmp_path: Path) -> None:
    for number, target in enumerate(fleet.targets):
        with (connected := connect_to(fleet, tmp_path / str(number), target=target)).session:
            assert answer(connected, tokens=TOKENS) == wanted


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_is_killed_in_the_middle_of_an_answer(
    fleet: FleetProcess, wanted: list[int], tmp_path: Path, rank: int
) -> None:
    """The answer goes on with the other replica; the one that lost a rank comes back where clients know it."""
    with (connected := connect_to(fleet, tmp_path / "both", retry_s=90)).session as session:
        seen, struck, before = 0, "", {}

        def kill(*_: object) -> bool:
            nonlocal seen, struck, before
            seen += 1
            if seen == STRIKE_AT:
                struck = next(
                    target for target, state in zip(fleet.targets, session.targets(), strict=True) if state.in_use
                )
                before = fleet.replica(struck)
                before[rank].kill()
            return False

        assert answer(connected, tokens=TOKENS, stopping_criteria=[kill]) == wanted
    assert (seen, bool(struck)) == (TOKENS, True), "nothing was killed: the test proves nothing"
    with (again := connect_to(fleet, tmp_path / "again", target=struck, retry_s=START_S)).session:
        assert answer(again, tokens=TOKENS) == wanted
    after = fleet.replica(struck)
    assert not {one.pid for one in before.values()} & {one.pid for one in after.values()}, "all its ranks are new"


def test_an_actor_that_dies_takes_its_rank_along(fleet: FleetProcess, wanted: list[int], tmp_path: Path) -> None:
    target = fleet.targets[0]
    before = fleet.replica(target)
    before[0].parent().kill()
    gone, alive = psutil.wait_procs(before.values(), timeout=60)
    assert len(gone) == RANKS, alive
    with (again := connect_to(fleet, tmp_path, target=target, retry_s=START_S)).session:
        assert answer(again, tokens=TOKENS) == wanted


def test_a_signal_ends_all_replicas(fleet: FleetProcess) -> None:
    """One rank hangs, and is killed after the grace. The last of this fleet's tests."""
    ranks = fleet.ranks()
    assert len(ranks) == REPLICAS * RANKS
    actors, drained = [one.parent() for one in ranks], _drained()
    next(one for one in ranks if _rank(one) == 1).suspend()
    assert fleet.terminate(90) == 0
    assert not [one for one in ranks if one.is_running()], "the command ends after them"
    assert _drained() == drained + REPLICAS
    gone, alive = psutil.wait_procs(actors, timeout=30)
    assert len(gone) == len(actors), alive
    assert "Traceback" not in fleet.log()


def test_a_folder_that_nodes_do_not_share(bundles: Callable[..., Path], cluster: Cluster, tmp_path: Path) -> None:
    """Seen from the command and from an actor, this is one path and two folders."""
    command = [Path(sys.executable).with_name("sordino"), "serve", bundles("llama"), "--engine", "ray", "--port", "0"]
    command += ["--ray-address", cluster.address, "--state", "/proc/self/cwd/state"]
    ended = subprocess.run(
        [str(part) for part in command], cwd=tmp_path, capture_output=True, text=True, timeout=START_S
    )
    assert ended.returncode == 1
    assert "error: SordinoError: node" in ended.stderr
    assert "are in a folder that all nodes share" in ended.stderr


def test_a_replica_moves_when_its_node_dies(
    bundles: Callable[..., Path], cluster: Cluster, wanted: list[int], tmp_path: Path
) -> None:
    """The last test: this node comes back no more."""
    (node,) = cluster.worker_nodes
    (lost,) = (info.process.pid for info in node.all_processes["raylet"])
    with FleetProcess(bundles("llama"), tmp_path / "fleet", cluster, ranks=1) as fleet:
        before = fleet.targets
        (gone,) = (one for one in fleet.ranks() if _node(one) == lost)
        kept = next(target for target in before if int(target.rpartition(":")[2]) not in _listens(gone))
        cluster.remove_node(node, allow_graceful=False)
        fleet.wait_until_it_serves(2)
        assert kept in fleet.targets
        assert fleet.targets != before
        assert lost not in {_node(one) for one in fleet.ranks()}
        for number, target in enumerate(fleet.targets):
            with (connected := connect_to(fleet, tmp_path / str(number), target=target)).session:
                assert answer(connected, tokens=TOKENS) == wanted
        assert fleet.terminate(90) == 0
