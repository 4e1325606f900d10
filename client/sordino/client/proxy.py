"""A recording gRPC proxy: stands between client and server, passes bytes on as they are, and notes every message.

It shows what a server (and anybody behind its TLS) sees: method, direction, size, time and bytes of every message. The
audit reads its record; tests of lying servers alter messages through its ``tamper`` hook. It parses nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import grpc

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.transport import parse_target

Direction = Literal["up", "down"]
Tamper = Callable[[str, Direction, int, bytes], bytes | Sequence[bytes]]
"""``tamper(method, direction, index, raw)``: what goes on instead of ``raw`` (a list: none, one or several messages).

``index`` counts the messages of that method and direction since the proxy was started.
"""

Observe = Callable[["WireMessage", bytes], None]

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Sordino"]
METHODS: Final = tuple(method.name for method in _SERVICE.methods)
_STREAMS: Final = 64
_GRACE_S: Final = 1.0
_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A server that comes back is found at once: the wait that counts is the client's.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.so_reuseport", 0),
    # Clients ask once a minute whether it is there; gRPC would take that for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireMessage:
    """One message as its sender sent it.

    Attributes:
        time: seconds since the proxy was started.
        stream: number of the call, in order of arrival; index: see :data:`Tamper`.
        size: serialised bytes (without HTTP/2 framing and TLS).
        raw: the bytes, or None where the proxy keeps none.
    """

    time: float
    method: str
    direction: Direction
    stream: int
    index: int
    size: int
    raw: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCall:
    """One call: when it began, and a digest of the token that came with it (never the token), or None."""

    time: float
    method: str
    stream: int
    identity: str | None


class RecordingProxy:
    """Listens on a free port of this machine's loopback and passes all calls of the service on. A context manager.

    Args:
        target: the server, ``grpcs://host:port`` or ``grpc://host:port``.
        ca: PEM of the authority behind the server's certificate.
        credentials: of the proxy's own certificate; None listens without TLS.
        keep_bytes: methods whose messages are kept in memory with their bytes; of the others, only the size.
        observe: called with every message and its bytes, kept or not, in the thread of the call.
        tamper: see :data:`Tamper`. It runs in the thread of the call, so it may also stop the server or wait.

    Raises:
        TransportError: the target is malformed.
    """

    def __init__(
        self,
        target: str,
        *,
        ca: Path | None = None,
        credentials: grpc.ServerCredentials | None = None,
        keep_bytes: Collection[str] = METHODS,
        observe: Observe | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        self.tamper = tamper
        self._keep_bytes = frozenset(keep_bytes)
        self._observe = observe
        self._lock = threading.Lock()
        self._messages: list[WireMessage] = []
        self._calls: list[WireCall] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._started = time.monotonic()
        self._upstream = _connect(target, ca)
        self._pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="proxy")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        handlers = {method.name: self._handler(method.name) for method in _SERVICE.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))
        address, scheme = "127.0.0.1:0", "grpc"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port, scheme = self._server.add_secure_port(address, credentials), "grpcs"
        self.target = f"{scheme}://127.0.0.1:{self.port}"
        self._server.start()

    # -- the record --------------------------------------------------------------------------------------------------

    def messages(self, method: str | None = None, direction: Direction | None = None) -> list[WireMessage]:
        """What passed so far, in order, of one method and direction or of all."""
        with self._lock:
            return [
                message
                for message in self._messages
                if method in (None, message.method) and direction in (None, message.direction)
            ]

    def calls(self) -> list[WireCall]:
        """The calls so far, in order."""
        with self._lock:
            return list(self._calls)

    def mark(self) -> int:
        """How many messages passed so far: the place in :meth:`messages` at which what follows begins."""
        with self._lock:
            return len(self._messages)

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the running calls and frees the port."""
        self._server.stop(_GRACE_S).wait()
        self._upstream.close()
        self._pool.shutdown()

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- passing on --------------------------------------------------------------------------------------------------

    def _handler(self, method: str) -> grpc.RpcMethodHandler[bytes, bytes]:
        # Whether a side sends one message or many makes no difference to the bytes: all calls are passed as streams.
        forward: grpc.StreamStreamMultiCallable[bytes, bytes] = self._upstream.stream_stream(
            f"/{_SERVICE.full_name}/{method}"
        )

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            stream = self._begin(method, context)
            call = forward(self._pass(method, "up", stream, _until_gone(requests)), metadata=_passed_on(context))

            def hang_up() -> None:
                call.cancel()

            context.add_callback(hang_up)
            try:
                yield from self._pass(method, "down", stream, call)
            except grpc.RpcError as error:
                context.set_trailing_metadata(tuple(call.trailing_metadata() or ()))
                context.abort(call.code(), call.details() or str(error))

        return grpc.stream_stream_rpc_method_handler(handle)

    def _begin(self, method: str, context: grpc.ServicerContext) -> int:
        token = dict(context.invocation_metadata()).get("authorization")
        identity = hashlib.sha256(str(token).encode()).hexdigest()[:16] if token else None
        with self._lock:
            stream = len(self._calls)
            now = time.monotonic() - self._started
            self._calls.append(WireCall(time=now, method=method, stream=stream, identity=identity))
        return stream

    def _pass(self, method: str, direction: Direction, stream: int, messages: Iterator[bytes]) -> Iterator[bytes]:
        for raw in messages:
            with self._lock:
                index = self._counts[method, direction]
                self._counts[method, direction] += 1
                message = WireMessage(
                    time=time.monotonic() - self._started,
                    method=method,
                    direction=direction,
                    stream=stream,
                    index=index,
                    size=len(raw),
                    raw=raw if method in self._keep_bytes else None,
                )
                self._messages.append(message)
            if self._observe is not None:
                self._observe(message, raw)
            if self.tamper is None:
                yield raw
                continue
            changed = self.tamper(method, direction, index, raw)
            if isinstance(changed, bytes):
                yield changed
            else:
                yield from changed


def _until_gone(requests: Iterator[bytes]) -> Iterator[bytes]:
    """The client's messages until it ends the stream or goes away (the call's own callback cancels the other side)."""
    try:
        yield from requests
    except grpc.RpcError:
        return


def _passed_on(context: grpc.ServicerContext) -> tuple[tuple[str, Any], ...]:
    """The metadata that the application set; what gRPC sets itself, it sets again."""
    metadata = context.invocation_metadata()
    return tuple((key, value) for key, value in metadata if not key.startswith(("grpc-", "user-agent")))


def _connect(target: str, ca: Path | None) -> grpc.Channel:
    scheme, host, port = parse_target(target)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if scheme == "grpc":
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes() if ca else None), options=_OPTIONS)
