"""What a service counts of its calls, for Prometheus, with a line of its log for each that ends. Names of tokens at
most, never content or tokens.

A call that has started ends exactly once, whatever ends it: started = ended + open, for each method.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from sordino.shared.logs import fields

Families: TypeAlias = Mapping[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]]

NOBODY: Final = "(no token)"
OTHERS: Final = "(others)"
_PROBE: Final = "Check"  # of the health service; every few seconds, for ever
_NAMES: Final = 256  # that have a series of their own
# Names of gRPC's statuses.
_UNKNOWN: Final = "UNKNOWN"
_UNIMPLEMENTED: Final = "UNIMPLEMENTED"


class Figures:
    """Those of one process.

    Args:
        prefix: of the names of all. info: name and text of the one that says what is served. log: where ended calls go.
        watched: the kind and the text of what :meth:`watch` may show, by name.

    Attributes:
        registry: all of them, and the process's own, for Prometheus.
    """

    def __init__(self, prefix: str, info: tuple[str, str], log: logging.Logger, watched: Families) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._prefix, self._log, self._watched = prefix, log, watched
        self._info = Info(*info, registry=self.registry)
        self._started = self._counter("calls_started", "Calls that started.", "method")
        self._ended = self._counter("calls_ended", "Calls that ended.", "method", "status")
        self._open = Gauge(f"{prefix}_calls_open", "Calls that are open.", ["method"], registry=self.registry)
        self._clients = self._counter("client_calls", "Calls that started, by the name of their token.", "client")
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}_{name}", what, labels, registry=self.registry)

    def describe(self, **labels: str) -> None:
        """What is served, and by what."""
        self._info.info(labels)

    def watch(self, **values: Callable[[], float]) -> None:
        """Shows what is counted elsewhere: asked for whenever Prometheus asks, in a thread of its own."""
        self.registry.register(_Watched(self._prefix, self._watched, values))

    @contextmanager
    def call(self, method: str, client: str, peer: str) -> Iterator[Callable[[str], None]]:
        """A call, while it is open: its start is counted, and its end when the block is told the status; and logged."""
        name, start = method.rpartition("/")[2], time.monotonic()
        self._started.labels(name).inc()
        self._clients.labels(self._bounded(client)).inc()
        self._open.labels(name).inc()
        status = _UNKNOWN

        def ended(with_status: str) -> None:
            nonlocal status
            status = with_status

        try:
            yield ended
        finally:
            self._open.labels(name).dec()
            self._ended.labels(name, status).inc()
            self._log_end(name, status, time.monotonic() - start, client, peer.rpartition(":")[0])

    def unknown_call(self) -> None:
        """A call of no method that there is: a stranger's text is no label."""
        self._started.labels("other").inc()
        self._ended.labels("other", _UNIMPLEMENTED).inc()

    def _bounded(self, client: str) -> str:
        """Each name is a series for ever, and a token file may hold any number of them, one after another."""
        with self._lock:
            if len(self._names) < _NAMES:
                self._names.add(client)
            return client if client in self._names else OTHERS

    def _log_end(self, method: str, status: str, seconds: float, client: str, peer: str) -> None:
        level = logging.DEBUG if method == _PROBE else logging.INFO
        self._log.log(
            level,
            "%s of %s at %s ended with %s after %.3f s",
            method,
            client,
            peer,
            status,
            seconds,
            extra=fields(method=method, client=client, peer=peer, status=status, seconds=round(seconds, 6)),
        )


class _Watched(Collector):
    def __init__(self, prefix: str, families: Families, values: Mapping[str, Callable[[], float]]) -> None:
        self._prefix = prefix
        self._families = families
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for name, value in self._values.items():
            family, what = self._families[name]
            yield family(f"{self._prefix}_{name}", what, value=value())
