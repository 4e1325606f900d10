"""``sordino serve --engine ray``: replicas of one server, and the ranks of each, placed over a Ray cluster.

The command is a Ray driver. A replica has a placement group; each of its ranks has an actor there, which starts
``sordino serve`` as a process of its own, watches it and ends it: signals, torch.distributed and gRPC each want one.
A rank ends with its actor, and an actor with the command.

Through Ray go command lines, paths and digests. Keys and tokens do not: all nodes read them from one folder.
"""

# Ray is imported where it is used: the process of a rank starts with this module, and needs none of it.

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

from sordino.server.parent import end_with_parent
from sordino.shared import address
from sordino.shared.cli import main
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import ModelManifest
from sordino.shared.tls import TlsFiles, make_certificates

log = logging.getLogger(__name__)
_RESTARTS: Final = 3
_PAUSE_S: Final = 1.0  # before each
_AFTER_GRACE_S: Final = 15.0  # until a rank that does not end is killed
_ANSWER_S: Final = 10.0  # of an actor, beside what it was asked for
_POLL_S: Final = 0.05
_START_S: Final = 120.0  # for the actors of a replica that has room
_SPREAD_S: Final = 5.0  # for room on a node that has no replica yet
_ROOM_S: Final = 300.0  # for any room: a cluster that grows takes minutes
_PARENT: Final = "SORDINO_PARENT"
_MAX_PORT: Final = 65_535
_AUTO: Final = "auto"
_REACH_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is placed.

    Attributes:
        arguments: the command line as it was given, without the program.
        replicas, ranks: servers, and processes of each.
        threads: of the kernels of a rank, which has as many CPUs; 0 is one.
        gpu: each rank has a GPU too.
        port, metrics_port: of replica 0, and one more for each next one. Port 0 is a free one, metrics port 0 is none.
        hostnames: names that the certificate has beside the addresses of the nodes.
        bundle, state: as every node finds them.
        certificate: one's own; None makes one in ``state``.
        others: further paths of the command line.

    Raises:
        SordinoError: what could not be placed anywhere.
    """

    arguments: Sequence[str]
    replicas: int
    ranks: int
    threads: int
    gpu: bool
    port: int
    metrics_port: int
    hostnames: Sequence[str] = ()
    bundle: Path
    state: Path
    certificate: Path | None = None
    others: Sequence[Path] = ()
    grace_s: float

    def __post_init__(self) -> None:
        for path in (self.bundle, self.state, self.certificate, *self.others):
            if path is not None and not path.is_absolute():
                raise SordinoError(
                    f"{path} is a path of this folder alone: --engine ray takes whole paths, the same on every node, "
                    "and a --state that all nodes share"
                )
        for name, first in (("--port", self.port), ("--metrics-port", self.metrics_port)):
            if first + self.replicas - 1 > _MAX_PORT:
                raise SordinoError(f"{name} {first} leaves no room for one port for each of {self.replicas} replicas")
        if self.threads < 0:
            raise SordinoError(f"--threads is 0 or more, not {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What every node must find at the paths that the command has."""

    bundle: Path
    fingerprint: str
    trusted: Path  # the CA, or one's own certificate
    sha256: str
    tokens: Path

    @classmethod
    def of(cls, fleet: Fleet) -> Shared:
        """As they are on this machine."""
        trusted = fleet.certificate or TlsFiles.self_made(fleet.state).ca
        return cls(
            bundle=fleet.bundle,
            fingerprint=ModelManifest.load(fleet.bundle).fingerprint,
            trusted=trusted,
            sha256=_sha256(trusted),
            tokens=fleet.state / "tokens.json",
        )

    def check(self, node: str) -> None:
        """Whether they are the same on ``node``, which is this one.

        Raises:
            SordinoError: one is not; BundleError: the bundle cannot be read.
        """
        for path in (self.tokens, self.trusted):
            if not path.exists() or (path == self.trusted and _sha256(path) != self.sha256):
                raise SordinoError(
                    f"node {node} has not the {path} of this command: certificates and tokens (--state, --tls-cert) "
                    "are in a folder that all nodes share"
                )
        if not self.bundle.exists():
            raise SordinoError(f"node {node} has no {self.bundle}: give every node the bundle, at one path")
        if ModelManifest.load(self.bundle).fingerprint != self.fingerprint:
            raise SordinoError(f"node {node} has another model in {self.bundle}: give every node a copy of one bundle")


def command_line(fleet: Fleet, number: int, host: str, port: int) -> list[str]:
    """Arguments of the ranks of replica ``number`` on this node: those given, and what holds instead for it alone."""
    return [
        *fleet.arguments,
        *("--engine", "local", "--replicas", "1"),
        *("--host", host, "--port", str(port), "--threads", str(fleet.threads or 1)),
        *("--metrics-port", str(fleet.metrics_port and fleet.metrics_port + number)),
    ]


def rank_environment(rank: int, ranks: int, master: tuple[str, int]) -> dict[str, str]:
    """What torchrun would tell this rank, where rank 0 has this host and port; nothing to a server of one process."""
    if ranks == 1:
        return {}
    host, port = master
    # Ray shows each rank its own GPU alone, which is the first there is.
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


class Rank:
    """An actor: the process of one rank, on this node."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = TemporaryDirectory(prefix="sordino-rank-")
        self._port_file = Path(self._folder.name) / "port"
        self._process: asyncio.subprocess.Process | None = None

    async def where(self) -> tuple[str, str, int]:
        """This node's id and address, and a port that is free there."""
        import ray

        host = _host()
        return ray.get_runtime_context().get_node_id(), host, address.free_port(host)

    async def start(self, arguments: Sequence[str], environment: dict[str, str], shared: Shared) -> None:
        """Starts it.

        Raises:
            SordinoError: see :meth:`Shared.check`.
        """
        shared.check(_host())
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sordino.server.ray_engine", *arguments, "--port-file", str(self._port_file)),
            env={**os.environ, **environment, _PARENT: str(os.getpid())},
        )

    async def port(self) -> int:
        """Where it answers, as soon as it does."""
        while not self._port_file.exists():
            await asyncio.sleep(_POLL_S)
        return int(self._port_file.read_text())

    async def ended(self) -> int:
        """Its exit code, when it has ended."""
        return await self._started.wait()

    async def stop(self, most_s: float) -> None:
        """SIGTERM, and SIGKILL after this time."""
        self._folder.cleanup()
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), most_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def __repr__(self) -> str:
        """What Ray puts before each line of its log."""
        return self._name

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the rank was never started")
        return self._process


class _Replica:
    """One server of the fleet: where its ranks are, and their life.

    Attributes:
        nodes: ids of the nodes that its ranks are on.
        target: what clients pass, once it has answered.
    """

    def __init__(self, fleet: Fleet, number: int, placing: asyncio.Lock) -> None:
        self._fleet = fleet
        self._number = number
        self._placing = placing
        self._group: Any = None
        self._ranks: list[Any] = []
        self._port = self._first_port = fleet.port and fleet.port + number
        self.nodes: list[str] = []
        self.target: str | None = None

    async def keep(self, replicas: Sequence[_Replica], ready: Callable[[], None]) -> NoReturn:
        """Starts it, and anew when a rank has ended, on the port that clients know: three times.

        Args:
            replicas: all of the fleet.
            ready: called whenever it answers.

        Raises:
            SordinoError: that was not enough; there is no room; a node lacks something.
        """
        end = ""
        for start in range(1 + _RESTARTS):
            if start:
                log.warning("replica %d: %s; all its ranks start anew", self._number, end)
                await asyncio.sleep(_PAUSE_S)
            end = await self._live(replicas, ready)
        raise SordinoError(f"replica {self._number}: {end}, after {_RESTARTS} restarts")

    async def _live(self, replicas: Sequence[_Replica], ready: Callable[[], None]) -> str:
        """Until a rank has ended; says which, and how."""
        from ray.exceptions import RayError, RayTaskError

        try:
            host, free = await self._place(replicas)
            return await self._serve(host, free, ready)
        except RayTaskError as error:
            if isinstance(error.cause, SordinoError):
                raise SordinoError(str(error.cause)) from None
            raise
        except RayError as error:  # a worker or a node that died, or is cut off
            return f"a rank and its actor are gone ({type(error).__name__})"
        except TimeoutError:
            return "the actors of its ranks did not start"
        finally:
            await self._stop()

    async def _place(self, replicas: Sequence[_Replica]) -> tuple[str, int]:
        """Gives each rank an actor, where it had one if that node is alive.

        Returns:
            address of rank 0's node, and a port that is free there.
        """
        nodes, before = _nodes(), self.nodes
        if self._fleet.certificate is None:
            make_certificates(self._fleet.state, [*self._fleet.hostnames, *sorted(set(nodes.values()))])
        if self._group is not None and set(before) <= nodes.keys():
            where = await self._actors()  # elsewhere, if Ray knows of a node's death meanwhile
        else:
            async with self._placing:
                self._leave()
                used = {node for other in replicas for node in other.nodes}
                self._group = await self._room(used, spare=bool(nodes.keys() - used))
                where = await self._actors()
        if before and before[0] != self.nodes[0]:  # the port may be taken there
            self._port = self._first_port
        return where

    async def _room(self, used: set[str], *, spare: bool) -> Any:
        """A placement group, on nodes that no other replica uses if some are to spare and have room."""
        if used and spare:
            others = {"ray.io/node-id": f"!in({','.join(sorted(used))})"}
            if group := await self._group_within(_SPREAD_S, others):
                return group
        if group := await self._group_within(_ROOM_S):
            return group
        wanted = " and ".join(f"{count} {kind}" for kind, count in self._resources.items())
        raise SordinoError(
            f"the Ray cluster has no room for replica {self._number}: "
            f"each of its {self._fleet.ranks} ranks wants {wanted}"
        )

    async def _group_within(self, seconds: float, labels: dict[str, str] | None = None) -> Any:
        """A placement group of nodes with these labels; None if there is no room so long."""
        from ray.util.placement_group import placement_group, remove_placement_group

        ranks = self._fleet.ranks
        group = placement_group(
            [self._resources] * ranks, strategy="PACK", bundle_label_selector=[labels] * ranks if labels else None
        )
        try:
            await asyncio.wait_for(group.ready(), seconds)
        except TimeoutError:
            remove_placement_group(group)
            return None
        except asyncio.CancelledError:
            remove_placement_group(group)
            raise
        return group

    @property
    def _resources(self) -> dict[str, int]:
        return {"CPU": self._fleet.threads or 1} | ({"GPU": 1} if self._fleet.gpu else {})

    async def _actors(self) -> tuple[str, int]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = self._resources
        self._ranks = [
            ray.remote(Rank)
            .options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote(f"replica {self._number}, rank {bundle}")
            for bundle in range(self._fleet.ranks)
        ]
        async with asyncio.timeout(_START_S):
            found = await asyncio.gather(*(rank.where.remote() for rank in self._ranks))
        self.nodes = [node for node, *_ in found]
        _, host, free = found[0]
        return host, free

    async def _serve(self, host: str, free: int, ready: Callable[[], None]) -> str:
        """Starts the ranks, rank 0 here, and waits for the first end of one."""
        fleet = self._fleet
        arguments, shared = command_line(fleet, self._number, host, self._port), Shared.of(fleet)
        starts = (
            rank.start.remote(arguments, rank_environment(number, fleet.ranks, (host, free)), shared)
            for number, rank in enumerate(self._ranks)
        )
        await asyncio.gather(*starts)
        ends = [asyncio.ensure_future(rank.ended.remote()) for rank in self._ranks]
        port = asyncio.ensure_future(self._ranks[0].port.remote())
        try:
            await asyncio.wait([port, *ends], return_when=asyncio.FIRST_COMPLETED)
            if port.done():
                self._port = port.result()
                self.target = f"grpcs://{address.join(host, self._port)}"
                ready()
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            first = next(end for end in ends if end in done)
            return f"rank {ends.index(first)} ended with code {first.result()}"
        finally:
            for task in (port, *ends):
                task.cancel()
            await asyncio.gather(port, *ends, return_exceptions=True)

    async def _stop(self) -> None:
        import ray

        ranks, self._ranks = self._ranks, []
        most_s = self._fleet.grace_s + _AFTER_GRACE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s + _ANSWER_S):
                # One that is gone has ended its process too.
                await asyncio.gather(*(rank.stop.remote(most_s) for rank in ranks), return_exceptions=True)
        for rank in ranks:
            ray.kill(rank)

    def _leave(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._group, self.nodes = None, []


@contextmanager
def joined(cluster: str) -> Iterator[None]:
    """This process is a driver of the Ray cluster at this address, or of the one that ``auto`` finds.

    Raises:
        SordinoError: Ray is not installed, or there is no such cluster.
    """
    # Read when Ray is imported: nothing is told to its makers, and a log has all its lines and no colours.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
    try:
        import ray
    except ModuleNotFoundError as error:
        raise SordinoError(
            f"--engine ray needs the extra: pip install 'sordino[ray]' (no module {error.name})"
        ) from error
    if cluster != _AUTO:
        _check_cluster(cluster)
    try:
        ray.init(address=cluster, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SordinoError(f"no Ray cluster at {cluster!r}, `ray start --head` makes one: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def run_fleet(fleet: Fleet, ready: Callable[[Sequence[str], str], None]) -> None:
    """Places all replicas and keeps them there until SIGTERM or SIGINT, then drains them. Call it from the main thread.

    Args:
        ready: called with the targets of all replicas and the fingerprint, when all have answered, and again when one
            had to move.

    Raises:
        SordinoError: a replica failed too often, there is no room for it, or a node lacks something.
    """
    fingerprint = ModelManifest.load(fleet.bundle).fingerprint
    asyncio.run(_run(fleet, lambda targets: ready(targets, fingerprint)))


async def _run(fleet: Fleet, ready: Callable[[Sequence[str]], None]) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    placing = asyncio.Lock()
    replicas = [_Replica(fleet, number, placing) for number in range(fleet.replicas)]
    said: list[str] = []

    def tell() -> None:
        targets = [replica.target for replica in replicas if replica.target]
        if len(targets) == len(replicas) and targets != said:
            said[:] = targets
            ready(targets)

    tasks = [asyncio.create_task(replica.keep(replicas, tell)) for replica in replicas]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining all replicas: at most %.0f s for running calls", fleet.grace_s)
    for task in (*tasks, stopped):
        task.cancel()
    await asyncio.gather(*tasks, stopped, return_exceptions=True)
    for task in done:
        task.result()


def _check_cluster(cluster: str) -> None:
    """Whether anybody listens there: Ray would try for minutes.

    Raises:
        SordinoError: nobody does, or it is no ``host:port``.
    """
    host, _, port = cluster.rpartition(":")
    if not (host and port.isdecimal() and int(port) <= _MAX_PORT) or "/" in host:
        raise SordinoError(f"--ray-address is host:port of the cluster, or auto, not {cluster!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SordinoError(f"no Ray cluster at {cluster}, `ray start --head` makes one: {reason}") from error


def _nodes() -> dict[str, str]:
    """Addresses of the cluster's nodes that are alive, by id."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _host() -> str:
    """This node's address, as the others reach it."""
    import ray

    host: str = ray.util.get_node_ip_address()
    return host


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":  # the process of a rank
    end_with_parent(int(os.environ.pop(_PARENT)))
    main()
