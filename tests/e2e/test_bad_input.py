"""Bad input gets a clear error, of the right kind, and the server goes on serving others (§4.5.3)."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from stack import ServerProcess, check_message, connect_to, masks_message, opening, rows_message, send_raw

from sordino.client.bundle import fetch_bundle
from sordino.client.proxy import RecordingProxy
from sordino.client.transport import Connection
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.store import MatrixStore
from sordino.shared.auth import TokenFile
from sordino.shared.errors import (
    AuthError,
    BundleError,
    FingerprintError,
    HandshakeError,
    PoolError,
    ProtocolError,
    TransportError,
)
from sordino.shared.manifest import ModelManifest
from sordino.shared.ring import P
from sordino.shared.tls import make_certificates

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
GIB = 1 << 30
Build = Callable[[ModelManifest], list[bytes]]


def _element(value: int, width: int) -> bytes:
    row = np.zeros(width, "<u4")
    row[width // 2] = value
    return row.tobytes()


def _half(message: bytes) -> bytes:
    return message[: len(message) // 2]


BAD_MESSAGES: dict[str, tuple[str, grpc.StatusCode, str, Build]] = {
    # Evaluation.
    "empty first": ("Evaluate", INVALID, "must set `open`", lambda m: [b""]),
    "open missing": ("Evaluate", INVALID, "must set `open`", lambda m: [rows_message(m)]),
    "open twice": ("Evaluate", INVALID, "first message", lambda m: [opening(m), opening(m)]),
    "protocol unspecified": ("Evaluate", INVALID, "no protocol", lambda m: [opening(m, 0)]),
    "protocol unknown": ("Evaluate", INVALID, "no protocol", lambda m: [opening(m, 77)]),
    "clear": ("Evaluate", INVALID, "masked rows only", lambda m: [opening(m, pb.PROTOCOL_CLEAR)]),
    "fingerprint": (
        "Evaluate",
        grpc.StatusCode.FAILED_PRECONDITION,
        "another split",
        lambda m: [opening(m, fingerprint="0" * 64)],
    ),
    "first cut in half": ("Evaluate", INVALID, "cut short", lambda m: [_half(opening(m))]),
    "cut in half": ("Evaluate", INVALID, "cut short", lambda m: [opening(m), _half(rows_message(m))]),
    "garbage": ("Evaluate", INVALID, "cut short", lambda m: [opening(m), b"\xff" * 100]),
    "empty": ("Evaluate", INVALID, "0 bytes", lambda m: [opening(m), b""]),
    "no rows": ("Evaluate", INVALID, "0 rows", lambda m: [opening(m), rows_message(m, rows=0)]),
    "row too short": ("Evaluate", INVALID, "expected", lambda m: [opening(m), rows_message(m, data=bytes(252))]),
    "half an element": ("Evaluate", INVALID, "expected", lambda m: [opening(m), rows_message(m, data=bytes(255))]),
    "width of another group": ("Evaluate", INVALID, "expected", lambda m: [opening(m), rows_message(m, 3, group=0)]),
    "huge rows": (
        "Evaluate",
        INVALID,
        "expected",
        lambda m: [opening(m), pb.EvaluateRequest(id=1, rows=2**32 - 1, data=bytes(256)).SerializeToString()],
    ),
    "element is p": ("Evaluate", INVALID, "below p", lambda m: [opening(m), rows_message(m, data=_element(P, 64))]),
    "element over p": (
        "Evaluate",
        INVALID,
        "below p",
        lambda m: [opening(m), rows_message(m, data=_element(2**32 - 1, 64))],
    ),
    "no such group": ("Evaluate", NOT_FOUND, "does not exist", lambda m: [opening(m), rows_message(m, group=8)]),
    "group 2^32-1": ("Evaluate", NOT_FOUND, "does not exist", lambda m: [opening(m), rows_message(m, group=2**32 - 1)]),
    # Provisioning.
    "neither kind": ("Provision", INVALID, "neither", lambda m: [b""]),
    "provision cut": ("Provision", INVALID, "cut short", lambda m: [_half(masks_message(m))]),
    "provision group": (
        "Provision",
        NOT_FOUND,
        "does not exist",
        lambda m: [pb.ProvisionRequest(group=8, masks=pb.MaskBlock(points=1)).SerializeToString()],
    ),
    "short seed": ("Provision", INVALID, "a seed has", lambda m: [masks_message(m, seed=bytes(31))]),
    "no residues": ("Provision", INVALID, "values of 27 bits", lambda m: [masks_message(m, c0=b"")]),
    "one byte more": ("Provision", INVALID, "values of 27 bits", lambda m: [masks_message(m, c0=bytes(27649))]),
    "residue over its prime": ("Provision", INVALID, "its prime", lambda m: [masks_message(m, c0=b"\xff" * 27648)]),
    "no points": ("Provision", INVALID, "points", lambda m: [masks_message(m, masks=pb.MaskBlock(points=0))]),
    "points over N": ("Provision", INVALID, "points", lambda m: [masks_message(m, masks=pb.MaskBlock(points=4096))]),
    "block over N": (
        "Provision",
        INVALID,
        "index below",
        lambda m: [masks_message(m, masks=pb.MaskBlock(points=64, block=2**32 - 1))],
    ),
    "three rows in a block": (
        "Provision",
        INVALID,
        "power of two",
        lambda m: [check_message(m, block=pb.BlockProduct(rows=3, inputs=1, outputs=1))],
    ),
    "block of size 0": (
        "Provision",
        INVALID,
        "power of two",
        lambda m: [check_message(m, block=pb.BlockProduct(rows=1, inputs=0, outputs=8))],
    ),
    "block all but empty": (
        "Provision",
        INVALID,
        "half of its",
        lambda m: [check_message(m, block=pb.BlockProduct(rows=1, inputs=1, outputs=1))],
    ),
    "block of 2^64": (
        "Provision",
        INVALID,
        "at most 2048",
        lambda m: [check_message(m, block=pb.BlockProduct(rows=2, inputs=2**32 - 1, outputs=2**32 - 1))],
    ),
    "answers of 40 bits": (
        "Provision",
        INVALID,
        "modulo q or",
        lambda m: [check_message(m, block=pb.BlockProduct(rows=1, inputs=32, outputs=64, answer_bits=40))],
    ),
    # Files.
    "path": (
        "FetchFile",
        NOT_FOUND,
        "no such file",
        lambda m: [pb.FetchFileRequest(name="../manifest.json").SerializeToString()],
    ),
    "server file": (
        "FetchFile",
        NOT_FOUND,
        "no such file",
        lambda m: [pb.FetchFileRequest(name=next(iter(m.server_files))).SerializeToString()],
    ),
    "offset": (
        "FetchFile",
        INVALID,
        "past the file",
        lambda m: [pb.FetchFileRequest(name="config.json", offset=2**63).SerializeToString()],
    ),
    "fetch garbage": ("FetchFile", INVALID, "cut short", lambda m: [b"\xff" * 9]),
    "manifest garbage": ("GetManifest", INVALID, "cut short", lambda m: [b"\xff" * 9]),
    "no such call": ("Decrypt", grpc.StatusCode.UNIMPLEMENTED, "", lambda m: [b""]),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_message_gets_a_clear_status(server: ServerProcess, name: str) -> None:
    method, status, text, build = BAD_MESSAGES[name]
    _, got, details = send_raw(server, method, build(server.manifest))
    assert (got, text in details) == (status, True), f"{got}: {details}"
    assert server.serves()


def test_a_bad_message_leaves_other_streams_alone(server: ServerProcess) -> None:
    manifest = server.manifest

    def requests() -> Iterator[bytes]:
        yield opening(manifest)
        for name in ("cut in half", "element is p", "huge rows", "one byte more"):
            yield rows_message(manifest)
            method, _, _, build = BAD_MESSAGES[name]
            send_raw(server, method, build(manifest))

    answers, status, details = send_raw(server, "Evaluate", requests())
    assert (status, len(answers)) == (grpc.StatusCode.OK, 5), details


def test_the_log_shows_no_internal_error(server: ServerProcess) -> None:
    for method, _, _, build in BAD_MESSAGES.values():
        send_raw(server, method, build(server.manifest))
    assert "Traceback" not in server.log()


# -- size ------------------------------------------------------------------------------------------------------------


def test_message_over_the_limit(server: ServerProcess) -> None:
    before = server.rss()
    big = [opening(server.manifest), bytes(64 << 20)]
    _, status, details = send_raw(server, "Evaluate", big)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in details
    assert server.rss() - before < 32 << 20
    assert server.serves()


def test_message_that_declares_one_gigabyte(server: ServerProcess) -> None:
    before = server.rss()
    trailers = _declare(server, "Evaluate", GIB)
    assert b"grpc-status" in trailers
    assert server.rss() - before < 32 << 20
    assert server.serves()


def _declare(server: ServerProcess, method: str, length: int) -> bytes:
    """Opens a call by hand and announces a message of ``length`` bytes; returns the header block that ends it."""
    context = ssl.create_default_context(cafile=str(server.ca))
    context.set_alpn_protocols(["h2"])
    headers = {
        ":method": "POST",
        ":scheme": "https",
        ":path": f"/sordino.proto.v1.Sordino/{method}",
        ":authority": server.address,
        "te": "trailers",
        "content-type": "application/grpc",
        **dict(server.metadata),
    }
    # HPACK literals without indexing; every string here is shorter than 127 bytes.
    block = b"".join(
        b"\x00" + b"".join(bytes([len(part)]) + part.encode() for part in pair) for pair in headers.items()
    )
    with (
        socket.create_connection(("127.0.0.1", server.port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        message = b"\x00" + length.to_bytes(4, "big") + bytes(1000)
        tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        tls.sendall(_frame(1, 4, 1, block) + _frame(0, 0, 1, message))
        with tls.makefile("rb") as answers:
            while True:
                head = answers.read(9)
                assert len(head) == 9, "the server closed the connection without a status"
                body = answers.read(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if stream == 1 and kind == 1 and flags & 1:
                    return body
                assert kind != 3, "the stream was reset without a status"


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


# -- who asks, and over what -----------------------------------------------------------------------------------------


def _connection(server: ServerProcess, **options: object) -> Connection:
    chosen = {
        "target": server.target,
        "token": server.token,
        "ca": server.ca,
        "retry_s": 0.2,
        "timeout_s": 5,
        **options,
    }
    return Connection(chosen.pop("target"), **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [None, "", "sord_wrong", "x" * 2000])
def test_wrong_token(server: ServerProcess, token: str | None) -> None:
    with pytest.raises(AuthError, match="token"):
        _connection(server, token=token)
    assert server.serves()


def test_wrong_token_on_every_call(server: ServerProcess) -> None:
    for method in ("GetManifest", "FetchFile", "Provision", "Evaluate"):
        wrong = (("authorization", "Bearer sord_wrong"),)
        answers, status, _ = send_raw(server, method, [b""], metadata=wrong)
        assert (answers, status) == ([], grpc.StatusCode.UNAUTHENTICATED)


def test_expired_token(server: ServerProcess) -> None:
    tokens = TokenFile(server.state / "tokens.json")
    expired = tokens.issue("late", days=1e-9)
    with pytest.raises(AuthError, match="expired"):
        _connection(server, token=expired)
    _connection(server, token=tokens.issue("in time", days=1)).close()
    assert server.serves()


def test_wrong_ca(server: ServerProcess, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other", ["localhost"])
    started = time.monotonic()
    with pytest.raises(HandshakeError, match="not signed by the CA"):
        _connection(server, ca=other.ca, retry_s=60)
    assert time.monotonic() - started < 15, "a wrong CA does not become the right one by waiting"
    assert server.serves()


def test_ca_that_is_no_certificate(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(TransportError):
        _connection(server, ca=tmp_path / "ca.pem")
    with pytest.raises(TransportError, match="cannot be read"):
        _connection(server, ca=tmp_path / "missing.pem")


def test_plain_text_to_a_tls_port(server: ServerProcess) -> None:
    with pytest.raises(TransportError, match="TLS"):
        _connection(server, target=f"grpc://127.0.0.1:{server.port}", ca=None)
    assert server.serves()


def test_tls_to_a_plain_text_port(server: ServerProcess) -> None:
    with RecordingProxy(server.target, ca=server.ca) as proxy, pytest.raises(HandshakeError, match="without TLS"):
        _connection(server, target=f"grpcs://127.0.0.1:{proxy.port}", retry_s=60)


def test_nothing_listens(server: ServerProcess) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match="nothing listens"):
            _connection(server, target=f"grpcs://localhost:{taken.getsockname()[1]}")


@pytest.mark.parametrize("target", ["localhost:1", "http://localhost:1", "grpcs://", "grpc://example.org:1"])
def test_malformed_target(server: ServerProcess, target: str) -> None:
    with pytest.raises(TransportError, match="grpc"):
        _connection(server, target=target)


def test_clear_is_refused_before_anything_is_sent(server: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="does not offer"):
        connect_to(server, tmp_path, protocol="clear")


# -- damaged bundles -------------------------------------------------------------------------------------------------


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


FILES = ["manifest.json", "server/weights.safetensors", "client/client.safetensors", "client/tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
def test_bundle_changed_on_the_server(bundles: Callable[..., Path], tmp_path: Path, name: str, place: float) -> None:
    bundle = Path(shutil.copytree(bundles("llama"), tmp_path / "bundle"))
    _flip(bundle / name, int(place * (bundle / name).stat().st_size))
    with pytest.raises(BundleError):
        MatrixStore(bundle)


def test_server_with_a_changed_bundle_does_not_start(bundles: Callable[..., Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundles("llama"), tmp_path / "bundle"))
    _flip(bundle / "server/weights.safetensors", -1)
    command = [Path(sys.executable).with_name("sordino"), "serve", bundle, "--port", "0", "--state", tmp_path / "state"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "was changed after the split" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["client.safetensors", "tokenizer.json", "config.json"])
def test_bundle_changed_on_the_wire(server: ServerProcess, tmp_path: Path, name: str) -> None:
    digest = server.manifest.client_files[name]

    def tamper(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if method != "FetchFile" or direction != "down":
            return raw
        chunk = pb.FileChunk.FromString(raw)
        if len(chunk.data) != digest.size:
            return raw
        data = bytearray(chunk.data)
        data[len(data) // 2] ^= 1
        return pb.FileChunk(offset=chunk.offset, data=bytes(data)).SerializeToString()

    with RecordingProxy(server.target, ca=server.ca, tamper=tamper) as proxy:
        connection = _connection(server, target=proxy.target, ca=None)
        with pytest.raises(BundleError, match=name):
            fetch_bundle(connection, cache=tmp_path)
        connection.close()
    assert not list(tmp_path.rglob(name)), "a file that failed its check was kept"
    connection = _connection(server)
    assert (fetch_bundle(connection, cache=tmp_path) / name).is_file()
    connection.close()


@pytest.mark.parametrize("change", ["longer", "shorter", "shifted", "manifest"])
def test_file_of_another_length_on_the_wire(server: ServerProcess, tmp_path: Path, change: str) -> None:
    def tamper(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if direction == "down" and method == "GetManifest" and change == "manifest":
            return raw.replace(b'"l1_max": 3', b'"l1_max": 2', 1)
        if direction != "down" or method != "FetchFile":
            return raw
        chunk = pb.FileChunk.FromString(raw)
        if change == "longer":
            chunk.data += b"\0"
        elif change == "shorter":
            chunk.data = b""
        elif change == "shifted":
            chunk.offset += 1
        return chunk.SerializeToString()

    with RecordingProxy(server.target, ca=server.ca, tamper=tamper) as proxy:
        expected = {"shorter": ProtocolError, "shifted": ProtocolError}.get(change, BundleError)
        with pytest.raises(expected):  # noqa: PT012 - either step may be the one that refuses
            connection = _connection(server, target=proxy.target, ca=None)
            try:
                fetch_bundle(connection, cache=tmp_path)
            finally:
                connection.close()


# -- another model than expected -------------------------------------------------------------------------------------


def test_another_fingerprint_than_asked_for(server: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match="another split"):
        connect_to(server, tmp_path, fingerprint="0" * 64)


def test_pool_of_another_model(server: ServerProcess, bundles: Callable[..., Path], tmp_path: Path) -> None:
    connect_to(server, tmp_path).session.close()
    with (
        ServerProcess(bundles("qwen3"), tmp_path / "other") as other,
        pytest.raises((FingerprintError, PoolError), match=r"split|fingerprint"),
    ):
        connect_to(other, tmp_path)
    started = time.monotonic()
    with connect_to(server, tmp_path).session as session:
        assert session.masks_left, "the pool is of use to its own model still"
        assert "provision" not in session.traffic.up
    assert time.monotonic() - started < 30


def test_a_caller_without_a_token_holds_no_thread(server: ServerProcess) -> None:
    """Hundreds of calls that send headers and never a message are refused at once; others are served meanwhile."""
    hold = threading.Event()

    def never() -> Iterator[bytes]:
        hold.wait(60)
        yield from ()

    with server.channel() as channel:
        call = channel.stream_unary("/sordino.proto.v1.Sordino/GetManifest")
        waiting = [call.future(never()) for _ in range(350)]
        try:
            codes = {future.exception(timeout=20).code() for future in waiting}
            assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert grpc.StatusCode.UNAUTHENTICATED in codes
            assert server.serves()
        finally:
            hold.set()


def test_a_caller_with_a_token_holds_no_thread_for_long(server: ServerProcess) -> None:
    """More calls than the server takes, and none sends its message: they end, and others are served."""
    hold = threading.Event()

    def never() -> Iterator[bytes]:
        hold.wait(60)
        yield from ()

    with server.channel() as channel:
        calls = [(f"/sordino.proto.v1.Sordino/{name}", server.metadata) for name in ("GetManifest", "Evaluate")] * 150
        calls += [("/grpc.health.v1.Health/Check", ())] * 50
        waiting = [channel.stream_unary(call).future(never(), metadata=metadata) for call, metadata in calls]
        try:
            codes = [future.exception(timeout=20).code() for future in waiting]
            assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert server.serves()
        finally:
            hold.set()
    assert "Traceback" not in server.log()


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize("call", ["/grpc.health.v1.Health/Check", REFLECTION, "/sordino.proto.v1.Sordino/GetManifest"])
def test_calls_that_send_nothing_take_no_place_from_others(server: ServerProcess, call: str) -> None:
    """Those without a token take none of a token's, and those of one token none of another's."""
    other = (("authorization", f"Bearer {TokenFile(server.state / 'tokens.json').issue('other')}"),)
    hold = threading.Event()

    def never() -> Iterator[bytes]:
        hold.wait(60)
        yield from ()

    with server.channel() as channel:
        held = channel.stream_stream(call)
        waiting = [held(never(), metadata=() if "health" in call else other) for _ in range(700)]
        try:
            deadline = time.monotonic() + 20
            while sum(not one.done() for one in waiting) > 32:
                assert time.monotonic() < deadline, "more places are held than one holder may have"
                assert server.serves()
            assert server.serves()
        finally:
            hold.set()
            for one in waiting:
                one.cancel()


def test_a_token_that_is_withdrawn_ends_its_streams(server: ServerProcess) -> None:
    tokens = TokenFile(server.state / "tokens.json")
    metadata = (("authorization", f"Bearer {tokens.issue('withdrawn')}"),)
    hold = threading.Event()

    def resting(*messages: bytes) -> Iterator[bytes]:
        yield from messages
        hold.wait(60)

    with server.channel() as channel:
        first = {"Evaluate": opening(server.manifest), "Provision": masks_message(server.manifest)}
        streams = [
            channel.stream_stream(f"/sordino.proto.v1.Sordino/{name}")(resting(message), metadata=who, timeout=20)
            for name, message in first.items()
            for who in (metadata, server.metadata)
        ]
        try:
            for stream in streams:
                next(stream)
            tokens.revoke("withdrawn")
            for stream in streams[::2]:
                with pytest.raises(grpc.RpcError) as error:
                    next(stream)
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "withdrawn" in error.value.details()
            assert all(stream.is_active() for stream in streams[1::2])
        finally:
            hold.set()
            for stream in streams:
                stream.cancel()
