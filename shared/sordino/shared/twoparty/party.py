"""A party of the two: what it reads of the dealer, and how it opens wires to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError
from sordino.shared.twoparty.tape import CLIENT, Tape

U64 = NDArray[np.uint64]
Word = np.uint64


class Link(Protocol):
    """The way to the other party. Messages come in the order in which they were sent."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes: ...


@dataclass(slots=True)
class Count:
    """Of one party: ``rounds`` in which both waited for each other, and bytes of messages."""

    rounds: int = 0
    sent: int = 0
    received: int = 0


class Party:
    """One party's side of a pass.

    Attributes:
        index: ``CLIENT`` or ``SERVER``. count: what it cost so far.
    """

    def __init__(self, tape: Tape, link: Link) -> None:
        self.index = tape.party
        self.tape = tape
        self.count = Count()
        self._link = link

    def public(self, value: U64) -> U64:
        """A share of a value that both know."""
        return value if self.index == CLIENT else np.zeros_like(value)

    def open(self, *shares: U64) -> list[U64]:
        """The values of which both hold shares: one round, whatever their number and shapes.

        Raises:
            ProtocolError: the other sends another number of words.
        """
        mine = np.concatenate([share.reshape(-1) for share in shares])
        self.send(mine)
        theirs = self.receive(mine.size)
        self.count.rounds += 1
        return _split(mine + theirs, [share.shape for share in shares])

    def open_small(self, share: NDArray[np.generic]) -> NDArray[np.generic]:
        """The same in a ring of fewer bits, that of the array's type."""
        self._write(share.tobytes())
        data = self._read(share.nbytes)
        self.count.rounds += 1
        out: NDArray[np.generic] = share + np.frombuffer(data, share.dtype).reshape(share.shape)
        return out

    def open_bits(self, share: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The same of bits ``[n]``, whose shares are 0 or 1 each and added modulo 2; eight go in a byte."""
        mine = np.packbits(share)
        self._write(mine.tobytes())
        data = self._read(mine.nbytes)
        self.count.rounds += 1
        return np.unpackbits(mine ^ np.frombuffer(data, np.uint8), count=len(share))

    def send(self, words: U64) -> None:
        """One way."""
        self._write(words.astype("<u8", copy=False).tobytes())

    def receive(self, count: int) -> U64:
        """``count`` words that the other has sent."""
        return np.frombuffer(self._read(8 * count), "<u8").astype(np.uint64, copy=False)

    def _write(self, message: bytes) -> None:
        self.count.sent += len(message)
        self._link.send(message)

    def _read(self, size: int) -> bytes:
        message = self._link.receive()
        if len(message) != size:
            raise ProtocolError(
                f"the other party sent {len(message)} bytes where {size} belong: the two run different passes"
            )
        self.count.received += size
        return message


def _split(words: U64, shapes: Sequence[tuple[int, ...]]) -> list[U64]:
    out, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        out.append(words[start : start + size].reshape(shape))
        start += size
    return out
