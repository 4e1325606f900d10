"""Several servers of one model, from the client's side: who is asked, who is left out, and what is said of it."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from inprocess import InProcess
from stack import answer, opening

from sordino.client import Connected, Session, connect
from sordino.client.proxy import RecordingProxy
from sordino.client.transport import Connection
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.app import ServerConfig
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.shared.errors import (
    FingerprintError,
    HandshakeError,
    IntegrityError,
    KvEvictedError,
    RangeError,
    SessionLostError,
    TransportError,
)

NOWHERE = "grpc://127.0.0.1:9"
WAIT_S = 20.0


class Host(InProcess):
    """The real server in this process, of some layers or all; it can be ended, and come back at the same port."""

    def __init__(
        self, bundle: Path, layers: tuple[int, int] | None = None, *, port: int = 0, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        service = SordinoService(MatrixStore(bundle, layers=layers), limits, allow_clear=True)
        super().__init__(service, ServerConfig(bundle=bundle, tls=None, tokens=None, limits=limits), port=port)


Start = Callable[..., Host]


@pytest.fixture
def host(bundles: Callable[..., Path]) -> Iterator[Start]:
    made: list[Host] = []

    def start(layers: tuple[int, int] | None = None, *, family: str = "llama", **options: Any) -> Host:
        made.append(Host(bundles(family), layers, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are preferred in the order in which they are given."""
    monkeypatch.setattr(secrets.SystemRandom, "shuffle", lambda *_: None)


def link_to(tmp: Path, *targets: str, **options: Any) -> Connected:
    defaults: dict[str, Any] = {"cache": tmp / "cache", "timeout_s": 10, "retry_s": 5, "batch": 128, "low_water": 0}
    if options.get("protocol", "masked") in ("masked", "auto"):
        defaults |= {"pool": tmp / "pool", "state_dir": tmp / "state"}
    return connect(",".join(targets), **{**defaults, **options})


def undisturbed(tmp: Path, target: str, **options: Any) -> list[int]:
    with (link := link_to(tmp / "alone", target, protocol="clear")).session:
        return answer(link, **options)


def until(session: Session, what: Callable[[dict[str, Any]], bool]) -> None:
    """Waits until ``what`` is true of the problems by target; each look has those that are away asked again."""
    deadline = time.monotonic() + WAIT_S
    while not what({state.name: state.problem for state in session.targets()}):
        assert time.monotonic() < deadline, session.targets()
        session._connection.route.wait(0.1)


def rows_seen(proxy: RecordingProxy) -> list[bytes]:
    """The evaluation requests that a server got, but for the openings."""
    got = [pb.EvaluateRequest.FromString(m.raw or b"") for m in proxy.messages("Evaluate", "up")]
    return [request.SerializeToString() for request in got if not request.HasField("open")]


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["masked", "auto", "rlwe", "clear"])
def test_stages_give_the_tokens_of_one_server(host: Start, tmp_path: Path, protocol: Any) -> None:
    first, second = host((0, 0)), host((1, 1))
    with RecordingProxy(first.target) as low, RecordingProxy(second.target) as high:
        link = link_to(tmp_path, low.target, high.target, protocol=protocol, refill=protocol != "auto")
        with link.session as session:
            tokens = answer(link)
            states = session.targets()
            held = [range(s.first_group, s.first_group + s.group_count) for s in states]
            online = sum(session.traffic.up.get(phase, 0) for phase in ("online", "provision"))
        wire = 0
        for proxy, groups in ((low, held[0]), (high, held[1])):
            assert {pb.EvaluateRequest.FromString(raw).group for raw in rows_seen(proxy)} == set(groups)
            asked = {pb.ProvisionRequest.FromString(m.raw or b"").group for m in proxy.messages("Provision", "up")}
            assert asked == (set() if protocol == "clear" else set(groups))
            wire += sum(m.size for method in ("Evaluate", "Provision") for m in proxy.messages(method, "up"))
    assert held[0].stop == held[1].start
    assert held[1].stop == len(session.manifest.groups)
    assert all(state.in_use and not state.failures and state.problem is None for state in states)
    assert online == wire, "bytes of both servers are counted, each once"
    assert tokens == undisturbed(tmp_path, host().target)


def test_stages_that_overlap_and_a_whole_server(host: Start, tmp_path: Path, in_order: None) -> None:
    """The first that holds a group is asked for it, whoever holds it as well."""
    stage, whole = host((1, 1)), host()
    with (link := link_to(tmp_path, stage.target, whole.target)).session as session:
        assert answer(link) == undisturbed(tmp_path, whole.target)
        assert [state.in_use for state in session.targets()] == [True, True]


# -- what is wrong at the start ----------------------------------------------------------------------------------------


def test_servers_of_different_models(host: Start) -> None:
    one, other = host(), host(family="qwen2")
    with pytest.raises(FingerprintError) as told:
        Connection(f"{one.target},{other.target}", retry_s=5)
    assert one.target in str(told.value)
    assert other.target in str(told.value)
    with closing(Connection(one.target)) as a, closing(Connection(other.target)) as b:
        assert a.manifest.fingerprint in str(told.value)
        assert b.manifest.fingerprint in str(told.value)


def test_groups_that_nobody_holds(host: Start) -> None:
    stage, again = host((1, 1)), host((1, 1))
    start = time.monotonic()
    with pytest.raises(
        HandshakeError, match=r"no server holds groups 0 to 3 \(\S*layers\.0\.\S+ to \S*layers\.0\."
    ) as told:
        Connection(f"{stage.target},{again.target}", retry_s=60)
    assert stage.target in str(told.value)
    assert again.target in str(told.value)
    assert time.monotonic() - start < 30, "nobody comes who would hold them"
    with pytest.raises(HandshakeError, match="no server holds groups 0 to 3"):
        Connection(stage.target, retry_s=60)


def test_a_stage_that_cannot_be_reached_is_waited_for(host: Start, tmp_path: Path) -> None:
    low, high = host((0, 0)), host((1, 1))
    high.close()
    with pytest.raises(TransportError, match="no server holds groups 4 to 7") as told:
        Connection(f"{low.target},{high.target}", retry_s=0.5)
    assert high.target in str(told.value).partition("not reached: ")[2]
    back = threading.Timer(1.0, lambda: host((1, 1), port=high.port))
    back.start()
    with (link := link_to(tmp_path, low.target, high.target, retry_s=30)).session:
        assert answer(link) == undisturbed(tmp_path, host().target)
    back.join()


def test_nobody_answers() -> None:
    with pytest.raises(TransportError, match=r"127.0.0.1:9 \(nothing listens.*127.0.0.1:19 \(nothing listens"):
        Connection(f"{NOWHERE},{NOWHERE.replace(':9', ':19')}", retry_s=0)


@pytest.mark.parametrize("second", ["grpc://127.0.0.1:9", " grpc://127.0.0.1:9/", "grpcs://127.0.0.1:9"])
def test_one_server_twice(second: str) -> None:
    with pytest.raises(RangeError, match="named twice"):
        Connection(f"{NOWHERE},{second}", retry_s=60)


@pytest.mark.parametrize("targets", [f"{NOWHERE},", f",{NOWHERE}", f"{NOWHERE},,{NOWHERE}", f"{NOWHERE};{NOWHERE}"])
def test_a_list_with_a_hole(targets: str) -> None:
    with pytest.raises(TransportError, match="is not of the form"):
        Connection(targets, retry_s=60)


def test_unreachable_at_the_start_and_back_later(host: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, gone = host(), host()
    gone.close()
    with (link := link_to(tmp_path, gone.target, there.target)).session as session:
        assert f"{gone.target} is left out until it answers: nothing listens" in caplog.text
        expected = answer(link)
        assert [state.in_use for state in session.targets()] == [False, True]
        assert session.traffic.retries == 0
        host(port=gone.port)
        until(session, lambda problems: problems[gone.target] is None)
        there.close()
        assert answer(link) == expected
        assert [state.in_use for state in session.targets()] == [True, False]


def test_one_that_takes_connections_and_says_nothing(host: Start, tmp_path: Path) -> None:
    """Nobody waits for it to the end: not at the start, nor when it is asked again."""
    there = host()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        with (link := link_to(tmp_path, silent, there.target, timeout_s=120)).session as session:
            assert session.targets()[0].problem == "no answer yet"
            assert answer(link) == undisturbed(tmp_path, there.target)
            assert [state.in_use for state in session.targets()] == [False, True]


def test_who_comes_back_with_another_model_stays_out(
    host: Start, tmp_path: Path, in_order: None, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = host(), host()
    with (link := link_to(tmp_path, one.target, two.target)).session as session:
        expected = answer(link)
        one.close()
        other = host(family="qwen2", port=one.port)
        assert answer(link) == expected
        until(session, lambda problems: "another model" in str(problems[one.target]))
        assert f"{one.target} is left out: it holds another model" in caplog.text
        other.close()
        host(port=one.port)
        until(session, lambda problems: problems[one.target] is None)


def test_who_comes_back_as_another_stage_is_asked_for_that(host: Start, tmp_path: Path, in_order: None) -> None:
    one, low, high = host(), host((0, 0)), host((1, 1))
    with (link := link_to(tmp_path, one.target, low.target, high.target)).session as session:
        expected = answer(link)
        one.close()
        host((1, 1), port=one.port)
        assert answer(link) == expected
        until(session, lambda problems: problems[one.target] is None)
        assert session.targets()[0].group_count == 4
        high.close()
        assert answer(link) == expected
        assert [state.in_use for state in session.targets()] == [True, True, False]


def test_sessions_are_spread(host: Start) -> None:
    one, two = host(), host()
    used: Counter[str] = Counter()
    for _ in range(40):
        with closing(Connection(f"{one.target},{two.target}")) as connection:
            used.update(state.name for state in connection.route.states() if state.in_use)
    assert set(used) == {one.target, two.target}, "one time in 2^39 by chance"
    assert sum(used.values()) == 40, "a session asks one"


# -- in the middle of an answer ----------------------------------------------------------------------------------------


def test_a_full_server_is_passed_over(host: Start, tmp_path: Path, in_order: None) -> None:
    full, free = host(limits=Limits(max_streams=1)), host()
    held = threading.Event()
    with closing(Connection(full.target)) as other:

        def requests() -> Iterator[Any]:
            yield pb.EvaluateRequest.FromString(opening(other.manifest))
            held.wait(30)

        call = other.open_stream(requests())
        next(call)
        with (link := link_to(tmp_path, full.target, free.target)).session as session:
            assert answer(link) == undisturbed(tmp_path, free.target)
            assert [state.failures for state in session.targets()] == [1, 0]
            assert session.traffic.retries == 1
        held.set()
        call.cancel()


def test_an_overdue_answer_is_asked_of_another(host: Start, tmp_path: Path, in_order: None) -> None:
    """At once, for there is no time to wait here; and what comes too late is not taken for another answer."""
    one, two = host(), host()
    over = threading.Event()

    def hang(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction, index) == ("Evaluate", "down", 20):
            over.wait(30)
        return raw

    with (
        RecordingProxy(one.target, tamper=hang) as slow,
        RecordingProxy(two.target) as quick,
        (link := link_to(tmp_path, slow.target, quick.target, timeout_s=1, retry_s=0)).session as session,
    ):
        assert answer(link) == undisturbed(tmp_path, two.target)
        assert session.traffic.retries == 1
        assert [state.failures for state in session.targets()] == [1, 0]
        over.set()
        sent, resent = rows_seen(slow), rows_seen(quick)
    assert sent[-1] == resent[0], "the same bytes go to the other"
    assert len(set(sent + resent)) == len(sent + resent) - 1, "and no others twice"


def test_provisioning_moves_to_another(host: Start, tmp_path: Path, in_order: None) -> None:
    """With fresh seeds: a mask that is encrypted again is encrypted anew."""
    one, two = host(), host()

    def end(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction, index) == ("Provision", "down", 30):
            one.close()
        return raw

    with RecordingProxy(one.target, tamper=end) as first, RecordingProxy(two.target) as second:
        with (link := link_to(tmp_path, first.target, second.target)).session as session:
            assert session.masks_left == 128
            assert answer(link) == undisturbed(tmp_path, two.target)
        proxies = (first, second)
        sent = [pb.ProvisionRequest.FromString(m.raw or b"") for p in proxies for m in p.messages("Provision", "up")]
        assert all(p.messages("Provision", "down") for p in proxies)
    seeds = [(request.seed, request.masks.block) for request in sent]
    assert len(set(seeds)) == len(seeds)


def test_all_away_and_back(host: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = host(), host()
    with (link := link_to(tmp_path, one.target, two.target, retry_s=1)).session as session:
        expected = answer(link)
        one.close()
        two.close()
        start = time.monotonic()
        with pytest.raises(SessionLostError, match="all servers of these layers were away for 1 s") as told:
            answer(link)
        assert 1 <= time.monotonic() - start < 15
        assert one.target in str(told.value)
        assert two.target in str(told.value)
        host(port=two.port)
        session._connection.retry_s = 30
        assert answer(link) == expected
    assert [r.levelno for r in caplog.records if "failed" in r.message] == [logging.WARNING]


def test_closing_ends_the_wait_for_all(host: Start, tmp_path: Path) -> None:
    one, two = host(), host()
    link = link_to(tmp_path, one.target, two.target, retry_s=60)
    one.close()
    two.close()
    ending = threading.Timer(1.0, link.session.close)
    ending.start()
    start = time.monotonic()
    with pytest.raises(SessionLostError, match="closed"):
        answer(link)
    ending.join()
    assert time.monotonic() - start < 20


# -- a failed check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["masked", "auto", "rlwe"])
def test_a_lie_is_final_and_says_whose(host: Start, tmp_path: Path, in_order: None, protocol: Any) -> None:
    """Check vectors came from the first server; the second one's answers are held against them, and nobody is asked
    after the lie."""
    one, two = host(), host()
    lying = threading.Event()

    def lie(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction) != ("Evaluate", "down") or not lying.is_set():
            return raw
        response = pb.EvaluateResponse.FromString(raw)
        wrong = bytes(byte ^ 0x10 for byte in response.data[2:6])  # in the middle of numbers, and far above any noise
        response.data = response.data[:2] + wrong + response.data[6:]
        return response.SerializeToString()

    with RecordingProxy(one.target) as honest, RecordingProxy(two.target, tamper=lie) as liar:
        link = link_to(tmp_path, honest.target, liar.target, protocol=protocol, refill=protocol != "auto")
        with link.session:
            assert honest.messages("Provision"), "the check vectors are the first one's"
            assert not liar.messages("Provision")
            one.close()
            answer(link, tokens=1)
            assert liar.messages("Evaluate"), "the second one took over"
            host(port=one.port)
            until(link.session, lambda problems: not any(problems.values()))
            before = len(honest.messages("Evaluate", "up"))
            lying.set()
            for _ in range(2):
                with pytest.raises(IntegrityError, match=f"the answer of the server {liar.target} for group"):
                    answer(link)
            assert len(honest.messages("Evaluate", "up")) == before, "nothing is sent to another after a failed check"


# -- pages of a KV cache -----------------------------------------------------------------------------------------------


def test_pages_live_at_one_server_and_go_with_it(host: Start, tmp_path: Path, in_order: None) -> None:
    low, high = host((0, 0)), host((1, 1))
    spare, whole = host((0, 0)), host()
    options: dict[str, Any] = {"attention": "rlwe", "page_tokens": 2, "protocol": "clear"}
    with RecordingProxy(low.target) as first, RecordingProxy(high.target) as second:
        targets = (first.target, second.target, spare.target)
        with (link := link_to(tmp_path, *targets, **options)).session:
            expected = answer(link)
            assert first.messages("Attend"), "one server has the pages"
            assert not second.messages("Attend")
            steps = 0

            def end(ids: Any, scores: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == 3:
                    low.close()
                return scores

            with pytest.raises(KvEvictedError, match="start the answer anew"):
                answer(link, logits_processor=[end])
            assert answer(link) == expected, "the next answer puts its pages elsewhere"
    assert expected == undisturbed(tmp_path, whole.target)
