"""Assembles and runs the server: TLS, authentication, health, reflection, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.auth import TokenFile, TokenInterceptor
from sordino.server.decoding import DecodingInterceptor
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.server.tls import TlsFiles
from sordino.shared.errors import SordinoError
from sordino.shared.transport import channel_options

log = logging.getLogger(__name__)
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Sordino"].full_name
_SPARE_WORKERS = 16
_MAX_GRACE_S = 86_400
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How one server runs.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        tls: None serves without TLS, on loopback only.
        tokens: None serves without authentication, on loopback only.
        allow_clear: answer ``protocol=clear`` too.
        grace_s: how long running calls may go on after SIGTERM.

    Raises:
        SordinoError: what no server could run with, said before anything is loaded or written.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 50551
    tls: TlsFiles | None
    tokens: Path | None
    device: str = "cpu"
    allow_clear: bool = False
    grace_s: float = 10.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK and (self.tls is None or self.tokens is None):
            raise SordinoError(
                f"without TLS or without tokens a server listens on loopback alone, not on {self.host!r}"
            )
        if not 0 <= self.grace_s <= _MAX_GRACE_S:
            raise SordinoError(f"the grace is 0 to {_MAX_GRACE_S} seconds, not {self.grace_s}")
        _check_device(self.device)


def serve(config: ServerConfig, *, ready: Callable[[int], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Call it from the main thread.

    While the bundle is loaded, either signal ends the process at once: nobody is served yet.

    Args:
        ready: called once with the port, when requests are answered.

    Raises:
        SordinoError: the bundle is damaged, or the port cannot be had.
    """
    store = MatrixStore(config.bundle, config.device)
    log.info("%d groups on %s by %s", len(store.matrices), store.device, store.kernel.name)
    service = SordinoService(store, config.limits, allow_clear=config.allow_clear)
    server, checks = build_server(service, config)
    port = _listen(server, config)
    server.start()
    for name in ("", SERVICE_NAME):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    asyncio.run(_until_signalled(lambda: ready(port), service.waits.end_overdue))
    log.info("draining: no new streams, at most %.0f s for the running ones", config.grace_s)
    checks.enter_graceful_shutdown()
    stopped = server.stop(config.grace_s)
    service.waits.drain()
    stopped.wait()


async def _until_signalled(ready: Callable[[], None], tend: Callable[[], None]) -> None:
    """Waits for SIGTERM or SIGINT by asyncio's wake-up socket, and meanwhile calls ``tend`` twice a second.

    A lock would not do: a handler that sets an Event can meet its own thread inside that Event, and a signal that the
    system gives to another thread wakes no lock.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready()
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)
        tend()


def build_server(service: SordinoService, config: ServerConfig) -> tuple[grpc.Server, health.HealthServicer]:
    """The gRPC server, not listening yet: one thread a stream, and room beside them for health and short calls."""
    limits = config.limits
    streams = limits.max_streams + limits.max_provisioning + limits.max_attention
    workers = streams + limits.max_downloads + _SPARE_WORKERS
    interceptors: list[grpc.ServerInterceptor] = [
        DecodingInterceptor(
            service.waits,
            SERVICE_NAME,
            first_s=limits.first_message_s,
            idle_s=limits.idle_s,
            kv_idle_s=limits.kv_idle_s,
        )
    ]
    if config.tokens:
        interceptors.append(TokenInterceptor(TokenFile(config.tokens)))
    server = grpc.server(
        ThreadPoolExecutor(workers, thread_name_prefix="call"),
        interceptors=interceptors,
        options=[*channel_options(limits.max_message_bytes), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=workers,  # over it a call is refused at once; it never waits unseen
    )
    checks = health.HealthServicer()
    pb_grpc.add_SordinoServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, checks


def _listen(server: grpc.Server, config: ServerConfig) -> int:
    address = f"{config.host}:{config.port}"
    try:
        if config.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, grpc.ssl_server_credentials([config.tls.read()]))
    except RuntimeError as error:
        raise SordinoError(f"cannot listen on {address}: is another server there?") from error


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SordinoError(f"device {name!r} is not known: it is cpu, cuda, or one of several as in cuda:1")
    found = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= found:
        raise SordinoError(f"device {name!r} is not there: torch finds {found} of this kind")
