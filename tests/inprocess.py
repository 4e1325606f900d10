"""Real servers in this process, in one event loop in a thread of its own: gRPC has one poller for all loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from sordino.server.app import ServerConfig, build_server
from sordino.server.metrics import Metrics
from sordino.server.service import SordinoService

T = TypeVar("T")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """In the loop of the servers."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(60)


class InProcess:
    """One server on a loopback port, from here to :meth:`close`.

    Args:
        port: 0 takes a free one.
    """

    def __init__(
        self, service: SordinoService, config: ServerConfig, metrics: Metrics | None = None, *, port: int = 0
    ) -> None:
        self.service = service
        self.port = run(self._start(config, metrics, port))
        self.target = f"grpc://127.0.0.1:{self.port}"

    async def _start(self, config: ServerConfig, metrics: Metrics | None, port: int) -> int:
        self._server, _ = build_server(self.service, config, metrics)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    def do(self, function: Callable[[], T]) -> T:
        """In the server's thread."""

        async def done() -> T:
            return function()

        return run(done())

    def close(self) -> None:
        run(self._server.stop(0))
        self.service.close()
