"""Whether the server can compute now, and if not why: for gRPC's health service, and for probes over HTTP.

Alive is another matter: a server that loads, drains or lost its bundle is alive and not ready, and no restart helps.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

import torch
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sordino.server.kernel import known_answer_test
from sordino.server.metrics import Metrics
from sordino.server.store import MatrixStore
from sordino.shared import address
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import CLIENT_DIR, SERVER_DIR

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

LOADING: Final = "the bundle is being loaded"
DRAINING: Final = "the server is shutting down"
TOKENS: Final = "the token file cannot be read, so nobody new can enter"
RANK: Final = "a rank of this server is gone"
DEAF: Final = "the server listens no more"
KERNEL: Final = "the kernel fails its known-answer test"
STUCK: Final = "the server's look at itself does not end: a device or a file system hangs"
_LOOK_S: Final = 1.0
_KERNEL_S: Final = 30.0
_STUCK_S: Final = 60.0
_SILENT_S: Final = 10.0  # a client of the pages


class Readiness:
    """The reasons why the server is not ready, each in words of its own; any thread may tell.

    Args:
        reasons: those at the start.
    """

    def __init__(self, *reasons: str) -> None:
        self._lock = threading.Lock()
        self._reasons = dict.fromkeys(reasons)
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def reason(self) -> str | None:
        """All of them, in one line; None: the server is ready."""
        with self._lock:
            return "; ".join(self._reasons) or None

    def fail(self, reason: str) -> None:
        """Not ready, until :meth:`clear` is called with the same words, which probes are shown."""
        self.set(reason, holds=True)

    def clear(self, reason: str) -> None:
        self.set(reason, holds=False)

    def set(self, reason: str, *, holds: bool) -> None:
        """Fails or clears."""
        with self._lock:
            if holds == (reason in self._reasons):
                return
            if holds:
                self._reasons[reason] = None
            else:
                del self._reasons[reason]
            if self._reasons:
                log.warning("not ready: %s", "; ".join(self._reasons))
            else:
                log.info("ready")
            for listener in self._listeners:
                listener(not self._reasons)

    def listen(self, listener: Callable[[bool], None]) -> None:
        """``listener`` is told whether the server is ready: now, and after every change."""
        with self._lock:
            self._listeners.append(listener)
            listener(not self._reasons)


class SelfCheck:
    """Looks again and again whether the bundle is whole and the kernel exact, in a thread, from enter to exit."""

    def __init__(self, store: MatrixStore, readiness: Readiness) -> None:
        self._store = store
        self._readiness = readiness
        self._bundle: str | None = None
        self._looked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="self-check", daemon=True)

    def __enter__(self) -> SelfCheck:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_LOOK_S)  # one that hangs keeps nobody from ending

    def notice_hang(self) -> None:
        """To be called every now and then, from another thread."""
        self._readiness.set(STUCK, holds=time.monotonic() > self._looked + _STUCK_S)

    def look_at_bundle(self) -> None:
        name = _changed_file(self._store)
        reason = name and f"{name} of the bundle is gone, or has another size than when it was loaded"
        if reason != self._bundle:
            if reason:
                self._readiness.fail(reason)
            if self._bundle:
                self._readiness.clear(self._bundle)
            self._bundle = reason

    def look_at_kernel(self) -> None:
        try:
            exact = known_answer_test(self._store.kernel, self._store.device)
        except RuntimeError as error:  # of a CUDA device
            log.error("the kernel's known-answer test: %s", error)
            exact = False
        self._readiness.set(KERNEL, holds=not exact)

    def _run(self) -> None:
        torch.set_num_threads(1)
        due = time.monotonic() + _KERNEL_S  # the store has just chosen it
        while not self._ended.wait(_LOOK_S):
            self.look_at_bundle()
            if time.monotonic() > due:
                self.look_at_kernel()
                due = time.monotonic() + _KERNEL_S
            self._looked = time.monotonic()


def _changed_file(store: MatrixStore) -> str | None:
    """Weights are mapped, not copied: beyond the end of a file that was cut there is nothing to compute with."""
    manifest = store.manifest
    for folder, files in ((CLIENT_DIR, manifest.client_files), (SERVER_DIR, manifest.server_files)):
        for name, spec in files.items():
            try:
                size = (store.bundle / folder / name).stat().st_size
            except OSError:
                size = -1
            if size != spec.size:
                return f"{folder}/{name}"
    return None


@contextmanager
def pages(host: str, port: int, metrics: Metrics, readiness: Readiness) -> Iterator[int]:
    """Serves ``/metrics``, ``/livez`` and ``/readyz`` over HTTP, in threads; gives the port (0 takes a free one).

    Raises:
        SordinoError: it cannot be had.
    """
    try:
        server = make_server(host.strip("[]"), port, _application(metrics, readiness), _server_class(host), _Handler)
    except OSError as error:
        where = address.join(host, port)
        raise SordinoError(
            f"cannot serve metrics on {where}: {error.strerror}. Pass another --metrics-port or --metrics-host"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _application(metrics: Metrics, readiness: Readiness) -> WSGIApplication:
    figures = make_wsgi_app(metrics.registry)

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = figures(environ, start)
            return answer
        status, text = HTTPStatus.NOT_FOUND, "there are /metrics, /livez and /readyz"
        if path == "/livez":
            status, text = HTTPStatus.OK, "alive"
        elif path == "/readyz":
            reason = readiness.reason
            status, text = (HTTPStatus.SERVICE_UNAVAILABLE, reason) if reason else (HTTPStatus.OK, "ready")
        start(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return application


class _Server(ThreadingWSGIServer):
    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """A client that is silent or breaks off is nobody's error."""
        log.debug("a client of the metrics port broke off", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds."""
        log.debug(format, *args)
