"""Several clients fetch a bundle at once: of one machine, or with one token."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from pairs import InProcessServer

from sordino.client.bundle import fetch_bundle
from sordino.client.transport import Connection
from sordino.server.service import Limits
from sordino.shared.errors import SordinoError, TransportError


def fetch(server: InProcessServer, cache: Path, timeout_s: float = 20, retry_s: float = 20) -> Path:
    link = Connection(f"grpc://127.0.0.1:{server.port}", timeout_s=timeout_s, retry_s=retry_s)
    with closing(link):
        return fetch_bundle(link, cache=cache)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_child_forked_meanwhile_does_not_hold_the_cache(bundles: Callable[..., Path], tmp_path: Path) -> None:
    children = []

    def fork(done: int, total: int) -> None:
        if not children:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            children.append(child)

    with closing(InProcessServer(bundles("llama"))) as server:
        with closing(Connection(f"grpc://127.0.0.1:{server.port}")) as link:
            fetch_bundle(link, cache=tmp_path, progress=fork)
        try:
            fetch(server, tmp_path, timeout_s=1)
        finally:
            children[0].kill()
            children[0].join()


def test_more_downloads_than_places_wait_for_one(bundles: Callable[..., Path], tmp_path: Path) -> None:
    limits = Limits(max_downloads=2, max_downloads_per_identity=1)
    with closing(InProcessServer(bundles("llama"), limits)) as server:
        failed: list[Exception] = []

        def one(number: int) -> None:
            try:
                fetch(server, tmp_path / str(number))
            except SordinoError as error:
                failed.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_without_a_place_for_ever_it_says_why(bundles: Callable[..., Path], tmp_path: Path) -> None:
    with (
        closing(InProcessServer(bundles("llama"), Limits(max_downloads=0))) as server,
        pytest.raises(TransportError, match="busy: the server has its 0 downloads"),
    ):
        fetch(server, tmp_path, retry_s=0.3)
