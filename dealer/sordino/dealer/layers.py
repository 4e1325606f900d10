"""The material of one pass, layer after layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sordino.dealer.deal import deal, deal_with_cache
from sordino.dealer.press import Press
from sordino.shared.twoparty.amounts import layer_bytes, steps_of
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.steps import WithCache
from sordino.shared.twoparty.tape import layer_masks

U64 = NDArray[np.uint64]


class PassMaker:
    """Makes the layers of one pass, each once and in their order.

    Args:
        counters: of all rows that the cache has after the pass, of which the last ``rows`` are new.
        tokens: that are chosen, of as many rows.
    """

    def __init__(
        self,
        keys: tuple[bytes, bytes],
        plan: Plan,
        number: int,
        rows: int,
        counters: Sequence[int],
        tokens: int = 0,
    ) -> None:
        self._keys, self._plan, self._rows, self._counters = keys, plan, rows, counters
        self._tokens = tokens
        self._press = Press(keys, number)
        self._layer = 0

    @property
    def next_bytes(self) -> int:
        """What the next layer takes while it is made: its material, and both parties' masks of a product."""
        shape, kept = self._plan.shape, len(self._counters)
        masks = 16 * kept * shape.groups * shape.head if self._layer < shape.layers else 0
        return layer_bytes(self._plan, self._layer, self._rows, kept, self._tokens) + masks

    def make(self) -> tuple[bytes, bytes]:
        """The next layer's corrections of point functions, and the server's corrections."""
        layer = self._layer
        for step in steps_of(self._plan, layer, self._rows, len(self._counters), self._tokens):
            if isinstance(step, WithCache):
                deal_with_cache(step, self._press, self._of(int(step.values), layer))
            else:
                deal(step, self._press)
        self._layer += 1
        return self._press.take()

    def _of(self, kind: int, layer: int) -> U64:
        """``[kept, groups, head]``"""
        shape = self._plan.shape
        first, second = (layer_masks(key, self._counters, kind, layer, shape.groups, shape.head) for key in self._keys)
        first += second
        return first
