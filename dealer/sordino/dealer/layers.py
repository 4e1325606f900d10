"""The material of one pass, layer after layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sordino.dealer.deal import deal, deal_with_cache
from sordino.dealer.press import Press
from sordino.shared.twoparty.amounts import layer_bytes, steps_of
from sordino.shared.twoparty.numbers import Plan, Shape
from sordino.shared.twoparty.steps import WithCache
from sordino.shared.twoparty.tape import append_masks

U64 = NDArray[np.uint64]


def row_masks(keys: tuple[bytes, bytes], counter: int, shape: Shape) -> U64:
    """Of a row of the cache, ``[2, layers, groups, head]``: of its keys and values."""
    first, second = (append_masks(key, [counter], 2, shape.layers, shape.groups, shape.head)[0] for key in keys)
    masks: U64 = first + second
    return masks


class PassMaker:
    """Makes the layers of one pass, each once and in their order.

    Args:
        counters: of all rows that the cache has after the pass, of which the last ``rows`` are new.
        known: masks of rows that need not be made again. tokens: that are chosen, of as many rows.

    Attributes:
        masks: of all rows, once the first layer is made; empty again after the last.
    """

    def __init__(
        self,
        keys: tuple[bytes, bytes],
        plan: Plan,
        number: int,
        rows: int,
        counters: Sequence[int],
        known: Mapping[int, U64],
        tokens: int = 0,
    ) -> None:
        self.masks = dict(known)
        self._keys, self._plan, self._rows, self._counters = keys, plan, rows, counters
        self._tokens = tokens
        self._press = Press(keys, number)
        self._layer = 0

    @property
    def next_bytes(self) -> int:
        """What the next layer takes."""
        return layer_bytes(self._plan, self._layer, self._rows, len(self._counters), self._tokens)

    def make(self) -> tuple[bytes, bytes]:
        """The next layer's corrections of point functions, and the server's corrections."""
        shape, layer = self._plan.shape, self._layer
        if layer == 0:
            self.masks = {
                counter: self.masks[counter] if counter in self.masks else row_masks(self._keys, counter, shape)
                for counter in self._counters
            }
        for step in steps_of(self._plan, layer, self._rows, len(self._counters), self._tokens):
            if isinstance(step, WithCache):
                deal_with_cache(step, self._press, self._of(int(step.values), layer))
            else:
                deal(step, self._press)
        self._layer += 1
        if self._layer > shape.layers:
            self.masks = {}
        return self._press.take()

    def _of(self, kind: int, layer: int) -> U64:
        """``[kept, groups, head]``"""
        return np.stack([masks[kind, layer] for masks in self.masks.values()])
