"""Where the time of an answer goes: a few clock readings a message, so it is always on."""

from __future__ import annotations

import time


class Timings(dict[str, float]):
    """Seconds by step, added up over all messages.

    ``quantise``, ``masks`` (taken from the pool), ``mask``, ``wait`` (for the server's answer; ``server`` is its own
    account of the products in it), ``verify``, ``unmask``, ``dequantise``.
    """

    def lap(self, step: str, since: float) -> float:
        """Adds the time since ``since`` (of ``time.perf_counter``) to ``step``; returns now."""
        now = time.perf_counter()
        self[step] = self.get(step, 0.0) + now - since
        return now
