"""The dealer's gRPC service, and what every call of it passes: a token of the right party, an end to waiting, and
errors that become statuses; and all of it is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sordino.dealer.metrics import PARTIES, Metrics
from sordino.dealer.sessions import Session, Sessions, Stream
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.proto.v1 import dealer_pb2_grpc as pb_grpc
from sordino.shared.auth import TokenFile, bearer, identity_of, is_open
from sordino.shared.errors import AuthError, ProtocolError, SessionLostError, SordinoError, TransportError, printable
from sordino.shared.figures import NOBODY
from sordino.shared.transport import ERROR_KEY, OPENED_KEY, status_of
from sordino.shared.twoparty.tape import CLIENT, SERVER

log = logging.getLogger(__name__)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Dealer"].full_name
PART_BYTES: Final = 1 << 20
MAX_REQUEST_BYTES: Final = 1 << 20
_FIRST_S: Final = 10.0  # for the first message of a call
_FAREWELL_S: Final = 20.0  # for the status to go out, behind answers that are not read
_DRAINING: Final = "the dealer is shutting down"
# A health stream needs no token and has no end.
_REFUSED: Final = ("/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List")


@dataclass(slots=True)
class Caller:
    """Who calls: which party by its token, and that token's digest. ``context`` is gRPC's.

    Attributes:
        name: the party's and the token's, for figures and the log.
        stream: of the session, once it is open.
    """

    party: int
    holder: str
    name: str
    context: Any
    stream: Stream | None = None

    def must_be(self, party: int) -> None:
        """
        Raises:
            AuthError: it is the other.
        """
        if self.party != party:
            raise AuthError(f"this is for a {PARTIES[party]}, the token is a {PARTIES[self.party]}'s")


class Tokens:
    """Of clients and of servers, each in a folder of its own below the dealer's state."""

    def __init__(self, state: Path) -> None:
        self.folders = tuple(state / party for party in PARTIES)
        self.files = tuple(TokenFile(folder / "tokens.json") for folder in self.folders)

    def caller(self, context: Any) -> Caller:
        """
        Raises:
            AuthError: no token, or one that neither file has.
        """
        metadata = context.invocation_metadata()
        token, refusals = bearer(metadata), list[AuthError]()
        for party, file in enumerate(self.files):
            try:
                name = file.verify(token)
            except AuthError as error:
                refusals.append(error)
            except OSError:
                raise AuthError("the dealer's token file cannot be read: its operator must mend it") from None
            else:
                return Caller(party, identity_of(metadata), f"{PARTIES[party]}/{printable(name)}", context)
        # One file says the token is unknown; the other may know better, such as that it has expired.
        raise next((error for error in refusals if "not known" not in str(error)), refusals[0])

    def valid(self) -> tuple[set[str], set[str]]:
        """Digests, of clients and of servers.

        Raises:
            AuthError, OSError: a file is malformed, or cannot be read.
        """
        return self.files[CLIENT].valid(), self.files[SERVER].valid()


class DealerService(pb_grpc.DealerServicer):
    """To be called by way of :class:`CallInterceptor`, which passes a :class:`Caller` for gRPC's context."""

    def __init__(self, sessions: Sessions, metrics: Metrics) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._waiting: set[Stream] = set()
        self._draining = False

    def drain(self) -> None:
        """Ends streams that wait for a request; others end after their pass."""
        self._draining = True
        for stream in list(self._waiting):
            stream.end(TransportError(_DRAINING))

    async def Begin(self, request: pb.BeginRequest, caller: Caller) -> pb.BeginResponse:  # noqa: N802
        caller.must_be(CLIENT)
        session, key = self._sessions.begin(caller.holder, request.fingerprint, request.plan, caller.name)
        return pb.BeginResponse(session=session, key=key)

    async def Join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinResponse:  # noqa: N802
        caller.must_be(SERVER)
        key = self._sessions.join(caller.holder, request.session, request.fingerprint, request.plan, caller.name)
        return pb.JoinResponse(key=key)

    async def Deal(self, requests: AsyncIterator[pb.DealRequest], caller: Caller) -> AsyncIterator[pb.DealResponse]:  # noqa: N802
        first = await anext(requests, None)
        if first is None or first.WhichOneof("kind") != "open":
            raise ProtocolError("the first message of a stream names its session")
        session = self._sessions.find(caller.holder, caller.party, first.open)
        # Before anybody can end the stream: a status cannot go out while metadata may be on the way.
        await caller.context.send_initial_metadata(((OPENED_KEY, "1"),))
        caller.stream = stream = self._sessions.open(session, caller.party)
        try:
            while (request := await self._next(requests, stream)) is not None:
                if request.WhichOneof("kind") != "pass":
                    raise ProtocolError("after its first message a stream asks for passes alone")
                async for part in self._pass(session, caller.party, getattr(request, "pass")):
                    yield part
        finally:
            self._sessions.close(session, caller.party, stream)

    async def End(self, request: pb.EndRequest, caller: Caller) -> pb.EndResponse:  # noqa: N802
        caller.must_be(CLIENT)
        self._sessions.end(self._sessions.find(caller.holder, CLIENT, request.session))
        return pb.EndResponse()

    async def _next(self, requests: AsyncIterator[pb.DealRequest], stream: Stream) -> pb.DealRequest | None:
        if self._draining:
            raise TransportError(_DRAINING)
        self._waiting.add(stream)
        try:
            return await anext(requests, None)
        finally:
            self._waiting.discard(stream)

    async def _pass(self, session: Session, party: int, wanted: pb.Pass) -> AsyncIterator[pb.DealResponse]:
        async with aclosing(self._sessions.layers(session, party, wanted)) as layers:
            async for points, corrections in layers:
                for part in _parts(points):
                    yield pb.DealResponse(number=wanted.number, points=part)
                    self._metrics.sent(party, "points", len(part))
                for part in _parts(corrections):
                    yield pb.DealResponse(number=wanted.number, corrections=part)
                    self._metrics.sent(party, "corrections", len(part))
                del points, corrections  # of which memory counts until both parties have them, and the next may wait
        self._metrics.dealt(party, wanted.rows)  # before the party can see it
        yield pb.DealResponse(number=wanted.number, last=True)


def _parts(material: bytes) -> Iterator[bytes]:
    return (material[start : start + PART_BYTES] for start in range(0, len(material), PART_BYTES))


class Status(NamedTuple):
    """How a call ends; ``error`` is the name of the Sordino error that it stands for."""

    code: grpc.StatusCode
    text: str = ""
    error: str = ""


_GONE: Final = Status(grpc.StatusCode.CANCELLED)  # the party, or gRPC ends the call for want of time


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Nothing of a call is read before its token was looked at; then every message is awaited with an end."""

    def __init__(self, tokens: Tokens, metrics: Metrics) -> None:
        self._tokens = tokens
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        handler: Any = await continuation(handler_call_details)
        if handler is None or method in _REFUSED:
            self._metrics.unknown_call()
            return None
        if is_open(method):
            return handler  # type: ignore[no-any-return]

        async def serve(_: object, context: Any) -> None:
            try:
                caller: Caller | AuthError = self._tokens.caller(context)
            except AuthError as error:
                caller = error
            name = NOBODY if isinstance(caller, AuthError) else caller.name
            with self._metrics.call(method, name, context.peer()) as ended:
                try:
                    if isinstance(caller, AuthError):
                        raise caller
                    await _handle(handler, caller)
                    status = Status(grpc.StatusCode.OK)
                except (Exception, asyncio.CancelledError) as error:
                    status = _status(error, caller)
                if status.error:
                    self._metrics.refused(status.error)
                ended(status.code.name)  # before the party can see it
            if status is _GONE:
                raise asyncio.CancelledError
            if status.code is not grpc.StatusCode.OK:
                await _farewell(context, status)

        return grpc.stream_stream_rpc_method_handler(serve)


async def _handle(handler: Any, caller: Caller) -> None:
    """Runs a method of either kind."""
    context = caller.context

    async def requests() -> AsyncIterator[Any]:
        seconds: float | None = _FIRST_S
        while True:
            async with asyncio.timeout(seconds):
                raw = await context.read()
            if raw is grpc.aio.EOF:
                return
            seconds = None
            yield handler.request_deserializer(raw)

    if handler.stream_stream:
        async with aclosing(handler.stream_stream(requests(), caller)) as answers:
            async for answer in answers:
                await context.write(handler.response_serializer(answer))
        return
    request = await anext(requests(), None)
    if request is None:
        raise ProtocolError("the call ended without its message")
    await context.write(handler.response_serializer(await handler.unary_unary(request, caller)))


def _status(error: BaseException, caller: Caller | AuthError) -> Status:
    """A Sordino error's status; of anything else INTERNAL without its text (it could hold values)."""
    stream = caller.stream if isinstance(caller, Caller) else None
    if isinstance(error, asyncio.CancelledError) and stream and stream.ended:
        error = stream.ended  # the cancel came of that
    if isinstance(error, asyncio.CancelledError | grpc.aio.BaseError):
        return _GONE
    if isinstance(error, TimeoutError):
        return Status(grpc.StatusCode.DEADLINE_EXCEEDED, "no message came")
    if isinstance(error, DecodeError):
        error = ProtocolError("the bytes are not a message of this call")
    if isinstance(error, SordinoError):
        lost = isinstance(error, SessionLostError)
        return Status(grpc.StatusCode.NOT_FOUND if lost else status_of(error), str(error), type(error).__name__)
    log.error("internal error: %s", type(error).__name__, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, "internal error, see the dealer's log")


async def _farewell(context: Any, status: Status) -> None:
    """Ends the call with its status."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
    trailing = ((ERROR_KEY, status.error),) if status.error else ()
    try:
        async with asyncio.timeout(_FAREWELL_S):
            await context.abort(status.code, status.text, trailing)
    except grpc.aio.AbortError:  # gRPC's own, and it wants it back
        raise
    except (grpc.aio.BaseError, TimeoutError):
        raise asyncio.CancelledError from None
