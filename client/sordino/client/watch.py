"""What left for a group of layers, beside what it was: for the user's own eyes, while the user looks.

A masked row and the row itself give the mask away. Both are kept here for one row of each group looked at, in memory,
until the next row or until nobody looks; the mask has been used by then, and is used once (§4.5.1).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from sordino.client.kernels import I32, U32, from_ring
from sordino.shared.manifest import GroupSpec


@dataclass(frozen=True, slots=True)
class Sight:
    """The newest row that left for a group.

    Attributes:
        number: 1 for the first row of this group since somebody looks.
        true: ``[n]``, the integers that the layers are applied to.
        sent: ``[n]`` ring elements as they left; bytes of a ciphertext where whole rows go encrypted.
    """

    number: int
    true: I32 = field(repr=False)
    sent: U32 | bytes = field(repr=False)

    def correlation(self) -> float | None:
        """Pearson's, of the true row and the one sent; None where there are no pairs, or one of them is constant."""
        if isinstance(self.sent, bytes):
            return None
        sent = centred(self.sent)
        if not self.true.std() or not sent.std():
            return None
        return float(np.corrcoef(self.true, sent)[0, 1])


def centred(row: U32) -> I32:
    """Ring elements ``[n]`` as integers around zero."""
    out = np.empty((1, row.size), np.int32)
    from_ring(row.reshape(1, -1), out)
    return out.reshape(-1)


class Watch:
    """The newest row of each group that somebody looks at; nothing of the others. Safe for several threads.

    Attributes:
        groups: those looked at, by name. Empty, it is all that a protocol asks for.
    """

    def __init__(self) -> None:
        self.groups: dict[str, Sight | None] = {}
        self._lock = threading.Lock()

    def look(self, group: str) -> None:
        with self._lock:
            self.groups.setdefault(group)

    def look_away(self, group: str) -> None:
        """Forgets the group's row."""
        with self._lock:
            self.groups.pop(group, None)

    def newest(self, group: str) -> Sight | None:
        """None before the first row, and where nobody looks."""
        return self.groups.get(group)

    def see(self, group: GroupSpec, rows: I32, sent: U32 | bytes) -> None:
        """Keeps the last of ``rows [R, n]`` if somebody looks.

        Args:
            sent: ``[R, n]`` ring elements, or the ciphertext that the last row is in.
        """
        with self._lock:
            if group.name in self.groups:
                before = self.groups[group.name]
                number = before.number + 1 if before else 1
                left = sent if isinstance(sent, bytes) else sent[-1].copy()
                self.groups[group.name] = Sight(number, rows[-1].copy(), left)
