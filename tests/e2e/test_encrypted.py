"""Protocols that need no pool: ``rlwe``, and ``auto`` with masks made just in time (two processes, TLS)."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack import ServerProcess, answer, connect_to, send_raw

from sordino.client.proxy import RecordingProxy
from sordino.client.rlwe import SecretKey
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, RangeError, SordinoError
from sordino.shared.packing import BlockShape
from sordino.shared.rlwe import PARAMS, SWITCH_BITS, pack, unpack

TOKENS = 6
GROUPS = 8


@pytest.fixture(scope="module")
def truth(clear_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    with (connected := connect_to(clear_server, tmp_path_factory.mktemp("truth"), protocol="clear")).session:
        return answer(connected, tokens=TOKENS)


def auto(server: ServerProcess, tmp: Path, **options: Any) -> Any:
    pooled = {"pool": tmp / "pool", "state_dir": tmp / "client-state"}
    return connect_to(server, tmp, protocol="auto", **pooled, **options)


@pytest.mark.parametrize("bandwidth", [10.0, 100_000.0])  # answers switched to fewer bits, and whole
def test_rlwe_gives_the_tokens_of_clear(
    server: ServerProcess, truth: list[int], tmp_path: Path, bandwidth: float
) -> None:
    with (connected := connect_to(server, tmp_path, protocol="rlwe", bandwidth_mbit=bandwidth)).session:
        assert connected.session.masks_left is None
        assert answer(connected, tokens=TOKENS) == truth
        traffic, groups = connected.session.traffic, connected.session.manifest.groups
        cost = [connected.session.protocol.cost(group, 1) for group in groups]
        before, up, down = traffic.rounds, traffic.up["online"], traffic.down["online"]
        answer(connected, tokens=2)  # the prompt, and one row
        assert traffic.rounds - before == 2 * sum(c.rounds for c in cost)
        prompt = [connected.session.protocol.cost(group, 5) for group in groups]
        for got, at_least in (
            (traffic.up["online"] - up, sum(c.bytes_up for c in [*cost, *prompt])),
            (traffic.down["online"] - down, sum(c.bytes_down for c in [*cost, *prompt])),
        ):
            assert 0.5 * at_least < got < 2 * at_least + 20_000


def test_auto_begins_at_once_and_goes_over_to_the_pool(server: ServerProcess, truth: list[int], tmp_path: Path) -> None:
    with (connected := auto(server, tmp_path, batch=256)).session:
        assert connected.session.masks_left == 0
        assert answer(connected, tokens=TOKENS) == truth
        deadline = time.monotonic() + 60
        while not connected.session.masks_left and time.monotonic() < deadline:
            answer(connected, tokens=2)
        left = connected.session.masks_left
        assert left
        made = -1
        while made != (now := connected.session.traffic.up["provision"]):  # the last block under way
            made = now
            time.sleep(0.5)
        assert answer(connected, tokens=TOKENS) == truth
        assert connected.session.masks_left < left, "the pool is full and is not used"
        assert connected.session.traffic.up["provision"] == made


def test_auto_without_refill_lives_on_just_in_time_masks(
    server: ServerProcess, truth: list[int], tmp_path: Path
) -> None:
    with (connected := auto(server, tmp_path, refill=False)).session:
        for _ in range(3):
            assert answer(connected, tokens=TOKENS) == truth
        assert connected.session.masks_left == 0


def test_long_prompts_and_batches(server: ServerProcess, clear_server: ServerProcess, tmp_path: Path) -> None:
    """More rows than a block has, and fewer than the last block made."""
    answers = []
    for name in ("clear", "rlwe", "auto"):
        options = {"pool": tmp_path / "pool", "state_dir": tmp_path / "state", "refill": False}
        used = clear_server if name == "clear" else server
        with (link := connect_to(used, tmp_path, protocol=name, **(options if name == "auto" else {}))).session:
            tokenizer = link.tokenizer
            tokenizer.padding_side = "left"
            batch = tokenizer(
                ["the fox " * 60, "a dog", "once there was " * 20],
                return_tensors="pt",
                padding=True,
                return_token_type_ids=False,
            )
            assert batch["input_ids"].numel() > 256
            options = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
            answers.append(link.model.generate(**batch, **options).tolist())
    assert answers[0] == answers[1] == answers[2]


def test_masks_made_just_in_time_are_used_once(server: ServerProcess, tmp_path: Path) -> None:
    """Nothing masked repeats, nothing encrypted repeats, and every seed is new."""
    with RecordingProxy(server.target, ca=server.ca) as proxy:
        connected = auto(server, tmp_path, target=proxy.target, ca=None, refill=False)
        with connected.session:
            for _ in range(2):
                answer(connected, tokens=TOKENS)
        sent = [pb.EvaluateRequest.FromString(m.raw) for m in proxy.messages("Evaluate", "up") if m.raw is not None]
    masked = [m for m in sent if m.rows]
    blocks = [m for m in sent if m.HasField("block")]
    assert len(masked) == 2 * GROUPS * TOKENS
    assert blocks
    assert max(Counter(m.data for m in masked).values()) == 1
    assert max(Counter(m.data for m in blocks).values()) == 1
    assert max(Counter(m.seed for m in blocks).values()) == 1


def test_every_block_of_masks_has_a_key_of_its_own(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a later answer could carry a ciphertext of a used mask, less a guess, and the abort would tell of it."""
    used: list[tuple[SecretKey, str]] = []
    encrypt, decrypt = SecretKey.encrypt_seeded, SecretKey.decrypt_switched

    def noting_encrypt(self: SecretKey, m: Any, seed: bytes) -> Any:
        used.append((self, "encrypt"))
        return encrypt(self, m, seed)

    def noting_decrypt(self: SecretKey, *arguments: Any) -> Any:
        used.append((self, "decrypt"))
        return decrypt(self, *arguments)

    with (connected := auto(server, tmp_path, refill=False, bandwidth_mbit=10)).session:
        monkeypatch.setattr(SecretKey, "encrypt_seeded", noting_encrypt)
        monkeypatch.setattr(SecretKey, "decrypt_switched", noting_decrypt)
        answer(connected, tokens=40)
    by_key = Counter((id(key), what) for key, what in used)
    assert len(by_key) > 4 * GROUPS
    assert max(by_key.values()) == 1


# -- a server that lies ------------------------------------------------------------------------------------------------


class BlockLiar:
    """Changes one coefficient of the n-th encrypted answer by half of its modulus."""

    def __init__(self, place: int) -> None:
        self._left = place
        self.told = False

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> bytes:
        if (method, direction) != ("Evaluate", "down"):
            return raw
        message = pb.EvaluateResponse.FromString(raw)
        if not message.c1:
            return raw
        self._left -= 1
        if self._left != 0:
            return raw
        self.told = True
        data = bytearray(message.data)
        data[3] ^= 0x40
        message.data = bytes(data)
        return message.SerializeToString()


@pytest.mark.parametrize("place", [1, 5, 19])
def test_rlwe_stops_for_ever_after_a_wrong_answer(server: ServerProcess, tmp_path: Path, place: int) -> None:
    liar = BlockLiar(place)
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        # Whole answers: a high bit of a residue, which may put it over the prime.
        connected = connect_to(server, tmp_path, target=proxy.target, ca=None, protocol="rlwe", bandwidth_mbit=10)
        with connected.session:
            with pytest.raises(IntegrityError):
                answer(connected, tokens=TOKENS)
            assert liar.told
            sent = len(proxy.messages("Evaluate", "up"))
            with pytest.raises(IntegrityError):
                answer(connected, tokens=TOKENS)
            assert len(proxy.messages("Evaluate", "up")) == sent, "after a failed check nothing is sent again"
    assert server.serves()


@pytest.mark.parametrize("place", [1, 4, 12])
def test_just_in_time_masks_of_a_liar_end_the_session(server: ServerProcess, tmp_path: Path, place: int) -> None:
    liar = BlockLiar(place)
    with RecordingProxy(server.target, ca=server.ca, tamper=liar) as proxy:
        connected = auto(server, tmp_path, target=proxy.target, ca=None, refill=False, bandwidth_mbit=10)
        with connected.session:
            with pytest.raises(IntegrityError) as first:
                answer(connected, tokens=100)
            assert liar.told
            assert not (tmp_path / "pool").exists()
            with pytest.raises(IntegrityError) as later:
                answer(connected, tokens=TOKENS)
            assert later.value is first.value
    assert server.serves()


# -- breaks, forks, ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["rlwe", "auto"])
def test_the_answer_goes_on_after_a_restart(
    bundles: Callable[..., Path], truth: list[int], tmp_path: Path, protocol: str
) -> None:
    with ServerProcess(bundles("llama"), tmp_path / "server") as mortal:
        made = auto if protocol == "auto" else lambda s, t, **o: connect_to(s, t, protocol="rlwe", **o)
        with (connected := made(mortal, tmp_path)).session:
            assert answer(connected, tokens=2) == truth[:2]
            mortal.kill()
            mortal.restart()
            assert answer(connected, tokens=TOKENS) == truth
            assert connected.session.traffic.retries


def _in_a_fork(connected: Any, results: Any) -> None:
    try:
        connected.session.protocol._keeper._just_in_time.take(connected.session.manifest.groups[0].name, 1)
    except SordinoError as error:
        results.put(type(error).__name__)
    else:
        results.put("masks")


def test_masks_do_not_pass_a_fork(server: ServerProcess, tmp_path: Path) -> None:
    with (connected := auto(server, tmp_path, refill=False)).session:
        answer(connected, tokens=2)
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_in_a_fork, args=(connected, results))
        child.start()
        child.join(20)
        assert results.get() == "PoolError"


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_that_is_none(server: ServerProcess, tmp_path: Path, bandwidth: float) -> None:
    with pytest.raises(RangeError, match="bandwidth_mbit"):
        connect_to(server, tmp_path, protocol="rlwe", bandwidth_mbit=bandwidth)


def test_closing_does_not_wait_for_masks(server: ServerProcess, tmp_path: Path) -> None:
    connected = auto(server, tmp_path, refill=False)
    answer(connected, tokens=1)
    begin = time.monotonic()
    connected.session.close()
    assert time.monotonic() - begin < 5


# -- bad ciphertexts ---------------------------------------------------------------------------------------------------


def _block(server: ServerProcess, **changes: Any) -> list[bytes]:
    manifest = server.manifest
    group = manifest.groups[0]
    shape = BlockShape(1, 64, 32, group.in_features, group.out_features)
    c0 = np.zeros((2, PARAMS.n, shape.input_blocks), np.uint32)
    fields: dict[str, Any] = {
        "id": 2,
        "group": 0,
        "seed": bytes(32),
        "data": pack(c0),
        "block": pb.BlockProduct(rows=1, inputs=shape.inputs, outputs=shape.outputs),
    }
    opening = pb.EvaluateRequest(id=1, open=pb.Open(fingerprint=manifest.fingerprint, protocol=pb.PROTOCOL_RLWE))
    return [opening.SerializeToString(), pb.EvaluateRequest(**{**fields, **changes}).SerializeToString()]


def test_an_honest_block(server: ServerProcess) -> None:
    answers, status, _ = send_raw(server, "Evaluate", _block(server))
    assert (len(answers), status.name) == (2, "OK")
    response = pb.EvaluateResponse.FromString(answers[1])
    assert not unpack(response.data, (2, PARAMS.n, 4)).any()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "residues over the prime": (
        {"data": b"\xff" * len(pack(np.zeros((2, PARAMS.n, 1), np.uint32)))},
        "below its prime",
    ),
    "one ciphertext too many": ({"data": pack(np.zeros((2, PARAMS.n, 2), np.uint32))}, "expected"),
    "another ring": ({"data": pack(np.zeros((2, 2 * PARAMS.n, 1), np.uint32))}, "expected"),
    "one prime alone": ({"data": pack(np.zeros((1, PARAMS.n, 1), np.uint32))}, "expected"),
    "nothing": ({"data": b""}, "expected"),
    "seed of 16 bytes": ({"seed": bytes(16)}, "a seed has"),
    "seed of 33 bytes": ({"seed": bytes(33)}, "a seed has"),
    "no block": ({"block": None, "rows": 1}, "a power of two"),
    "three rows": ({"block": pb.BlockProduct(rows=3, inputs=64, outputs=8)}, "a power of two"),
    "too large a block": ({"block": pb.BlockProduct(rows=2, inputs=64, outputs=32)}, "at most"),
    "all but empty": ({"block": pb.BlockProduct(rows=1, inputs=1, outputs=1)}, "half of its"),
    "answers of 40 bits": ({"block": pb.BlockProduct(rows=1, inputs=64, outputs=32, answer_bits=40)}, "modulo q or"),
    "a group that does not exist": ({"group": 99}, "does not exist"),
    "a range outside": ({"block": pb.BlockProduct(rows=1, inputs=64, outputs=32, first_output=500)}, "not a range"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_blocks_get_a_status_and_others_are_served(server: ServerProcess, case: str) -> None:
    changes, text = BAD[case]
    _, status, details = send_raw(server, "Evaluate", _block(server, **changes))
    assert status.name in ("INVALID_ARGUMENT", "NOT_FOUND"), details
    assert text in details
    assert server.serves()


def test_switched_answers_have_their_size(server: ServerProcess) -> None:
    group = server.manifest.groups[0]
    shape = BlockShape(1, 64, 32, group.in_features, group.out_features)
    block = pb.BlockProduct(rows=1, inputs=shape.inputs, outputs=shape.outputs, answer_bits=SWITCH_BITS)
    answers, _, _ = send_raw(server, "Evaluate", _block(server, block=block))
    response = pb.EvaluateResponse.FromString(answers[1])
    assert len(response.c1) == PARAMS.n * SWITCH_BITS * shape.output_blocks // 8
    assert len(response.data) < len(response.c1) // 8


def test_encoded_weights_stay_within_their_limit(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """A hundred shapes of block, far more than fit: memory does not follow."""
    with ServerProcess(bundles("llama"), tmp_path / "server", arguments=("--encoded-mib", "1")) as small:

        def requests() -> Iterator[bytes]:
            for inputs in range(1, 101):
                first, message = _block(
                    small,
                    block=pb.BlockProduct(rows=1, inputs=inputs, outputs=2048 // inputs),
                    data=pack(np.zeros((2, PARAMS.n, -(-64 // inputs)), np.uint32)),
                )
                if inputs == 1:
                    yield first
                yield message

        list(send_raw(small, "Evaluate", requests())[0])
        before = small.rss()
        for _ in range(3):
            answers, status, details = send_raw(small, "Evaluate", requests())
            assert (len(answers), status.name) == (101, "OK"), details
        assert small.rss() - before < 16 << 20
