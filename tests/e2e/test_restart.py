"""A server that goes away and comes back: answers go on with the same tokens, retried messages are the same bytes."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from stack import ServerProcess, answer, connect_to, opening, rows_message, send_raw

from sordino.client.proxy import RecordingProxy
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import SessionLostError

TOKENS = 6


@pytest.fixture(scope="module")
def mortal(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that tests end; each leaves it running."""
    with ServerProcess(bundles("llama"), tmp_path_factory.mktemp("mortal"), allow_clear=True) as process:
        yield process


class Assassin:
    """A proxy's ``tamper`` that ends the server at one message and starts it again meanwhile."""

    def __init__(self, server: ServerProcess, method: str, direction: str) -> None:
        self._server = server
        self._where = (method, direction)
        self._left = 0
        self.done = threading.Event()
        self.restarting: threading.Thread | None = None

    def arm(self, after: int) -> None:
        """At the message after ``after`` more of them."""
        self._left = after + 1

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> bytes | list[bytes]:
        if (method, direction) != self._where or not self._left:
            return raw
        self._left -= 1
        if self._left:
            return raw
        self._server.kill()
        self.restarting = threading.Thread(target=self._server.restart)
        self.restarting.start()
        self.done.set()
        # A request goes nowhere, an answer is lost.
        return raw if direction == "up" else []

    def wait(self) -> None:
        assert self.done.is_set(), "the server was never ended: the test proves nothing"
        assert self.restarting is not None
        self.restarting.join()


@pytest.mark.parametrize("protocol", ["masked", "clear"])
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("after", [0, 3, 21])
def test_killed_in_the_middle_of_an_answer(
    mortal: ServerProcess, tmp_path: Path, protocol: str, direction: str, after: int
) -> None:
    assassin = Assassin(mortal, "Evaluate", direction)
    with (
        RecordingProxy(mortal.target, ca=mortal.ca, tamper=assassin) as proxy,
        (connected := connect_to(mortal, tmp_path, target=proxy.target, ca=None, protocol=protocol)).session as session,
    ):
        undisturbed = answer(connected, tokens=TOKENS)
        begin = proxy.mark()
        assassin.arm(after)
        assert answer(connected, tokens=TOKENS) == undisturbed
        assassin.wait()
        assert session.traffic.retries >= 1
        copies = _copies(proxy, begin)
    repeated = {number: sent for number, sent in copies.items() if len(sent) > 1}
    assert repeated, "nothing was retried"
    for sent in repeated.values():
        assert len(set(sent)) == 1, "a retry must send the same bytes"
    # Nothing but the repeated messages occurs twice.
    rows = [pb.EvaluateRequest.FromString(sent[0]).data for sent in copies.values()]
    assert len(set(rows)) == len(rows) or protocol == "clear"


def _copies(proxy: RecordingProxy, begin: int) -> dict[int, list[bytes]]:
    """Evaluation requests by their number."""
    sent: dict[int, list[bytes]] = defaultdict(list)
    for message in proxy.messages()[begin:]:
        if message.method == "Evaluate" and message.direction == "up":
            assert message.raw is not None
            request = pb.EvaluateRequest.FromString(message.raw)
            if not request.HasField("open"):
                sent[request.id].append(message.raw)
    return sent


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_restarted_between_two_messages(mortal: ServerProcess, tmp_path: Path, number: int) -> None:
    with (connected := connect_to(mortal, tmp_path)).session as session:
        undisturbed = answer(connected, tokens=TOKENS)
        seen = 0

        def restart(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal seen
            seen += 1
            if seen == 3:
                mortal.signal(number)
                assert mortal.wait() == (0 if number == signal.SIGTERM else -number)
                mortal.restart()
            return scores

        started = time.monotonic()
        assert answer(connected, tokens=TOKENS, logits_processor=[restart]) == undisturbed
        assert seen == TOKENS
        assert session.traffic.retries >= 1
        assert time.monotonic() - started < 30


def test_server_that_stays_away(bundles: Callable[..., Path], tmp_path: Path) -> None:
    with ServerProcess(bundles("llama"), tmp_path / "server") as server:
        connected = connect_to(server, tmp_path, retry_s=4)
        with connected.session:
            undisturbed = answer(connected, tokens=2)
            server.kill()
            started = time.monotonic()
            with pytest.raises(SessionLostError, match="away"):
                answer(connected, tokens=2)
            assert time.monotonic() - started < 10
            server.restart()
            # The session is not lost for good: the next call opens a new stream, under new masks.
            assert answer(connected, tokens=2) == undisturbed


@pytest.mark.parametrize("after", [9, 30, 66])
def test_killed_while_masks_are_provisioned(mortal: ServerProcess, tmp_path: Path, after: int) -> None:
    assassin = Assassin(mortal, "Provision", "down")
    assassin.arm(after)
    with (
        RecordingProxy(mortal.target, ca=mortal.ca, tamper=assassin) as proxy,
        (connected := connect_to(mortal, tmp_path, target=proxy.target, ca=None)).session as session,
    ):
        assassin.wait()
        assert session.masks_left
        masked = answer(connected, tokens=TOKENS)
        sent = [pb.ProvisionRequest.FromString(m.raw) for m in proxy.messages("Provision", "up") if m.raw is not None]
    with (clear := connect_to(mortal, tmp_path, protocol="clear")).session:
        assert masked == answer(clear, tokens=TOKENS)
    seeds = [(request.seed, request.masks.block) for request in sent]
    assert len(set(seeds)) == len(seeds), "what was encrypted anew must have a fresh seed"
    owners = {(request.seed, request.group) for request in sent}
    assert len(owners) == len({seed for seed, _ in owners})


def test_killed_while_the_bundle_is_fetched(mortal: ServerProcess, tmp_path: Path) -> None:
    assassin = Assassin(mortal, "FetchFile", "down")
    assassin.arm(2)
    with RecordingProxy(mortal.target, ca=mortal.ca, tamper=assassin) as proxy:
        connected = connect_to(mortal, tmp_path, target=proxy.target, ca=None, protocol="clear")
        with connected.session:
            assassin.wait()
            assert len(answer(connected, tokens=2)) == 2


# -- SIGTERM ---------------------------------------------------------------------------------------------------------


def test_drain_in_the_middle_of_a_stream(mortal: ServerProcess) -> None:
    manifest = mortal.manifest
    drained = threading.Event()

    def requests() -> Iterator[bytes]:
        yield opening(manifest)
        number = 2
        while not drained.is_set():
            yield rows_message(manifest, rows=16, id=number)
            if number == 50:
                mortal.signal(signal.SIGTERM)
            number += 1

    threading.Timer(15, drained.set).start()
    answers, status, details = send_raw(mortal, "Evaluate", requests())
    drained.set()
    assert status is grpc.StatusCode.UNAVAILABLE, details
    # What was asked before is answered, in order and whole.
    parsed = [pb.EvaluateResponse.FromString(raw) for raw in answers]
    assert [response.id for response in parsed] == list(range(1, len(parsed) + 1))
    # All alike; on a busy machine it may be that none was read before the signal.
    assert len({response.data for response in parsed[1:]}) <= 1
    _, status, _ = send_raw(mortal, "GetManifest", [b""])
    assert status is grpc.StatusCode.UNAVAILABLE
    assert mortal.wait() == 0
    assert "Traceback" not in mortal.log()
    mortal.restart()
    assert mortal.serves()


def test_drain_ends_idle_streams_at_once(mortal: ServerProcess) -> None:
    manifest, held = mortal.manifest, threading.Event()

    def requests() -> Iterator[bytes]:
        yield opening(manifest)
        mortal.signal(signal.SIGTERM)
        held.wait(20)

    started = time.monotonic()
    answers, status, details = send_raw(mortal, "Evaluate", requests())
    held.set()
    assert status is grpc.StatusCode.UNAVAILABLE, f"{status}: {details}\n{mortal.log()[-1000:]}"
    assert len(answers) <= 1
    assert mortal.wait() == 0
    assert time.monotonic() - started < 8, "an idle stream held the server up until the grace was over"
    mortal.restart()


def test_drain_does_not_wait_for_a_client_that_does_not_read(bundles: Callable[..., Path], tmp_path: Path) -> None:
    with ServerProcess(bundles("llama"), tmp_path, arguments=("--grace", "1")) as server, server.channel() as channel:
        manifest, held = server.manifest, threading.Event()

        def requests() -> Iterator[bytes]:
            yield opening(manifest)
            for number in range(200):
                yield rows_message(manifest, of=2, rows=1000, id=number)
            held.wait(20)

        call = channel.stream_stream("/sordino.proto.v1.Sordino/Evaluate")(requests(), metadata=server.metadata)
        next(call)
        time.sleep(0.5)
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 8
        held.set()
        with pytest.raises(grpc.RpcError):
            list(call)
