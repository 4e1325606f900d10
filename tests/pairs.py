"""A server in this process (real gRPC on loopback) with a ``masked`` and a ``clear`` model connected to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import models
from inprocess import InProcess

from sordino.client import Connected, connect
from sordino.server.app import ServerConfig
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore


class InProcessServer(InProcess):
    """With a store of its own, which answers in clear too."""

    def __init__(self, bundle: Path, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.store = MatrixStore(bundle)
        service = SordinoService(self.store, limits, allow_clear=True)
        self.pages, self.waits = service.pages, service.waits
        super().__init__(service, ServerConfig(bundle=bundle, tls=None, tokens=None, limits=limits))


class Pair(NamedTuple):
    """The same split, hidden and in clear, the folder of the original model, and the server for more of the kind."""

    masked: Connected
    clear: Connected
    original: Path
    family: str
    target: str


def open_pair(family: str, folder: Path, **options: Any) -> Iterator[Pair]:
    from sordino.server.split import split_model

    original = models.make_tiny(family, folder / "model")
    split_model(original, folder / "bundle", **{"rounding": "nearest", **options})
    server = InProcessServer(folder / "bundle")
    target = f"grpc://127.0.0.1:{server.port}"
    common: dict[str, Any] = {"cache": folder / "cache", "retry_s": 5}
    masked = connect(target, pool=folder / "pool", state_dir=folder / "state", batch=1024, low_water=0, **common)
    clear = connect(target, protocol="clear", **common)
    try:
        yield Pair(masked, clear, original, family, target)
    finally:
        masked.session.close()
        clear.session.close()
        server.close()
