"""A session in a forked child: an error that says so instead of a wait without end, and the parent's goes on."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stack import ServerProcess, answer, connect_to

from sordino.client import Connected
from sordino.client.attend import PageStream
from sordino.client.bundle import fetch_bundle
from sordino.client.provision import fetch_check_vectors
from sordino.shared.errors import SessionLostError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
Use = Callable[[Connected, Path], object]


USES: dict[str, Use] = {
    "generate": lambda link, tmp: answer(link, tokens=2),
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
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_all_uses, args=(link, tmp_path, results))
        child.start()
        child.join(60)
        alive = child.is_alive()
        child.kill()
        child.join()
        assert not alive, "the child hangs"
        assert child.exitcode == 0
        got = {}
        while not results.empty():
            name, text = results.get()
            got[name] = text
        assert got.pop("ends") == "well"
        assert got.keys() == USES.keys()
        for text in got.values():
            assert f"belongs to process {os.getpid()}" in text
            assert "sordino.connect" in text
        assert link.session.traffic.up == sent
        assert answer(link, tokens=2) == truth
