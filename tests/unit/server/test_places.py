"""Places are few for each holder, and connections that are not used are given up."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from inprocess import InProcess

from sordino.server import app
from sordino.server.places import Places, Room
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.shared.auth import TokenFile, identity_of
from sordino.shared.errors import LimitError

HEALTH = "/grpc.health.v1.Health/Check"


class Call:
    """What of a call a place looks at."""

    def __init__(self, method: str, token: str, address: str) -> None:
        self.method = method
        self.holder = identity_of([("authorization", f"Bearer {token}")])
        self.peer = address
        self.ended = False

    def end(self, code: grpc.StatusCode, text: str) -> None:
        self.ended = True


def test_a_room_is_counted_by_holder_and_in_all() -> None:
    places = Places({"/a": Room("streams", 3, 2)}, Room("short calls", 2, 1), Room("calls without a token", 2, 1))

    @contextmanager
    def held(method: str, token: str, address: str = "ipv4:10.0.0.1:1") -> Iterator[None]:
        with places.hold(Call(method, token, address)):  # type: ignore[arg-type]
            yield

    with held("/a", "x"), held("/a", "x"):
        with pytest.raises(LimitError, match="this token has its 2 streams"), held("/a", "x"):
            pass
        with held("/a", "y"):
            with pytest.raises(LimitError, match="the server has its 3 streams"), held("/a", "z"):
                pass
            with held("/b", "x"), pytest.raises(LimitError, match="this token has its 1 short calls"), held("/c", "x"):
                pass
            # A token that is made up makes nobody another holder, nor does another port.
            with held(HEALTH, "x"):
                with (
                    pytest.raises(LimitError, match="this address has its 1 calls without"),
                    held(HEALTH, "y", "ipv4:10.0.0.1:2"),
                ):
                    pass
                with held(HEALTH, "x", "ipv6:%5B::1%5D:1"), held("/b", "x"):
                    pass
        with held("/a", "z"):
            pass


def test_only_calls_of_withdrawn_tokens_end(bundles: Callable[..., Path], tmp_path: Path) -> None:
    service = SordinoService(MatrixStore(bundles("llama")), Limits())
    file = TokenFile(tmp_path / "tokens.json")
    kept, gone = (Call("/a", file.issue(name), "ipv4:10.0.0.1:1") for name in ("kept", "gone"))
    calls = (kept, gone, Call(HEALTH, "none", "ipv4:10.0.0.1:1"))
    with ExitStack() as stack:
        for call in calls:
            stack.enter_context(service.places.hold(call))  # type: ignore[arg-type]
        app._end_withdrawn(service, file)
        assert not any(call.ended for call in calls)
        before = (tmp_path / "tokens.json").read_bytes()
        for broken in (b"", b"[{"):  # half of what an editor writes
            (tmp_path / "tokens.json").write_bytes(broken)
            app._end_withdrawn(service, file)
        (tmp_path / "tokens.json").unlink()
        app._end_withdrawn(service, file)
        assert not any(call.ended for call in calls)
        (tmp_path / "tokens.json").write_bytes(before)
        TokenFile(tmp_path / "tokens.json").revoke("gone")
        app._end_withdrawn(service, file)
        assert [call.ended for call in calls] == [False, True, False]


@pytest.fixture
def port(bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server of three connections, none of which waits long."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (app._SPARE_FILES + 3,) * 2)
    monkeypatch.setattr(app, "_HANDSHAKE_MS", 500)
    monkeypatch.setattr(app, "_IDLE_MS", 500)
    config = app.ServerConfig(bundle=bundles("llama"), tls=None, tokens=None)
    server = InProcess(SordinoService(MatrixStore(config.bundle), Limits()), config)
    yield server.port
    server.close()


@pytest.mark.parametrize("first", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"], ids=["silent", "idle"])
def test_connections_that_are_not_used_keep_nobody_out(port: int, first: bytes) -> None:
    connections = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(3)]
    for connection in connections:
        connection.sendall(first)
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 100)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        assert channel.unary_unary(HEALTH)(b"", wait_for_ready=True, timeout=20)
    for connection in connections:
        while connection.recv(4096):  # the server's settings and farewell, and then the end
            pass
        connection.close()


def test_connections_are_bounded(port: int) -> None:
    connections = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(4)]
    assert connections[3].recv(1) == b"", "the fourth is one too many"
    for connection in connections:
        connection.close()


def test_a_server_takes_all_files_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        app._raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (
            app._MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, app._MAX_FILES),
            hard,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
