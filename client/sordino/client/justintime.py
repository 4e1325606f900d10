"""Masks made just in time: small blocks of W r, a little ahead of need, kept in memory only (§4.2).

What is encrypted is r, fresh and uniform, never anything of a prompt; so a client without masks starts at once and
stays protected against a server that sends wrong answers on purpose, which protocol ``rlwe`` does not promise.

Each block has an RLWE key of its own. Under a key shared with a later block a server could add a ciphertext of an
earlier, used mask, less a guess, to the later answer, and learn from the abort whether it guessed: with u, that is a
guess of the prompt. Here nothing is decrypted under a key once a mask made with it has been used.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sordino.client.blocks import Round, rounds
from sordino.client.forks import this_process
from sordino.client.interrupts import interrupts
from sordino.client.pool import CheckVector
from sordino.client.prg import uniform_mod_p
from sordino.client.provision import verify
from sordino.client.rlwe import SecretKey
from sordino.client.transport import Connection, EvaluationStream
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, PoolError, SessionLostError
from sordino.shared.packing import Prices
from sordino.shared.prg import random_key
from sordino.shared.rlwe import U32

log = logging.getLogger(__name__)

AHEAD_ROWS: Final = 32  # made at a time while an answer is decoded row by row


@dataclass(slots=True)
class _Stock:
    """Unused masks of one group, oldest first."""

    blocks: deque[tuple[U32, U32]] = field(default_factory=deque)
    rows: int = 0

    def put(self, r: U32, wr: U32) -> None:
        self.blocks.append((r, wr))
        self.rows += r.shape[0]

    def take(self, rows: int) -> tuple[U32, U32]:
        taken: list[tuple[U32, U32]] = []
        self.rows -= rows
        while rows:
            r, wr = self.blocks.popleft()
            if r.shape[0] > rows:
                self.blocks.appendleft((r[rows:], wr[rows:]))
                r, wr = r[:rows], wr[:rows]
            taken.append((r, wr))
            rows -= r.shape[0]
        if len(taken) == 1:
            return taken[0]
        return np.concatenate([r for r, _ in taken]), np.concatenate([wr for _, wr in taken])


@dataclass(slots=True, eq=False)
class _Wish:
    """What one thread waits for."""

    index: int
    rows: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Order:
    """A block under way: its masks, its key, and the messages that ask for W r."""

    index: int
    r: U32
    key: SecretKey
    round: Round
    messages: Sequence[pb.EvaluateRequest]


class JustInTime:
    """A source of masks that makes them while the answer goes on, in a thread of its own.

    Who waits is served first, in the order in which they came. Else it follows the model: after the group that was
    last asked for come the ones that will be asked for next. A group is given the rows of the pass it is in (a prompt),
    and :data:`AHEAD_ROWS` for the tokens after it.

    Args:
        check: the check vectors of a group, or None where the user turned checks off.
        choices: how to price blocks; see :func:`sordino.client.blocks.prices`.

    Attributes:
        on_failure: called with the IntegrityError of a block, in the thread that makes them and before anybody else
            hears of it, whether or not somebody waits.
    """

    def __init__(
        self, connection: Connection, check: Callable[[str], CheckVector | None], choices: Sequence[Prices]
    ) -> None:
        self.on_failure: Callable[[IntegrityError], object] = lambda _: None
        self._groups = connection.manifest.groups
        self._index = {group.name: i for i, group in enumerate(self._groups)}
        self._stream = EvaluationStream(connection, pb.PROTOCOL_RLWE, phase="provision")
        self._route = connection.route
        self._max_message_bytes = connection.max_message_bytes
        self._check = check
        self._choices = choices
        self._changed = threading.Condition()  # guards what follows
        self._stocks = [_Stock() for _ in self._groups]
        self._wishes: list[_Wish] = []  # oldest first
        self._last, self._pass_rows = -1, AHEAD_ROWS
        self._closed = False
        # Set to False by the thread itself: who finds it True is heard by it, which is_alive() does not promise.
        self._making = False
        self._thread: threading.Thread | None = None
        self._pid = this_process()

    def take(self, group: str, rows: int) -> tuple[U32, U32]:
        """Masks r ``[rows, n]`` and W r ``[rows, m]`` that nobody was given before; waits until they are made.

        Raises:
            IntegrityError: the server answered wrongly; nothing made with it may be used any more.
            PoolError: this process is a fork of the one that began.
            SessionLostError: closed, or the server stayed away.
            SordinoError: they could not be made.
        """
        if this_process() != self._pid:
            raise PoolError("masks do not pass a fork, they would be used twice: connect again in this process")
        index = self._index[group]
        with interrupts, self._changed:
            if index <= self._last:
                self._pass_rows = AHEAD_ROWS
            self._last, self._pass_rows = index, max(self._pass_rows, rows)
            wish = _Wish(index, rows)
            self._wishes.append(wish)
            try:
                self._changed.notify_all()
                while not self._served(wish):
                    if wish.error is not None:
                        raise wish.error
                    if self._closed:
                        raise SessionLostError("the session is closed")
                    interrupts.check()
                    self._start()
                    self._changed.wait(0.5)
                return self._stocks[index].take(rows)
            finally:
                self._wishes.remove(wish)
                self._changed.notify_all()

    def close(self) -> None:
        """Stops; masks that were not used are dropped. Waits for an answer under way: see :meth:`Connection.close`."""
        with interrupts, self._changed:
            self._end()
        self._stream.close()
        if self._thread is not None:
            self._thread.join()

    def _served(self, wish: _Wish) -> bool:
        """Whether it is this one's turn in its group, and there is enough."""
        first = next(other for other in self._wishes if other.index == wish.index)
        return first is wish and self._stocks[wish.index].rows >= wish.rows

    def _end(self) -> None:
        self._closed = True
        self._stocks = [_Stock() for _ in self._groups]
        self._changed.notify_all()

    # -- the thread that makes them ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed or self._making:
            return
        self._thread = threading.Thread(target=self._run, name="sordino-just-in-time", daemon=True)
        self._thread.start()
        self._making = True

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._make()
        except IntegrityError as caught:
            error = caught
            self.on_failure(caught)
        except Exception as caught:  # whatever it is, those who wait are told
            error = caught
        finally:
            with self._changed:
                self._making = False
                if error is not None and not self._wishes:
                    # The next one who asks tries again, and hears what there is to hear then.
                    log.debug("no masks are made ahead any more: %s", error)
                for wish in self._wishes:
                    wish.error = error
                if isinstance(error, IntegrityError):
                    self._end()
                self._changed.notify_all()

    def _make(self) -> None:
        following: _Order | None = None
        while (order := following or self._order(wait=True)) is not None:
            following = None

            def prepare() -> None:
                nonlocal following
                following = self._order(wait=False, under_way=order)

            answers = self._stream.exchange(order.messages, meanwhile=prepare)
            wr = order.round.result(answers, order.key, order.r.shape[0])
            group = self._groups[order.index]
            if (check := self._check(group.name)) is not None:
                verify(group, check, order.r, wr, self._route.answerer())
            with self._changed:
                if self._closed:
                    return
                self._stocks[order.index].put(order.r, wr)
                self._changed.notify_all()

    def _order(self, *, wait: bool, under_way: _Order | None = None) -> _Order | None:
        """The next block, encrypted; None when there is none to make (with ``wait``: when it is over)."""
        with self._changed:
            while (wanted := self._wanted(under_way)) is None:
                if self._closed or not wait:
                    return None
                self._changed.wait()
            if self._closed:
                return None
        index, rows = wanted
        group = self._groups[index]
        made = next(rounds(index, group, rows, max_message_bytes=self._max_message_bytes, choices=self._choices))
        r = uniform_mod_p(random_key(), b"just in time", made.rows * group.in_features).reshape(made.rows, -1)
        key = SecretKey()
        return _Order(index, r, key, made, made.requests(r, key))

    def _wanted(self, under_way: _Order | None) -> tuple[int, int] | None:
        """Which group comes next, and how many rows it lacks."""
        have = [stock.rows for stock in self._stocks]
        if under_way is not None:
            have[under_way.index] += under_way.r.shape[0]
        spare = have.copy()
        for wish in self._wishes:
            spare[wish.index] -= wish.rows
            if spare[wish.index] < 0:
                return wish.index, max(-spare[wish.index], AHEAD_ROWS)
        count = len(self._groups)
        for step in range(1, count + 1):
            index = (self._last + step) % count
            target = self._pass_rows if index > self._last else AHEAD_ROWS
            if have[index] <= target // 2:
                return index, target - have[index]
        return None
