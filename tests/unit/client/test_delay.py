"""The relay behind ``--rtt-ms``: at least the delay, nothing but the delay, and no bytes changed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sordino.client.delay import delayed
from sordino.shared.errors import RangeError


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that gives back what it gets, and ends when its client does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"grpcs://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def connect(target: str) -> socket.socket:
    scheme, _, address = target.partition("://")
    assert scheme == "grpcs"
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(1 << 20)
        assert more, "it ended early"
        data += more
    return data


def test_an_echo_takes_the_round_trip(echo: str) -> None:
    """And without the relay it does not, so that it is the relay which is measured."""

    def fastest(target: str) -> float:
        times = []
        with connect(target) as connection:
            for _ in range(5):
                start = time.perf_counter()
                connection.sendall(b"x")
                assert read(connection, 1) == b"x"
                times.append(time.perf_counter() - start)
        return min(times)

    with delayed(echo, 0.1) as far:
        assert fastest(far) >= 0.1
    assert fastest(echo) < 0.1


def test_messages_travel_side_by_side(echo: str) -> None:
    """A delay is no queue: 20 messages, 10 ms apart, take one round trip more than their sending, not 20."""
    with delayed(echo, 1.0) as far, connect(far) as connection:
        start = time.perf_counter()
        for number in range(20):
            connection.sendall(bytes([number]))
            time.sleep(0.01)
        assert read(connection, 20) == bytes(range(20))
        assert 1.0 <= time.perf_counter() - start < 10


def test_bytes_come_whole_and_in_order(echo: str) -> None:
    data = bytes(range(256)) * (1 << 16)  # 16 MiB, in both directions at once
    with delayed(echo, 0.01) as far, connect(far) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert read(connection, len(data)) == data
        sender.join()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"", "the end of one way comes to the other side and back"


def test_a_server_that_is_not_there_is_a_connection_that_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with delayed(f"grpcs://127.0.0.1:{port}", 0.01) as far, connect(far) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("wrong", [-0.1, 11, float("nan")])
def test_times_that_mean_nothing(wrong: float) -> None:
    with pytest.raises(RangeError, match="0 to 10 s"), delayed("grpcs://127.0.0.1:9", wrong):
        pass
