"""A server in this process (real gRPC on loopback) with a ``masked`` and a ``clear`` model connected to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import models

from sordino.client import Connected, connect
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.shared.transport import channel_options


class InProcessServer:
    """The real service on a loopback port, on an event loop of its own thread."""

    def __init__(self, bundle: Path) -> None:
        self._store = MatrixStore(bundle)
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _serve(self) -> None:
        limits = Limits()
        service = SordinoService(self._store, limits, allow_clear=True)
        server = grpc.aio.server(options=channel_options(limits.max_message_bytes))
        pb_grpc.add_SordinoServicer_to_server(service, server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(0)
        service.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()


class Pair(NamedTuple):
    """The same split, hidden and in clear, and the folder of the original model."""

    masked: Connected
    clear: Connected
    original: Path
    family: str


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
        yield Pair(masked, clear, original, family)
    finally:
        masked.session.close()
        clear.session.close()
        server.close()
