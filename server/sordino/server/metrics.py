"""What the server counts, for Prometheus: calls, bytes, products. Names of tokens at most, never content or tokens.

A call that has started ends exactly once, whatever ends it: started = ended + open, for each method.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, TypeAlias, TypeVar, get_args

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from sordino.shared.logs import fields

log = logging.getLogger(__name__)
Kind: TypeAlias = Literal["masked", "rlwe", "masks", "attention"]
K = TypeVar("K")
W = TypeVar("W")
R = TypeVar("R")

NOBODY: Final = "(no token)"
OTHERS: Final = "(others)"
_PROBE: Final = "Check"  # of the health service; every few seconds, for ever
_NAMES: Final = 256  # that have a series of their own
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WATCHED: Final = {
    "queue_depth": (GaugeMetricFamily, "Requests that wait for a product."),
    "page_sessions": (GaugeMetricFamily, "Encrypted KV caches: streams that may keep pages."),
    "page_bytes": (GaugeMetricFamily, "Encrypted KV caches: bytes in memory."),
    "page_limit_bytes": (GaugeMetricFamily, "Encrypted KV caches: the most bytes in memory."),
    "page_spilled_bytes": (GaugeMetricFamily, "Encrypted KV caches: bytes on disk."),
    "page_evictions": (CounterMetricFamily, "Encrypted KV caches: sessions that lost their pages."),
    "gpu_allocated_bytes": (GaugeMetricFamily, "Memory of the CUDA device that tensors take."),
    "gpu_reserved_bytes": (GaugeMetricFamily, "Memory of the CUDA device that this process holds."),
}


class Metrics:
    """The figures of one server.

    Attributes:
        registry: all of them, and the process's own, for Prometheus.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._info = Info("sordino_server", "What is served, and by what.", registry=self.registry)
        self._started = self._counter("calls_started", "Calls that started.", "method")
        self._ended = self._counter("calls_ended", "Calls that ended.", "method", "status")
        self._open = Gauge("sordino_calls_open", "Calls that are open.", ["method"], registry=self.registry)
        self._clients = self._counter("client_calls", "Calls that started, by the name of their token.", "client")
        self._blocks = self._counter("provision_blocks", "Blocks of masks, and of checks, that were answered.")
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._products: dict[Kind, _Products] = {kind: _Products() for kind in get_args(Kind)}
        self._bytes: dict[str, Bytes] = {}
        self.registry.register(_Often(self._products, self._bytes))

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"sordino_{name}", what, labels, registry=self.registry)

    def describe(self, **labels: str) -> None:
        """What ``sordino_server_info`` says."""
        self._info.info(labels)

    def watch(self, **values: Callable[[], float]) -> None:
        """Shows what is counted elsewhere, by the names of ``_WATCHED``: asked for whenever Prometheus asks."""
        self.registry.register(_Watched(values))

    def product(self, kind: Kind, *, requests: int, rows: int, seconds: float) -> None:
        """One product, and the rows of all its requests: of ``masks`` points, of ``attention`` sums.

        Clear rows are among the ``masked``, which one product may hold together.
        """
        of_kind = self._products[kind]
        with self._lock:
            of_kind.by_requests[bisect_left(_BATCHES, requests)] += 1
            of_kind.requests += requests
            of_kind.rows += rows
            of_kind.seconds += seconds

    def timed(
        self, kind: Kind, compute: Callable[[K, list[W]], R], rows: Callable[[W], int]
    ) -> Callable[[K, list[W]], R]:
        """``compute``, which makes one product for several requests, counted; ``rows`` of each."""

        def counted(key: K, works: list[W]) -> R:
            start = time.perf_counter()
            result = compute(key, works)
            seconds = time.perf_counter() - start
            self.product(kind, requests=len(works), rows=sum(map(rows, works)), seconds=seconds)
            return result

        return counted

    def provisioned(self) -> None:
        """One block of a provisioning stream was answered."""
        self._blocks.inc()

    @contextmanager
    def call(self, method: str, client: str, peer: str) -> Iterator[Callable[[str], None]]:
        """A call, while it is open: its start is counted, and its end when the block is told the status; and logged."""
        name, start = method.rpartition("/")[2], time.monotonic()
        self._started.labels(name).inc()
        self._clients.labels(self._bounded(client)).inc()
        self._open.labels(name).inc()
        status = grpc.StatusCode.UNKNOWN.name

        def ended(with_status: str) -> None:
            nonlocal status
            status = with_status

        try:
            yield ended
        finally:
            self._open.labels(name).dec()
            self._ended.labels(name, status).inc()
            _log_end(name, status, time.monotonic() - start, client, peer.rpartition(":")[0])

    def unknown_call(self) -> None:
        """A call of no method of the server's: a stranger's text is no label."""
        self._started.labels("other").inc()
        self._ended.labels("other", grpc.StatusCode.UNIMPLEMENTED.name).inc()

    def bytes_of(self, method: str) -> Bytes:
        """Where the calls of a method count what they receive and send, all from one thread."""
        return self._bytes.setdefault(method.rpartition("/")[2], Bytes())

    def _bounded(self, client: str) -> str:
        """Each name is a series for ever, and a token file may hold any number of them, one after another."""
        with self._lock:
            if len(self._names) < _NAMES:
                self._names.add(client)
            return client if client in self._names else OTHERS


@dataclass(slots=True)
class Bytes:
    """Of messages without their envelopes."""

    received: int = 0
    sent: int = 0


@dataclass(slots=True)
class _Products:
    by_requests: list[int] = field(default_factory=lambda: [0] * (len(_BATCHES) + 1))
    requests: int = 0
    rows: int = 0
    seconds: float = 0.0


class _Often(Collector):
    """What is counted with every message: plain numbers, since six counters of the library cost a message 18 us."""

    def __init__(self, products: Mapping[Kind, _Products], sizes: Mapping[str, Bytes]) -> None:
        self._products = products
        self._sizes = sizes

    def collect(self) -> Iterable[Metric]:
        counted = HistogramMetricFamily(
            "sordino_product_requests", "Requests that one product answers.", labels=["kind"]
        )
        rows = CounterMetricFamily("sordino_product_rows", "Rows in products.", labels=["kind"])
        seconds = CounterMetricFamily("sordino_product_seconds", "Time that products took.", labels=["kind"])
        for kind, products in self._products.items():
            limits = [str(float(most)) for most in _BATCHES] + ["+Inf"]
            buckets = list(zip(limits, accumulate(products.by_requests), strict=True))
            counted.add_metric([kind], buckets, products.requests)
            rows.add_metric([kind], products.rows)
            seconds.add_metric([kind], products.seconds)
        received = CounterMetricFamily(
            "sordino_received_bytes", "Messages of clients, without their envelopes.", labels=["method"]
        )
        sent = CounterMetricFamily("sordino_sent_bytes", "Answers, without their envelopes.", labels=["method"])
        for method, size in list(self._sizes.items()):
            received.add_metric([method], size.received)
            sent.add_metric([method], size.sent)
        yield from (counted, rows, seconds, received, sent)


class _Watched(Collector):
    def __init__(self, values: Mapping[str, Callable[[], float]]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for name, value in self._values.items():
            family, what = _WATCHED[name]
            yield family(f"sordino_{name}", what, value=value())


def _log_end(method: str, status: str, seconds: float, client: str, peer: str) -> None:
    level = logging.DEBUG if method == _PROBE else logging.INFO
    log.log(
        level,
        "%s of %s at %s ended with %s after %.3f s",
        method,
        client,
        peer,
        status,
        seconds,
        extra=fields(method=method, client=client, peer=peer, status=status, seconds=round(seconds, 6)),
    )
