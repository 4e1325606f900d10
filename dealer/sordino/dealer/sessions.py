"""Sessions: whose they are, what has been dealt in them, and material that one party has still to fetch.

In memory alone: after a restart no key exists, so nothing can be given out twice. Everything here is called on one
event loop; material is made in threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from sordino.dealer.layers import PassMaker
from sordino.dealer.metrics import NO_SERVER, Metrics, Reason
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.shared.errors import FingerprintError, LimitError, ProtocolError, SessionLostError, SordinoError
from sordino.shared.prg import random_key
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.passes import Counters, check_tokens
from sordino.shared.twoparty.tape import CLIENT, SERVER

SESSION_BYTES: Final = 16
_LONGEST_FINGERPRINT: Final = 200
_MOST_PASSES: Final = 4  # that a party has not had: the one that runs, one asked for ahead, and some of these dropped
_POLL_S: Final = 0.02
_UNKNOWN: Final = (
    "the dealer does not know this session of yours: it has restarted, or the session ended; begin a new session, "
    "nothing of the old one can be used again"
)
_IDLE: Final = "nobody used the session for too long: begin a new session, nothing of this one can be used again"
_AWAY: Final = "no party came back to the session: begin a new one, nothing of this one can be used again"
_ENDED: Final = "the client has ended the session: begin a new one, nothing of this one can be used again"
_STOPPED: Final = "the dealer has stopped: begin a new session, nothing of this one can be used again"
_WITHDRAWN: Final = "a token of this session was withdrawn or has expired"
_REPLACED: Final = "the same party has opened another stream of this session"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    Attributes:
        sessions, sessions_each: at a time; of all clients, and of one.
        held_bytes, held_bytes_token, held_bytes_each: material that is made, or that a party has still to fetch; of all
            sessions, of those of one client, and of one.
        idle_s: a session that nobody uses for so long ends. away_s: or in which no party has had a stream for so long.
        wait_s: how long a party that is ahead waits for the other, before it is refused.
    """

    sessions: int = 256
    sessions_each: int = 16
    held_bytes: int = 4 << 30
    held_bytes_token: int = 1 << 30
    held_bytes_each: int = 512 << 20
    idle_s: float = 900.0
    away_s: float = 60.0
    wait_s: float = 30.0


class Stream:
    """A party's open stream. To be made in the task that serves it.

    Attributes:
        ended: why somebody else has ended it.
    """

    def __init__(self) -> None:
        self.ended: SordinoError | None = None
        self._task = asyncio.current_task()

    def end(self, error: SordinoError) -> None:
        if self.ended is None and self._task is not None:
            self.ended = error
            if self._task is not asyncio.current_task():  # which raises it
                self._task.cancel()


class Dealing:
    """One pass: its layers as they are made, until both parties have them.

    Attributes:
        taken: layers that each party has fetched, or will not fetch any more.
        made: layers that there are or were. held_bytes: of those that a party has still to fetch, and of one that is
            being made.
    """

    def __init__(self, wanted: pb.Pass, maker: PassMaker, layers: int) -> None:
        self.wanted = wanted
        self.maker = maker
        self.layers = layers
        self.taken = [0, 0]
        self.made = self.held_bytes = 0
        self.making: asyncio.Task[None] | None = None
        self._held: dict[int, tuple[bytes, bytes]] = {}

    def layer(self, at: int, party: int) -> tuple[bytes, bytes]:
        """What a party that has still to fetch it gets of one that is made."""
        points, corrections = self._held[at]
        return points, corrections if party == SERVER else b""

    def put(self, material: tuple[bytes, bytes]) -> None:
        """The next layer."""
        self._held[self.made] = material
        self.held_bytes += sum(map(len, material))
        self.made += 1

    def took(self, party: int, layers: int) -> None:
        """A party has the first ``layers``; what both have goes."""
        self.taken[party] = max(layers, self.taken[party])
        for at in [at for at in self._held if at < min(self.taken)]:
            self.held_bytes -= sum(map(len, self._held.pop(at)))

    def drop(self) -> None:
        """Nobody wants more of it: a layer that waits for a thread is not made."""
        if self.making is not None:
            self.making.cancel()


class Session:
    """Of one client and one server.

    Attributes:
        holders: who began and who joined it, as :func:`sordino.shared.auth.identity_of` gives them. names: of their
            tokens.
        began, used: when, by the monotonic clock. left: since when no party has a stream, if none has.
        passes, rows: that were asked for.

    Args:
        ended: told once why it ended, whatever ends it.
    """

    def __init__(
        self, holder: str, called: str, fingerprint: str, plan: Plan, ended: Callable[[Session, Reason], None]
    ) -> None:
        self.holders: list[str | None] = [holder, None]
        self.names = [called, NO_SERVER]
        self.fingerprint = fingerprint
        self.plan = plan
        self.keys = (random_key(), random_key())
        self.began = self.used = self.left = time.monotonic()
        self.passes = self.rows = 0
        self.streams: list[Stream | None] = [None, None]
        self.dealings: dict[int, Dealing] = {}
        self._ended = ended
        self._fault: SordinoError | None = None
        self._numbers = Counters()
        self._asked = [-1, -1]

    @property
    def held_bytes(self) -> int:
        return sum(dealing.held_bytes for dealing in list(self.dealings.values()))

    @property
    def is_open(self) -> bool:
        return self._fault is None

    def end(self, error: SordinoError, reason: Reason) -> None:
        """Nothing more is dealt in it: both parties get this error, now or when they ask."""
        if self.is_open:
            self._ended(self, reason)
        self._fault = error
        for dealing in self.dealings.values():
            dealing.drop()
        self.dealings.clear()
        for stream in self.streams:
            if stream is not None:
                stream.end(error)

    def check(self) -> None:
        """
        Raises:
            SordinoError: what it has failed of.
        """
        if self._fault is not None:
            raise type(self._fault)(str(self._fault))
        self.used = time.monotonic()

    def ask(self, party: int, wanted: pb.Pass) -> Dealing:
        """The pass, for a party that has not asked for it before. Material of earlier ones is not kept for it.

        Raises:
            ProtocolError: no server has joined; the number, or a new row's counter, was used before; tokens that the
                plan has not; or the other party asked for another pass under this number, which ends the session.
        """
        self.check()
        if self.holders[SERVER] is None:
            raise ProtocolError("no server has joined this session: nothing is dealt before one has")
        if wanted.number <= self._asked[party]:
            raise ProtocolError(
                f"this party asked for pass {self._asked[party]} already, and now for {wanted.number}: numbers go up, "
                "and each is dealt once"
            )
        dealing = self.dealings.get(wanted.number)
        if dealing is None:
            dealing = self._new(wanted)
        elif differing := _differences(dealing.wanted, wanted):
            error = ProtocolError(
                f"the parties ask for different passes under number {wanted.number}: {differing}; the session ends"
            )
            self.end(error, "failed")
            raise error
        self._asked[party] = wanted.number
        for number, one in list(self.dealings.items()):
            if number < wanted.number:
                self.leave(one, party)
        return dealing

    def is_ahead(self, party: int, number: int) -> bool:
        """Whether the party asks for a pass that is not there while the other has left too many unread."""
        unread = sum(one.taken[1 - party] < one.layers for one in self.dealings.values())
        return number not in self.dealings and unread >= _MOST_PASSES

    def leave(self, dealing: Dealing, party: int) -> None:
        """A party has all of a pass, or wants no more of it."""
        dealing.took(party, dealing.layers)
        if min(dealing.taken) == dealing.layers:
            dealing.drop()
            self.dealings.pop(dealing.wanted.number, None)

    def _new(self, wanted: pb.Pass) -> Dealing:
        # Which of the old rows are alive the parties see to: the dealer is not told which passes were dropped that were
        # asked for ahead. It may deal for any of them (docs/two-party.md, section 6.6).
        check_tokens(wanted, self.plan)
        every = self._numbers.check(wanted)
        self.passes += 1
        self.rows += wanted.rows
        maker = PassMaker(self.keys, self.plan, wanted.number, wanted.rows, every, wanted.tokens)
        dealing = self.dealings[wanted.number] = Dealing(wanted, maker, self.plan.parts(wanted.tokens))
        return dealing


def _differences(first: pb.Pass, second: pb.Pass) -> str:
    """In which fields two passes differ."""
    names = ("rows", "first_counter", "kept", "tokens")
    return ", ".join(name for name in names if getattr(first, name) != getattr(second, name))


class Sessions:
    """All sessions of a dealer. Their sums may be asked for from any thread, so they are made over copies.

    Args:
        threads: that make material. metrics: where sessions and that time are counted.
    """

    def __init__(self, limits: Limits, threads: Executor, metrics: Metrics | None = None) -> None:
        self._limits = limits
        self._threads = threads
        self._metrics = metrics or Metrics()
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        """Places that are taken: of a session that has failed, too, until both parties had time to hear of it."""
        return len(self._sessions)

    @property
    def open_ones(self) -> int:
        return sum(session.is_open for session in list(self._sessions.values()))

    @property
    def held_bytes(self) -> int:
        """Of material that is made, or has still to be fetched."""
        return sum(session.held_bytes for session in list(self._sessions.values()))

    def begin(self, holder: str, fingerprint: str, plan: bytes, called: str = "") -> tuple[bytes, bytes]:
        """A new session and the client's key; ``called`` is the name of the client's token.

        Raises:
            ProtocolError: the plan or the fingerprint is malformed.
            LimitError: too many sessions.
        """
        checked = Plan.from_json(plan)
        if not fingerprint or len(fingerprint) > _LONGEST_FINGERPRINT:
            raise ProtocolError(f"a fingerprint has 1 to {_LONGEST_FINGERPRINT} characters")
        if len(self._sessions) >= self._limits.sessions:
            raise LimitError(f"the dealer has its {self._limits.sessions} sessions: try again later")
        own = sum(session.holders[CLIENT] == holder for session in self._sessions.values())
        if own >= self._limits.sessions_each:
            raise LimitError(f"this token has its {self._limits.sessions_each} sessions: one ends when it is not used")
        name = os.urandom(SESSION_BYTES)
        session = self._sessions[name] = Session(holder, called, fingerprint, checked, self._count_end)
        self._metrics.session_began()
        return name, session.keys[CLIENT]

    def _count_end(self, session: Session, reason: Reason) -> None:
        client, server = session.names
        seconds = time.monotonic() - session.began
        self._metrics.session_ended(reason, client, server, seconds, session.passes, session.rows)

    def join(self, holder: str, name: bytes, fingerprint: str, plan: bytes, called: str = "") -> bytes:
        """The server's key; ``called`` is the name of its token.

        Raises:
            SessionLostError: no such session.
            FingerprintError, ProtocolError: it is of another model; or somebody has joined it before.
        """
        session = self._sessions.get(name)
        if session is None:
            raise SessionLostError(_UNKNOWN)
        session.check()
        if session.holders[SERVER] is not None:
            raise ProtocolError("a server has joined this session: a second one cannot")
        if session.fingerprint != fingerprint:
            raise FingerprintError("the client began the session for a model of another fingerprint")
        if session.plan != Plan.from_json(plan):
            raise ProtocolError("the client began the session with another plan of the model")
        session.holders[SERVER], session.names[SERVER] = holder, called
        return session.keys[SERVER]

    def find(self, holder: str, party: int, name: bytes) -> Session:
        """
        Raises:
            SessionLostError: no such session, or this holder is not that party of it.
            SordinoError: what it has failed of.
        """
        session = self._sessions.get(name)
        if session is None or session.holders[party] != holder:
            raise SessionLostError(_UNKNOWN)
        session.check()
        return session

    def open(self, session: Session, party: int) -> Stream:
        """Makes the running task the party's stream, in the place of one that it had."""
        if (old := session.streams[party]) is not None:
            old.end(ProtocolError(_REPLACED))
        stream = session.streams[party] = Stream()
        return stream

    def close(self, session: Session, party: int, stream: Stream) -> None:
        if session.streams[party] is stream:
            session.streams[party] = None
            session.left = time.monotonic()

    def end(self, session: Session) -> None:
        """At once, because its client wants no more of it."""
        self._sessions = {name: one for name, one in self._sessions.items() if one is not session}
        session.end(SessionLostError(_ENDED), "client")

    async def layers(self, session: Session, party: int, wanted: pb.Pass) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """What the party gets of each layer of a pass: corrections of point functions, and of shares for the server.

        A party that stops before the end gets no more of the pass.

        Raises:
            ProtocolError: see :meth:`Session.ask`.
            LimitError: a layer is too large, or there is no room for it while others do not fetch theirs; or the other
                party has left too many passes unread.
        """
        await self._wait(
            lambda: not session.is_ahead(party, wanted.number),
            lambda: f"the other party has not fetched {_MOST_PASSES} passes, and there are no more at a time",
        )
        dealing = session.ask(party, wanted)
        try:
            for at in range(dealing.layers):
                if at == dealing.made:
                    await self._made(session, dealing, at)
                yield dealing.layer(at, party)
                dealing.took(party, at + 1)
                session.check()
        finally:
            session.leave(dealing, party)

    async def _made(self, session: Session, dealing: Dealing, at: int) -> None:
        """Returns when layer ``at`` is there: one party has it made, and the other may wait for it too."""
        if dealing.making is None:
            size = dealing.maker.next_bytes
            await self._room(session, dealing, at, size)
            if dealing.making is None and at == dealing.made:
                dealing.held_bytes += size  # before another looks for room
                dealing.making = asyncio.ensure_future(self._make(dealing, size))
        if dealing.making is not None and at == dealing.made:
            # A party that goes must not take the layer with it: the keystreams have moved on.
            await asyncio.shield(dealing.making)

    async def _make(self, dealing: Dealing, size: int) -> None:
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._threads, self._metrics.timed, dealing.maker.make)
        dealing.held_bytes -= size
        dealing.put(made)
        dealing.making = None

    async def _room(self, session: Session, dealing: Dealing, at: int, size: int) -> None:
        limits, client = self._limits, session.holders[CLIENT]
        if size > (most := min(limits.held_bytes_each, limits.held_bytes_token, limits.held_bytes)):
            raise LimitError(
                f"one layer of this pass takes {size >> 20} MiB, and a session may hold {most >> 20} MiB: ask for "
                "fewer rows at a time"
            )

        def held() -> tuple[int, int, int]:
            own = sum(one.held_bytes for one in self._sessions.values() if one.holders[CLIENT] == client)
            return session.held_bytes, own, self.held_bytes

        def there() -> bool:
            most = (limits.held_bytes_each, limits.held_bytes_token, limits.held_bytes)
            room = all(now + size <= one for now, one in zip(held(), most, strict=True))
            return room or dealing.making is not None or at < dealing.made

        def refusal() -> str:
            each, token, every = (now >> 20 for now in held())
            return (
                f"the session holds {each} MiB, its client's token {token} MiB and the dealer {every} MiB of material "
                f"that a party has not fetched, and there was no room for more in {limits.wait_s:g} s"
            )

        await self._wait(there, refusal)

    async def _wait(self, there: Callable[[], bool], refusal: Callable[[], str]) -> None:
        """
        Raises:
            LimitError: it is not there for too long.
        """
        until = time.monotonic() + self._limits.wait_s
        while not there():
            if time.monotonic() >= until:
                raise LimitError(refusal())
            await asyncio.sleep(_POLL_S)

    def tend(self) -> None:
        """Ends sessions that nobody uses; to be called every now and then."""
        now, limits = time.monotonic(), self._limits
        for name, session in list(self._sessions.items()):
            idle = session.used + limits.idle_s < now
            if idle or (not any(session.streams) and session.left + limits.away_s < now):
                del self._sessions[name]
                if idle:
                    session.end(SessionLostError(_IDLE), "idle")
                else:
                    session.end(SessionLostError(_AWAY), "away")

    def end_all_but(self, valid: tuple[set[str], set[str]]) -> None:
        """Ends sessions of tokens that are not among the valid ones, of clients and of servers."""
        for name, session in list(self._sessions.items()):
            for party, holder in enumerate(session.holders):
                if holder is not None and holder not in valid[party]:
                    self._sessions.pop(name, None)
                    session.end(SessionLostError(_WITHDRAWN), "withdrawn")

    def end_all(self) -> None:
        """When the dealer has stopped."""
        for session in self._sessions.values():
            session.streams = [None, None]  # gRPC has ended them, and their tasks say how
            session.end(SessionLostError(_STOPPED), "shutdown")
        self._sessions.clear()
