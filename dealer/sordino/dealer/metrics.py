"""What the dealer counts beside its calls, for Prometheus: sessions and material.

A session that has begun ends exactly once, whatever ends it: begun = ended + those that are open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from prometheus_client.metrics_core import GaugeMetricFamily

from sordino.shared.figures import Families, Figures
from sordino.shared.logs import fields

log = logging.getLogger(__name__)
# Why a session ended: its client was done; nobody used it; no party had a stream; the parties asked for different
# passes; a token was withdrawn; the dealer stopped.
Reason: TypeAlias = Literal["client", "idle", "away", "failed", "withdrawn", "shutdown"]
R = TypeVar("R")

PARTIES: Final = ("client", "server")
NO_SERVER: Final = "(no server)"
_WATCHED: Final[Families] = {
    "sessions": (GaugeMetricFamily, "Sessions that are open."),
    "sessions_limit": (GaugeMetricFamily, "The most sessions at a time."),
    "held_bytes": (GaugeMetricFamily, "Material that is made, or that a party has still to fetch: bytes in memory."),
    "held_limit_bytes": (GaugeMetricFamily, "The same: the most bytes in memory."),
    "threads": (GaugeMetricFamily, "Threads that make material."),
}


class Metrics(Figures):
    """The figures of one dealer."""

    def __init__(self) -> None:
        super().__init__("sordino_dealer", ("sordino_dealer", "What deals."), log, _WATCHED)
        self._refusals = self._counter("refusals", "Calls that ended with an error, by its name.", "error")
        self._begun = self._counter("sessions_begun", "Sessions that began.")
        self._over = self._counter("sessions_ended", "Sessions that ended.", "reason")
        self._passes = self._counter("passes", "Passes that a party has had in whole.", "party")
        self._rows = self._counter("rows", "Rows of these.", "party")
        self._sent = self._counter("material_bytes", "Material that a party has had.", "party", "kind")
        self._seconds = self._counter("material_seconds", "Time that threads took to make material.")
        for reason in get_args(Reason):  # a series that first comes with 1 is no rise to Prometheus
            self._over.labels(reason)

    def refused(self, error: str) -> None:
        """A call ends with an error of this name."""
        self._refusals.labels(error).inc()

    def session_began(self) -> None:
        self._begun.inc()

    def session_ended(self, reason: Reason, client: str, server: str, seconds: float, passes: int, rows: int) -> None:
        """Counted, and logged: by the names of its parties' tokens, and what was asked for in it."""
        self._over.labels(reason).inc()
        log.info(
            "a session of %s and %s ended (%s) after %.3f s: %d passes, %d rows",
            client,
            server,
            reason,
            seconds,
            passes,
            rows,
            extra=fields(
                client=client, server=server, reason=reason, seconds=round(seconds, 6), passes=passes, rows=rows
            ),
        )

    def sent(self, party: int, kind: Literal["points", "corrections"], size: int) -> None:
        """Bytes of material, without their envelopes."""
        self._sent.labels(PARTIES[party], kind).inc(size)

    def dealt(self, party: int, rows: int) -> None:
        """A pass that a party has had in whole."""
        self._passes.labels(PARTIES[party]).inc()
        self._rows.labels(PARTIES[party]).inc(rows)

    def timed(self, make: Callable[[], R]) -> R:
        """What ``make`` gives, and its time counted; from any thread."""
        start = time.perf_counter()
        try:
            return make()
        finally:
            self._seconds.inc(time.perf_counter() - start)
