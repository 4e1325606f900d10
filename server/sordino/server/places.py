"""Who may hold how many calls at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc

from sordino.shared.auth import is_open
from sordino.shared.errors import LimitError

if TYPE_CHECKING:
    from sordino.server.calls import Call

_WITHDRAWN: Final = "the token was withdrawn or has expired: ask the provider for another"


@dataclass(frozen=True, slots=True)
class Room:
    """Places for calls of one kind: of all holders, and of each."""

    what: str
    total: int
    each: int


class Places:
    """The calls that are open. Over a limit a call is refused before anything of it is read.

    A holder is a token; of the calls that need none, an address. Those have a room of their own: whoever has no token
    takes no place from those who have one.

    Args:
        rooms: for methods by their full names.
        others: for all other methods.
        tokenless: for the services that need no token.
    """

    def __init__(self, rooms: Mapping[str, Room], others: Room, tokenless: Room) -> None:
        self._rooms = rooms
        self._others = others
        self._tokenless = tokenless
        self._held: dict[Call, tuple[Room, str]] = {}

    @property
    def total(self) -> int:
        return sum(room.total for room in (*self._rooms.values(), self._others, self._tokenless))

    @contextmanager
    def hold(self, call: Call) -> Iterator[None]:
        """A place, for as long as the call goes on.

        Raises:
            LimitError: there is none for this kind of call, or for this holder.
        """
        if is_open(call.method):
            room, holder = self._tokenless, call.peer.rpartition(":")[0]
        else:
            room, holder = self._rooms.get(call.method, self._others), call.holder
        held = Counter(other for kind, other in self._held.values() if kind is room)
        if held.total() >= room.total:
            raise LimitError(f"the server has its {room.total} {room.what}: try again later")
        if held[holder] >= room.each:
            owner = "this address" if room is self._tokenless else "this token"
            raise LimitError(f"{owner} has its {room.each} {room.what}: close one first")
        self._held[call] = (room, holder)
        try:
            yield
        finally:
            del self._held[call]

    def end_all_but(self, valid: Collection[str]) -> None:
        """Ends the calls whose token is not among ``valid``, which are as :func:`identity_of` gives them."""
        for call, (room, holder) in list(self._held.items()):
            if room is not self._tokenless and holder not in valid:
                call.end(grpc.StatusCode.UNAUTHENTICATED, _WITHDRAWN)
