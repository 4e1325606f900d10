"""A client of ``sordino bench serve``: sends recorded requests again and again, each as soon as the last is answered.

It is a process of its own (``python -m sordino.client.replay``) that costs as little as can be, so that a benchmark
measures the server: one TLS socket and HTTP/2 frames that were made before, in one thread. gRPC's own client takes
three to four times the processor time for a message. What is spoken is gRPC over HTTP/2 all the same, with TLS and a
token (RFC 9113; RFC 7541, section 6.2.2; PROTOCOL-HTTP2 of gRPC).

It is told what to do by lines on standard input, and answers by lines on standard output:

1. A JSON object (:class:`Setup`); the answer ``open``, when each server has a stream.
2. ``SERVER WARM RAMP TOKENS FIRST``; after ``WARM`` tokens, whose answers are compared with the recorded ones, comes
   ``warm``.
3. An empty line lets it begin, at group ``FIRST``; after ``RAMP`` tokens comes ``ramped``, and the client goes on.
4. An empty line starts the count; after ``TOKENS`` tokens comes ``done``, and the client goes on.
5. An empty line ends it with the token that is under way; a JSON object (:class:`Run`) tells of all messages. Then 2.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import sys
import time
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, TransportError

METHOD: Final = f"/{pb.DESCRIPTOR.services_by_name['Sordino'].full_name}/Evaluate"
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE: Final = 4  # a setting
_FIRST_WINDOW: Final = (1 << 16) - 1
_LARGEST_WINDOW: Final = (1 << 31) - 1
_RENEWED_AT: Final = 1 << 30
_FRAME_BYTES: Final = 1 << 14  # that every peer takes
_STREAM: Final = 1
_SILENCE_S: Final = 60.0
_READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Setup:
    """What a client is told first.

    Attributes:
        servers: host, port, file of the CA, and token of each.
        opening: the first message of a stream, in base64, as all messages here.
        requests, answers: of a token: a message for each group, and the ``data`` that answers it.
    """

    servers: list[tuple[str, int, str, str]]
    opening: str
    requests: list[str]
    answers: list[str]


@dataclass(frozen=True, slots=True)
class Run:
    """Messages that were counted: when each answer was there (``time.monotonic``), and its ``compute_us``."""

    ended: list[float] = field(default_factory=list)
    compute_us: list[int] = field(default_factory=list)


class Stream:
    """One evaluation stream over a connection of its own.

    Raises:
        OSError: no connection, or silence for a minute.
        TransportError: the server ended the connection or the call.
    """

    def __init__(self, host: str, port: int, ca: Path, token: str, opening: bytes) -> None:
        context = ssl.create_default_context(cafile=ca)
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection((host, port), _SILENCE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(plain, server_hostname=host)
        self._unread = bytearray()  # bytes of frames
        self._messages = bytearray()  # what frames of data held
        self._mine, self._whole, self._initial = _FIRST_WINDOW, _FIRST_WINDOW, _FIRST_WINDOW  # bytes that may be sent
        self._received = 0  # since the windows for what comes were renewed
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        more = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        self._socket.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_WINDOW, 0, 0, more)
            + _frame(_HEADERS, _END_HEADERS, _STREAM, _headers(token))
        )
        self.exchange(framed(opening))

    def exchange(self, frames: Sequence[bytes]) -> pb.EvaluateResponse:
        """Sends a message (:func:`framed`) and waits for the next one that comes."""
        for frame in frames:
            while min(self._mine, self._whole) < len(frame):
                self._read_frame()
            self._mine -= len(frame)  # a few bytes too many: the frame's head
            self._whole -= len(frame)
            self._socket.sendall(frame)
        while len(self._messages) < 5 or len(self._messages) < 5 + int.from_bytes(self._messages[1:5], "big"):
            self._read_frame()
        end = 5 + int.from_bytes(self._messages[1:5], "big")
        with memoryview(self._messages) as view:
            answer = pb.EvaluateResponse.FromString(bytes(view[5:end]))
        del self._messages[:end]
        return answer

    def fileno(self) -> int:
        return self._socket.fileno()

    def tend(self) -> None:
        """Answers what came while nothing was asked, such as a ping: without, the server takes the client for dead."""
        self._read_frame()
        while self._unread or self._socket.pending():  # half a frame too: its rest is on the way
            self._read_frame()

    def close(self) -> None:
        self._socket.close()

    def _read_frame(self) -> None:
        while len(self._unread) < 9 or len(self._unread) < 9 + int.from_bytes(self._unread[:3], "big"):
            got = self._socket.recv(_READ_BYTES)
            if not got:
                raise TransportError("the server closed the connection")
            self._unread += got
        length, kind, flags = int.from_bytes(self._unread[:3], "big"), self._unread[3], self._unread[4]
        if kind == _DATA:
            with memoryview(self._unread) as view:
                self._messages += view[9 : 9 + length]
            self._count(length)
        else:
            self._control(kind, flags, int.from_bytes(self._unread[5:9], "big"), bytes(self._unread[9 : 9 + length]))
        del self._unread[: 9 + length]

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW:
            more = int.from_bytes(payload, "big")
            if stream:
                self._mine += more
            else:
                self._whole += more
        elif kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW_SIZE:
                    self._mine += value - self._initial
                    self._initial = value
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind in (_RESET, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            raise TransportError("the server ended the call")

    def _count(self, length: int) -> None:
        """The server may send on for ever."""
        self._received += length
        if self._received >= _RENEWED_AT:
            more = struct.pack(">I", self._received)
            self._socket.sendall(_frame(_WINDOW, 0, 0, more) + _frame(_WINDOW, 0, _STREAM, more))
            self._received = 0


def framed(message: bytes) -> list[bytes]:
    """A message of a call, as the frames that carry it."""
    data = struct.pack(">BI", 0, len(message)) + message
    starts = range(0, len(data), _FRAME_BYTES)
    return [_frame(_DATA, 0, _STREAM, data[start : start + _FRAME_BYTES]) for start in starts]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(token: str) -> bytes:
    """Literal fields that no table holds, without compression."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": METHOD,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": f"Bearer {token}",
    }
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def _text(value: str) -> bytes:
    raw = value.encode("ascii")
    return bytes([len(raw)]) + raw  # from 127 bytes on a length would take more; none of these has so many


class _Client:
    def __init__(self, setup: Setup) -> None:
        opening = b64decode(setup.opening)
        self._streams = [Stream(host, port, Path(ca), token, opening) for host, port, ca, token in setup.servers]
        self._requests = [framed(b64decode(request)) for request in setup.requests]
        self._answers = [b64decode(answer) for answer in setup.answers]

    def line(self) -> str:
        """The next line of standard input, which holds one at a time; empty at the end."""
        while not self._tend(None):
            pass
        return sys.stdin.readline()

    def _tend(self, timeout_s: float | None, busy: int | None = None) -> bool:
        """Answers what came on all streams but one; whether there is a line."""
        streams = [stream for number, stream in enumerate(self._streams) if number != busy]
        ready = select.select([sys.stdin, *streams], [], [], timeout_s)[0]
        for stream in streams:
            if stream in ready:
                stream.tend()
        return sys.stdin in ready

    def warm(self, server: int, tokens: int) -> None:
        """
        Raises:
            IntegrityError: another answer than the recorded one.
        """
        stream = self._streams[server]
        for _ in range(tokens):
            for request, wanted in zip(self._requests, self._answers, strict=True):
                if stream.exchange(request).data != wanted:
                    raise IntegrityError("the server gave another answer than before")

    def run(self, server: int, ramp: int, tokens: int, first: int) -> Run:
        """Tells of ``ramp`` tokens, of ``tokens`` more from the next line on, and goes on until another line comes."""
        exchange, run = self._streams[server].exchange, Run()
        ended, compute_us, now = run.ended.append, run.compute_us.append, time.monotonic
        requests, done, counted = self._requests[first:] + self._requests[:first], 0, -1
        while True:
            for request in requests:
                answer = exchange(request)
                ended(now())
                compute_us(answer.compute_us)
            done += 1
            if done == ramp:
                _say("ramped")
            if counted >= 0:
                counted += 1
            if counted == tokens:
                _say("done")
            if self._tend(0, server) and done >= ramp and not 0 <= counted < tokens:
                sys.stdin.readline()
                if counted >= 0:
                    return run
                counted = 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _main() -> None:
    client = _Client(Setup(**json.loads(sys.stdin.readline())))
    _say("open")
    while line := client.line():
        server, warm, ramp, tokens, first = map(int, line.split())
        client.warm(server, warm)
        _say("warm")
        if not client.line():
            return
        _say(json.dumps(asdict(client.run(server, ramp, tokens, first))))


if __name__ == "__main__":
    _main()
