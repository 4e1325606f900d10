"""Correlated randomness of one pass, as a party reads it (docs/two-party.md, §2).

What is uniform comes from the party's own keystream. What depends on masks is *given*: the client's share of it is
keystream too, the server's a correction that the dealer sent. Corrections of point functions are the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.shared.prg import Keystream

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

CLIENT: Final = 0
SERVER: Final = 1


class Source(Protocol):
    """What the dealer sent for one pass."""

    def corrections(self, count: int) -> U64:
        """The next ``count`` words; the server's only."""
        ...

    def points(self, count: int) -> bytes:
        """The next ``count`` bytes of corrections of point functions."""
        ...


def label(number: int) -> bytes:
    """Of a pass: the name of its keystreams. A number is used once in a session."""
    return b"pass/%d" % number


def append_masks(key: bytes, counters: Sequence[int], kinds: int, layers: int, *row: int) -> U64:
    """A party's shares of the masks of rows that are appended to the cache: ``[counters, kinds, layers, *row]``. A
    counter stands for one row that was ever appended in a session; kinds are keys and values."""
    places = [[layer_masks(key, counters, kind, layer, *row) for layer in range(layers)] for kind in range(kinds)]
    return np.moveaxis(np.array(places, np.uint64), 2, 0)


def layer_masks(key: bytes, counters: Sequence[int], kind: int, layer: int, *row: int) -> U64:
    """Those of one kind and layer, ``[counters, *row]``: each at its counter's place in one keystream, so that they can
    be made whenever they are needed. A row has an even number of words."""
    out = np.zeros((len(counters), *row), "<u8")
    blocks, start = math.prod(row) // 2, 0
    for stop in range(1, len(counters) + 1):
        if stop == len(counters) or counters[stop] != counters[stop - 1] + 1:
            Keystream(key, b"append/%d/%d" % (kind, layer), counters[start] * blocks).fill(out[start:stop])
            start = stop
    return out.astype(np.uint64, copy=False)


class Tape:
    """One party's material of one pass, read once from its beginning to its end.

    Args:
        party: ``CLIENT`` or ``SERVER``. key: its key of the session, 32 bytes. number: of the pass.
    """

    def __init__(self, party: int, key: bytes, number: int, source: Source) -> None:
        self.party = party
        self._stream = Keystream(key, label(number))
        self._source = source

    def words(self, *shape: int) -> U64:
        """A share of values that are uniform on Z_2^64."""
        out = np.zeros(shape, "<u8")
        self._stream.fill(out)
        return out.astype(np.uint64, copy=False)

    def small(self, ring: type[np.uint8] | type[np.uint16], *shape: int) -> NDArray[Any]:
        """A share of values that are uniform on a ring of 8 or 16 bits."""
        out = np.zeros(shape, np.dtype(ring).newbyteorder("<"))
        self._stream.fill(out)
        return out.astype(ring, copy=False)

    def given(self, *shape: int) -> U64:
        """A share of values that the dealer computed."""
        if self.party == CLIENT:
            return self.words(*shape)
        return self._source.corrections(math.prod(shape)).reshape(shape)

    def points(self, wires: int, width: int) -> tuple[U8, U64]:
        """Corrections of point functions ``[wires, width]``, and this party's roots of them, ``[wires, 2]``."""
        data = np.frombuffer(self._source.points(wires * width), np.uint8)
        return data.reshape(wires, width), self.words(wires, 2)


class Given:
    """Material that is there as a whole, such as of a pool or a test."""

    def __init__(self, points: bytes, corrections: bytes) -> None:
        self._points, self._point = points, 0
        self._words, self._word = np.frombuffer(corrections, "<u8"), 0

    def corrections(self, count: int) -> U64:
        self._word += count
        return self._words[self._word - count : self._word].astype(np.uint64, copy=False)

    def points(self, count: int) -> bytes:
        self._point += count
        return self._points[self._point - count : self._point]

    @property
    def rest(self) -> int:
        """Bytes that nobody has read."""
        return len(self._points) - self._point + 8 * (len(self._words) - self._word)
