"""Bytes that no gRPC client sends, of somebody without a token: the server goes on, and its log is silent on them."""

from __future__ import annotations

import socket
import ssl
import struct

import pytest
from stack import ServerProcess

Head = list[tuple[bytes, bytes]]

MANIFEST = b"/sordino.proto.v1.Sordino/GetManifest"
EMPTY = b"\0\0\0\0\0"  # a message
HEADERS, SETTINGS, DATA = 1, 4, 0
END_HEADERS, END_STREAM = 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113 §4.1."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(key: bytes, value: bytes) -> bytes:
    """A header field without indexing, with a new name, in plain octets (RFC 7541 §6.2.2)."""
    assert max(len(key), len(value)) < 127
    return b"\0" + bytes([len(key)]) + key + bytes([len(value)]) + value


def head(path: bytes = MANIFEST, *more: tuple[bytes, bytes]) -> Head:
    usual = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", path), (b":authority", b"x")]
    return [*usual, (b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]


def send(server: ServerProcess, fields: Head, message: bytes = EMPTY) -> bytes:
    """One call over a connection of its own; what comes back in a while, or until the server closes."""
    context = ssl.create_default_context(cafile=str(server.ca))
    context.set_alpn_protocols(["h2"])
    block = b"".join(literal(key, value) for key, value in fields)
    with (
        socket.create_connection(("127.0.0.1", server.port), 10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as line,
    ):
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
        line.sendall(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, message))
        line.settimeout(1.0)
        got = b""
        try:
            while data := line.recv(65536):
                got += data
        except TimeoutError:
            pass
        return got


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (b"/sordino.proto.v1.Sordino/\xff\xfe", ()),
        (b"/\xed\xa0\x80", ()),
        (b"", ()),
        (b"/\0", ()),
        (MANIFEST, ((b"x-odd", b"\xff\xfe"),)),
        (MANIFEST, ((b"\xff\xfe", b"x"),)),
        (MANIFEST, ((b"x-odd-bin", b"!!!"),)),
        (MANIFEST, ((b"grpc-timeout", b"zzz"),)),
        (MANIFEST, ((b"grpc-encoding", b"zzz"),)),
    ],
    ids=["path", "surrogate", "no path", "nul", "value", "key", "no base64", "timeout", "encoding"],
)
def test_a_head_that_is_no_text(server: ServerProcess, path: bytes, more: tuple[tuple[bytes, bytes], ...]) -> None:
    before = len(server.log())
    assert send(server, head(path, *more))
    assert server.serves()
    assert "Traceback" not in server.log()[before:]


def test_a_token_with_odd_bytes_stays_out_of_the_log(server: ServerProcess) -> None:
    before = len(server.log())
    send(server, head(MANIFEST, (b"authorization", b"Bearer \xff\xfe" + server.token.encode())))
    assert server.serves()
    assert server.token not in server.log()
    assert "Traceback" not in server.log()[before:]


@pytest.mark.parametrize("message", [b"\1\0\0\0\5abcde", b"\0\xff\xff\xff\xffabc", b"\0\0\0"])
def test_a_message_that_is_none(server: ServerProcess, message: bytes) -> None:
    more = (b"authorization", f"Bearer {server.token}".encode())
    before = len(server.log())
    send(server, head(MANIFEST, more), message)
    assert server.serves()
    assert "Traceback" not in server.log()[before:]
