"""Profile two-party in bad company: messages that do not fit, parties that go, and clients that ask for more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import InProcess
from stack import PROMPT, ServerProcess
from twoparty import DealerProcess, serve_with

from sordino.client.proxy import RecordingProxy, Tamper
from sordino.client.twoparty.connect import TwoPartyConnected, connect
from sordino.proto.v1 import dealer_pb2 as deal_pb
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.app import ServerConfig
from sordino.server.service import Limits, SordinoService
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import TwoPartyModel
from sordino.shared.errors import (
    FingerprintError,
    IntegrityError,
    LimitError,
    ProtocolError,
    SessionLostError,
    SordinoError,
    TransportError,
    UnknownGroupError,
)
from sordino.shared.twoparty.source import Dealer, PassSource
from sordino.shared.twoparty.tape import CLIENT, SERVER

IDLE_S = 1.5
PLACES = 6
OPENED = 8


class PartyServer(InProcess):
    """In this process, so that its threads can be counted; with a short patience."""

    def __init__(self, bundle: Path, dealer: DealerProcess) -> None:
        limits = Limits(idle_s=IDLE_S, max_two_party=PLACES, max_opened_rows=OPENED)
        store = MatrixStore(bundle, "cpu")
        self.dealer = Dealer(dealer.target, dealer.ca, dealer.token_file("server").read_text().strip())
        service = SordinoService(store, limits, two_party=(TwoPartyModel(store, OPENED), self.dealer))
        super().__init__(service, ServerConfig(bundle=bundle, tls=None, tokens=None, limits=limits))

    def end_overdue(self) -> None:
        """As a server's process does every now and then."""
        self.do(self.service.waits.end_overdue)

    def close(self) -> None:
        super().close()
        self.dealer.close()


@pytest.fixture(scope="module")
def dealer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DealerProcess]:
    with DealerProcess(tmp_path_factory.mktemp("dealer"), arguments=("--max-sessions-each", "200")) as process:
        yield process


@pytest.fixture(scope="module")
def server(bundles: Callable[..., Path], dealer: DealerProcess) -> Iterator[PartyServer]:
    running = PartyServer(bundles("llama"), dealer)
    yield running
    running.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client")


@pytest.fixture(scope="module")
def witness(server: PartyServer, dealer: DealerProcess, cache: Path) -> Iterator[TwoPartyConnected]:
    """A session that is open all the while."""
    connected = link_to(server.target, dealer, cache, ahead=256)
    with connected.session:
        yield connected


@pytest.fixture
def linked(server: PartyServer, dealer: DealerProcess, cache: Path) -> Iterator[Callable[..., TwoPartyConnected]]:
    """A new session, by way of a proxy that alters messages; closed after the test."""
    made: list[Any] = []

    def link(tamper: Tamper | None = None, **options: Any) -> TwoPartyConnected:
        proxy = RecordingProxy(server.target, tamper=tamper, keep_bytes=())
        made.append(proxy)
        connected = link_to(proxy.target, dealer, cache, **options)
        made.append(connected.session)
        return connected

    yield link
    for one in reversed(made):
        one.close()


def link_to(target: str, running: DealerProcess, cache: Path, **options: Any) -> TwoPartyConnected:
    token = running.token_file("client").read_text().strip()
    fixed: dict[str, Any] = {"dealer": running.target, "dealer_ca": running.ca, "dealer_token": token, "ahead": 6}
    return connect(target, **{**fixed, "cache": cache, "timeout_s": 20, "retry_s": 5, **options})


def ask(connected: TwoPartyConnected, tokens: int = 2, prompt: str = "ab") -> list[int]:
    inputs = connected.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = connected.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def is_over(connected: TwoPartyConnected) -> bool:
    with pytest.raises(SessionLostError, match=r"connect anew|closed"):
        ask(connected)
    return connected.session._connection.closed


@dataclass
class Once:
    """Alters one message: the ``at``-th of a kind, in one direction."""

    direction: str
    kind: str
    at: int
    change: Callable[[Any], Any]
    seen: int = field(default=0, init=False)

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> Any:
        if method != "Compute" or direction != self.direction:
            return raw
        message: Any = (pb.ComputeRequest if direction == "up" else pb.ComputeResponse).FromString(raw)
        if message.WhichOneof("kind") != self.kind:
            return raw
        self.seen += 1
        if self.seen != self.at + 1:
            return raw
        changed = self.change(message)
        if isinstance(changed, list):
            return [one.SerializeToString() for one in changed]
        return (message if changed is None else changed).SerializeToString()


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """Sets a field, to a value or by a function of what it was."""

    def change(message: Any) -> None:
        *outer, last = path.split(".")
        for name in outer:
            message = getattr(message, name)
        setattr(message, last, value(getattr(message, last)) if callable(value) else value)

    return change


def keeping(first: int, count: int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        del message.forward.numbers.kept[:]
        message.forward.numbers.kept.add(first=first, count=count)

    return change


def seeing(bits: bytes) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.forward.positions.append(0)
        message.forward.visible = bits

    return change


def extending(field: str, *values: int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        getattr(message.forward, field).extend(values)

    return change


def twice(message: Any) -> list[Any]:
    return [message, message]


def words_before(message: Any) -> list[Any]:
    return [pb.ComputeRequest(words=bytes(8)), message]


def flood(message: Any) -> list[Any]:
    return [message] * 40


def cut(data: bytes) -> bytes:
    return data[:-8]


FORGED = [
    # Of the opening.
    ("open", 0, setting("open.fingerprint", "sha256:" + "0" * 64), FingerprintError, "split"),
    ("open", 0, setting("open.protocol", pb.PROTOCOL_MASKED), ProtocolError, "TWO_PARTY"),
    ("session", 0, setting("session.session", bytes(16)), TransportError, "dealer does not know this session"),
    ("session", 0, setting("session.digest", bytes(32)), ProtocolError, "other public numbers"),
    ("session", 0, setting("session.public_key", cut), ProtocolError, "bytes"),
    ("session", 0, lambda m: pb.ComputeRequest(words=b""), ProtocolError, "second message"),
    # Of products.
    ("products", 1, setting("products.ciphertexts", cut), ProtocolError, "bytes"),
    ("products", 1, setting("products.layer", 99), UnknownGroupError, "does not exist"),
    ("products", 1, setting("products.rows", 0), ProtocolError, "1 to"),
    ("products", 1, setting("products.rows", 4097), ProtocolError, "1 to"),
    ("products", 1, setting("products.last", False), ProtocolError, "goes on after its last"),
    ("products", 0, setting("products.matrix", 3), ProtocolError, "answered blocks"),
    # Of passes: rows that nobody made, numbers and counters again, rows that a cache lacks.
    ("forward", 0, setting("forward.numbers.rows", 7), ProtocolError, "6 were made ahead"),
    ("forward", 0, setting("forward.numbers.rows", 200), LimitError, "at most"),
    ("forward", 0, twice, ProtocolError, "when the pass before has ended"),
    ("forward", 0, words_before, ProtocolError, "words of no pass"),
    ("forward", 1, setting("forward.numbers.number", 0), ProtocolError, "numbers go up"),
    ("forward", 1, setting("forward.numbers.first_counter", 1), ProtocolError, "used before"),
    ("forward", 1, keeping(1, 1), ProtocolError, "does not have"),
    ("forward", 1, keeping(0, 5000), ProtocolError, "at most"),
    ("forward", 0, keeping(0, 1), ProtocolError, "used before"),
    ("forward", 0, lambda m: pb.ComputeRequest(), ProtocolError, "none of them"),
    # Of what rows see and open.
    ("forward", 0, extending("positions", 0), ProtocolError, "1 positions of"),
    ("forward", 1, extending("positions", 1 << 20), ProtocolError, "that the model does not have"),
    ("forward", 0, setting("forward.visible", b"\xff"), ProtocolError, "0 positions"),
    ("forward", 1, seeing(b"\xff" * 9), ProtocolError, "72 bits"),
    ("forward", 1, seeing(b"\x00"), ProtocolError, "does not see itself"),
    ("forward", 0, extending("opened", 0), ProtocolError, "in their order"),
    ("forward", 1, extending("opened", 1), ProtocolError, "rows of the pass, of which there are 1"),
    ("forward", 0, extending("opened", *range(1, OPENED + 1)), LimitError, f"opens at most {OPENED}"),
    # Of passes asked for ahead.
    ("ahead", 0, twice, ProtocolError, "one at a time"),
    ("ahead", 0, setting("ahead.rows", 200), LimitError, "at most"),
    ("ahead", 0, setting("ahead.number", 0), ProtocolError, "numbers go up"),
    # Of words.
    ("words", 3, setting("words", cut), ProtocolError, "bytes where"),
    ("words", 3, setting("words", b""), ProtocolError, "bytes where"),
    ("words", 3, twice, ProtocolError, "bytes where"),
    ("words", 3, flood, (LimitError, ProtocolError), "wait for|bytes where"),
]


@pytest.mark.parametrize(("kind", "at", "change", "error", "text"), FORGED)
def test_a_client_whose_messages_do_not_fit(
    linked: Callable[..., TwoPartyConnected],
    witness: TwoPartyConnected,
    kind: str,
    at: int,
    change: Any,
    error: Any,
    text: str,
) -> None:
    """It is told why, and gets no answer. More than its share of the last hidden state is nowhere to be had: an answer
    to words is words of its pass, and every pass has a number, counters and products of its own."""
    tamper = Once("up", kind, at, change)
    with pytest.raises(error, match=text):
        ask(linked(tamper), tokens=3)
    assert tamper.seen >= at + 1, "nothing was altered"
    assert ask(witness, 1), "others are served"


LIED = [
    ("words", 3, setting("words", cut), ProtocolError, "bytes where"),
    ("words", 3, twice, ProtocolError, "bytes where"),
    ("words", 3, lambda m: pb.ComputeResponse(joined=True), IntegrityError, "another kind"),
    ("words", 3, lambda m: pb.ComputeResponse(), IntegrityError, "another kind"),
    ("answers", 1, setting("answers.ciphertexts", cut), ProtocolError, "bytes"),
    ("answers", 1, setting("answers.last", False), SessionLostError, "sent nothing for 1 s"),
    ("plan", 0, setting("plan.plan", b"{"), ProtocolError, "plan"),
]


@pytest.mark.parametrize(("kind", "at", "change", "error", "text"), LIED)
def test_a_server_whose_messages_do_not_fit(
    linked: Callable[..., TwoPartyConnected],
    witness: TwoPartyConnected,
    kind: str,
    at: int,
    change: Any,
    error: Any,
    text: str,
) -> None:
    tamper = Once("down", kind, at, change)
    with pytest.raises(error, match=text):
        ask(linked(tamper, timeout_s=1), tokens=3)
    assert tamper.seen >= at + 1, "nothing was altered"
    assert ask(witness, 1), "others are served"


def test_what_broke_is_over(linked: Callable[..., TwoPartyConnected]) -> None:
    """On both sides: a pass after it would mix what two parties have of different passes."""
    connected = linked(Once("down", "words", 30, setting("words", cut)))
    right = ask(linked())
    with pytest.raises(ProtocolError, match="bytes where"):
        ask(connected)
    assert is_over(connected)
    assert ask(linked()) == right


def test_a_session_of_another_server_cannot_be_joined_again(linked: Callable[..., TwoPartyConnected]) -> None:
    """Nor by the same: its material goes to two parties."""
    first = linked()
    name = first.session._dealing.session
    with pytest.raises(ProtocolError, match="a second one cannot"):
        linked(Once("up", "session", 0, setting("session.session", name)))
    assert len(ask(first)) == 2


def party_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(("dealer stream", "sordino-watchdog"))]


def until(there: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not (found := there()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_clients_that_vanish_in_the_middle_leave_nothing(
    linked: Callable[..., TwoPartyConnected], server: PartyServer
) -> None:
    """More of them than there are places for: each is free at once, with the thread and the dealer's stream."""
    before = len(party_threads())
    held: list[TwoPartyConnected] = []

    def vanish(message: Any) -> None:
        held[-1].session._call.cancel()

    for _ in range(PLACES + 1):
        connected = linked(Once("down", "words", 9, vanish))
        held.append(connected)
        with pytest.raises(SessionLostError):
            ask(connected)
        connected.session.close()
    assert until(lambda: len(party_threads()) <= before), [one.name for one in party_threads()]
    assert len(ask(linked())) == 2


def test_a_client_that_says_nothing_in_the_middle(
    linked: Callable[..., TwoPartyConnected], server: PartyServer
) -> None:
    """Its thread and its place have an end."""
    before = len(party_threads())
    over = threading.Event()

    def wait(message: Any) -> list[Any]:
        begin = time.monotonic()
        while not over.wait(0.1) and time.monotonic() < begin + 20:
            server.end_overdue()
        return []

    connected = linked(Once("up", "words", 9, wait))
    with pytest.raises(SessionLostError, match="sent nothing for"):
        ask(connected)
    over.set()
    assert until(lambda: len(party_threads()) <= before)


def test_ctrl_c_in_an_answer(linked: Callable[..., TwoPartyConnected]) -> None:
    """It ends the answer and with it the session, and no lock of gRPC's is held for ever."""
    right = ask(linked())

    def interrupt(message: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    connected = linked(Once("down", "words", 20, interrupt))
    with pytest.raises(KeyboardInterrupt):
        ask(connected, tokens=4)
    assert is_over(connected)
    assert ask(linked()) == right


def test_ctrl_c_while_products_are_made(linked: Callable[..., TwoPartyConnected]) -> None:
    """What the two sides have of them does not fit together any more: a pass with it would be wrong."""

    def interrupt(message: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    connected = linked(Once("down", "answers", 10, interrupt))
    with pytest.raises(KeyboardInterrupt):
        connected.session.provision(2)
    assert is_over(connected)


def test_a_session_that_is_closed_during_a_pass(linked: Callable[..., TwoPartyConnected]) -> None:
    held: list[TwoPartyConnected] = []
    closers: list[threading.Thread] = []

    def close(message: Any) -> None:
        closers.append(threading.Thread(target=held[0].session.close))
        closers[0].start()
        closers[0].join(0.5)

    held.append(linked(Once("down", "words", 9, close)))
    with pytest.raises(SessionLostError, match="the session is closed"):
        ask(held[0])
    closers[0].join(20)
    assert not closers[0].is_alive()
    with pytest.raises(SessionLostError, match="the session is closed"):
        ask(held[0])


def test_ctrl_c_while_the_dealer_is_silent(linked: Callable[..., TwoPartyConnected], dealer: DealerProcess) -> None:
    """The client waits for material then, maybe for minutes, in no lock that an interrupt could leave taken."""
    connected = linked()
    dealer.signal(signal.SIGSTOP)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ask(connected)
        assert time.monotonic() - start < 20, "of the 30 s and more that a silent dealer is waited for"
    finally:
        dealer.signal(signal.SIGCONT)
    assert is_over(connected)


def test_threads_take_turns(linked: Callable[..., TwoPartyConnected]) -> None:
    """Passes of one session in two threads: all right."""
    prompts = ("ab", "xy") * 3
    connected = linked(ahead=24)
    right = [ask(connected, 1, prompt) for prompt in prompts[:2]] * 3
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda prompt: ask(connected, 1, prompt), prompts)) == right


def test_a_cache_of_an_answer_before_is_refused_and_nothing_breaks(linked: Callable[..., TwoPartyConnected]) -> None:
    """A session has one cache; what asks for rows that another prompt has dropped is told so, before it is sent."""
    connected = linked(ahead=12)
    session, rows = connected.session, np.ones((2, connected.session.plan.shape.d))
    _, old = session.forward(rows, [])
    _, new = session.forward(rows, [])
    with pytest.raises(ProtocolError, match="another prompt"):
        session.forward(rows[:1], old)
    session.forward(rows[:1], new)


def test_a_session_that_does_not_open_leaves_nothing(linked: Callable[..., TwoPartyConnected]) -> None:
    before = len(party_threads())
    for _ in range(3):
        with pytest.raises(SordinoError):
            linked(Once("up", "session", 0, setting("session.digest", bytes(32))))
    assert until(lambda: len(party_threads()) <= before), [one.name for one in party_threads()]


def test_one_client_more_than_there_is_room_for(linked: Callable[..., TwoPartyConnected]) -> None:
    held: list[TwoPartyConnected] = []

    def fill() -> None:
        while len(held) <= PLACES:
            held.append(linked(ahead=0))

    with pytest.raises(LimitError, match="two-party sessions"):
        fill()
    held.pop().session.close()

    def opens() -> bool:
        try:
            linked(ahead=0)
        except LimitError:
            return False
        return True

    assert until(opens), "a place is free again"


def test_a_dealer_that_is_not_there(linked: Callable[..., TwoPartyConnected]) -> None:
    """An error, in seconds, and no session without one."""
    with pytest.raises(TransportError, match=r"nothing listens there|cannot be reached"):
        linked(dealer="grpcs://localhost:1")


def test_a_model_in_bfloat16(linked: Callable[..., TwoPartyConnected]) -> None:
    """Case 5.10. What is the client's own has the type that it likes: the same tokens, within that type's precision."""
    connected = linked(ahead=16)
    ids = torch.tensor([[40, 41, 42, 43]])
    with torch.no_grad():
        right = connected.model(ids).logits
        found = connected.model.to(torch.bfloat16)(ids).logits
    assert found.dtype == torch.bfloat16
    assert (found.float() - right).abs().max() < 0.05 * right.abs().max()
    assert (found.argmax(-1) == right.argmax(-1)).float().mean() >= 0.75


def test_a_dealer_that_is_killed_in_an_answer(
    linked: Callable[..., TwoPartyConnected], dealer: DealerProcess, server: PartyServer
) -> None:
    """The answer ends with an error, nothing of the session is used again, and a new one works when it is back."""
    right = ask(linked())

    def kill(message: Any) -> None:
        dealer.kill()
        dealer.start()

    connected = linked(Once("down", "words", 9, kill), timeout_s=60)
    with pytest.raises(SordinoError, match=r"dealer|session"):
        ask(connected, tokens=6)
    assert is_over(connected)
    assert ask(linked()) == right


def test_a_server_that_is_killed_in_an_answer(
    bundles: Callable[..., Path], dealer: DealerProcess, cache: Path, tmp_path: Path
) -> None:
    with serve_with(dealer, bundles("llama"), tmp_path) as process:
        assert isinstance(process, ServerProcess)
        options: dict[str, Any] = {"ca": process.ca, "token": process.token}
        connected = link_to(process.target, dealer, cache, **options)
        right = ask(connected)
        passes, product = 0, connected.session.product

        def killing(*arguments: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 5:
                process.kill()
            return product(*arguments)

        connected.session.product = killing  # type: ignore[method-assign]
        with pytest.raises(SessionLostError, match="connect anew"):
            ask(connected, prompt=PROMPT[:4])
        assert is_over(connected)
        process.restart()
        again = link_to(process.target, dealer, cache, **options)
        with again.session:
            assert ask(again) == right


def test_a_pass_asked_ahead_that_is_lost_costs_a_number_and_nothing_else(
    linked: Callable[..., TwoPartyConnected],
) -> None:
    """The client's stream from the dealer broke in it, between two tokens."""
    rows = np.linspace(-1, 1, 4 * 64).reshape(4, -1)

    def run(*, losing: bool) -> list[np.ndarray[Any, Any]]:
        session, kept, found = linked(ahead=4).session, list[int](), []
        for row in rows[:, : session.plan.shape.d]:
            hidden, new = session.forward(row[None], kept)
            kept += new
            found.append(hidden)
            assert session._ahead is not None
            wanted, source = session._ahead
            source.wait()
            if losing:
                with session._dealing.stream.changed:
                    source.lose()
        assert wanted.number == (7 if losing else 4)
        return found

    for lost, right in zip(run(losing=True), run(losing=False), strict=True):
        assert np.abs(lost - right).max() < 0.02 * np.abs(right).max()


def test_a_dealer_that_falls_silent(linked: Callable[..., TwoPartyConnected], dealer: DealerProcess) -> None:
    """No longer than any other message is waited for."""
    connected = linked(timeout_s=1)
    dealer.signal(signal.SIGSTOP)
    try:
        with pytest.raises(SessionLostError, match="the dealer has sent nothing for 1 s"):
            connected.session.ask_ahead(1, [])
    finally:
        dealer.signal(signal.SIGCONT)


def test_a_server_that_ends_while_the_dealer_is_waited_for(
    server: PartyServer, dealer: DealerProcess, cache: Path
) -> None:
    with RecordingProxy(server.target, keep_bytes=()) as proxy:
        connected = link_to(proxy.target, dealer, cache)
        dealer.signal(signal.SIGSTOP)
        try:
            threading.Timer(0.5, proxy.close).start()
            with pytest.raises(SessionLostError, match="while the dealer was waited for, the server ended"):
                connected.session.ask_ahead(1, [])
        finally:
            dealer.signal(signal.SIGCONT)


@pytest.mark.parametrize("party", [CLIENT, SERVER])
def test_a_dealer_that_sends_too_much(
    linked: Callable[..., TwoPartyConnected], monkeypatch: pytest.MonkeyPatch, party: int
) -> None:
    """To either: it is told at the end of the pass, and nothing of it is used."""
    put = PassSource.put

    def more(source: PassSource, part: deal_pb.DealResponse, to: int) -> int:
        if part.last and to == party:
            part.points = b"1"
        return put(source, part, to)

    monkeypatch.setattr(PassSource, "put", more)
    with pytest.raises(ProtocolError, match="bytes too many for pass 0"):
        ask(linked())
