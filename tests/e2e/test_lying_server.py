"""A server that lies, once, in one element: the session stops, and nothing made with that server survives (§4.4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stack import ServerProcess, answer, connect_to

from sordino.client.proxy import RecordingProxy
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, ProtocolError, SordinoError
from sordino.shared.ring import P
from sordino.shared.rlwe import PARAMS, pack, unpack

U32 = NDArray[np.uint32]
TOKENS = 5
GROUPS = 8  # of the tiny Llama; so an answer of 5 tokens takes 40 messages each way, and one that opens the stream
BLOCKS = 8  # messages that answer one group's masks


class Liar:
    """A proxy's ``tamper``: calls ``lie`` with one answer of one method and passes on what it returns."""

    def __init__(self, method: str, place: int, lie: Callable[..., bytes | list[bytes]]) -> None:
        self._method = method
        self._lie = lie
        self.place = place
        self.told = False
        self.past: list[bytes] = []

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> bytes | list[bytes]:
        if (method, direction) != (self._method, "down"):
            return raw
        self.past.append(raw)
        if index != self.place:
            return raw
        self.told = True
        return self._lie(raw, self)


# -- online answers --------------------------------------------------------------------------------------------------


def _with_values(raw: bytes, change: Callable[[U32], U32]) -> bytes:
    response = pb.EvaluateResponse.FromString(raw)
    response.data = change(np.frombuffer(response.data, "<u4").copy()).astype("<u4").tobytes()
    return response.SerializeToString()


def _add(delta: int) -> Callable[[bytes, Liar], bytes]:
    def lie(raw: bytes, liar: Liar) -> bytes:
        def change(values: U32) -> U32:
            at = np.random.default_rng(liar.place).integers(values.size)
            values[at] = (int(values[at]) + delta) % P
            return values

        return _with_values(raw, change)

    return lie


def _over_p(raw: bytes, liar: Liar) -> bytes:
    return _with_values(raw, lambda values: np.concatenate([[np.uint32(P + 2)], values[1:]]))


def _swap_elements(raw: bytes, liar: Liar) -> bytes:
    return _with_values(raw, lambda values: np.concatenate([values[1::-1], values[2:]]))


def _swap_rows(raw: bytes, liar: Liar) -> bytes:
    def change(values: U32) -> U32:
        rows = values.reshape(-1, 128)
        assert rows.shape[0] > 2, "the first answer has a row for each token of the prompt"
        rows[[0, 1]] = rows[[1, 0]]
        return rows.reshape(-1)

    return _with_values(raw, change)


def _zeros(raw: bytes, liar: Liar) -> bytes:
    return _with_values(raw, np.zeros_like)


def _earlier_answer(raw: bytes, liar: Liar) -> bytes:
    """The answer to the same group's previous row, under the number of this one."""
    earlier = pb.EvaluateResponse.FromString(liar.past[-1 - GROUPS])
    response = pb.EvaluateResponse.FromString(raw)
    assert len(earlier.data) == len(response.data)
    response.data = earlier.data
    return response.SerializeToString()


def _other_number(raw: bytes, liar: Liar) -> bytes:
    response = pb.EvaluateResponse.FromString(raw)
    response.id += 1
    return response.SerializeToString()


def _resized(change: Callable[[bytes], bytes]) -> Callable[[bytes, Liar], bytes]:
    def lie(raw: bytes, liar: Liar) -> bytes:
        response = pb.EvaluateResponse.FromString(raw)
        response.data = change(response.data)
        return response.SerializeToString()

    return lie


# Answer 0 opens the stream; 1 to 8 are the prompt's, and so on.
ONLINE: dict[str, tuple[int, Callable[[bytes, Liar], bytes | list[bytes]]]] = {
    "first element plus one": (1, _add(1)),
    "one too many in the prompt": (4, _add(1)),
    "one too few": (13, _add(-1)),
    "one too many in the last answer of all": (GROUPS * TOKENS, _add(1)),
    "half of p": (23, _add(P // 2)),
    "element over p": (11, _over_p),
    "two elements swapped": (10, _swap_elements),
    "two rows swapped": (1, _swap_rows),
    "zeros": (20, _zeros),
    "an earlier answer": (27, _earlier_answer),
    "one element less": (12, _resized(lambda data: data[:-4])),
    "one byte less": (12, _resized(lambda data: data[:-1])),
    "one element more": (12, _resized(lambda data: data + bytes(4))),
    "empty": (12, _resized(lambda data: b"")),
    "another number": (14, _other_number),
}


@pytest.fixture(scope="module")
def truth(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The honest answer."""
    with (connected := connect_to(server, tmp_path_factory.mktemp("truth"))).session:
        return answer(connected, tokens=TOKENS)


class _Heard:
    """A streamer that keeps the tokens that came out."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", ONLINE)
def test_lie_in_an_online_answer(server: ServerProcess, tmp_path: Path, truth: list[int], name: str) -> None:
    place, lie = ONLINE[name]
    liar = Liar("Evaluate", place, lie)
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None, batch=192)
        with connected.session as session:
            heard = _Heard()
            with pytest.raises(IntegrityError) as caught:
                answer(connected, tokens=TOKENS, streamer=heard)
            assert liar.told
            # Nothing that depends on the false answer was sent, nothing of it came out.
            assert len(proxy.messages("Evaluate", "up")) == place + 1
            prompt = len(heard.tokens) - (place - 1) // GROUPS
            assert heard.tokens[prompt:] == truth[: (place - 1) // GROUPS]
            _ended_for_good(connected, proxy, caught.value, tmp_path)
            assert not session.masks_left
    # The server was honest all along: with everything made anew it serves as before.
    with (again := connect_to(server, tmp_path)).session:
        assert answer(again, tokens=TOKENS) == truth


def test_answer_that_is_no_message(server: ServerProcess, tmp_path: Path, truth: list[int]) -> None:
    """gRPC fails the call, as it does when a server has an error of its own: the answer stops, the masks are kept."""
    liar = Liar("Evaluate", 15, lambda raw, liar: raw[:3] + b"\xff\xff")
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None, batch=192)
        with connected.session:
            with pytest.raises(ProtocolError):
                answer(connected, tokens=TOKENS)
            assert len(proxy.messages("Evaluate", "up")) == 16
            assert answer(connected, tokens=TOKENS) == truth
        sent = [pb.EvaluateRequest.FromString(m.raw) for m in proxy.messages("Evaluate", "up") if m.raw]
    rows = [request.data for request in sent if request.data]
    assert len(set(rows)) == len(rows), "a masked row was sent twice"


def _ended_for_good(connected: Any, proxy: RecordingProxy, error: SordinoError, tmp_path: Path) -> None:
    sent = proxy.mark()
    for _ in range(2):
        with pytest.raises(type(error)):
            answer(connected, tokens=1)
    assert proxy.mark() == sent, "a session that failed sent something"
    assert not [path for path in (tmp_path / "pool").glob("*") if path.is_file()], "masks survive"
    assert not re.search(r"\d{5}", str(error)), "values in the text of an error"


def test_element_over_p_that_is_congruent_to_the_right_one(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p instead of 0: the check mod p alone would accept it, and it would unmask to another value."""
    liar = Liar("Evaluate", 1, lambda raw, _: _with_values(raw, lambda y: np.where(y == 0, np.uint32(P), y)))
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None)
        with connected.session as session:
            group = session.manifest.groups[0]
            nothing = np.zeros((3, group.in_features), np.uint32), np.zeros((3, group.out_features), np.uint32)
            # Without a mask a row of zeros is answered by zeros, the only value that has a second form.
            monkeypatch.setattr(session.protocol._keeper, "take", lambda *_: nothing)  # type: ignore[attr-defined]
            with pytest.raises(IntegrityError) as caught:
                session.protocol.apply(group, np.zeros((3, group.in_features), np.int32))
            assert liar.told
            _ended_for_good(connected, proxy, caught.value, tmp_path)


# -- provisioning ----------------------------------------------------------------------------------------------------


def _residue(half: str) -> Callable[[bytes, Liar], bytes]:
    def lie(raw: bytes, liar: Liar) -> bytes:
        response = pb.ProvisionResponse.FromString(raw)
        packed = getattr(response, half)
        values = unpack(packed, (2, len(packed) * 8 // 27 // 2))
        rng = np.random.default_rng(liar.place)
        prime, at = rng.integers(2), rng.integers(values.shape[1])
        values[prime, at] = (int(values[prime, at]) + 1) % PARAMS.primes[prime]
        setattr(response, half, pack(values))
        return response.SerializeToString()

    return lie


def _cut(raw: bytes, liar: Liar) -> bytes:
    response = pb.ProvisionResponse.FromString(raw)
    response.c1 = response.c1[:-216]
    return response.SerializeToString()


def _residue_over_its_prime(raw: bytes, liar: Liar) -> bytes:
    response = pb.ProvisionResponse.FromString(raw)
    response.c0 = b"\xff" * len(response.c0)
    return response.SerializeToString()


def _halves_swapped(raw: bytes, liar: Liar) -> bytes:
    response = pb.ProvisionResponse.FromString(raw)
    response.c0, response.c1 = response.c1, response.c0
    return response.SerializeToString()


def _other_group(raw: bytes, liar: Liar) -> bytes:
    response = pb.ProvisionResponse.FromString(raw)
    response.group += 1
    return response.SerializeToString()


def _previous(raw: bytes, liar: Liar) -> bytes:
    """The block before instead of this one: two blocks of a group have one size."""
    return liar.past[-2]


# Answers 0 to 7 are check vectors, then 8 blocks for each group.
FIRST = GROUPS
PROVISIONED: dict[str, tuple[int, Callable[[bytes, Liar], bytes | list[bytes]]]] = {
    "a check vector's residue": (0, _residue("c0")),
    "the last check vector's residue": (GROUPS - 1, _residue("c1")),
    "a residue of the first block": (FIRST, _residue("c0")),
    "a residue of the random half's product": (FIRST + 19, _residue("c1")),
    "a residue of the last block of all": (FIRST + BLOCKS * GROUPS - 1, _residue("c0")),
    "halves swapped": (FIRST + 12, _halves_swapped),
    "a block twice": (FIRST + 5, _previous),
    "cut": (FIRST + 6, _cut),
    "a check vector cut": (3, _cut),
    "residues over their prime": (FIRST + 7, _residue_over_its_prime),
    "another group's number": (FIRST + 9, _other_group),
    "no message at all": (FIRST + 9, lambda raw, liar: b"\xff" * 20),
}


@pytest.mark.parametrize("name", PROVISIONED)
def test_lie_while_masks_are_provisioned(server: ServerProcess, tmp_path: Path, truth: list[int], name: str) -> None:
    place, lie = PROVISIONED[name]
    liar = Liar("Provision", place, lie)
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        with pytest.raises((IntegrityError, ProtocolError)) as caught:
            connect_to(server, tmp_path, target=proxy.target, ca=None)
        assert liar.told
        batches = [path.name for path in (tmp_path / "pool").glob("*") if path.suffix in (".keys", ".data", ".part")]
        assert not batches, "masks of a batch with a false answer survive"
        assert (tmp_path / "pool").exists() != isinstance(caught.value, IntegrityError)
        assert not proxy.messages("Evaluate"), "a prompt was sent after a false answer"
    with (again := connect_to(server, tmp_path)).session:
        assert answer(again, tokens=TOKENS) == truth


def test_two_blocks_in_the_wrong_order(server: ServerProcess, tmp_path: Path) -> None:
    held: list[bytes] = []

    def tamper(method: str, direction: str, index: int, raw: bytes) -> bytes | list[bytes]:
        if (method, direction) != ("Provision", "down") or index not in (FIRST + 2, FIRST + 3):
            return raw
        held.append(raw)
        return [] if len(held) == 1 else held[::-1]

    with RecordingProxy(server.target, ca=server.ca, tamper=tamper) as proxy, pytest.raises(IntegrityError):
        connect_to(server, tmp_path, target=proxy.target, ca=None)
    assert len(held) == 2


def test_lie_in_a_background_refill(server: ServerProcess, tmp_path: Path) -> None:
    liar = Liar("Provision", -1, _residue("c0"))
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None, batch=64, low_water=64)
        with connected.session:
            liar.place = len(proxy.messages("Provision", "down")) + 20
            with pytest.raises(IntegrityError):  # noqa: PT012 - which answer it meets is up to the threads
                for _ in range(20):
                    answer(connected, tokens=TOKENS)
            assert liar.told
            with pytest.raises(IntegrityError):
                answer(connected, tokens=1)
    assert not [path for path in (tmp_path / "pool").glob("*") if path.is_file()]


def test_without_check_vectors_a_lie_goes_unseen(server: ServerProcess, tmp_path: Path, truth: list[int]) -> None:
    """What the checks are for: the control of this file."""
    liar = Liar("Evaluate", 20, _zeros)
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None, check_vectors=0)
        with connected.session:
            assert len(answer(connected, tokens=TOKENS)) == TOKENS
    assert liar.told


def test_two_check_vectors(server: ServerProcess, tmp_path: Path, truth: list[int]) -> None:
    liar = Liar("Evaluate", 20, _add(1))
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None, check_vectors=2)
        with connected.session, pytest.raises(IntegrityError):
            answer(connected, tokens=TOKENS)
    assert liar.told
