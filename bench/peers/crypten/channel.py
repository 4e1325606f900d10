"""Messages between two processes on one gRPC stream over TLS, and their count.

Whoever serves is a :class:`Listener`, the other side calls :func:`connected`; both then hold a :class:`Link`, on which
either may send at any time. Messages are plain bytes under a generic handler: no stub, no schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import grpc

from sordino.shared.errors import TransportError
from sordino.shared.tls import TlsFiles
from sordino.shared.transport import channel_options, error_of

# CrypTen opens a whole matrix in one message: 3072 x 576 words are 14 MB, so an 8B model's would still pass.
_OPTIONS: Final = channel_options(1 << 30)
_SERVICE: Final = "sordino.bench.Peer"
_PATIENCE_S: Final = 120.0
Stream = Iterator[bytes]


@dataclass(slots=True)
class Count:
    """What one end of a stream saw: payloads in bytes, without HTTP/2 and TLS; up is what it sent, down what came.

    A round is a wait for an answer: the first message taken after one was sent. Two ends that exchange messages count
    the same rounds; a message that nobody waits for, or several sent together, add none.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def __sub__(self, other: Count) -> Count:
        return Count(self.rounds - other.rounds, self.bytes_up - other.bytes_up, self.bytes_down - other.bytes_down)

    def mirrored(self) -> Count:
        """What the other end of the stream counts."""
        return Count(self.rounds, self.bytes_down, self.bytes_up)

    def copy(self) -> Count:
        return Count(self.rounds, self.bytes_up, self.bytes_down)


class Link:
    """One end of a stream. Sending never blocks, so that both ends may send before they receive."""

    def __init__(self) -> None:
        self.count = Count()
        self._incoming: Stream = iter(())
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._asked = False

    def attach(self, incoming: Stream) -> None:
        self._incoming = incoming

    def outgoing(self) -> Stream:
        """What gRPC takes from, in a thread of its own, until :meth:`close`."""
        while (message := self._outgoing.get()) is not None:
            yield message

    def send(self, message: bytes) -> None:
        self.count.bytes_up += len(message)
        self._asked = True
        self._outgoing.put(message)

    def receive(self) -> bytes:
        """The next message, waiting for it.

        Raises:
            TransportError: the other end has closed the stream, or is gone.
        """
        try:
            message = next(self._incoming)
        except StopIteration:
            raise TransportError("the other party closed the stream") from None
        except grpc.RpcError as error:
            raise (error_of(error) if isinstance(error, grpc.Call) else TransportError("the stream broke")) from error
        self.count.bytes_down += len(message)
        self.count.rounds += self._asked
        self._asked = False
        return message

    def close(self) -> None:
        """Nothing more is sent; what was sent still goes out."""
        self._outgoing.put(None)

    def drain(self) -> None:
        """Waits until the other end has closed as well, so that all that was sent has arrived."""
        for _ in self._incoming:
            pass


class Listener:
    """The serving end, on a port of localhost that the system chooses; a context manager."""

    def __init__(self, files: TlsFiles) -> None:
        self._links: SimpleQueue[Link] = SimpleQueue()
        self._open: list[Link] = []
        self._server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
        handler: Any = grpc.stream_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Stream": handler}),))
        self.port = self._server.add_secure_port("localhost:0", grpc.ssl_server_credentials([files.read()]))

    def accept(self) -> Link:
        """The next stream that is opened.

        Raises:
            TransportError: none was, for two minutes.
        """
        try:
            return self._links.get(timeout=_PATIENCE_S)
        except Empty:
            raise TransportError("no party connected: see what the other processes said") from None

    def __enter__(self) -> Listener:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._open:
            link.close()
        self._server.stop(grace=10).wait()

    def _stream(self, requests: Stream, _: grpc.ServicerContext) -> Stream:
        link = Link()
        link.attach(requests)
        self._open.append(link)
        self._links.put(link)
        yield from link.outgoing()


@contextmanager
def connected(port: int, ca: Path) -> Iterator[Link]:
    """A stream to the :class:`Listener` at ``port`` of localhost, whose certificate ``ca`` has signed."""
    credentials = grpc.ssl_channel_credentials(ca.read_bytes())
    with grpc.secure_channel(f"localhost:{port}", credentials, options=_OPTIONS) as channel:
        link = Link()
        call: Any = channel.stream_stream(f"/{_SERVICE}/Stream")
        link.attach(call(link.outgoing(), wait_for_ready=True))
        try:
            yield link
        finally:
            link.close()
        link.drain()
