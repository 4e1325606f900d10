"""A dealer in operation: figures that add up however calls and sessions end, probes, a log without secrets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, get_args

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from twoparty import DealerProcess

from sordino.dealer.metrics import _WATCHED, Metrics, Reason
from sordino.dealer.sessions import Limits, Sessions
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.proto.v1 import dealer_pb2_grpc as pb_grpc
from sordino.shared.auth import TokenFile
from sordino.shared.errors import ProtocolError
from sordino.shared.twoparty.numbers import Plan, Shape, Sizes
from sordino.shared.twoparty.passes import ranges
from sordino.shared.twoparty.tape import CLIENT, SERVER

PARTIES: Final = ("client", "server")
CODE = grpc.StatusCode
EACH: Final = 4
LIMITS: Final = ("--max-sessions", "40", "--max-sessions-each", str(EACH), "--held-mib", "96", "--held-token-mib", "96")


def plan_of(layers: int, d: int, heads: int, groups: int, inner: int) -> Plan:
    """Of a Llama."""
    config = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": layers, "hidden_size": d}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": inner}
    shape = Shape.of(config | {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64})
    return Plan(shape, (Sizes(value=14, score_bits=8, gate_cell=0.1, cut_up=30),) * layers)


PLAN = plan_of(layers=2, d=8, heads=2, groups=1, inner=8)
# Of which a pass takes more than a stream reads ahead.
LARGE = plan_of(layers=100, d=512, heads=8, groups=2, inner=1024)
Figures = Counter[tuple[str, ...]]


def until(look: Callable[[], Any], enough: Callable[[Any], bool], seconds: float = 60) -> Any:
    """What ``look`` gives as soon as it is ``enough``."""
    deadline = time.monotonic() + seconds
    while not enough(seen := look()):
        assert time.monotonic() < deadline, f"still not so: {seen}"
        time.sleep(0.02)
    return seen


class Operated(DealerProcess):
    """A dealer with a metrics port and a log in JSON."""

    def __init__(self, tmp: Path, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.metrics_port = free.getsockname()[1]
        own = ("--metrics-port", str(self.metrics_port), "--log-format", "json", "--threads", "1")
        super().__init__(tmp, arguments=(*own, *arguments))

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def figures(self) -> Figures:
        """``(name without prefix, *values of labels)`` to value."""
        found: Figures = Counter()
        for family in text_string_to_metric_families(self.page("metrics")[1]):
            for sample in family.samples:
                labels = (sample.labels[key] for key in sorted(sample.labels))
                found[sample.name.removeprefix("sordino_dealer_"), *labels] += sample.value
        return found

    def when_quiet(self) -> Figures:
        """The figures when no call and no session is open: all that started has ended."""
        now = until(self.figures, lambda now: not now["sessions",] and not any(of(now, "calls_open").values()))
        started = of(now, "calls_started_total")
        for method, *rest in started:
            ended = {key: value for key, value in of(now, "calls_ended_total").items() if key[0] == method}
            assert started[method, *rest] == sum(ended.values()), now
        assert now["sessions_begun_total",] == sum(of(now, "sessions_ended_total").values())
        return now

    def log(self) -> str:
        return (self._tmp / "dealer.log").read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines()]

    def token(self, party: int) -> str:
        return self.token_file(PARTIES[party]).read_text().strip()

    @contextmanager
    def stub(self) -> Iterator[Any]:
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.secure_channel(f"localhost:{self.port}", credentials, options=options) as channel:
            yield channel


def of(figures: Figures, name: str) -> dict[tuple[str, ...], float]:
    """Those of one name that are not 0, by their labels."""
    return {key[1:]: value for key, value in figures.items() if key[0] == name and value}


class Session:
    """Of both parties, by bare gRPC: what it receives is all that there is."""

    def __init__(self, dealer: Operated, channel: grpc.Channel, plan: Plan = PLAN, token: str = "") -> None:
        self.stub = pb_grpc.DealerStub(channel)
        tokens = token or dealer.token(CLIENT), dealer.token(SERVER)
        self.metadata = [(("authorization", f"Bearer {one}"),) for one in tokens]
        asked = pb.BeginRequest(fingerprint="model", plan=plan.to_json())
        begun = self.stub.Begin(asked, metadata=self.metadata[CLIENT], timeout=20)
        self.name, self.keys = begun.session, [begun.key]
        joined = pb.JoinRequest(session=self.name, fingerprint="model", plan=plan.to_json())
        self.keys.append(self.stub.Join(joined, metadata=self.metadata[SERVER], timeout=20).key)


class Stream:
    """A party's, open until it is closed."""

    def __init__(self, session: Session, party: int) -> None:
        self._session, self._party = session, party
        self._more, self._asked, self._end = threading.Semaphore(0), list[pb.DealRequest](), False
        self.call = session.stub.Deal(self._requests(session.name), metadata=session.metadata[party], timeout=60)
        assert dict(self.call.initial_metadata())["sordino-opened"]

    def _requests(self, name: bytes) -> Iterator[pb.DealRequest]:
        yield pb.DealRequest(open=name)
        while self._more.acquire(timeout=60) and not self._end:
            yield self._asked.pop(0)

    def ask(self, number: int, rows: int, first: int, kept: list[int] | None = None) -> None:
        one = pb.Pass(number=number, rows=rows, first_counter=first, kept=ranges(kept or []))
        self._asked.append(pb.DealRequest(**{"pass": one}))
        self._more.release()

    def read(self) -> tuple[int, int]:
        """Bytes of points and of corrections, until the end of a pass."""
        points = corrections = 0
        for part in self.call:
            points, corrections = points + len(part.points), corrections + len(part.corrections)
            if part.last:
                return points, corrections
        raise AssertionError("the stream ended in a pass")

    def close(self) -> CODE:
        """Of a client's, and then of its session."""
        self._end = True
        self._more.release()
        code = self.call.code()
        if self._party == CLIENT:
            ended = pb.EndRequest(session=self._session.name)
            self._session.stub.End(ended, metadata=self._session.metadata[CLIENT], timeout=20)
        return code


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Operated(tmp_path_factory.mktemp("operated"), *LIMITS, "--away", "3") as dealer:
        yield dealer


@pytest.fixture(scope="module")
def channel(operated: Operated) -> Iterator[grpc.Channel]:
    with operated.stub() as channel:
        yield channel


def test_what_is_dealt_is_counted(operated: Operated, channel: grpc.Channel) -> None:
    before = operated.when_quiet()
    log = len(operated.lines())
    session = Session(operated, channel)
    client, server = (Stream(session, party) for party in (CLIENT, SERVER))
    client.ask(0, 3, 0)
    got = Counter(client=client.read()[0])
    now = operated.figures()
    assert (now["sessions",], now["calls_open", "Deal"]) == (1, 2)
    assert now["held_bytes",] > got["client"], "the server has still to fetch its own"
    server.ask(0, 3, 0)
    points, corrections = server.read()
    until(operated.figures, lambda now: not now["held_bytes",])
    server.ask(1, 1, 3, [0, 1, 2])
    more = server.read()
    client.ask(1, 1, 3, [0, 1, 2])
    got["client"] += client.read()[0]
    assert (server.close(), client.close()) == (CODE.OK, CODE.OK)
    after = operated.when_quiet() - before
    assert of(after, "material_bytes_total") == {
        ("points", "client"): got["client"],
        ("points", "server"): points + more[0],
        ("corrections", "server"): corrections + more[1],
    }
    assert of(after, "passes_total") == {("client",): 2, ("server",): 2}
    assert of(after, "rows_total") == {("client",): 4, ("server",): 4}
    assert of(after, "calls_ended_total") == {
        **{("Begin", "OK"): 1, ("Join", "OK"): 1},
        **{("Deal", "OK"): 2, ("End", "OK"): 1},
    }
    assert of(after, "client_calls_total") == {("client/first",): 3, ("server/first",): 2}
    assert of(after, "sessions_ended_total") == {("client",): 1}
    assert after["material_seconds_total",] > 0
    assert after["held_bytes",] == 0
    now = operated.figures()
    limits = [now[name,] for name in ("sessions_limit", "held_limit_bytes", "threads")]
    assert limits == [40, 96 << 20, 1]
    lines = operated.lines()[log:]
    assert Counter(line["method"] for line in lines if "method" in line) == {"Begin": 1, "Join": 1, "Deal": 2, "End": 1}
    [ended] = [line for line in lines if "reason" in line]
    told = {key: ended[key] for key in ("client", "server", "reason", "passes", "rows")}
    assert told == {"client": "client/first", "server": "server/first", "reason": "client", "passes": 2, "rows": 4}
    assert ended["seconds"] > 0
    for line in lines:
        if line.get("method") == "Deal":
            assert line.keys() == {
                *("time", "level", "logger", "event"),
                *("method", "client", "peer", "status", "seconds"),
            }


_KILLED = """
import sys, time, grpc
address, ca, token, *messages = sys.argv[2:]
credentials = grpc.ssl_channel_credentials(open(ca, "rb").read())
channel = grpc.secure_channel(address, credentials, options=[("grpc.enable_http_proxy", 0)])
def requests():
    yield from map(bytes.fromhex, messages)
    time.sleep(120)
call = channel.stream_stream("/sordino.proto.v1.Dealer/Deal")
answers = call(requests(), metadata=[("authorization", f"Bearer {token}")])
for _ in range(int(sys.argv[1])):
    next(answers)
print("open", flush=True)
time.sleep(120)
"""


@contextmanager
def killed(dealer: Operated, session: Session, rows: int, answers: int) -> Iterator[None]:
    """A client that has read so many answers of its first pass, until the end of the block."""
    wanted = pb.DealRequest(**{"pass": pb.Pass(number=0, rows=rows, first_counter=0)})
    messages = [one.SerializeToString().hex() for one in (pb.DealRequest(open=session.name), wanted)]
    arguments = [str(answers), f"localhost:{dealer.port}", str(dealer.ca), dealer.token(CLIENT), *messages]
    with subprocess.Popen([sys.executable, "-c", _KILLED, *arguments], stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout
            assert client.stdout.readline() == b"open\n"
            yield
        finally:
            client.kill()


def test_a_party_that_is_killed_in_a_pass(operated: Operated, channel: grpc.Channel) -> None:
    """And one that cancels: what they had not read is not counted as a pass, and their session ends once."""
    before = operated.when_quiet()
    session = Session(operated, channel, LARGE)
    cancelled = Stream(session, SERVER)
    cancelled.ask(0, 20, 0)
    next(cancelled.call)
    with killed(operated, session, rows=20, answers=1):
        assert operated.figures()["calls_open", "Deal"] == 2
    cancelled.call.cancel()
    after = operated.when_quiet() - before
    assert of(after, "calls_ended_total") == {("Begin", "OK"): 1, ("Join", "OK"): 1, ("Deal", "CANCELLED"): 2}
    assert of(after, "sessions_ended_total") == {("away",): 1}
    assert of(after, "passes_total") == {}
    assert after["material_bytes_total", "points", "client"] > 0
    assert after["refusals_total",] == 0


def test_a_client_that_is_killed_between_passes_has_not_ended_its_session(
    operated: Operated, channel: grpc.Channel
) -> None:
    before = operated.when_quiet()
    session = Session(operated, channel)
    server = Stream(session, SERVER)
    with killed(operated, session, rows=1, answers=PLAN.shape.layers + 2):  # a part a layer, the last norm's, the end
        until(operated.figures, lambda now: (now - before)["passes_total", "client"])
    now = until(operated.figures, lambda now: now["calls_open", "Deal"] == 1) - before
    assert of(now, "sessions_ended_total") == {}
    again = Stream(session, CLIENT)
    for stream in (again, server):
        stream.ask(1, 1, 1)
        stream.read()
    assert (again.close(), server.call.code()) == (CODE.OK, CODE.NOT_FOUND)
    after = operated.when_quiet() - before
    assert of(after, "sessions_ended_total") == {("client",): 1}
    ended = {key[1]: value for key, value in of(after, "calls_ended_total").items() if key[0] == "Deal"}
    assert ended.pop("NOT_FOUND") == 1
    # Of the one that was killed gRPC says at first that its messages are at an end.
    assert ended in ({"OK": 2}, {"OK": 1, "CANCELLED": 1})


def test_a_stream_that_is_replaced_and_a_session_that_fails(operated: Operated, channel: grpc.Channel) -> None:
    before = operated.when_quiet()
    session = Session(operated, channel)
    first = Stream(session, CLIENT)
    second = Stream(session, CLIENT)
    assert first.call.code() is CODE.INVALID_ARGUMENT
    now = operated.figures() - before
    assert (now["sessions",], now["calls_open", "Deal"]) == (1, 1)
    assert of(now, "sessions_ended_total") == {}
    second.ask(0, 1, 0)
    second.read()
    server = Stream(session, SERVER)
    server.ask(0, 2, 0)
    assert server.call.code() is second.call.code() is CODE.INVALID_ARGUMENT
    now = operated.figures() - before
    assert (now["sessions",], now["held_bytes",]) == (0, 0), "though it keeps its place until it is forgotten"
    after = operated.when_quiet() - before
    assert of(after, "sessions_ended_total") == {("failed",): 1}
    assert of(after, "refusals_total") == {("ProtocolError",): 3}
    assert after["calls_ended_total", "Deal", "INVALID_ARGUMENT"] == 3


def test_refusals_have_names_and_strangers_none(operated: Operated, channel: grpc.Channel) -> None:
    before, stub = operated.when_quiet(), pb_grpc.DealerStub(channel)
    token = TokenFile(operated.state / "client" / "tokens.json").issue("bob")
    own = (("authorization", f"Bearer {token}"),)

    def code(method: Any, request: Any, metadata: Any = own) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as raised:
            method(request, metadata=metadata, timeout=20)
        refused: grpc.StatusCode = raised.value.code()  # type: ignore[attr-defined]
        return refused

    begin = pb.BeginRequest(fingerprint="model", plan=PLAN.to_json())
    assert code(stub.Begin, begin, (("authorization", "Bearer sord_wrong"),)) is CODE.UNAUTHENTICATED
    assert code(stub.Begin, begin, ()) is CODE.UNAUTHENTICATED
    assert code(stub.Join, pb.JoinRequest(session=b"x", fingerprint="model")) is CODE.UNAUTHENTICATED
    assert code(stub.Begin, pb.BeginRequest(fingerprint="model", plan=b"{}")) is CODE.INVALID_ARGUMENT
    assert code(channel.unary_unary("/sordino.proto.v1.Dealer/Begin"), b"\xff") is CODE.INVALID_ARGUMENT
    assert code(channel.unary_unary("/sordino.proto.v1.Dealer/Secret-of-mine"), b"") is CODE.UNIMPLEMENTED
    # With streams, so that none ends before.
    streams = [Stream(Session(operated, channel, token=token), CLIENT) for _ in range(EACH)]
    assert code(stub.Begin, begin) is CODE.RESOURCE_EXHAUSTED
    assert [stream.close() for stream in streams] == [CODE.OK] * EACH
    after = operated.when_quiet() - before
    assert of(after, "refusals_total") == {("AuthError",): 3, ("ProtocolError",): 2, ("LimitError",): 1}
    assert of(after, "sessions_ended_total") == {("client",): EACH}
    assert of(after, "client_calls_total") == {
        ("(no token)",): 2,
        ("client/bob",): 4 + 3 * EACH,
        ("server/first",): EACH,
    }
    assert after["calls_ended_total", "other", "UNIMPLEMENTED"] == 1


def test_neither_figures_nor_log_tell_secrets(operated: Operated, channel: grpc.Channel) -> None:
    session = Session(operated, channel)
    stream = Stream(session, CLIENT)
    stream.ask(0, 1, 0)
    stream.read()
    shown = operated.page("metrics")[1] + operated.log()
    stream.close()
    operated.when_quiet()
    shown += operated.page("metrics")[1] + operated.log()
    tokens = [operated.token(party) for party in (CLIENT, SERVER)]
    digests = [sha256(token.encode()).hexdigest() for token in tokens]
    names = [name.hex() for name in (session.name, *session.keys)]
    assert "client/first" in shown
    for secret in (*tokens, *digests, *names, "model"):
        assert secret not in shown


def test_a_token_that_is_withdrawn_and_a_file_that_is_damaged(operated: Operated, channel: grpc.Channel) -> None:
    before, file = operated.when_quiet(), TokenFile(operated.state / "client" / "tokens.json")
    health = health_pb2_grpc.HealthStub(channel)
    stream = Stream(Session(operated, channel, token=file.issue("alice")), CLIENT)
    assert operated.figures()["sessions",] == 1
    file.revoke("alice")
    assert stream.call.code() is CODE.NOT_FOUND
    after = operated.when_quiet() - before
    assert of(after, "sessions_ended_total") == {("withdrawn",): 1}
    assert after["client_calls_total", "client/alice"] == 2
    [ended] = [line for line in operated.lines() if line.get("reason") == "withdrawn"]
    assert (ended["client"], ended["server"]) == ("client/alice", "server/first")

    def serving() -> bool:
        answer = health.Check(health_pb2.HealthCheckRequest(service="sordino.proto.v1.Dealer"), timeout=20)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    assert operated.page("readyz") == (200, "ready\n")
    assert serving()
    path = operated.state / "server" / "tokens.json"
    text = path.read_bytes()
    path.write_bytes(b"[")
    until(lambda: operated.page("readyz")[0], lambda status: status == 503)
    assert operated.page("readyz")[1] == "a token file cannot be read, so nobody new can enter\n"
    assert operated.page("livez") == (200, "alive\n")
    until(serving, lambda now: not now)
    path.write_bytes(text)
    until(lambda: operated.page("readyz"), lambda answer: answer == (200, "ready\n"))
    until(serving, bool)


def test_a_drain_is_seen_and_ends_what_is_open(tmp_path: Path) -> None:
    with Operated(tmp_path, "--grace", "60") as dealer, dealer.stub() as channel, ExitStack() as stack:
        session = Session(dealer, channel, LARGE)
        stream = Stream(session, CLIENT)
        stack.callback(stream.call.cancel)
        stream.ask(0, 20, 0)
        next(stream.call)
        assert dealer._process
        dealer._process.send_signal(signal.SIGTERM)
        until(lambda: dealer.page("readyz"), lambda answer: answer == (503, "the dealer is shutting down\n"))
        assert dealer.page("livez") == (200, "alive\n")
        stream.call.cancel()
        assert dealer._process.wait(30) == 0
        lines = dealer.lines()
        assert [line["status"] for line in lines if line.get("method") == "Deal"] == ["CANCELLED"]
        assert [line["reason"] for line in lines if "reason" in line] == ["shutdown"]


def test_the_page_of_operations_has_every_figure() -> None:
    metrics = Metrics()
    metrics.watch(**dict.fromkeys(_WATCHED, lambda: 0.0))
    families = metrics.registry.collect()
    real = {family.name + {"counter": "_total", "info": "_info"}.get(family.type, "") for family in families}
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    named = set(re.findall(r"sordino_dealer_[a-z_]+", text))
    assert named == {name for name in real if name.startswith("sordino_")}
    assert all(f"`{reason}`" in text for reason in get_args(Reason))


def test_a_session_ends_once_and_of_its_first_reason() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    with ThreadPoolExecutor(1) as threads:
        sessions = Sessions(Limits(), threads, metrics)

        def begun() -> Any:
            name, _ = sessions.begin("a" * 64, "model", PLAN.to_json(), "client/alice")
            sessions.join("b" * 64, name, "model", PLAN.to_json(), "server/bob")
            return sessions.find("a" * 64, CLIENT, name)

        async def program() -> None:
            ends: dict[str, Callable[[Any], None]] = {
                "idle": lambda session: setattr(session, "used", session.used - 1e6),
                "away": lambda session: setattr(session, "left", session.left - 1e6),
                "client": sessions.end,
            }
            for reason, end in ends.items():
                end(begun())
                sessions.tend()
                assert (len(sessions), value("sordino_dealer_sessions_ended_total", {"reason": reason})) == (0, 1)
            failed = begun()
            failed.ask(CLIENT, pb.Pass(number=0, rows=1))
            with pytest.raises(ProtocolError):
                failed.ask(SERVER, pb.Pass(number=0, rows=2))
            assert (len(sessions), sessions.open_ones) == (1, 0)
            sessions.end_all_but((set(), set()))
            begun()
            sessions.end_all_but((set(), set()))  # both parties' tokens
            begun()
            sessions.end_all()

        asyncio.run(program())
    ended = {
        reason: value("sordino_dealer_sessions_ended_total", {"reason": reason})
        for reason in ("idle", "away", "client", "failed", "withdrawn", "shutdown")
    }
    assert ended == dict.fromkeys(ended, 1)
    assert value("sordino_dealer_sessions_begun_total") == 6


def test_sums_can_be_asked_for_while_sessions_come_and_go() -> None:
    """By the thread of the metrics port."""
    stop, asked = threading.Event(), 0
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(2) as threads:
        sessions = Sessions(Limits(), threads)
        plan = PLAN.to_json()

        def ask() -> None:
            nonlocal asked
            while not stop.is_set():
                assert sessions.held_bytes == 0 <= sessions.open_ones
                asked += 1

        sys.setswitchinterval(1e-6)
        try:
            asking = threads.submit(ask)
            for _ in range(4):
                for number in range(128):
                    sessions.begin(f"{number // 16:064x}", "model", plan)
                sessions.end_all()
            stop.set()
            asking.result(60)
        finally:
            stop.set()
            sys.setswitchinterval(interval)
    assert asked
