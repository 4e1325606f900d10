"""Runs the dealer: TLS, tokens of both parties, health, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sordino.dealer.service import MAX_REQUEST_BYTES, SERVICE_NAME, CallInterceptor, DealerService, Tokens
from sordino.dealer.sessions import Limits, Sessions
from sordino.proto.v1 import dealer_pb2_grpc as pb_grpc
from sordino.shared import address
from sordino.shared.errors import AuthError, SordinoError
from sordino.shared.logs import keep_strangers_out
from sordino.shared.tls import TlsFiles
from sordino.shared.transport import channel_options

log = logging.getLogger(__name__)
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]", "::1")
_MAX_REFUSALS: Final = 256
_TEND_S: Final = 0.5
_HANDSHAKE_MS: Final = 10_000
_IDLE_MS: Final = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DealerConfig:
    """How a dealer runs.

    Attributes:
        state: the folder with tokens. host, port: where to listen; port 0 takes a free one.
        tls: None serves without TLS, on loopback only.
        threads: that make material, each for one session at a time.
        grace_s: how long running passes may go on after SIGTERM.

    Raises:
        SordinoError: it would serve a network without TLS.
    """

    state: Path
    host: str = "127.0.0.1"
    port: int = 50552
    tls: TlsFiles | None
    threads: int = 2
    grace_s: float = 10.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.tls is None and self.host not in _LOOPBACK:
            raise SordinoError(f"without TLS a dealer listens on loopback alone, not on {self.host!r}")


def run(config: DealerConfig, *, ready: Callable[[int], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Call it from the main thread.

    Args:
        ready: called once with the port, when requests are answered.

    Raises:
        SordinoError: the port cannot be had.
    """
    keep_strangers_out()
    with ThreadPoolExecutor(config.threads, thread_name_prefix="deal") as threads:
        asyncio.run(_serve(config, Sessions(config.limits, threads), ready))


async def _serve(config: DealerConfig, sessions: Sessions, ready: Callable[[int], None]) -> None:
    service, tokens = DealerService(sessions), Tokens(config.state)
    server = grpc.aio.server(
        interceptors=[CallInterceptor(tokens)],
        options=[
            *channel_options(MAX_REQUEST_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
        ],
        maximum_concurrent_rpcs=2 * config.limits.sessions + _MAX_REFUSALS,
    )
    checks = health.aio.HealthServicer()
    pb_grpc.add_DealerServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = _listen(server, config)
    await server.start()
    for name in ("", SERVICE_NAME):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ready(port)
    while not stop.is_set():
        sessions.tend()
        _end_withdrawn(sessions, tokens)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _TEND_S)
    log.info("draining: at most %.0f s for running passes", config.grace_s)
    await checks.enter_graceful_shutdown()
    stopped = asyncio.ensure_future(server.stop(config.grace_s))
    await asyncio.sleep(0)  # it refuses new calls now
    service.drain()
    await stopped


def _end_withdrawn(sessions: Sessions, tokens: Tokens) -> None:
    try:
        sessions.end_all_but(tokens.valid())
    except (AuthError, OSError) as error:  # an editor may be at work on it; nobody new enters meanwhile
        log.debug("a token file cannot be read now: %s", error)


def _listen(server: grpc.aio.Server, config: DealerConfig) -> int:
    address.check(config.host, config.port)
    where = address.join(config.host, config.port)
    try:
        if config.tls is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, grpc.ssl_server_credentials([config.tls.read()]))
    except RuntimeError as error:
        raise SordinoError(f"cannot listen on {where}: is another server there?") from error
