"""Correlated randomness of one pass, as the dealer writes it: the other side of :mod:`sordino.shared.twoparty.tape`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.shared.prg import Keystream
from sordino.shared.twoparty.tape import label

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]


class Press:
    """Writes what both tapes of a pass read, in the same order.

    Args:
        keys: of both parties, 32 bytes each. number: of the pass, used once in a session.
    """

    def __init__(self, keys: tuple[bytes, bytes], number: int) -> None:
        self._streams = tuple(Keystream(key, label(number)) for key in keys)
        self._corrections: list[bytes] = []
        self._points: list[bytes] = []

    def words(self, *shape: int) -> U64:
        """Values that are uniform on Z_2^64: the sum of what both parties draw."""
        first, second = (self._words(party, shape) for party in (0, 1))
        return first + second

    def small(self, ring: type[np.uint8] | type[np.uint16], *shape: int) -> NDArray[Any]:
        """Values that are uniform on a ring of 8 or 16 bits."""
        out: NDArray[Any] = np.zeros(shape, ring)
        for stream in self._streams:
            share = np.zeros(shape, np.dtype(ring).newbyteorder("<"))
            stream.fill(share)
            out += share.astype(ring, copy=False)
        return out

    def roots(self, wires: int) -> tuple[U64, U64]:
        """``[wires, 2]`` each: both parties' roots of point functions."""
        return self._words(0, (wires, 2)), self._words(1, (wires, 2))

    def give(self, *values: U64) -> None:
        """Gives shares of values, in turn."""
        for value in values:
            correction = value - self._words(0, value.shape)
            self._corrections.append(correction.astype("<u8", copy=False).tobytes())

    def points(self, corrections: U8) -> None:
        """Sends corrections of point functions, ``[wires, width]``, to both. Their roots come out of ``roots``."""
        self._points.append(corrections.tobytes())

    def take(self) -> tuple[bytes, bytes]:
        """What has been written since the last call: corrections of point functions, and the server's corrections."""
        taken = b"".join(self._points), b"".join(self._corrections)
        self._points.clear()
        self._corrections.clear()
        return taken

    def _words(self, party: int, shape: tuple[int, ...]) -> U64:
        out = np.zeros(shape, "<u8")
        self._streams[party].fill(out)
        return out.astype(np.uint64, copy=False)
