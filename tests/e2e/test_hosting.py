"""Twenty answers at the same time while servers die: replicas, a rank of a tensor parallel server, one of each stage.

There is no process in front of the servers: the client finds its way by itself (docs/replicas.md), so there is no front
to kill. The clients are processes (this file, run as a script) with several sessions each; every answer has a prompt of
its own. Half of them wait in their middle for the death, the others go on through it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from stack import ServerProcess, answer, connect_to

from sordino.shared.errors import SessionLostError, SordinoError, TransportError

TOKENS = 24
MIDDLE = 5
_connecting = threading.Lock()
ROOT = Path(__file__).parents[2]


def prompt(number: int) -> str:
    return f"{number}: the {'quick' * (1 + number % 3)} brown fox"


class Given(NamedTuple):
    """What a client process is told: where to go, the numbers of its sessions, and a folder to meet in."""

    targets: str
    ca: str
    token: str
    numbers: list[int]
    folder: str
    retry_s: float


class Told(NamedTuple):
    """Of one answer: its tokens, or the error that ended it; and how often a message was sent again."""

    number: int
    tokens: list[int]
    error: str
    retryable: bool
    retries: int


# -- a client process --------------------------------------------------------------------------------------------------


def talk(given: Given, number: int) -> Told:
    """One session, one answer. In its middle it says which servers it asks; an odd one waits there for the death."""
    from sordino.client import connect

    folder = Path(given.folder)
    mine = folder / f"client-{number}"
    options = {"cache": mine / "cache", "pool": mine / "pool", "state_dir": mine / "state"}
    with _connecting:
        connected = connect(
            given.targets,
            ca=Path(given.ca),
            token=given.token,
            batch=64,
            low_water=0,
            timeout_s=30,
            retry_s=given.retry_s,
            **options,
        )
    seen = 0

    def meet(*_: object) -> bool:
        nonlocal seen
        seen += 1
        if seen == MIDDLE:
            used = [place for place, state in enumerate(connected.session.targets()) if state.in_use]
            part = folder / f"part-{number}"
            part.write_text(json.dumps(used))
            part.rename(folder / f"middle-{number}")
            while number % 2 and not (folder / "struck").exists():
                time.sleep(0.01)
        return False

    with connected.session as session:
        try:
            tokens = answer(connected, prompt(number), TOKENS, stopping_criteria=[meet])
        except SordinoError as error:
            retryable = isinstance(error, TransportError | SessionLostError)
            return Told(number, [], f"{type(error).__name__}: {error}", retryable, session.traffic.retries)
        return Told(number, tokens, "", False, session.traffic.retries)


def main() -> None:
    given = Given(*json.loads(sys.argv[1]))
    with ThreadPoolExecutor(len(given.numbers)) as pool:
        told = list(pool.map(lambda number: talk(given, number), given.numbers))
    print(json.dumps(told))


# -- servers, and what happens to them ---------------------------------------------------------------------------------


@contextmanager
def serving(bundle: Path, tmp: Path, options: Sequence[tuple[str, ...]]) -> Iterator[list[ServerProcess]]:
    """A server for each of ``options``, with one authority and one token."""
    with ExitStack() as stack:
        servers = [
            ServerProcess(bundle, tmp / f"server-{number}", allow_clear=True, arguments=some)
            for number, some in enumerate(options)
        ]
        for server in servers:
            server.state = servers[0].state
            stack.callback(server.close)
        servers[0].start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(ServerProcess.start, servers[1:]))
        yield servers


def undisturbed(servers: Sequence[ServerProcess], tmp: Path, count: int) -> list[list[int]]:
    targets = ",".join(server.target for server in servers)
    with (clear := connect_to(servers[0], tmp / "clear", target=targets, protocol="clear")).session:
        return [answer(clear, prompt(number), TOKENS) for number in range(count)]


def answers(
    servers: Sequence[ServerProcess],
    tmp: Path,
    strike: Callable[[Counter[int]], None],
    *,
    processes: int,
    threads: int,
    retry_s: float,
) -> list[Told]:
    """All answers. ``strike`` is called in their middle, with how many sessions ask each of the servers."""
    folder, count = tmp / "clients", processes * threads
    folder.mkdir()
    targets = ",".join(server.target for server in servers)
    paths = [str(ROOT / part) for part in ("tests", "client", "dealer", "server", "shared", "proto")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with ExitStack() as stack:
        clients = []
        for first in range(0, count, threads):
            numbers = list(range(first, first + threads))
            given = Given(targets, str(servers[0].ca), servers[0].token, numbers, str(folder), retry_s)
            with (folder / f"errors-{first}").open("wb") as errors:
                client = subprocess.Popen(
                    [sys.executable, __file__, json.dumps(given)],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                )
            stack.enter_context(client)
            stack.callback(client.kill)
            clients.append(client)
        waiting = [folder / f"middle-{number}" for number in range(1, count, 2)]
        deadline = time.monotonic() + 200
        while not all(path.exists() for path in waiting):
            assert time.monotonic() < deadline, "the clients did not come to the middle of their answers"
            for client in clients:
                assert client.poll() in (None, 0), said(folder)
            time.sleep(0.02)
        strike(Counter(place for path in waiting for place in json.loads(path.read_text())))
        (folder / "struck").touch()
        told: list[Told] = []
        for client in clients:
            out, _ = client.communicate(timeout=250)
            assert client.returncode == 0, said(folder)
            told += [Told(*one) for one in json.loads(out)]
    return sorted(told)


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("errors-*"))


def all_right(told: Sequence[Told], wanted: Sequence[list[int]]) -> None:
    assert [one.error for one in told] == [""] * len(wanted)
    assert [one.tokens for one in told] == list(wanted)
    assert sum(one.retries for one in told) > 0, "nobody noticed: the test proves nothing"


SIZES = [(2, 2), pytest.param((4, 5), marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
def test_a_replica_is_killed(bundles: Callable[..., Path], tmp_path: Path, size: tuple[int, int]) -> None:
    """The one that more sessions ask."""
    with serving(bundles("llama"), tmp_path, [(), ()]) as servers:
        wanted = undisturbed(servers, tmp_path, size[0] * size[1])

        def strike(used: Counter[int]) -> None:
            servers[used.most_common(1)[0][0]].kill()

        told = answers(servers, tmp_path, strike, processes=size[0], threads=size[1], retry_s=30)
        all_right(told, wanted)
        assert sum(server.running for server in servers) == 1


@pytest.mark.slow
def test_a_replica_of_each_stage_is_killed(bundles: Callable[..., Path], tmp_path: Path) -> None:
    stages = [("--layers", layers) for layers in ("0", "0", "1", "1")]
    with serving(bundles("llama"), tmp_path, stages) as servers:
        wanted = undisturbed(servers, tmp_path, 20)

        def strike(used: Counter[int]) -> None:
            for replicas in ((0, 1), (2, 3)):
                servers[max(replicas, key=lambda number: used[number])].kill()

        told = answers(servers, tmp_path, strike, processes=4, threads=5, retry_s=30)
        all_right(told, wanted)
        assert [servers[0].running + servers[1].running, servers[2].running + servers[3].running] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("retry_s", [120.0, 0.5])
def test_a_rank_is_killed(bundles: Callable[..., Path], tmp_path: Path, retry_s: float) -> None:
    """Whoever waits long enough has the right answer; whoever does not is told so, and no answer is wrong."""
    with serving(bundles("llama"), tmp_path, [("--tensor-parallel", "2")]) as servers:
        wanted = undisturbed(servers, tmp_path, 20)

        def strike(_: Counter[int]) -> None:
            rank_of(servers[0], 1).kill()

        told = answers(servers, tmp_path, strike, processes=4, threads=5, retry_s=retry_s)
        if retry_s > 60:
            all_right(told, wanted)
        failed = [one for one in told if one.error]
        assert all(one.retryable for one in failed), failed
        assert failed or retry_s > 60, "nobody noticed: the test proves nothing"
        assert all(one.tokens == wanted[one.number] for one in told if not one.error)
        assert undisturbed(servers, tmp_path / "after", 1) == wanted[:1], "the ranks are back"


def rank_of(server: ServerProcess, number: int) -> psutil.Process:
    children = psutil.Process(server._alive.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(number))


if __name__ == "__main__":
    main()
