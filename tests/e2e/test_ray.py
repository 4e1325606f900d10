"""Two replicas of two ranks over a Ray cluster of two nodes, as processes of this machine: ``make test-slow``."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from stack import ServerProcess, answer, connect_to

pytestmark = pytest.mark.slow

START_S = 180.0
TOKENS = 12
STRIKE_AT = 6
REPLICAS = RANKS = 2
_PIPE_BYTES = 100_000_000  # of Ray's object store, through which nothing large goes


class FleetProcess(ServerProcess):
    """``sordino serve --engine ray``; its target names all replicas."""

    def __init__(self, bundle: Path, tmp: Path, cluster: str) -> None:
        super().__init__(bundle, tmp)
        self._cluster = cluster
        self.targets: list[str] = []

    def start(self) -> None:
        command = [Path(sys.executable).with_name("sordino"), "serve", self.bundle, "--state", self.state]
        command += ["--engine", "ray", "--ray-address", self._cluster, "--port", "0", "--threads", "1"]
        command += ["--replicas", str(REPLICAS), "--tensor-parallel", str(RANKS)]
        with (self._tmp / "server.log").open("ab") as log:
            self._process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not (said := re.search(r"^serving on (\S+)$", self.log(), re.MULTILINE)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"the fleet did not start:\n{self.log()[-4000:]}")
            time.sleep(0.1)
        self.targets = said[1].split(",")

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
    try:
        number = process.environ().get("RANK") if "sordino.server.ray_engine" in process.cmdline() else None
    except psutil.Error:
        return None
    return None if number is None else int(number)


def _listens(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster whose two nodes have room for all ranks each."""
    # Not below the folder of the tests: names of sockets are short.
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {
            "num_cpus": REPLICAS * RANKS,
            "object_store_memory": _PIPE_BYTES,
            "include_dashboard": False,
        }
        made = Cluster(initialize_head=True, head_node_args=options)
        try:
            made.add_node(**options)
            yield made.address
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def fleet(
    bundles: Callable[..., Path], cluster: str, tmp_path_factory: pytest.TempPathFactory
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
        raylets = {one.parent().parent().pid for one in ranks.values()}  # the rank's actor, and the actor's node
        assert len(raylets) == 1
        nodes.append(raylets.pop())
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
    """The last of this fleet's tests."""
    ranks = fleet.ranks()
    assert len(ranks) == REPLICAS * RANKS
    actors = [one.parent() for one in ranks]
    assert fleet.terminate(90) == 0
    gone, alive = psutil.wait_procs([*ranks, *actors], timeout=30)
    assert len(gone) == 2 * len(ranks), alive
    assert "Traceback" not in fleet.log()
