"""The parties' side of the dealer's service: sessions, and material as it comes.

A thread reads the stream ahead of need. A pass of which a part has come is lost when the stream breaks: its number and
counters were used. Passes of which nothing has come are asked for again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from sordino.proto.v1 import dealer_pb2 as pb
from sordino.proto.v1 import dealer_pb2_grpc as pb_grpc
from sordino.shared.errors import HandshakeError, ProtocolError, SessionLostError, SordinoError, TransportError
from sordino.shared.transport import ERROR_KEY, OPENED_KEY, authorization, error_of, open_channel
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.tape import CLIENT

log = logging.getLogger(__name__)

U64 = NDArray[np.uint64]

DEFAULT_DEALER_PORT: Final = 50552
_MAX_PART_BYTES: Final = 2 << 20
AHEAD_BYTES: Final = 96 << 20  # that are read before they are needed
# Before what is needed: a layer at most, of which a dealer holds half of this unless it is told otherwise.
_MOST_AHEAD: Final = 1 << 30
_CALL_S: Final = 30.0  # for the short calls
_RETRY_PAUSE_S: Final = 0.1
_PROBE_S: Final = 0.5
_CONNECT_S: Final = 2.0  # for a dealer that is about to come back
_FAREWELL_S: Final = 2.0  # for the dealer to see a stream's end, and a session's
_WORD: Final = 8
_FINAL: Final = (HandshakeError, SessionLostError)  # of errors of transport: trying again does not help


class Dealer:
    """A connection to a dealer.

    Args:
        target: ``grpcs://host:port``, or ``grpc://`` on loopback. ca: the dealer's ``ca.pem``; None trusts the
            authorities that everybody knows. token: a client's or a server's.

    Attributes:
        check: called every now and then by who waits for material, to raise what should end the wait.

    Raises:
        TransportError, AuthError: target, CA file or token are malformed.
    """

    def __init__(self, target: str, ca: Path | None, token: str) -> None:
        self.check: Callable[[], None] = lambda: None
        self._target = target
        self._metadata = authorization(token)
        self._channel = open_channel(target, ca, _MAX_PART_BYTES, DEFAULT_DEALER_PORT)
        self._stub = pb_grpc.DealerStub(self._channel)

    def begin(self, fingerprint: str, plan: Plan) -> tuple[bytes, bytes]:
        """A new session, for a client: its name, which the server needs, and the client's key.

        Raises:
            SordinoError: the dealer refuses, or cannot be reached.
        """
        answer = self._call(self._stub.Begin, pb.BeginRequest(fingerprint=fingerprint, plan=plan.to_json()))
        return answer.session, answer.key

    def join(self, session: bytes, fingerprint: str, plan: Plan) -> bytes:
        """The server's key of a session that a client has begun.

        Raises:
            SordinoError: the dealer refuses, or cannot be reached.
        """
        request = pb.JoinRequest(session=session, fingerprint=fingerprint, plan=plan.to_json())
        key: bytes = self._call(self._stub.Join, request).key
        return key

    def end(self, session: bytes) -> None:
        """The client's end of a session. One that the dealer does not hear of lasts until it is away for too long."""
        try:
            self._stub.End(pb.EndRequest(session=session), metadata=self._metadata, timeout=_FAREWELL_S)
        except (grpc.RpcError, ValueError) as error:  # the latter of a channel that was closed
            log.debug("the end of a session: %s", error)

    def greet(self, fingerprint: str, plan: Plan) -> None:
        """Whether it is there and knows this token, a server's.

        Raises:
            SordinoError: it is not, or does not.
        """
        with suppress(SessionLostError):  # of the name of no session
            self.join(bytes(16), fingerprint, plan)

    def error_of(self, call: Any) -> SordinoError:
        """The error that a failed call stands for; its text names the dealer."""
        error: SordinoError = error_of(call, "dealer", "--dealer-ca")
        if call.code() is grpc.StatusCode.NOT_FOUND and ERROR_KEY in dict(call.trailing_metadata() or ()):
            return SessionLostError(call.details() or "")
        return type(error)(f"the dealer at {self._target}: {error}")

    def stream(
        self,
        session: bytes,
        party: int,
        *,
        retry_s: float = 30.0,
        silence_s: float = 120.0,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> DealerStream:
        """Material for one party of a session. See :class:`DealerStream`."""
        return DealerStream(self, session, party, retry_s=retry_s, silence_s=silence_s, ahead_bytes=ahead_bytes)

    def call(self, session: bytes, requests: queue.SimpleQueue[pb.DealRequest | None]) -> Any:
        """gRPC's call of a new stream, of which nobody knows yet whether it will be accepted."""
        requests.put(pb.DealRequest(open=session))
        return self._stub.Deal(_until_none(requests), metadata=self._metadata)

    def wait_for_connection(self, timeout_s: float) -> None:
        """Lets the channel work on its connection: between calls that fail at once nobody would drive it."""
        probe: Any = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            probe(b"", wait_for_ready=True, timeout=timeout_s)
        except (grpc.RpcError, ValueError) as error:  # the latter of a channel that was closed
            # Connected or not, the next attempt says so by itself.
            log.debug("probe: %s", error)

    def _call(self, method: Any, request: Any) -> Any:
        try:
            try:
                return method(request, metadata=self._metadata, timeout=_CALL_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or isinstance(self.error_of(error), _FINAL):
                    raise
            # A channel that has lost its connection fails at once for a while, though the dealer is there again.
            self.wait_for_connection(_CONNECT_S)
            return method(request, metadata=self._metadata, timeout=_CALL_S)
        except grpc.RpcError as error:
            raise self.error_of(error) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _until_none(requests: queue.SimpleQueue[pb.DealRequest | None]) -> Iterator[pb.DealRequest]:
    while (request := requests.get()) is not None:
        yield request


def _asking(wanted: pb.Pass) -> pb.DealRequest:
    request = pb.DealRequest()
    getattr(request, "pass").CopyFrom(wanted)
    return request


def _is_open(call: Any, timeout_s: float) -> bool:
    """Waits for the dealer to accept a session's stream; False if it refuses it, or cannot be reached."""
    late = threading.Timer(timeout_s, call.cancel)
    late.daemon = True
    late.start()
    try:
        # The dealer sends it before any part; a call that is refused comes to an end without.
        return OPENED_KEY in dict(call.initial_metadata() or ())
    finally:
        late.cancel()


class _Bytes:
    """A queue of bytes, put in as they come and taken out in small pieces. One thread puts and one takes."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._now, self._at = b"", 0

    def put(self, part: bytes) -> None:
        self._parts.append(part)

    def have(self, count: int) -> bool:
        """Whether so many are there."""
        have = len(self._now) - self._at
        return have >= count or have + sum(map(len, self._parts)) >= count

    def take(self, count: int) -> tuple[bytes, int]:
        """The next ``count``, that :meth:`have` has seen: an object that holds them, and where."""
        if self._at == len(self._now) and self._parts:
            self._now, self._at = self._parts.popleft(), 0
        if self._at + count > len(self._now):
            pieces, missing = [self._now[self._at :]], count - (len(self._now) - self._at)
            while missing > 0:
                self._now, self._at = self._parts.popleft(), 0
                pieces.append(self._now[:missing])
                self._at = len(pieces[-1])
                missing -= self._at
            return b"".join(pieces), 0
        self._at += count
        return self._now, self._at - count

    def clear(self) -> None:
        self._parts.clear()
        self._now, self._at = b"", 0

    @property
    def rest(self) -> int:
        return len(self._now) - self._at + sum(map(len, self._parts))


class PassSource:
    """Material of one pass, a :class:`sordino.shared.twoparty.tape.Source`: reading waits until it comes.

    Attributes:
        wanted: the pass. begun: a part has come. sent, again: it was asked for, and on a new stream again.
        complete: all has come. dropped: nobody will read it. lost: the stream broke in it; nothing of it can be read.
    """

    def __init__(self, stream: DealerStream, wanted: pb.Pass) -> None:
        self.wanted = wanted
        self.begun = False
        self.sent = self.again = False
        self._stream = stream
        self._points, self._words = _Bytes(), _Bytes()
        self.complete = self.dropped = self.lost = False

    def corrections(self, count: int) -> U64:
        """
        Raises:
            ProtocolError: the dealer sent less. TransportError: the pass is lost. SordinoError: see
                :meth:`DealerStream.ask`.
        """
        held, at = self._take(self._words, count * _WORD)
        return np.frombuffer(held, "<u8", count, at).astype(np.uint64, copy=False)

    def points(self, count: int) -> bytes:
        """As :meth:`corrections`."""
        held, at = self._take(self._points, count)
        return held[at : at + count]

    def wait(self) -> None:
        """Until all is there, or lost. Raises as :meth:`DealerStream.wait`."""
        with self._stream.changed:
            self._stream.wait(lambda: self.complete or self.lost)

    def finish(self) -> None:
        """To be called when all was read.

        Raises:
            ProtocolError: the dealer sent more than that. TransportError: its end is lost.
        """
        with self._stream.changed:
            self._stream.wait(lambda: self.complete or self.lost or self._rest)
            if self._rest:
                raise ProtocolError(f"the dealer sent bytes too many for pass {self.wanted.number}")
            if not self.complete:
                raise self._broken()

    def put(self, part: pb.DealResponse, party: int) -> int:
        """Takes a part in, under the stream's lock; returns its bytes.

        Raises:
            ProtocolError: it is not the next of this pass, or of another shape.
        """
        if part.number != self.wanted.number:
            raise ProtocolError(f"the dealer sent pass {part.number} where {self.wanted.number} belongs")
        if len(part.corrections) % _WORD or (part.corrections and party == CLIENT):
            raise ProtocolError("the dealer sent corrections of a wrong size, or to a client")
        if not (part.points or part.corrections or part.last):
            raise ProtocolError("the dealer sent a part with nothing in it")
        self.begun = True
        self.complete = part.last
        if self.dropped:
            return 0
        for into, data in ((self._points, part.points), (self._words, part.corrections)):
            if data:
                into.put(data)
        return len(part.points) + len(part.corrections)

    def drop(self) -> None:
        """Nobody will read what has come and what will come."""
        with self._stream.changed:
            self.dropped = True
            self._forget()

    def lose(self) -> None:
        """What has come has no rest, and must not be read; under the stream's lock."""
        self.lost = True
        self._forget()

    def _forget(self) -> None:
        self._stream.took(self._rest)
        self._points.clear()
        self._words.clear()

    @property
    def _rest(self) -> int:
        return self._points.rest + self._words.rest

    def _broken(self) -> TransportError:
        return TransportError(
            f"the dealer's stream broke in pass {self.wanted.number}: ask for it anew, under another number and other "
            "counters"
        )

    def _take(self, which: _Bytes, size: int) -> tuple[bytes, int]:
        with self._stream.changed:
            if not which.have(size):
                self._stream.wait(lambda: self.complete or self.lost or which.have(size))
                if self.lost:
                    raise self._broken()
                if not which.have(size):
                    raise ProtocolError(f"the dealer sent too little for pass {self.wanted.number}")
            self._stream.took(size)
            return which.take(size)


class DealerStream:
    """One party's stream of a session: passes are asked for, and their material read, in order.

    Args:
        dealer: the connection, which stays the caller's. session: its name. party: ``CLIENT`` or ``SERVER``.
        retry_s: how long a dealer that is gone is waited for. silence_s: and one that is there and sends nothing.
        ahead_bytes: that are read before they are needed; more only where what is needed lies behind them.

    Attributes:
        changed: held whenever something here is looked at or changed.
    """

    def __init__(
        self, dealer: Dealer, session: bytes, party: int, *, retry_s: float, silence_s: float, ahead_bytes: int
    ) -> None:
        self.changed = threading.Condition()
        self._dealer, self._session, self._party = dealer, session, party
        self._retry_s, self._silence_s = retry_s, silence_s
        self._asked: deque[PassSource] = deque()
        self._requests: queue.SimpleQueue[pb.DealRequest | None] = queue.SimpleQueue()
        self._call: Any = None
        self._opening: Any = None
        self._error: SordinoError | None = None
        self._closed = False
        self._ahead, self._ahead_bytes = 0, ahead_bytes
        self._hungry = False
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dealer stream", daemon=True)
        self._thread.start()

    def ask(self, wanted: pb.Pass) -> PassSource:
        """Asks for a pass, ahead of need; returns at once. What is asked for must be read, or dropped.

        Errors show when the material is read: TransportError (the dealer is gone), SessionLostError (it does not know
        the session any more), LimitError, ProtocolError (it refuses the pass). After one of them the stream gives
        nothing more. A pass in which the stream broke is lost alone: it must be asked for anew, under another number
        and other counters, by both parties.
        """
        source = PassSource(self, wanted)
        with self.changed:
            self._asked.append(source)
            self._heard = time.monotonic()
            if self._call is not None:
                source.sent = True
                self._requests.put(_asking(wanted))
        return source

    def wait(self, there: Any) -> None:
        """Until ``there()``; with ``changed`` held.

        Raises:
            SordinoError: what the stream has ended of.
        """
        since = time.monotonic()
        try:
            while not there():
                self._hungry = True
                self.changed.notify_all()
                if self._error is not None:
                    raise type(self._error)(str(self._error))
                if self._closed:
                    raise TransportError("the stream of the dealer is closed")
                self._dealer.check()
                self.changed.wait(timeout=0.5)
                silent = self._call is not None and time.monotonic() - max(since, self._heard) > self._silence_s
                if silent and not there():
                    raise TransportError(f"the dealer has sent nothing for {self._silence_s:g} s")
        finally:
            self._hungry = False

    def took(self, size: int) -> None:
        """Makes room for more; with ``changed`` held."""
        self._ahead -= size
        if self._ahead + size >= self._ahead_bytes > self._ahead:
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the stream, and if it is a client's the session; what was not read is lost."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            self._requests.put(None)
            if self._asked or self._call is None:
                self._hang_up()
            self.changed.notify_all()
        self._thread.join(_FAREWELL_S)
        with self.changed:
            self._hang_up()
        self._thread.join()
        if self._party == CLIENT and not isinstance(self._error, SessionLostError):
            self._dealer.end(self._session)

    def __enter__(self) -> DealerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._connected():
                try:
                    for part in self._call:
                        self._put(part)
                    raise TransportError("the dealer ended the stream")
                except grpc.RpcError as error:
                    failed = self._dealer.error_of(error)
                    if isinstance(failed, ProtocolError) and self._lose_again():
                        continue
                    if not isinstance(failed, TransportError) or isinstance(failed, _FINAL):
                        raise failed from None
                except TransportError:  # its end is tried again as any other
                    continue
        except SordinoError as error:
            with self.changed:
                self._error = error
                self.changed.notify_all()
        finally:
            with self.changed:
                self._hang_up()

    def _hang_up(self) -> None:
        for call in (self._call, self._opening):
            if call is not None:
                call.cancel()
        self._requests.put(None)

    def _lose_again(self) -> bool:
        """Whether what the dealer refuses is a pass that it had begun, and nothing of it came."""
        with self.changed:
            if not (self._asked and self._asked[0].again):
                return False
            self._asked.popleft().lose()
            self.changed.notify_all()
        return True

    def _connected(self) -> bool:
        """Opens the stream, trying for ``retry_s``; False when it is closed.

        Raises:
            SordinoError: it cannot be opened.
        """
        until, said = time.monotonic() + self._retry_s, False
        with self.changed:
            self._call = None
            self._requests.put(None)
        while not self._closed:
            with self.changed:
                self._requests = queue.SimpleQueue()
                self._opening = self._dealer.call(self._session, self._requests)
            try:
                if not _is_open(self._opening, max(1.0, until - time.monotonic())):
                    raise self._dealer.error_of(self._opening)
            except TransportError as error:
                self._requests.put(None)
                if isinstance(error, _FINAL):
                    raise
                if time.monotonic() >= until:
                    raise TransportError(f"the dealer cannot be reached for {self._retry_s:g} s: {error}") from None
                if not said:
                    said = True
                    log.warning("the dealer is away, trying for up to %g s: %s", self._retry_s, error)
                self._dealer.wait_for_connection(_PROBE_S)
                time.sleep(_RETRY_PAUSE_S)
                continue
            with self.changed:
                self._call, self._heard = self._opening, time.monotonic()
                if self._asked and self._asked[0].begun:
                    self._asked.popleft().lose()
                    self.changed.notify_all()
                # Dropped ones too: numbers go up, and the other party may still come to ask for these.
                for source in self._asked:
                    source.again, source.sent = source.sent, True
                    self._requests.put(_asking(source.wanted))
            return True
        return False

    def _put(self, part: pb.DealResponse) -> None:
        with self.changed:
            while self._ahead >= self._ahead_bytes and not self._hungry and not self._closed:
                self.changed.wait()
            if self._ahead >= _MOST_AHEAD:
                raise ProtocolError(f"the dealer sent {_MOST_AHEAD >> 20} MiB without what is needed next")
            if not self._asked:
                raise ProtocolError("the dealer sent material that nobody asked for")
            self._heard = time.monotonic()
            self._ahead += self._asked[0].put(part, self._party)
            if part.last:
                self._asked.popleft()
            self.changed.notify_all()
