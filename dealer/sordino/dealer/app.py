"""Runs the dealer: TLS, tokens of both parties, metrics, health, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sordino.dealer.metrics import Metrics
from sordino.dealer.service import MAX_REQUEST_BYTES, SERVICE_NAME, CallInterceptor, DealerService, Tokens
from sordino.dealer.sessions import Limits, Sessions
from sordino.proto.v1 import dealer_pb2_grpc as pb_grpc
from sordino.shared import address
from sordino.shared.errors import AuthError, SordinoError
from sordino.shared.logs import keep_strangers_out
from sordino.shared.probes import Readiness, pages
from sordino.shared.tls import TlsFiles
from sordino.shared.transport import channel_options

log = logging.getLogger(__name__)
STARTING: Final = "the dealer starts"
DRAINING: Final = "the dealer is shutting down"
TOKENS: Final = "a token file cannot be read, so nobody new can enter"
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
        metrics_host, metrics_port: where metrics and probes are answered over HTTP; None for nowhere.

    Raises:
        SordinoError: it would serve a network without TLS.
    """

    state: Path
    host: str = "127.0.0.1"
    port: int = 50552
    tls: TlsFiles | None
    threads: int = 2
    grace_s: float = 10.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.tls is None and self.host not in _LOOPBACK:
            raise SordinoError(f"without TLS a dealer listens on loopback alone, not on {self.host!r}")


def run(config: DealerConfig, *, ready: Callable[[int], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Call it from the main thread.

    Args:
        ready: called once with the port, when requests are answered.

    Raises:
        SordinoError: a port cannot be had.
    """
    keep_strangers_out()
    metrics, readiness = Metrics(), Readiness(STARTING)
    with ExitStack() as stack:
        if config.metrics_port is not None:
            stack.enter_context(pages(config.metrics_host, config.metrics_port, metrics.registry, readiness))
        threads = stack.enter_context(ThreadPoolExecutor(config.threads, thread_name_prefix="deal"))
        sessions = Sessions(config.limits, threads, metrics)
        _watch(metrics, sessions, config)
        asyncio.run(_serve(config, sessions, metrics, readiness, ready))


def _watch(metrics: Metrics, sessions: Sessions, config: DealerConfig) -> None:
    """What is not counted where it happens."""
    limits = config.limits
    metrics.describe(version=version("sordino"))
    metrics.watch(
        sessions=lambda: sessions.open_ones,
        sessions_limit=lambda: limits.sessions,
        held_bytes=lambda: sessions.held_bytes,
        held_limit_bytes=lambda: limits.held_bytes,
        threads=lambda: config.threads,
    )


async def _serve(
    config: DealerConfig, sessions: Sessions, metrics: Metrics, readiness: Readiness, ready: Callable[[int], None]
) -> None:
    service, tokens = DealerService(sessions, metrics), Tokens(config.state)
    server = grpc.aio.server(
        interceptors=[CallInterceptor(tokens, metrics)],
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
    loop = asyncio.get_running_loop()

    def tell(now: bool) -> None:  # from any thread
        asyncio.run_coroutine_threadsafe(_tell(checks, now), loop)

    readiness.listen(tell)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    readiness.clear(STARTING)
    ready(port)
    while not stop.is_set():
        sessions.tend()
        readiness.set(TOKENS, holds=not _end_withdrawn(sessions, tokens))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _TEND_S)
    log.info("draining: at most %.0f s for running passes", config.grace_s)
    readiness.fail(DRAINING)
    stopped = asyncio.ensure_future(server.stop(config.grace_s))
    await asyncio.sleep(0)  # it refuses new calls now
    service.drain()
    await stopped
    sessions.end_all()


async def _tell(checks: health.aio.HealthServicer, ready: bool) -> None:
    status = health_pb2.HealthCheckResponse
    for name in ("", SERVICE_NAME):
        await checks.set(name, status.SERVING if ready else status.NOT_SERVING)


def _end_withdrawn(sessions: Sessions, tokens: Tokens) -> bool:
    """Ends the sessions of tokens that are valid no more; returns whether both files could be read.

    While one cannot be read nobody of it enters; who is in stays, for an editor may be at work on it.
    """
    try:
        valid = tokens.valid()
    except (AuthError, OSError) as error:
        log.debug("a token file cannot be read now: %s", error)
        return False
    sessions.end_all_but(valid)
    return True


def _listen(server: grpc.aio.Server, config: DealerConfig) -> int:
    address.check(config.host, config.port)
    where = address.join(config.host, config.port)
    try:
        if config.tls is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, grpc.ssl_server_credentials([config.tls.read()]))
    except RuntimeError as error:
        raise SordinoError(f"cannot listen on {where}: is another server there?") from error
