"""``sordino deal`` as a process of its own, over TLS: what each party gets of it, and what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sordino.shared.grpc_settings  # noqa: F401 - before grpc is imported, as by the parties

# isort: split
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sordino.dealer.layers import PassMaker
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.proto.v1 import dealer_pb2_grpc as pb_grpc
from sordino.shared.auth import TokenFile
from sordino.shared.errors import (
    AuthError,
    FingerprintError,
    HandshakeError,
    LimitError,
    ProtocolError,
    SessionLostError,
    TransportError,
)
from sordino.shared.transport import OPENED_KEY
from sordino.shared.twoparty import source as source_module
from sordino.shared.twoparty.numbers import Plan, Shape, Sizes
from sordino.shared.twoparty.passes import ranges
from sordino.shared.twoparty.source import Dealer, PassSource
from sordino.shared.twoparty.tape import CLIENT, SERVER


def shape(layers: int, d: int, heads: int, groups: int, inner: int) -> Shape:
    """Of a Llama."""
    config = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": layers, "hidden_size": d}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": inner}
    return Shape.of(config | {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64})


SIZES = Sizes(value=14, score_bits=8, gate_cell=0.1, cut_up=30)
PLAN = Plan(shape(layers=2, d=8, heads=2, groups=1, inner=8), (SIZES,) * 2)
# Of which a pass takes more than a stream reads ahead.
LARGE = Plan(shape(layers=100, d=512, heads=8, groups=2, inner=1024), (SIZES,) * 100)
START_S = 60.0


class DealerProcess:
    """``sordino deal`` with self-made certificates and a token of each kind."""

    def __init__(self, tmp: Path, *arguments: str) -> None:
        self.tmp, self.state, self.port = tmp, tmp / "state", 0
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> DealerProcess:
        """On the port that it had, if it had one."""
        port_file = self.tmp / "port"
        port_file.unlink(missing_ok=True)
        command = [str(Path(sys.executable).with_name("sordino")), "deal", "--state", str(self.state)]
        command += ["--port", str(self.port), "--port-file", str(port_file), "--threads", "1", *self._arguments]
        with (self.tmp / "log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        return self

    def log(self) -> str:
        return (self.tmp / "log").read_text()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def token(self, party: int) -> str:
        return (self.state / ("client", "server")[party] / "token").read_text().strip()

    def dealer(self, party: int) -> Dealer:
        return Dealer(f"grpcs://127.0.0.1:{self.port}", self.state / "ca.pem", self.token(party))

    def __enter__(self) -> DealerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DealerProcess]:
    with DealerProcess(tmp_path_factory.mktemp("dealer"), "--max-sessions-each", "64") as running:
        yield running


class Parties:
    """Both parties' connections, keys and streams of one session."""

    def __init__(self, process: DealerProcess, plan: Plan = PLAN, **options: Any) -> None:
        self.dealers = [process.dealer(party) for party in (CLIENT, SERVER)]
        self.session, first = self.dealers[CLIENT].begin("model", plan)
        self.keys = first, self.dealers[SERVER].join(self.session, "model", plan)
        self.streams = [self.dealers[party].stream(self.session, party, **options) for party in (CLIENT, SERVER)]

    def __enter__(self) -> Parties:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.close()
        for dealer in self.dealers:
            dealer.close()


def wanted(number: int, rows: int, first: int, kept: list[int] | None = None) -> pb.Pass:
    return pb.Pass(number=number, rows=rows, first_counter=first, kept=ranges(kept or []))


def by_hand(keys: tuple[bytes, bytes], plan: Plan, number: int, rows: int, counters: list[int]) -> tuple[bytes, bytes]:
    maker = PassMaker(keys, plan, number, rows, counters)
    made = [maker.make() for _ in range(plan.shape.layers + 1)]
    return b"".join(points for points, _ in made), b"".join(corrections for _, corrections in made)


def read(source: PassSource, points: int, words: int, piece: int = 7) -> tuple[bytes, bytes]:
    """All of a pass, in pieces that do not fit its parts."""
    got_points = [source.points(min(piece * 8, points - at)) for at in range(0, points, piece * 8)]
    got_words = [source.corrections(min(piece, words - at)).tobytes() for at in range(0, words, piece)]
    source.finish()
    return b"".join(got_points), b"".join(got_words)


@pytest.mark.parametrize("options", [{}, {"ahead_bytes": 1}], ids=["ahead", "little-ahead"])
def test_each_party_reads_its_half(process: DealerProcess, options: dict[str, int]) -> None:
    """Points first and then words, so that the one is read behind the other."""
    with Parties(process, **options) as both, ThreadPoolExecutor(2) as pool:
        passes = [(0, 3, 0, []), (1, 1, 3, [0, 1, 2]), (2, 1, 5, [0, 1])]
        asked = [[stream.ask(wanted(*one)) for one in passes] for stream in both.streams]  # ahead
        for at, (number, rows, first, kept) in enumerate(passes):
            points, words = by_hand(both.keys, PLAN, number, rows, [*kept, *range(first, first + rows)])
            client = pool.submit(read, asked[CLIENT][at], len(points), 0)
            server = pool.submit(read, asked[SERVER][at], len(points), len(words) // 8, 100_000)
            assert client.result(60) == (points, b"")
            assert server.result(60) == (points, words)


def raw(process: DealerProcess, party: int, requests: Iterator[pb.DealRequest]) -> list[pb.DealResponse]:
    """What comes on a stream until its end.

    Raises:
        grpc.RpcError: it ends with another status than OK.
    """
    credentials = grpc.ssl_channel_credentials((process.state / "ca.pem").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{process.port}", credentials) as channel:
        metadata = [("authorization", f"Bearer {process.token(party)}")]
        return list(pb_grpc.DealerStub(channel).Deal(requests, metadata=metadata, timeout=20))


def test_a_client_gets_no_corrections_and_no_words_of_the_servers(process: DealerProcess) -> None:
    """By the bytes of its stream, not by our reader of them."""
    with process.dealer(CLIENT) as client, process.dealer(SERVER) as server:
        session, key = client.begin("model", PLAN)
        keys = key, server.join(session, "model", PLAN)
    requests = [pb.DealRequest(open=session), pb.DealRequest(**{"pass": wanted(0, 2, 0)})]
    received = {party: raw(process, party, iter(requests)) for party in (CLIENT, SERVER)}
    assert all(not part.corrections for part in received[CLIENT])
    assert [part.last for part in received[CLIENT]].count(True) == 1
    points = [b"".join(part.points for part in received[party]) for party in (CLIENT, SERVER)]
    words = b"".join(part.corrections for part in received[SERVER])
    assert points[CLIENT] == points[SERVER]
    assert (points[SERVER], words) == by_hand(keys, PLAN, 0, 2, [0, 1])


def test_of_many_streams_at_once_one_stays_and_the_others_end(process: DealerProcess) -> None:
    with process.dealer(CLIENT) as client, ThreadPoolExecutor(16) as pool:
        session, _ = client.begin("model", PLAN)
        stop = threading.Event()

        def requests() -> Iterator[pb.DealRequest]:
            yield pb.DealRequest(open=session)
            stop.wait(20)

        streams = [pool.submit(raw, process, CLIENT, requests()) for _ in range(16)]
        for _, stream in zip(range(15), as_completed(streams, timeout=15), strict=False):
            error = stream.exception()
            assert isinstance(error, grpc.RpcError)
            assert "another stream" in error.details()
        stop.set()
        assert [stream.result(10) for stream in streams if stream.exception() is None] == [[]]


def test_roles_and_strangers(process: DealerProcess) -> None:
    with process.dealer(CLIENT) as client, process.dealer(SERVER) as server:
        with pytest.raises(AuthError, match="for a client, the token is a server's"):
            server.begin("model", PLAN)
        session, _ = client.begin("model", PLAN)
        with pytest.raises(AuthError, match="for a server, the token is a client's"):
            client.join(session, "model", PLAN)
        with pytest.raises(FingerprintError):
            server.join(session, "another", PLAN)
        with pytest.raises(ProtocolError, match="another plan"):
            server.join(session, "model", LARGE)
        server.join(session, "model", PLAN)
        with pytest.raises(ProtocolError, match="second one cannot"):
            server.join(session, "model", PLAN)
        for dealer, name in ((server, bytes(16)), (client, bytes(16)), (client, b"")):
            with dealer.stream(name, CLIENT) as stream, pytest.raises(SessionLostError, match="begin a new session"):
                stream.ask(wanted(0, 1, 0)).points(1)
        ca = process.state / "ca.pem"
        with Dealer(f"grpcs://127.0.0.1:{process.port}", ca, "sord_of_nobody") as stranger:
            with pytest.raises(AuthError, match="token is not known"):
                stranger.begin("model", PLAN)
            with stranger.stream(session, CLIENT) as stream, pytest.raises(AuthError):
                stream.ask(wanted(0, 1, 0)).points(1)
    with Dealer(f"grpc://127.0.0.1:{process.port}", None, "sord_x") as plain, pytest.raises(TransportError):
        plain.begin("model", PLAN)
    with Dealer(f"grpcs://127.0.0.1:{process.port}", None, "sord_x") as untrusting, pytest.raises(HandshakeError):
        untrusting.begin("model", PLAN)


def test_refusals_reach_the_party_that_asks(process: DealerProcess) -> None:
    with Parties(process) as both:
        client = both.streams[CLIENT]
        client.ask(wanted(3, 2, 0)).points(1)
        again = client.ask(wanted(3, 2, 2))
        with pytest.raises(ProtocolError, match="numbers go up"):
            again.points(1)
    with Parties(process) as both:
        first = both.streams[CLIENT].ask(wanted(0, 1, 0))
        first.points(1)
        with pytest.raises(ProtocolError, match="different passes under number 0: rows"):
            both.streams[SERVER].ask(wanted(0, 2, 0)).points(1)
        with pytest.raises(ProtocolError, match="different passes under number 0: rows"):
            both.streams[CLIENT].ask(wanted(1, 1, 1)).points(1)
    with Parties(process) as both:
        # More, and less, than there is.
        points, words = by_hand(both.keys, PLAN, 0, 1, [0])
        source = both.streams[SERVER].ask(wanted(0, 1, 0))
        source.points(len(points) - 1)
        with pytest.raises(ProtocolError, match="too many"):
            source.finish()
        with pytest.raises(ProtocolError, match="too little"):
            source.points(2)
        source.corrections(len(words) // 8)


def test_a_new_stream_takes_the_place_of_a_silent_one(process: DealerProcess) -> None:
    with Parties(process) as both:
        both.streams[CLIENT].ask(wanted(0, 1, 0)).points(1)
        with both.dealers[CLIENT].stream(both.session, CLIENT) as stream:
            stream.ask(wanted(1, 1, 1)).points(1)
            with pytest.raises(ProtocolError, match="another stream"):
                both.streams[CLIENT].ask(wanted(2, 1, 2)).points(1)


def test_a_client_that_closes_its_stream_ends_the_session(process: DealerProcess) -> None:
    with Parties(process) as both:
        points, words = by_hand(both.keys, PLAN, 0, 1, [0])
        for stream, size in zip(both.streams, (0, len(words) // 8), strict=True):
            read(stream.ask(wanted(0, 1, 0)), len(points), size)
        both.streams[CLIENT].close()
        with pytest.raises(SessionLostError, match="client has ended"):
            both.streams[SERVER].ask(wanted(1, 1, 1)).points(1)
        with both.dealers[CLIENT].stream(both.session, CLIENT) as stream, pytest.raises(SessionLostError):
            stream.ask(wanted(0, 1, 0)).points(1)


def test_a_dealer_killed_in_mid_pass_and_started_again_gives_nothing_of_the_old_session(tmp_path: Path) -> None:
    with DealerProcess(tmp_path) as process:
        with Parties(process, LARGE, retry_s=0.5) as both:
            source = both.streams[SERVER].ask(wanted(0, 30, 0))
            source.points(1000)
            process.kill()
            with pytest.raises(TransportError, match=r"cannot be reached for 0.5 s"):
                _drain(source)
        process.start()
        with Parties(process, LARGE, retry_s=30) as both:
            source = both.streams[SERVER].ask(wanted(0, 30, 0))
            source.points(1000)
            process.kill()
            time.sleep(1.5)  # longer than gRPC waits at first: it must be made to try again
            process.start()
            with pytest.raises(SessionLostError, match=r"has restarted.*begin a new session"):
                _drain(source)
            with pytest.raises(SessionLostError):
                both.streams[SERVER].ask(wanted(1, 1, 30)).points(1)


def _drain(source: PassSource) -> None:
    for _ in range(10_000):
        source.points(100_000)


def test_sigterm_lets_a_running_pass_end_and_stops(tmp_path: Path) -> None:
    with DealerProcess(tmp_path, "--grace", "60") as process, Parties(process, retry_s=0.2) as both:
        points, words = by_hand(both.keys, PLAN, 0, 1, [0])
        source = both.streams[SERVER].ask(wanted(0, 1, 0))
        assert read(source, len(points), len(words) // 8) == (points, words)
        assert process.terminate() == 0, process.log()
        assert "draining" in process.log()
        with pytest.raises(TransportError):
            both.streams[SERVER].ask(wanted(1, 1, 1)).points(1)


def test_a_silent_party_costs_the_other_a_clear_limit_and_the_dealer_no_more(tmp_path: Path) -> None:
    arguments = ("--held-session-mib", "8", "--wait", "0.2", "--idle", "3")
    with DealerProcess(tmp_path, *arguments) as process, Parties(process, LARGE) as both:
        with pytest.raises(LimitError, match="has not fetched"):
            _drain(both.streams[CLIENT].ask(wanted(0, 1, 0)))
        # The server's stream waits in silence until the session ends.
        with both.streams[SERVER].changed, pytest.raises(SessionLostError, match="used the session for too long"):
            both.streams[SERVER].wait(lambda: False)


@pytest.mark.parametrize(("arguments", "most"), [((), 4), (("--held-token-mib", "3"), 3)])
def test_a_token_has_a_quarter_unless_it_is_said(tmp_path: Path, arguments: tuple[str, ...], most: int) -> None:
    with DealerProcess(tmp_path, "--held-mib", "16", *arguments) as process, Parties(process, LARGE) as both:
        source = both.streams[CLIENT].ask(wanted(0, 8, 0))
        with pytest.raises(LimitError, match=f"may hold {most} MiB"):
            source.points(1)


def test_health_needs_no_token(process: DealerProcess) -> None:
    credentials = grpc.ssl_channel_credentials((process.state / "ca.pem").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{process.port}", credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="sordino.proto.v1.Dealer"), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):  # it would have no end
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20))


def test_a_token_that_is_withdrawn_ends_its_sessions(process: DealerProcess) -> None:
    file = TokenFile(process.state / "client" / "tokens.json")
    token = file.issue("guest")
    with Dealer(f"grpcs://127.0.0.1:{process.port}", process.state / "ca.pem", token) as dealer:
        session, _ = dealer.begin("model", PLAN)
        with process.dealer(SERVER) as server:
            server.join(session, "model", PLAN)
        with dealer.stream(session, CLIENT) as stream:
            stream.ask(wanted(0, 1, 0)).points(1)
            file.revoke("guest")
            with stream.changed, pytest.raises(SessionLostError, match="withdrawn"):
                stream.wait(lambda: False)
        with pytest.raises(AuthError):
            dealer.begin("model", PLAN)


def test_without_tls_only_on_loopback_and_tokens_always(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("sordino")), "deal", "--insecure", "--state", str(tmp_path / "other")]
    done = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "loopback alone" in done.stderr
    assert not (tmp_path / "other").exists()
    with DealerProcess(tmp_path, "--insecure") as process:
        target = f"grpc://127.0.0.1:{process.port}"
        with Dealer(target, None, process.token(CLIENT)) as dealer:
            assert len(dealer.begin("model", PLAN)[1]) == 32
        with Dealer(target, None, "sord_of_nobody") as dealer, pytest.raises(AuthError):
            dealer.begin("model", PLAN)
        with socket.create_connection(("127.0.0.1", process.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for party in ("client", "server"):
        assert (process.state / party / "tokens.json").stat().st_mode & 0o777 == 0o600


def test_a_pass_that_nobody_reads_takes_no_room(process: DealerProcess) -> None:
    """It was asked for ahead, and another came: what has come of it goes, and what will come is not kept."""
    with Parties(process) as parties:
        for stream in parties.streams:
            late, never = stream.ask(wanted(0, 1, 0)), stream.ask(wanted(1, 2, 1))
            never.drop()  # before it came
            late.wait()
            assert stream._ahead > 0
            late.drop()
            next_one = stream.ask(wanted(2, 1, 3))
            next_one.wait()
            assert stream._ahead == next_one._points.rest + next_one._words.rest > 0


def test_a_client_that_closes_in_the_middle_of_a_pass_ends_the_session(process: DealerProcess) -> None:
    with Parties(process, LARGE, silence_s=5) as both:
        both.streams[CLIENT].ask(wanted(0, 1, 0)).points(1)
        both.streams[CLIENT].ask(wanted(1, 1, 1))
        both.streams[CLIENT].close()
        with both.streams[SERVER].changed, pytest.raises(SessionLostError, match="client has ended"):
            both.streams[SERVER].wait(lambda: False)


def test_only_its_client_ends_a_session(process: DealerProcess) -> None:
    with Parties(process) as both:
        both.dealers[SERVER].end(both.session)
        token = TokenFile(process.state / "client" / "tokens.json").issue("another")
        with Dealer(f"grpcs://127.0.0.1:{process.port}", process.state / "ca.pem", token) as another:
            another.end(both.session)
        both.streams[CLIENT].ask(wanted(0, 1, 0)).points(1)


def test_a_dealer_that_has_come_back_is_found_at_once(tmp_path: Path) -> None:
    """By a connection that has just seen it away: a server has one for all its clients."""
    with DealerProcess(tmp_path) as process, process.dealer(CLIENT) as client:
        client.begin("model", PLAN)
        process.kill()
        back = threading.Timer(0.2, process.start)
        back.start()
        try:
            assert len(client.begin("model", PLAN)[1]) == 32
        finally:
            back.join()


class Relay:
    """Passes connections on, until the dealer has sent so many bytes more: then it breaks all of them, once."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._left: int | None = None
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def break_after(self, size: int) -> None:
        self._left = size

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, into: socket.socket) -> None:
        counted = source.getpeername()[1] == self._to
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counted and self._left is not None:
                    self._left -= (size := min(self._left, len(data)))
                    into.sendall(data[:size])
                    if not self._left:
                        self._left = None
                        self._break()
                else:
                    into.sendall(data)
        self._break(source, into)

    def _break(self, *ends: socket.socket) -> None:
        for end in ends or self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._break(self._listener)
        self._break()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()


MIDDLE = Plan(shape(layers=12, d=64, heads=4, groups=2, inner=128), (SIZES,) * 12)


@pytest.mark.parametrize("size", [2000, 100_000], ids=["nothing-came", "something-came"])
@pytest.mark.parametrize("party", [CLIENT, SERVER])
def test_a_pass_in_which_the_connection_breaks_is_lost_alone(process: DealerProcess, party: int, size: int) -> None:
    """Nothing of it can be read any more, then or after; the session goes on with the next number."""
    with Relay(process.port) as relay, Parties(process, MIDDLE) as both:
        far = Dealer(f"grpcs://127.0.0.1:{relay.port}", process.state / "ca.pem", process.token(party))
        both.streams[party] = far.stream(both.session, party, retry_s=20, silence_s=20, ahead_bytes=1 << 20)
        with far, both.streams[party] as stream:
            with stream.changed:
                stream.wait(lambda: stream._call is not None)
            relay.break_after(size)
            lost, ahead = stream.ask(wanted(0, 1, 0)), stream.ask(wanted(1, 1, 1))
            lost.wait()
            assert lost.lost
            assert lost.begun == (size > 2000)
            with pytest.raises(TransportError, match="broke in pass 0"):
                lost.points(1)
            other = both.streams[SERVER - party].ask(wanted(1, 1, 1))
            points, words = by_hand(both.keys, MIDDLE, 1, 1, [1])
            assert len(points) > size
            assert read(ahead, len(points), len(words) // 8 * (party == SERVER), 100_000)[0] == points
            assert read(other, len(points), len(words) // 8 * (party != SERVER), 100_000)[0] == points


class Lying(pb_grpc.DealerServicer):
    """Sends what it is told to on every stream, and then nothing, or the stream's end."""

    def __init__(self, parts: Iterable[pb.DealResponse], *, ends: bool) -> None:
        self._parts = parts
        self._ends = ends

    def Deal(self, requests: Iterator[pb.DealRequest], context: Any) -> Iterator[pb.DealResponse]:
        context.send_initial_metadata(((OPENED_KEY, "1"),))
        yield from self._parts
        while not self._ends and next(requests, None) is not None:
            pass


SOME = pb.DealResponse(number=0, points=bytes(1 << 20))
LIES = {
    "nothing": ([pb.DealResponse(number=0)] * 1000, ProtocolError, "nothing in it"),
    "silence": ((), TransportError, "sent nothing for 1 s"),
    "other-things": ([SOME] * 32, ProtocolError, "8 MiB without what is needed"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_lying_dealer_sends_has_an_end(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes no more than so much memory."""
    parts, error, text = LIES[lie]
    monkeypatch.setattr(source_module, "_MOST_AHEAD", 8 << 20)
    with lied_to(parts) as source, pytest.raises(error, match=text):
        source.corrections(1)


def test_surplus_is_noticed_whether_it_ends_or_not() -> None:
    for parts in ([SOME, SOME, pb.DealResponse(number=0, last=True)], [SOME] * 32):
        with lied_to(parts) as source:
            source.points(1 << 20)
            with pytest.raises(ProtocolError, match="too many"):
                source.finish()


def test_material_of_one_number_is_never_read_twice() -> None:
    """Not from a dealer that deals it anew after a break either."""
    with lied_to([SOME], ends=True) as source:
        read: list[bytes] = []
        with pytest.raises(TransportError, match="broke in pass 0"):
            read.extend(source.points(1 << 18) for _ in range(9))
        assert len(b"".join(read)) <= len(SOME.points)


@contextmanager
def lied_to(parts: Iterable[pb.DealResponse], *, ends: bool = False) -> Iterator[PassSource]:
    """A server's pass 0."""
    with ThreadPoolExecutor(2) as pool:
        lying = grpc.server(pool)
        pb_grpc.add_DealerServicer_to_server(Lying(parts, ends=ends), lying)
        port = lying.add_insecure_port("127.0.0.1:0")
        lying.start()
        with (
            Dealer(f"grpc://127.0.0.1:{port}", None, "sord_x") as dealer,
            dealer.stream(bytes(16), SERVER, silence_s=1, ahead_bytes=2 << 20) as stream,
        ):
            yield stream.ask(wanted(0, 1, 0))
        lying.stop(0).wait()
