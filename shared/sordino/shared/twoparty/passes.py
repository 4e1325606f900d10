"""Which rows a pass adds to the cache, and under which counters: kept alike by both parties and the dealer; and which
rows these see, of which the dealer is not told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sordino.proto.v1 import dealer_pb2 as pb
from sordino.proto.v1 import sordino_pb2
from sordino.shared.errors import ProtocolError
from sordino.shared.twoparty.forward import Cache, Sight
from sordino.shared.twoparty.numbers import LONGEST, Plan, Shape
from sordino.shared.twoparty.tape import append_masks


def ranges(counters: Sequence[int]) -> list[pb.Counters]:
    """Counters as they are sent."""
    out: list[pb.Counters] = []
    for counter in counters:
        if out and out[-1].first + out[-1].count == counter:
            out[-1].count += 1
        else:
            out.append(pb.Counters(first=counter, count=1))
    return out


def counters_of(sent: Iterable[pb.Counters]) -> list[int]:
    """The opposite of :func:`ranges`: they ascend, as counters of a cache do.

    Raises:
        ProtocolError: more than a cache can have; or other ranges than :func:`ranges` makes.
    """
    out: list[int] = []
    for one in sent:
        if not one.count or (out and one.first <= out[-1] + 1):
            raise ProtocolError("ranges of row counters are not empty, go up, and two that could be one are one")
        if one.count > LONGEST or len(out) + one.count > LONGEST:
            raise ProtocolError(f"a cache has at most {LONGEST} rows")
        out += range(one.first, one.first + one.count)
    return out


def check_tokens(wanted: pb.Pass, plan: Plan) -> None:
    """
    Raises:
        ProtocolError: tokens are to be chosen that the plan has not, or of more rows than there are.
    """
    if wanted.tokens > (wanted.rows if plan.choice is not None else 0):
        raise ProtocolError(f"{wanted.tokens} tokens of a pass of {wanted.rows} rows: the plan opens no such thing")


class Counters:
    """Numbers of passes and of rows, each used once in a session."""

    def __init__(self) -> None:
        self._last_pass = -1
        self._last_row = -1

    def check(self, wanted: pb.Pass) -> list[int]:
        """The counters of all rows that the cache has after the pass.

        Raises:
            ProtocolError: a number has been used before, or there are too many rows.
        """
        kept = counters_of(wanted.kept)
        if wanted.number <= self._last_pass:
            raise ProtocolError(f"pass {wanted.number} comes after pass {self._last_pass}: numbers go up")
        if wanted.first_counter <= self._last_row or (kept and kept[-1] >= wanted.first_counter):
            raise ProtocolError(f"row counter {wanted.first_counter} was used before: a counter is used once")
        if not 1 <= wanted.rows <= LONGEST - len(kept):
            raise ProtocolError(f"{wanted.rows} rows after {len(kept)}: a cache has at most {LONGEST}")
        new = list(range(wanted.first_counter, wanted.first_counter + wanted.rows))
        self._last_pass, self._last_row = wanted.number, new[-1]
        return kept + new

    def extend(self, cache: Cache, wanted: pb.Pass, key: bytes, shape: Shape) -> slice:
        """Crops a party's cache to what the pass keeps, and makes room for its rows.

        Raises:
            ProtocolError: as :meth:`check`, or the pass keeps rows that the cache does not begin with.
        """
        every = self.check(wanted)
        kept = len(every) - wanted.rows
        if cache.counters[:kept] != every[:kept]:
            raise ProtocolError("a pass keeps rows that this cache does not have: begin anew, with an empty one")
        cache.crop(kept)
        new = every[kept:]
        return cache.extend(new, append_masks(key, new, 2, shape.layers, shape.groups, shape.head))


def sight_of(sent: sordino_pb2.Forward, new: slice, shape: Shape) -> Sight:
    """What rows see that are the ``new`` ones of a cache.

    Raises:
        ProtocolError: positions or bits are not those of so many rows, or a row does not see itself.
    """
    if not sent.positions and not sent.visible:
        return Sight.causal(new)
    rows, kept = new.stop - new.start, new.stop
    positions = np.array(sent.positions, np.int64)
    if len(positions) != rows or positions.max(initial=0) >= min(shape.positions, LONGEST):
        raise ProtocolError(f"{len(positions)} positions of {rows} rows, or one that the model does not have")
    bits = np.unpackbits(np.frombuffer(sent.visible, np.uint8))
    if len(bits) != -(-rows * kept // 8) * 8:
        raise ProtocolError(f"{len(bits)} bits say which of {kept} rows {rows} rows see")
    visible = bits[: rows * kept].reshape(rows, kept).astype(bool)
    if not np.diagonal(visible, new.start).all():
        raise ProtocolError("a row does not see itself")
    return Sight(positions, visible)


def tell_sight(message: sordino_pb2.Forward, sight: Sight) -> None:
    """The opposite of :func:`sight_of`."""
    message.positions.extend(sight.positions.tolist())
    message.visible = np.packbits(sight.visible).tobytes()
