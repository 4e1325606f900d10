"""What the server counts beside its calls, for Prometheus: bytes, products, pages."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sordino.shared.figures import Families, Figures

log = logging.getLogger(__name__)
Kind: TypeAlias = Literal["masked", "rlwe", "masks", "attention"]
K = TypeVar("K")
W = TypeVar("W")
R = TypeVar("R")

_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WATCHED: Final[Families] = {
    "queue_depth": (GaugeMetricFamily, "Requests that wait for a product."),
    "page_sessions": (GaugeMetricFamily, "Encrypted KV caches: streams that may keep pages."),
    "page_bytes": (GaugeMetricFamily, "Encrypted KV caches: bytes in memory."),
    "page_limit_bytes": (GaugeMetricFamily, "Encrypted KV caches: the most bytes in memory."),
    "page_spilled_bytes": (GaugeMetricFamily, "Encrypted KV caches: bytes on disk."),
    "page_evictions": (CounterMetricFamily, "Encrypted KV caches: sessions that lost their pages."),
    "gpu_allocated_bytes": (GaugeMetricFamily, "Memory of the CUDA device that tensors take."),
    "gpu_reserved_bytes": (GaugeMetricFamily, "Memory of the CUDA device that this process holds."),
}


class Metrics(Figures):
    """The figures of one server."""

    def __init__(self) -> None:
        super().__init__("sordino", ("sordino_server", "What is served, and by what."), log, _WATCHED)
        self._blocks = self._counter("provision_blocks", "Blocks of masks, and of checks, that were answered.")
        self._products: dict[Kind, _Products] = {kind: _Products() for kind in get_args(Kind)}
        self._bytes: dict[str, Bytes] = {}
        self.registry.register(_Often(self._products, self._bytes))

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

    def bytes_of(self, method: str) -> Bytes:
        """Where the calls of a method count what they receive and send, all from one thread."""
        return self._bytes.setdefault(method.rpartition("/")[2], Bytes())


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
