"""What every call passes: it takes a place, waits for its client get an end, bytes become messages, and errors become
statuses."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from sordino.server.auth import is_open
from sordino.server.places import Places, end
from sordino.shared.errors import BundleError, ProtocolError, SordinoError, TransportError
from sordino.shared.transport import ERROR_KEY, status_of

log = logging.getLogger(__name__)
T = TypeVar("T")
Context = grpc.ServicerContext
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# A health stream needs no token and has no end; clients that miss it take the server for healthy, or ask with Check.
_REFUSED: Final = "/grpc.health.v1.Health/Watch"
_TOKENLESS_S: Final = 2.0
_DRAINING: Final = "the server is shutting down: try another replica, or again later"
_SILENT: Final = "the client sent no message for too long: its place went to others, open the call again"
_UNREAD: Final = "the client left an answer unread for too long: its place went to others, open the call again"


class Waits:
    """Calls that wait for their client and until when. The server ends the overdue ones, and when it drains all that
    wait for a message; those with a request under way answer it first.

    The wait itself is gRPC's, in the call's thread; here it costs an entry of a dict, no thread and no timer.
    """

    def __init__(self) -> None:
        self._messages: dict[Context, float] = {}
        self._readers: dict[Context, float] = {}
        self.draining = False

    def message(self, messages: Iterator[T], context: Context, seconds: float) -> T | None:
        """The next message, or None after the last.

        Raises:
            TransportError: the server drains.
        """
        # Before the look at `draining`: drain() sets that first and reads this after.
        self._messages[context] = time.monotonic() + seconds
        try:
            self.refuse_when_draining()
            return next(messages, None)
        finally:
            del self._messages[context]

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise TransportError(_DRAINING)

    def reader(self, answers: Iterator[T], context: Context, seconds: float) -> Iterator[T]:
        """``answers``, each of them given ``seconds`` to go out."""
        for answer in answers:
            self._readers[context] = time.monotonic() + seconds
            try:
                yield answer
            finally:
                del self._readers[context]

    def end_overdue(self) -> None:
        """To be called every now and then."""
        now = time.monotonic()
        for waiting, text in ((self._messages, _SILENT), (self._readers, _UNREAD)):
            for context in list(waiting):
                if waiting.get(context, math.inf) < now:
                    end(context, grpc.StatusCode.DEADLINE_EXCEEDED, text)

    def drain(self) -> None:
        self.draining = True
        for context in list(self._messages):
            end(context, grpc.StatusCode.UNAVAILABLE, _DRAINING)


class DecodingInterceptor(grpc.ServerInterceptor):
    """Wraps the calls of every service that may enter; the innermost interceptor.

    To gRPC each call here has a stream of requests: the one request of a unary call it would await without end, in a
    thread and before any code of ours, and bytes that are no message it would answer with INTERNAL.

    Args:
        service: whose ``Evaluate`` may rest between messages (a user thinks), and whose ``Provision`` has work to do
            for its first message as for any other.
        first_s: for the first message of all other calls, which is small and at hand.
        idle_s: for later messages, and for an answer to go out.
        kv_idle_s: between messages of ``Attend``, whose pages take memory.
    """

    def __init__(
        self,
        waits: Waits,
        places: Places,
        service: str,
        *,
        first_s: float,
        idle_s: float,
        kv_idle_s: float = math.inf,
    ) -> None:
        self._waits = waits
        self._places = places
        self._idle_s = idle_s
        self._usual = (first_s, idle_s)
        self._seconds = {
            f"/{service}/Provision": (idle_s, idle_s),
            f"/{service}/Evaluate": (first_s, math.inf),
            f"/{service}/Attend": (first_s, kv_idle_s),
        }

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        handler: Any = continuation(handler_call_details)
        if handler is None or method == _REFUSED:
            return None
        first_s, later_s = self._seconds.get(method, self._usual)
        if is_open(method):  # a few bytes, and few places
            first_s = min(first_s, _TOKENLESS_S)

        def messages(raw: Iterator[bytes], context: Context) -> Iterator[Any]:
            seconds = first_s
            while (message := self._waits.message(raw, context, seconds)) is not None:
                yield handler.request_deserializer(message)
                seconds = later_s

        def argument(raw: Iterator[bytes], context: Context) -> Any:
            decoded = messages(raw, context)
            if handler.request_streaming:
                return decoded
            for message in decoded:
                return message
            raise ProtocolError("the call ended without its message")

        def unary(raw: Iterator[bytes], context: Context) -> Any:
            with _edge(context), self._place(method, context):
                return (handler.stream_unary or handler.unary_unary)(argument(raw, context), context)

        def stream(raw: Iterator[bytes], context: Context) -> Iterator[Any]:
            with _edge(context), self._place(method, context):
                answers = (handler.stream_stream or handler.unary_stream)(argument(raw, context), context)
                yield from self._waits.reader(answers, context, self._idle_s)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    def _place(self, method: str, context: Context) -> AbstractContextManager[None]:
        self._waits.refuse_when_draining()  # rather than for want of a place that is about to be free
        return self._places.hold(method, context)


class _edge:  # noqa: N801 - used like a function
    """Turns a Sordino error into its status; anything else into INTERNAL without its text (it could hold values)."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DecodeError):
            error = ProtocolError("the bytes are not a message of this call: cut short, or damaged")
        if isinstance(error, SordinoError):
            self._context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
            if isinstance(error, BundleError):
                log.error("bundle: %s", error)
            # A call that somebody has ended meanwhile: the error came of that.
            ended: grpc.StatusCode | None = self._context.code()  # type: ignore[attr-defined]
            if ended is None and not self._context.is_active():
                ended = grpc.StatusCode.CANCELLED
            self._context.abort(ended or status_of(error), str(error))
        elif isinstance(error, Exception) and self._context.is_active():
            log.error("internal error: %s", type(error).__name__, exc_info=True)
            self._context.abort(grpc.StatusCode.INTERNAL, "internal error, see the server's log")
