"""The client's end of the wire: calls to the servers of a model, and streams that survive a restart of one."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from sordino.client.forks import Owner
from sordino.client.interrupts import interrupts
from sordino.client.route import PASSING, MovedError, Route, Target
from sordino.client.timings import Timings
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import (
    HandshakeError,
    IntegrityError,
    LimitError,
    ProtocolError,
    RangeError,
    SessionLostError,
    TransportError,
)
from sordino.shared.manifest import GroupSpec
from sordino.shared.transport import authorization, error_of, open_channel, parse_target

log = logging.getLogger(__name__)

U32 = NDArray[np.uint32]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """The part of gRPC's call object that is used here."""

    def __next__(self) -> T_co: ...

    def cancel(self) -> object: ...


_MAX_MESSAGE: Final = 64 << 20
_QUIET_TRIES: Final = 3  # a stream that breaks and comes back at once is nobody's concern
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class Traffic:
    """Payload bytes as serialised (without HTTP/2 and TLS framing), per phase, since the connection was made."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    retries: int = 0

    def count(self, phase: str, *, up: int = 0, down: int = 0) -> None:
        self.up.setdefault(phase, 0)
        self.down.setdefault(phase, 0)
        # One thread sends and another receives: neither writes what the other counts.
        if up:
            self.up[phase] += up
        if down:
            self.down[phase] += down


class Connection:
    """Channels to the servers of one model: to one (or a balancer before several), to replicas, to stages.

    Args:
        target: ``grpcs://host:port`` with TLS, ``grpc://host:port`` without (loopback only); several with commas
            between them. Between them they hold every group of the same split; see :class:`Route`.
        token: as the provider gave it; None for a server that asks for none. It goes to all of them.
        ca: PEM of the authority that signed the certificates; None uses the system's.
        timeout_s: for each short call, and the longest wait for one answer of a stream.
        retry_s: how long a broken stream is retried, without any progress, before it counts as lost. Where another
            server holds the same group, that one is asked at once.

    Raises:
        AuthError: the token cannot be one, or a server refuses it.
        TransportError: a target is malformed, the CA file holds no certificate, or no server can be reached.
        HandshakeError: no server holds some of the groups.
        FingerprintError: two servers hold different models.
        RangeError: a target is named twice, or a time is none.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        ca: Path | None = None,
        timeout_s: float = 60,
        retry_s: float = 60,
    ) -> None:
        for name, seconds in (("timeout_s", timeout_s), ("retry_s", retry_s)):
            # Not longer than a lock can wait; and a comparison with NaN is never true.
            if not (0 if name == "retry_s" else 1e-3) <= seconds <= threading.TIMEOUT_MAX:
                raise RangeError(f"{name} is a number of seconds, not {seconds}")
        self.owner = Owner()
        self.target = target
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self.traffic = Traffic()
        self.timings = Timings()
        self._metadata = authorization(token)
        self._closed = threading.Event()
        self._fetched = 0
        self.route = Route(
            [Target(one, open_channel(one, ca, _MAX_MESSAGE)) for one in _split(target)], self._metadata, timeout_s
        )
        try:
            # The manifest precedes every state, so a server that is just restarting is waited for.
            offer = self.retrying(self.route.open)
        except BaseException:
            self.route.close()
            raise
        self.manifest = offer.manifest
        self.max_message_bytes = min(offer.max_message_bytes, _MAX_MESSAGE)
        self.protocols = offer.protocols
        self.server_version = offer.version

    def fetch(self, name: str, offset: int) -> Iterator[bytes]:
        """The bytes of a file of the client bundle from ``offset`` on, in chunks."""
        self.owner.check()
        position = offset
        target = self.route.holder()
        call: Call[pb.FileChunk] = target.stub.FetchFile(
            pb.FetchFileRequest(name=name, offset=offset), metadata=self._metadata
        )
        for chunk in self._unless_busy(self._answers(call, Watchdog(self.timeout_s), target)):
            if chunk.offset != position:
                raise ProtocolError(f"the server sent {name!r} out of order")
            if not chunk.data:
                raise ProtocolError(f"the server sent a part of {name!r} with nothing in it")
            position += len(chunk.data)
            self._fetched += len(chunk.data)
            self.traffic.count("bundle", down=chunk.ByteSize())
            yield chunk.data

    def _unless_busy(self, answers: Iterator[T]) -> Iterator[T]:
        """With no place for one more download at the server, this one is tried again later."""
        try:
            yield from answers
        except LimitError as error:
            raise TransportError(f"the server is busy: {error}") from None

    def provision(self, requests: Iterator[pb.ProvisionRequest]) -> Generator[pb.ProvisionResponse]:
        """Provisioning: a stream, or one after another where groups lie with different servers.

        Answers come in the order of the requests.
        """
        self.owner.check()
        # What the next stream begins with. A lone server is asked before there is any request.
        following = [] if self.route.lone else list(islice(requests, 1))
        whole = True
        while whole:
            begin, following = following, []
            whole = yield from self._provision(begin, requests, following)
            whole = whole and bool(following)

    def _provision(
        self, begin: list[pb.ProvisionRequest], requests: Iterator[pb.ProvisionRequest], rest: list[pb.ProvisionRequest]
    ) -> Generator[pb.ProvisionResponse, None, bool]:
        """One stream, up to a request for a group that its server does not hold, which goes into ``rest``.

        Returns:
            Whether all that was asked has been answered.
        """
        group = begin[0].group if begin else None
        target = self.route.holder(group)
        watchdog = Watchdog(self.timeout_s)
        asked = answered = 0

        def counted() -> Iterator[pb.ProvisionRequest]:
            nonlocal asked
            for request in chain(begin, requests):
                if not (self.route.lone or target.holds(request.group)):
                    rest.append(request)
                    return
                self.traffic.count("provision", up=request.ByteSize())
                asked += 1
                # Encrypting the next request takes this side a while, which is no silence of the server.
                watchdog.restart()
                yield request

        call: Call[pb.ProvisionResponse] = target.stub.Provision(counted(), metadata=self._metadata)
        for response in self._answers(call, watchdog, target, group):
            answered += 1
            if answered > asked:
                raise ProtocolError("the server answered before it was asked")
            self.traffic.count("provision", down=response.ByteSize())
            yield response
        return answered == asked

    def _answers(self, call: Call[T], watchdog: Watchdog, target: Target, group: int | None = None) -> Iterator[T]:
        """The messages of a stream until it ends, each waited for by ``timeout_s`` at most."""
        try:
            while True:
                interrupts.check()
                with interrupts, watchdog.watching(call):
                    answer = next(call, None)
                if answer is None:
                    return
                self.route.answered(target)
                yield answer
        except grpc.RpcError as error:
            ended = error_of(error)
            raise (self.route.failed(target, ended, group) if isinstance(ended, PASSING) else ended) from None
        except TransportError as error:  # the watchdog's
            raise self.route.failed(target, error, group) from None
        finally:
            watchdog.close()
            call.cancel()

    def open_stream(
        self, requests: Iterator[pb.EvaluateRequest], target: Target | None = None
    ) -> Call[pb.EvaluateResponse]:
        """To any of the servers, if not to one."""
        self.owner.check()
        stub = (target or self.route.holder()).stub
        call: Call[pb.EvaluateResponse] = stub.Evaluate(requests, metadata=self._metadata)
        return call

    def open_attention(
        self, requests: Iterator[pb.AttendRequest], target: Target | None = None
    ) -> Call[pb.AttendResponse]:
        """To any of the servers, if not to one."""
        self.owner.check()
        stub = (target or self.route.holder()).stub
        call: Call[pb.AttendResponse] = stub.Attend(requests, metadata=self._metadata)
        return call

    def open_compute(self, requests: Iterator[pb.ComputeRequest]) -> Call[pb.ComputeResponse]:
        """To the one server that this session of profile two-party is with."""
        self.owner.check()
        call: Call[pb.ComputeResponse] = self.route.holder().stub.Compute(requests, metadata=self._metadata)
        return call

    def retrying(self, attempt: Callable[[], T], progress: Callable[[], object] | None = None) -> T:
        """Runs ``attempt`` until it succeeds or fails for another reason than the transport.

        It gives up ``retry_s`` after the first failure since there was progress: neither the time that the work takes
        counts, nor how often the stream broke on the way.

        Args:
            progress: a value that changes with whatever an attempt that fails leaves done. By default the bytes of
                files that came: they are kept, while other answers without a value of their own begin anew.

        Raises:
            SessionLostError: the connection was closed meanwhile, or is that of the process this one was forked from.
        """
        self.owner.check()
        with interrupts:
            done: Callable[[], object] = progress or (lambda: self._fetched)
            before, tries, moves, deadline = done(), 0, 0, math.inf
            while True:
                try:
                    return self._attempt(attempt)
                except (HandshakeError, SessionLostError):
                    raise
                except TransportError as error:
                    interrupts.check()
                    if (now := done()) != before:
                        before, tries, moves, deadline = now, 0, 0, math.inf
                    # Each of the others once; two that take turns to fail are away like one.
                    moved = isinstance(error, MovedError) and moves < self.route.others
                    pause = _BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)]
                    if not moved:
                        deadline = min(deadline, time.monotonic() + self.retry_s)
                        if time.monotonic() + pause > deadline:
                            raise
                        if tries == _QUIET_TRIES:
                            log.warning("the server is away, trying for up to %g s: %s", self.retry_s, error)
                self.traffic.retries += 1
                if moved:
                    moves += 1
                    continue
                tries, moves = tries + 1, 0
                self._closed.wait(pause)
                self._wait_for_connection(min(1.0, max(0.0, deadline - time.monotonic())))

    def _attempt(self, attempt: Callable[[], T]) -> T:
        """``attempt()`` with errors of this tree: gRPC's own stay here, and after :meth:`close` there is but one."""
        try:
            try:
                return attempt()
            except grpc.RpcError as error:
                raise error_of(error) from None
        except (TransportError, ValueError):  # the latter is gRPC's, of a call on a channel that was closed
            if self._closed.is_set():
                raise SessionLostError("the session is closed") from None
            raise

    def _wait_for_connection(self, timeout_s: float) -> None:
        """Lets the channel work on its connection: between calls that fail at once nobody would drive it."""
        if self.route.lone is None:
            self.route.wait(timeout_s)
            return
        probe: Callable[..., bytes] = self.route.lone.channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            probe(b"", wait_for_ready=True, timeout=timeout_s)
        except (grpc.RpcError, ValueError) as error:  # the latter of a channel that was closed
            # Connected or not, the next attempt says so by itself.
            log.debug("probe: %s", error)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Ends all calls, in whichever thread they wait, and all retrying. May be called again.

        In a forked child it does nothing: the calls are the parent's, and gRPC's threads are not there to wait for.
        """
        if not self.owner.here():
            return
        with interrupts:
            self._closed.set()
            self.route.close()


class _Line(NamedTuple):
    """The open stream to one server."""

    call: Call[pb.EvaluateResponse]
    outgoing: queue.SimpleQueue[pb.EvaluateRequest | None]


class EvaluationStream:
    """Requests and answers over one bidirectional stream to each server; safe for several threads, which take turns.

    A broken stream is opened again, to the same server or to another that holds the group, and the unanswered messages
    are sent as they were, byte for byte: a masked row or a ciphertext has one meaning, so a second copy tells nothing,
    nor do two servers that compare theirs learn more than one (§4.5.1).

    Args:
        phase: what its traffic is counted as; ``online`` counts rounds too.
    """

    def __init__(self, connection: Connection, protocol: pb.Protocol, phase: str = "online") -> None:
        self._connection = connection
        self._phase = phase
        self._open = pb.EvaluateRequest(
            open=pb.Open(fingerprint=connection.manifest.fingerprint, protocol=protocol), id=0
        )
        self._lock = threading.Lock()
        self._lines: dict[Target, _Line] = {}
        self._next_id = 1
        self._closed = False
        self._watchdog = Watchdog(connection.timeout_s)

    def product(self, index: int, group: GroupSpec, rows: U32, meanwhile: Callable[[], None] | None = None) -> U32:
        """W times ``rows [R, n]``: one round trip, in several messages when the rows do not fit in one.

        Returns:
            ``[R, m]`` ring elements.

        Raises:
            IntegrityError: the answer is of another request, or of another size than was asked for.
            SordinoError: as :meth:`exchange`.
        """
        messages = self._messages(index, group, rows)
        parts = []
        for message, answer in zip(messages, self.exchange(messages, meanwhile), strict=True):
            if len(answer.data) != 4 * message.rows * group.out_features:
                who = self._connection.route.answerer()
                raise IntegrityError(
                    f"group {group.name!r}: the answer of {who} has {len(answer.data)} bytes for {message.rows} rows"
                )
            parts.append(np.frombuffer(answer.data, dtype="<u4").reshape(message.rows, group.out_features))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        if not self._connection.owner.here():
            return
        with interrupts, self._lock:
            self._closed = True
            for target in list(self._lines):
                self._hang_up(target)
        self._watchdog.close()

    def _messages(self, index: int, group: GroupSpec, rows: U32) -> list[pb.EvaluateRequest]:
        limit, row = self._connection.max_message_bytes, 4 * max(group.in_features, group.out_features)
        per_message = limit // row
        if per_message < 1:
            raise LimitError(f"group {group.name!r}: one row has {row} bytes, the server's messages at most {limit}")
        messages = []
        for start in range(0, rows.shape[0], per_message):
            part = rows[start : start + per_message]
            data = part.astype("<u4", copy=False).tobytes()
            messages.append(pb.EvaluateRequest(group=index, rows=part.shape[0], data=data))
        return messages

    def exchange(
        self, messages: Sequence[pb.EvaluateRequest], meanwhile: Callable[[], None] | None = None
    ) -> list[pb.EvaluateResponse]:
        """One round: all ``messages`` go out, an answer to each comes back, in their order.

        Args:
            messages: of one group, without ids, which are given here.
            meanwhile: client work that runs while the server computes.

        Raises:
            SessionLostError: the server stayed away for ``retry_s``, or the session is closed, or another process's.
            IntegrityError: the server answered out of order.
            SordinoError: the server refused a request.
        """
        self._connection.owner.check()  # first: who held the lock may not be in this process
        with self._lock:
            if self._closed:
                raise SessionLostError("the session is closed")
            for message in messages:
                message.id = self._next_id
                self._next_id += 1
            return self._exchange(messages, meanwhile)

    def _exchange(
        self, messages: Sequence[pb.EvaluateRequest], meanwhile: Callable[[], None] | None
    ) -> list[pb.EvaluateResponse]:
        traffic, timings, phase = self._connection.traffic, self._connection.timings, self._phase
        route, group = self._connection.route, messages[0].group
        answers: list[pb.EvaluateResponse] = []
        pending = deque(messages)
        working = meanwhile

        def attempt() -> None:
            nonlocal working
            target = route.holder(group)
            try:
                line = self._line(target)
                for message in pending:
                    traffic.count(phase, up=message.ByteSize())
                    line.outgoing.put(message)
                if working is not None:
                    work, working = working, None
                    work()
                while pending:
                    answer = next_answer(line.call, self._watchdog)
                    route.answered(target)
                    if answer.id != pending[0].id:
                        raise IntegrityError(f"{route.answerer()} answered out of order")
                    traffic.count(phase, down=answer.ByteSize())
                    if phase == "online":
                        timings["server"] = timings.get("server", 0.0) + answer.compute_us / 1e6
                    answers.append(answer)
                    pending.popleft()
            except PASSING as error:
                self._hang_up(target)
                raise route.failed(target, error, group) from None
            except BaseException:
                self._hang_up(target)
                raise

        try:
            self._connection.retrying(attempt, lambda: len(answers))
        except SessionLostError:
            raise
        except TransportError as error:
            away = "the server was" if route.lone else "all servers of these layers were"
            raise SessionLostError(f"{away} away for {self._connection.retry_s:.0f} s: {error}") from None
        traffic.rounds += phase == "online"
        return answers

    def _line(self, target: Target) -> _Line:
        line = self._lines.get(target)
        if line is None:
            outgoing: queue.SimpleQueue[pb.EvaluateRequest | None] = queue.SimpleQueue()
            line = _Line(self._connection.open_stream(iter(outgoing.get, None), target), outgoing)
            self._lines[target] = line
            outgoing.put(self._open)
            opened = next_answer(line.call, self._watchdog)
            self._connection.traffic.count(self._phase, up=self._open.ByteSize(), down=opened.ByteSize())
        return line

    def _hang_up(self, target: Target) -> None:
        line = self._lines.pop(target, None)
        if line is not None:
            line.outgoing.put(None)
            line.call.cancel()


class Watchdog:
    """Cancels a call whose next answer takes longer than ``timeout_s``; one thread, no cost on the fast path.

    It watches one call at a time: each stream has its own.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._owner = Owner()
        self._call: Call[object] | None = None
        self._cancelled: Call[object] | None = None
        self._since = 0.0
        self._of_main_thread = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watching(self, call: Call[object]) -> Watchdog:
        """A context in which ``call`` is waited for; when it was cancelled here, the error says so."""
        self._owner.check()
        self._since = time.monotonic()
        self._of_main_thread = threading.current_thread() is threading.main_thread()
        self._call = call
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sordino-watchdog", daemon=True)
            self._thread.start()
        return self

    def restart(self) -> None:
        """The wait begins anew, from any thread."""
        self._since = time.monotonic()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        call, self._call = self._call, None
        if kind is not None and issubclass(kind, grpc.RpcError) and self._cancelled is call:
            raise TransportError(f"the server sent nothing for {self._timeout_s:g} s") from None

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(min(0.5, self._timeout_s / 4)):
            call, since = self._call, self._since
            if call is not None and self._of_main_thread and interrupts.noted:
                call.cancel()
            elif call is not None and time.monotonic() - since > self._timeout_s:
                log.warning("no answer for %g s: the stream is cancelled and opened again", self._timeout_s)
                self._cancelled = call
                call.cancel()


def next_answer(call: Call[T], watchdog: Watchdog) -> T:
    """The next message of a stream that should have one more, with errors of Sordino's own tree."""
    try:
        with watchdog.watching(call):
            return next(call)
    except StopIteration:
        raise TransportError("the server ended the stream") from None
    except grpc.RpcError as error:
        raise error_of(error) from None


def _split(targets: str) -> list[str]:
    """The targets between commas.

    Raises:
        TransportError: one is malformed.
        RangeError: one is named twice.
    """
    names = [name.strip() for name in targets.split(",")]
    seen: dict[tuple[str, int], str] = {}
    for name in names:
        _, host, port = parse_target(name)
        if (host, port) in seen:
            raise RangeError(f"target {name!r} is named twice: name each server once")
        seen[host, port] = name
    return names
