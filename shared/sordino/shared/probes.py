"""Whether a server or a dealer is ready, and if not why: for gRPC's health service, and for probes over HTTP.

Alive is another matter: one that loads, drains or lost its files is alive and not ready, and no restart helps.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sordino.shared import address
from sordino.shared.errors import SordinoError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

_SILENT_S: Final = 10.0  # a client of the pages


class Readiness:
    """The reasons why a process is not ready, each in words of its own; any thread may tell.

    Args:
        reasons: those at the start.
    """

    def __init__(self, *reasons: str) -> None:
        self._lock = threading.Lock()
        self._reasons = dict.fromkeys(reasons)
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def reason(self) -> str | None:
        """All of them, in one line; None: it is ready."""
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
        """``listener`` is told whether it is ready: now, and after every change."""
        with self._lock:
            self._listeners.append(listener)
            listener(not self._reasons)


@contextmanager
def pages(host: str, port: int, registry: CollectorRegistry, readiness: Readiness) -> Iterator[int]:
    """Serves ``/metrics``, ``/livez`` and ``/readyz`` over HTTP, in threads; gives the port (0 takes a free one).

    Raises:
        SordinoError: it cannot be had.
    """
    try:
        server = make_server(host.strip("[]"), port, _application(registry, readiness), _server_class(host), _Handler)
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


def _application(registry: CollectorRegistry, readiness: Readiness) -> WSGIApplication:
    figures = make_wsgi_app(registry)

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
