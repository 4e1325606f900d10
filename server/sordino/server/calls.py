"""What every call passes: it takes a place, waits for its client get an end, bytes become messages, errors become
statuses, and all of it is counted."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sordino.server.metrics import Bytes, Metrics
from sordino.server.places import Places
from sordino.shared.auth import ANONYMOUS, TokenFile, bearer, identity_of, is_open
from sordino.shared.errors import AuthError, BundleError, ProtocolError, SordinoError, TransportError, printable
from sordino.shared.figures import NOBODY
from sordino.shared.transport import ERROR_KEY, status_of

log = logging.getLogger(__name__)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# A health stream needs no token and has no end; clients that miss it take the server for healthy, or ask with Check.
_REFUSED: Final = ("/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List")
_TOKENLESS_S: Final = 2.0
_FAREWELL_S: Final = 20.0  # for the status to go out, behind answers that are not read
_DRAINING: Final = "the server is shutting down: try another replica, or again later"
_SILENT: Final = "the client sent no message for too long: its place went to others, open the call again"
_UNREAD: Final = "the client left an answer unread for too long: its place went to others, open the call again"


class Status(NamedTuple):
    """How a call ends; ``error`` is the name of the Sordino error that it stands for."""

    code: grpc.StatusCode
    text: str = ""
    error: str = ""


_GONE: Final = Status(grpc.StatusCode.CANCELLED)  # the client, or gRPC ends the call for want of time


class Call:
    """One open call: its messages, its answers, and an end from outside. To be made in the task that serves it.

    Args:
        seconds: for the first message, and for later ones; for an answer to go out.

    Attributes:
        method: full name. holder: what limits are counted by. peer: the client's address.
        ended: the status that somebody has ended it with.
    """

    def __init__(
        self,
        method: str,
        context: Any,
        waits: Waits,
        handler: Any,
        seconds: tuple[float, float, float],
        count: Bytes,
    ) -> None:
        self.method = method
        self.peer: str = context.peer()
        self.holder = identity_of(context.invocation_metadata())
        self.ended: Status | None = None
        self._task = asyncio.current_task()
        self._closed = False
        self._context = context
        self._waits = waits
        self._decode, self._encode = handler.request_deserializer, handler.response_serializer
        self._seconds, self._later_s, self._answer_s = seconds
        self._count = count

    def end(self, code: grpc.StatusCode, text: str) -> None:
        """Ends it, wherever it is, as soon as its task runs again."""
        if self.ended is None and not self._closed and self._task is not None:
            self.ended = Status(code, text)
            self._task.cancel()

    def close(self) -> None:
        """No end from outside any more: its status is known."""
        self._closed = True

    async def abort(self, code: grpc.StatusCode, text: str = "") -> None:
        """For services of others, which call it so."""
        self.ended = Status(code, text)
        raise _AbortedError

    async def read(self) -> Any:
        """The next message; None after the last.

        Raises:
            DecodeError: bytes that are no message.
            TransportError: the server drains.
        """
        # Before the look at `draining`: drain() sets that first and reads this after.
        self._waits.messages[self] = time.monotonic() + self._seconds
        try:
            self._waits.refuse_when_draining()
            raw = await self._context.read()
        finally:
            del self._waits.messages[self]
        if raw is grpc.aio.EOF:
            return None
        self._seconds = self._later_s
        self._count.received += len(raw)
        return self._decode(raw)

    async def write(self, answer: Any) -> None:
        """Returns when the answer has gone out, as far as the client's window allows."""
        data = self._encode(answer)
        self._waits.readers[self] = time.monotonic() + self._answer_s
        try:
            await self._context.write(data)
        finally:
            del self._waits.readers[self]
        self._count.sent += len(data)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is None:
            raise StopAsyncIteration
        return message


class _AbortedError(Exception):
    """A service of others has ended its call."""


class Waits:
    """Calls that wait for their client and until when. The server ends the overdue ones, and when it drains all that
    wait for a message; those with a request under way answer it first.

    The wait itself is gRPC's; here it costs an entry of a dict, no timer.
    """

    def __init__(self) -> None:
        self.messages: dict[Call, float] = {}
        self.readers: dict[Call, float] = {}
        self.draining = False

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise TransportError(_DRAINING)

    def end_overdue(self) -> None:
        """To be called every now and then."""
        now = time.monotonic()
        for waiting, text in ((self.messages, _SILENT), (self.readers, _UNREAD)):
            for call in [call for call, until in waiting.items() if until < now]:
                call.end(grpc.StatusCode.DEADLINE_EXCEEDED, text)

    def drain(self) -> None:
        self.draining = True
        for call in list(self.messages):
            call.end(grpc.StatusCode.UNAVAILABLE, _DRAINING)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the calls of every service.

    To gRPC each call here has a stream of bytes: the one request of a unary call it would await without end, before any
    code of ours, and bytes that are no message it would answer with INTERNAL. A call that may not enter ends before
    anything of it is read.

    Args:
        service: whose ``Evaluate`` may rest between messages (a user thinks), and whose ``Provision`` has work to do
            for its first message as for any other. Its methods are given the call for messages and context; those of
            other services too, as far as they use it.
        tokens: None on a server without authentication.
        first_s: for the first message of all other calls, which is small and at hand.
        idle_s: for later messages, and for an answer to go out.
        kv_idle_s: between messages of ``Attend`` and of ``Compute``, whose caches take memory.
    """

    def __init__(
        self,
        waits: Waits,
        places: Places,
        metrics: Metrics,
        tokens: TokenFile | None,
        service: str,
        *,
        first_s: float,
        idle_s: float,
        kv_idle_s: float = math.inf,
    ) -> None:
        self._waits = waits
        self._places = places
        self._metrics = metrics
        self._tokens = tokens
        self._usual = (first_s, idle_s, idle_s)
        self._seconds = {
            f"/{service}/Provision": (idle_s, idle_s, idle_s),
            f"/{service}/Evaluate": (first_s, math.inf, idle_s),
            f"/{service}/Attend": (first_s, kv_idle_s, idle_s),
            f"/{service}/Compute": (first_s, kv_idle_s, idle_s),
        }

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
        first_s, later_s, answer_s = self._seconds.get(method, self._usual)
        if is_open(method):  # a few bytes, and few places
            first_s = min(first_s, _TOKENLESS_S)

        async def serve(_: object, context: Any) -> None:
            count = self._metrics.bytes_of(method)
            call = Call(method, context, self._waits, handler, (first_s, later_s, answer_s), count)
            client, refusal = self._admit(method, context)
            with self._metrics.call(method, client, call.peer) as ended:
                try:
                    if refusal:
                        raise AuthError(refusal)
                    self._waits.refuse_when_draining()  # rather than for want of a place that is about to be free
                    with self._places.hold(call):
                        await _handle(handler, call)
                    status = Status(grpc.StatusCode.OK)
                except (Exception, asyncio.CancelledError) as error:
                    status = _status(error, call)
                call.close()
                ended(status.code.name)  # before the client can see it
            if status is _GONE:
                raise asyncio.CancelledError
            if status.code is not grpc.StatusCode.OK:
                await _farewell(context, status)

        return grpc.stream_stream_rpc_method_handler(serve)

    def _admit(self, method: str, context: Any) -> tuple[str, str]:
        """The name of the call's token, and why it may not enter."""
        if is_open(method):
            return NOBODY, ""
        if self._tokens is None:
            return ANONYMOUS, ""
        try:
            return printable(self._tokens.verify(bearer(context.invocation_metadata()))), ""
        except AuthError as error:
            return NOBODY, str(error)
        except OSError:
            return NOBODY, "the server's token file cannot be read: its operator must mend it"


async def _handle(handler: Any, call: Call) -> None:
    """Runs a method of any kind."""
    argument: Any = call
    if not handler.request_streaming:
        argument = await call.read()
        if argument is None:
            raise ProtocolError("the call ended without its message")
    method = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
    answers: AsyncIterable[Any] | Awaitable[Any] = method(argument, call)
    if isinstance(answers, AsyncIterable):
        async for answer in answers:
            await call.write(answer)
    elif (answer := await answers) is not None:
        await call.write(answer)


def _status(error: BaseException, call: Call) -> Status:
    """A Sordino error's status; of anything else INTERNAL without its text (it could hold values)."""
    if call.ended:  # the error came of that
        return call.ended
    if isinstance(error, asyncio.CancelledError | grpc.aio.BaseError):
        return _GONE
    if isinstance(error, DecodeError):
        error = ProtocolError("the bytes are not a message of this call: cut short, or damaged")
    if isinstance(error, SordinoError):
        if isinstance(error, BundleError):
            log.error("bundle: %s", error)
        return Status(status_of(error), str(error), type(error).__name__)
    log.error("internal error: %s", type(error).__name__, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, "internal error, see the server's log")


async def _farewell(context: Any, status: Status) -> None:
    task = asyncio.current_task()
    if task is not None:
        while task.cancelling():
            task.uncancel()
    trailing = ((ERROR_KEY, status.error),) if status.error else ()
    try:
        async with asyncio.timeout(_FAREWELL_S):
            await context.abort(status.code, status.text, trailing)
    except grpc.aio.AbortError:  # gRPC's own, and it wants it back
        raise
    except (grpc.aio.BaseError, TimeoutError):
        raise asyncio.CancelledError from None  # the client is gone, or reads nothing: gRPC drops the call
