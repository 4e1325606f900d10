"""Assembles and runs the server: TLS, authentication, metrics, health, reflection, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import grpc
import grpc.aio
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server import parallel
from sordino.server.calls import CallInterceptor
from sordino.server.health import DEAF, DRAINING, LOADING, RANK, TOKENS, SelfCheck
from sordino.server.metrics import Metrics
from sordino.server.provision import few_arenas, return_memory
from sordino.server.service import SERVICE_NAME, Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import TwoPartyModel
from sordino.shared import address
from sordino.shared.auth import TokenFile
from sordino.shared.errors import AuthError, SordinoError
from sordino.shared.logs import keep_strangers_out
from sordino.shared.probes import Readiness, pages
from sordino.shared.tls import TlsFiles
from sordino.shared.transport import channel_options
from sordino.shared.twoparty.source import Dealer

log = logging.getLogger(__name__)
_MAX_REFUSALS = 1024
_COLLECTIONS = (20_000, 20, 100)
_MAX_FILES = 1 << 16
_SPARE_FILES = 128  # that are no connections
_HANDSHAKE_MS = 10_000
_IDLE_MS = 300_000
_MAX_GRACE_S = 86_400
_LAST_WORDS_S = 1.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True, slots=True)
class DealerAddress:
    """Of profile two-party, and this server's token there."""

    target: str
    ca: Path | None
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How one server runs.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        tls: None serves without TLS, on loopback only.
        tokens: None serves without authentication, on loopback only.
        allow_clear: answer ``protocol=clear`` too.
        grace_s: how long running calls may go on after SIGTERM.
        layers: the first and the last layer whose groups this server holds, a stage of a pipeline; None for all.
        parallel: this process is a rank that torchrun started (:mod:`sordino.server.parallel`).
        metrics_host, metrics_port: where metrics and probes are answered over HTTP; None for nowhere.
        dealer: of profile two-party; None offers that profile to nobody. opens_tokens: it opens the next token alone,
            and not the hidden states that logits come of.

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
    layers: tuple[int, int] | None = None
    parallel: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    limits: Limits = field(default_factory=Limits)
    dealer: DealerAddress | None = None
    opens_tokens: bool = False

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
    keep_strangers_out()
    _raise_file_limit()
    few_arenas()
    metrics, readiness = Metrics(), Readiness(LOADING)
    with ExitStack() as stack:
        if config.metrics_port is not None:
            stack.enter_context(pages(config.metrics_host, config.metrics_port, metrics.registry, readiness))
        if config.parallel:
            parallel.join(config.device)
        shard = parallel.shard() if config.parallel else (0, 1)
        store = MatrixStore(config.bundle, config.device, layers=config.layers, shard=shard)
        log.info("%d groups on %s by %s", len(store.matrices), store.device, store.kernel.name)
        ranks = parallel.lead(store, config.limits.max_encoded_bytes) if config.parallel else None
        two_party = None
        if config.dealer is not None:
            dealer = stack.enter_context(Dealer(config.dealer.target, config.dealer.ca, config.dealer.token))
            log.info("profile two-party: bounds of all layers come from their matrices, which takes a while")
            model = TwoPartyModel(store, config.limits.max_opened_rows, tokens=config.opens_tokens)
            if model.unproven:
                log.warning(
                    "profile two-party: nothing proves that what layers %s add to a row cannot carry it past the check "
                    "of its domain (docs/two-party.md, 6.1)",
                    ", ".join(map(str, model.unproven)),
                )
            try:
                dealer.greet(model.fingerprint, model.plan)
            except SordinoError as error:  # it may come later
                log.warning("profile two-party cannot be used for now: %s", error)
            two_party = model, dealer
        service = SordinoService(
            store,
            config.limits,
            engine=ranks,
            allow_clear=config.allow_clear,
            metrics=metrics,
            two_party=two_party,
        )
        _watch(metrics, service, store)
        check = stack.enter_context(SelfCheck(store, readiness))
        asyncio.run(_serve(service, config, metrics, readiness, check, ranks, ready))
        if ranks is not None:
            ranks.stop()


async def _serve(
    service: SordinoService,
    config: ServerConfig,
    metrics: Metrics,
    readiness: Readiness,
    check: SelfCheck,
    ranks: parallel.TensorParallel | None,
    ready: Callable[[int], None],
) -> None:
    """Until a signal, or until a rank is lost; then drains."""
    server, checks = build_server(service, config, metrics)
    port = _listen(server, config)
    await server.start()
    return_memory()
    # What is there stays: a collector that looks at it again and again costs a tenth of a small server's time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    tokens = TokenFile(config.tokens) if config.tokens else None
    loop = asyncio.get_running_loop()

    def tell(now: bool) -> None:  # from any thread
        asyncio.run_coroutine_threadsafe(_tell(checks, now), loop)

    readiness.listen(tell)

    # Its end without a signal, of a fault in gRPC, must not leave a process behind that listens to nobody.
    listening = asyncio.ensure_future(server.wait_for_termination())

    def tend() -> bool:
        service.waits.end_overdue()
        check.notice_hang()
        if tokens:
            readiness.set(TOKENS, holds=not _end_withdrawn(service, tokens))
        return not listening.done() and (ranks is None or not ranks.lost)

    def serving() -> None:
        readiness.clear(LOADING)
        ready(port)

    await _until_signalled(serving, tend)
    if ranks is not None and ranks.lost:
        readiness.fail(RANK)
        await server.stop(_LAST_WORDS_S)
        raise SordinoError("a rank of this server is gone, and with it a part of each matrix: start all ranks anew")
    if listening.done():
        readiness.fail(DEAF)
        raise SordinoError("the gRPC server has ended by itself, after an error in the log: start it anew")
    log.info("draining: no new streams, at most %.0f s for the running ones", config.grace_s)
    readiness.fail(DRAINING)
    stopped = asyncio.ensure_future(server.stop(config.grace_s))
    await asyncio.sleep(0)  # it refuses new calls now
    service.waits.drain()
    await stopped
    service.close()


def work(config: ServerConfig) -> None:
    """Computes for rank 0 until it stops, as one of its other ranks. Signals are for rank 0, which has calls to end.

    Raises:
        SordinoError: the bundle is damaged, or rank 0 is gone.
    """
    few_arenas()
    parallel.join(config.device)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    shard = parallel.shard()
    store = MatrixStore(config.bundle, config.device, layers=config.layers, shard=shard, verify=False)
    log.info("rank %d of %d on %s by %s", *shard, store.device, store.kernel.name)
    parallel.follow(store, config.limits.max_encoded_bytes)


def _watch(metrics: Metrics, service: SordinoService, store: MatrixStore) -> None:
    """What is not counted where it happens."""
    metrics.describe(
        version=version("sordino"),
        fingerprint=store.manifest.fingerprint,
        device=str(store.device),
        kernel=store.kernel.name,
    )
    kept = service.pages
    metrics.watch(
        queue_depth=lambda: service.waiting,
        page_sessions=lambda: kept.sessions,
        page_bytes=lambda: kept.used_bytes,
        page_limit_bytes=lambda: kept.limit_bytes,
        page_spilled_bytes=lambda: kept.spilled_bytes,
        page_evictions=lambda: kept.evictions,
    )
    if store.device.type == "cuda":
        metrics.watch(
            gpu_allocated_bytes=lambda: torch.cuda.memory_allocated(store.device),
            gpu_reserved_bytes=lambda: torch.cuda.memory_reserved(store.device),
        )


async def _tell(checks: health.aio.HealthServicer, ready: bool) -> None:
    status = health_pb2.HealthCheckResponse
    for name in ("", SERVICE_NAME):
        await checks.set(name, status.SERVING if ready else status.NOT_SERVING)


def _end_withdrawn(service: SordinoService, tokens: TokenFile) -> bool:
    """Ends the calls of tokens that are valid no more; returns whether the file could be read.

    While it cannot be read nobody new enters; who is in stays, for an editor may be at work on it.
    """
    try:
        valid = tokens.valid()
    except (AuthError, OSError) as error:
        log.debug("the token file cannot be read now: %s", error)
        return False
    service.places.end_all_but(valid)
    return True


async def _until_signalled(ready: Callable[[], None], tend: Callable[[], bool]) -> None:
    """Waits for SIGTERM or SIGINT by asyncio's wake-up socket, and meanwhile calls ``tend`` twice a second: until it
    says no.

    A lock would not do: a handler that sets an Event can meet its own thread inside that Event, and a signal that the
    system gives to another thread wakes no lock.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready()
    while tend() and not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)


def build_server(
    service: SordinoService, config: ServerConfig, metrics: Metrics | None = None
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """The gRPC server of the running event loop, not listening yet.

    Args:
        metrics: what its calls are counted in.
    """
    limits = config.limits
    interceptor = CallInterceptor(
        service.waits,
        service.places,
        metrics or Metrics(),
        TokenFile(config.tokens) if config.tokens else None,
        SERVICE_NAME,
        first_s=limits.first_message_s,
        idle_s=limits.idle_s,
        kv_idle_s=limits.kv_idle_s,
    )
    server = grpc.aio.server(
        interceptors=[interceptor],
        options=[*channel_options(limits.max_message_bytes), *_connection_options()],
        # Over the places calls are refused, with a reason; over this, gRPC refuses at once.
        maximum_concurrent_rpcs=service.places.total + _MAX_REFUSALS,
    )
    checks = health.aio.HealthServicer()
    pb_grpc.add_SordinoServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, checks


def _connection_options() -> list[tuple[str, int]]:
    """What connections may do: who opens one and says nothing, or comes back to it no more, does not keep it."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = (_MAX_FILES if files == resource.RLIM_INFINITY else files) - _SPARE_FILES
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),  # of TLS, and of the first frames of HTTP/2
        ("grpc.max_connection_idle_ms", _IDLE_MS),  # without a call; a session keeps one open
        ("grpc.max_allowed_incoming_connections", max(1, connections)),
    ]


def _raise_file_limit() -> None:
    """Allows as many open files as the system lets this process have: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:  # some systems have a lower limit that they do not tell
        log.warning("the limit of %d open files cannot be raised: %s", soft, error)


def _listen(server: grpc.aio.Server, config: ServerConfig) -> int:
    address.check(config.host, config.port)
    where = address.join(config.host, config.port)
    try:
        if config.tls is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, grpc.ssl_server_credentials([config.tls.read()]))
    except RuntimeError as error:
        raise SordinoError(f"cannot listen on {where}: is another server there?") from error


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
