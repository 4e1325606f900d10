"""The two parties and the dealer as processes, on streams that share TLS on loopback alone."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.multiprocessing

from peers.crypten.channel import Link, Listener, connected
from sordino.shared.errors import SordinoError
from sordino.shared.tls import TlsFiles, make_certificates

CLIENT: Final = 0
SERVER: Final = 1


def run_dealer(files: TlsFiles, main: Connection) -> None:
    from peers.crypten.dealer import deal

    with Listener(files) as listener:
        main.send(listener.port)
        deal(listener)


class Works(Protocol):
    """What a party does on its stream to the other and on that to the dealer; ``main`` is told the figures."""

    def run(self, link: Link, material: Link, main: Connection) -> None: ...


def run_server(files: TlsFiles, dealer: int, party: Works, main: Connection) -> None:
    with Listener(files) as listener, connected(dealer, files.ca) as material:
        main.send(listener.port)
        party.run(listener.accept(), material, main)


def run_client(files: TlsFiles, dealer: int, server: int, party: Works, main: Connection) -> None:
    with connected(server, files.ca) as link, connected(dealer, files.ca) as material:
        party.run(link, material, main)


@contextmanager
def started(client: Works, server: Works) -> Iterator[tuple[Connection, Connection]]:
    """Both parties and a dealer as processes; what client and server tell is heard from the connections.

    Raises:
        SordinoError: CrypTen is not installed, or a process ended early.
    """
    if importlib.util.find_spec("crypten") is None:
        raise SordinoError("CrypTen is not installed: run pip install -c constraints.txt --no-deps crypten omegaconf")
    context = torch.multiprocessing.get_context("spawn")
    processes: list[Any] = []

    def begin(work: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(*arguments, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        return ours

    with tempfile.TemporaryDirectory(prefix="sordino-crypten-") as folder:
        files = make_certificates(Path(folder), ["localhost"])
        try:
            dealer = heard(begin(run_dealer, files))
            serving = begin(run_server, files, dealer, server)
            yield begin(run_client, files, dealer, heard(serving), client), serving
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()


def heard(process: Connection) -> Any:
    """
    Raises:
        SordinoError: the process has ended.
    """
    try:
        return process.recv()
    except EOFError:
        raise SordinoError("a process ended early: what it said stands above") from None
