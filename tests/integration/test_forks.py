"""A session in a forked child: an error that says so instead of a wait without end, and the parent's goes on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack import ServerProcess, answer, connect_to

from sordino.client import Connected
from sordino.client.attend import PageStream
from sordino.client.bundle import fetch_bundle
from sordino.client.interrupts import interrupts
from sordino.client.pages import PageKey
from sordino.client.provision import fetch_check_vectors
from sordino.client.rlwe import SecretKey
from sordino.shared.errors import SessionLostError
from sordino.shared.pages import KEYS, N
from sordino.shared.rlwe import PARAMS

pytestmark = [pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"), pytest.mark.forks]
Use = Callable[[Connected, Path], object]


def _rows(link: Connected) -> object:
    group = link.session.manifest.groups[0]
    return link.session.protocol.apply(group, np.zeros((1, group.in_features), np.int32))


USES: dict[str, Use] = {
    "generate": lambda link, tmp: answer(link, tokens=2),
    "a product": lambda link, tmp: _rows(link),  # as from a part of the model, which has no hook of its own
    "a round": lambda link, tmp: link.session.protocol._stream.exchange([]),  # type: ignore[attr-defined]
    "provision": lambda link, tmp: link.session.provision(),
    "check vectors": lambda link, tmp: fetch_check_vectors(link.session._connection, 1),
    "fetch": lambda link, tmp: fetch_bundle(link.session._connection, cache=tmp / "elsewhere"),
    "retrying": lambda link, tmp: link.session._connection.retrying(lambda: None),
    "evaluation": lambda link, tmp: link.session._connection.open_stream(iter(())),
    "pages": lambda link, tmp: PageStream(link.session._connection).append([]),
    "products with pages": lambda link, tmp: PageStream(link.session._connection).exchange(0, [], lambda *_: None),
    "attention": lambda link, tmp: link.session._connection.open_attention(iter(())),
}


def in_a_child(work: Callable[..., None], *args: Any) -> list[Any]:
    """What ``work(*args, results)`` puts into ``results`` in a forked child."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=work, args=(*args, results))
    child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    child.join()
    assert not alive, "the child hangs"
    assert child.exitcode == 0
    got = []
    while not results.empty():
        got.append(results.get())
    return got


def _all_uses(link: Connected, tmp: Path, results: Any) -> None:
    for name, use in USES.items():
        try:
            use(link, tmp)
        except SessionLostError as error:
            results.put((name, str(error)))
        else:
            results.put((name, "no error"))
    with link.session:
        pass
    link.session._connection.close()
    link.session.protocol.close()
    del link
    gc.collect()
    results.put(("ends", "well"))


@pytest.mark.parametrize("protocol", ["masked", "rlwe"])
def test_a_child_is_told_whose_session_it_is(server: ServerProcess, tmp_path: Path, protocol: str) -> None:
    with (link := connect_to(server, tmp_path, protocol=protocol)).session:
        truth = answer(link, tokens=2)
        sent = dict(link.session.traffic.up)
        got = dict(in_a_child(_all_uses, link, tmp_path))
        assert got.pop("ends") == "well"
        assert got.keys() == USES.keys()
        for text in got.values():
            assert f"belongs to process {os.getpid()}" in text
            assert "sordino.connect" in text
        assert link.session.traffic.up == sent
        assert answer(link, tokens=2) == truth


def _encrypts(results: Any = None) -> None:
    key, c1 = SecretKey(parallel=True), np.ones((2, PARAMS.n, 1), np.uint32)
    c0 = key.encrypt(np.full((PARAMS.n, 1), 7, np.uint32), c1)
    PageKey().encrypt(np.zeros((2, N)), KEYS, parallel=True)
    if results:
        results.put(np.unique(key.decrypt(c0, c1)).tolist())


def test_a_child_encrypts_with_threads_of_its_own() -> None:
    """Which it needs for a session of its own."""
    _encrypts()  # the parent has its threads
    assert in_a_child(_encrypts) == [[7]]


def _gets_interrupts(results: Any) -> None:
    try:
        with interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        results.put("late, or never")
    except KeyboardInterrupt:
        results.put("interrupted")


def test_a_child_of_another_thread_can_be_interrupted() -> None:
    """Whatever the main thread was in, which the child does not have."""
    got: list[Any] = []
    with interrupts:
        thread = threading.Thread(target=lambda: got.extend(in_a_child(_gets_interrupts)))
        thread.start()
        thread.join()
    assert got == ["interrupted"]
