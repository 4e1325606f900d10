"""Encrypted attention and encrypted products beside servers that lie, clients that die, sessions that end midway, and
others that take the room: a clear error, and nobody else is harmed."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import InProcessServer
from stack import ServerProcess, answer, connect_to
from transformers import StoppingCriteria, StoppingCriteriaList

from sordino.client import Connected, connect
from sordino.client import attend as attend_module
from sordino.client.answers import Generation
from sordino.client.attend import EncryptedAttention
from sordino.client.justintime import JustInTime
from sordino.client.kvcache import EncryptedLayer, encrypted_attention
from sordino.client.options import Options
from sordino.client.proxy import RecordingProxy
from sordino.client.refill import PoolKeeper
from sordino.client.terminal import encode_prompt
from sordino.client.transport import Connection
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.blockkernels import CompiledBlocks
from sordino.server.blocks import BlockProducts, Wanted
from sordino.server.kernel import Int8Kernel, RingMatrix
from sordino.server.service import Limits
from sordino.shared.errors import (
    IntegrityError,
    KvEvictedError,
    LimitError,
    PoolError,
    ProtocolError,
    RangeError,
    SessionLostError,
    SordinoError,
    TransportError,
)
from sordino.shared.packing import BlockShape, Part
from sordino.shared.pages import KEYS, VALUES
from sordino.shared.rlwe import PARAMS, SWITCH_BITS

PAGE_BYTES = KEYS.page_bytes + VALUES.page_bytes  # of keys and values of one head; the tiny Llama has 2 x 2 heads
TOKENS = 6


@pytest.fixture(scope="module")
def hosted(bundles: Callable[..., Path]) -> Iterator[InProcessServer]:
    server = InProcessServer(bundles("llama"))
    yield server
    server.close()


def target_of(server: InProcessServer) -> str:
    return f"grpc://127.0.0.1:{server.port}"


def join(target: str, tmp: Path, protocol: Any = "clear", **options: Any) -> Connected:
    chosen: dict[str, Any] = {"attention": "rlwe", "page_tokens": 4, "timeout_s": 20, "retry_s": 5}
    if protocol in ("masked", "auto"):
        chosen |= {"pool": tmp / protocol, "state_dir": tmp / "state", "batch": 256, "low_water": 0}
        chosen["refill"] = protocol == "masked"
    return connect(target, protocol=protocol, cache=tmp / "cache", **(chosen | options))


def wait_until(what: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


class At(StoppingCriteria):
    """Does something after the n-th token of an answer."""

    def __init__(self, number: int, what: Callable[[], object]) -> None:
        self._left, self._what = number, what

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            self._what()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def answer_with(link: Connected, number: int, what: Callable[[], object], tokens: int = 10) -> list[int]:
    return answer(link, tokens=tokens, stopping_criteria=StoppingCriteriaList([At(number, what)]))


# -- a server that lies ------------------------------------------------------------------------------------------------


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        message = pb.AttendResponse.FromString(raw)
        for name, value in fields.items():
            setattr(message, name, value(getattr(message, name)))
        return message.SerializeToString()

    return change


LIES: dict[str, tuple[Callable[[bytes], bytes | list[bytes]], type[SordinoError]]] = {
    "another id": (changed(id=lambda _: 0), IntegrityError),
    "the highest id": (changed(id=lambda _: 2**64 - 1), IntegrityError),
    "c0 cut short": (changed(c0=lambda c: c[:-1]), ProtocolError),
    "no c1": (changed(c1=lambda _: b""), ProtocolError),
    "c2 too long": (changed(c2=lambda c: c + bytes(1000)), ProtocolError),
    "longer than any message": (changed(c1=lambda _: bytes(70 << 20)), LimitError),
    "no message": (lambda _: b"\xff" * 50, ProtocolError),
    "nothing in it": (lambda _: b"", IntegrityError),
    "twice": (lambda raw: [raw, raw], IntegrityError),
    "a thousand times": (lambda raw: [raw] * 1000, IntegrityError),
    "never": (lambda _: [], KvEvictedError),
}


class Liar:
    """A proxy's ``tamper``: alters the third answer of one kind, and those after it."""

    def __init__(self, lie: Callable[[bytes], bytes | list[bytes]], kind: str) -> None:
        self.lies = True
        self._lie, self._kind, self._seen = lie, kind, 0
        self._kinds: dict[int, str | None] = {}

    def __call__(self, method: str, direction: str, index: int, raw: bytes) -> bytes | list[bytes]:
        if method != "Attend":
            return raw
        if direction == "up":
            request = pb.AttendRequest.FromString(raw)
            self._kinds[request.id] = request.WhichOneof("kind")
            return raw
        if self._kinds[pb.AttendResponse.FromString(raw).id] != self._kind:
            return raw
        self._seen += 1
        return self._lie(raw) if self.lies and self._seen >= 3 else raw


@pytest.mark.parametrize("lie", LIES)
def test_altered_answers_are_errors_and_the_session_goes_on(hosted: InProcessServer, tmp_path: Path, lie: str) -> None:
    how, error = LIES[lie]
    liar = Liar(how, "products")
    with RecordingProxy(target_of(hosted), tamper=liar, keep_bytes=()) as proxy:
        link = join(proxy.target, tmp_path, timeout_s=1, retry_s=2)
        for _ in range(2):
            with pytest.raises(error):
                answer(link, tokens=TOKENS)
        liar.lies = False
        told = answer(link, tokens=TOKENS)
        link.session.close()
    with (honest := join(target_of(hosted), tmp_path, attention="local", page_tokens=None)).session:
        assert told == answer(honest, tokens=TOKENS)
    assert wait_until(lambda: not hosted.pages.used_bytes)


def test_answers_in_another_order(hosted: InProcessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bytes] = []

    def swap(raw: bytes) -> list[bytes]:
        held.append(raw)
        return [] if len(held) % 2 else [held[-1], held[-2]]

    with RecordingProxy(target_of(hosted), tamper=Liar(swap, "products"), keep_bytes=()) as proxy:
        link = join(proxy.target, tmp_path)
        assert link.session.attention is not None
        monkeypatch.setattr(link.session.attention, "_limit", 90_000)  # several messages under way
        with pytest.raises(IntegrityError, match="out of order"):
            answer(link, tokens=TOKENS)
        link.session.close()


def test_a_wrong_value_is_not_found_out(hosted: InProcessServer, tmp_path: Path) -> None:
    """As docs/threat-model.md says: nothing checks these answers. They stay finite, and the answer goes on."""
    ones = {name: lambda c: b"\xff" * len(c) for name in ("c0", "c1", "c2")}
    with RecordingProxy(target_of(hosted), tamper=Liar(changed(**ones), "products"), keep_bytes=()) as proxy:
        link = join(proxy.target, tmp_path)
        wrong = answer(link, tokens=TOKENS)
        link.session.close()
    with (honest := join(target_of(hosted), tmp_path)).session:
        assert len(wrong) == TOKENS
        assert wrong != answer(honest, tokens=TOKENS)


# -- ends in the middle ------------------------------------------------------------------------------------------------


def answer_until_an_error(link: Connected, started: threading.Event, caught: list[SordinoError]) -> None:
    try:
        while True:
            answer_with(link, 2, started.set)
    except SordinoError as error:
        caught.append(error)


@pytest.mark.parametrize("protocol", ["rlwe", "auto"])
@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_session_closed_in_the_middle_says_so(
    hosted: InProcessServer, tmp_path: Path, protocol: str, pause: float
) -> None:
    """Never that the answer should start anew, wherever each of its threads was."""
    link, started, caught = join(target_of(hosted), tmp_path, protocol), threading.Event(), []
    threads = [threading.Thread(target=answer_until_an_error, args=(link, started, caught)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    time.sleep(pause)
    link.session.close()
    for thread in threads:
        thread.join(20)
    assert len(caught) == 3
    assert {type(error) for error in caught} <= {SessionLostError, PoolError}
    assert all("closed" in str(error) for error in caught)
    assert wait_until(lambda: not hosted.pages.used_bytes)


def test_a_closed_stream_says_so_before_anything_of_pages(hosted: InProcessServer, tmp_path: Path) -> None:
    connection = Connection(target_of(hosted))
    attention = EncryptedAttention(connection, 4)
    states = np.ones((1, 1, 4, 8), np.float32)
    pages = attention.seal(states, states)
    attention.close()
    with pytest.raises(SessionLostError, match="closed"):
        attention.scores(states[0, :, :1], pages, 4)
    connection.close()


def test_a_connection_that_ends_first_says_so(hosted: InProcessServer) -> None:
    """As after a failed check of a masked answer, in another thread."""
    connection = Connection(target_of(hosted))
    attention = EncryptedAttention(connection, 4)
    states = np.ones((1, 1, 4, 8), np.float32)
    pages = attention.seal(states, states)
    connection.close()
    with pytest.raises(SessionLostError, match="closed"):
        attention.scores(states[0, :, :1], pages, 4)


_ANSWERS = """
import sys
from sordino.client import connect
target, cache, protocol = sys.argv[1:]
options = {} if protocol == "rlwe" else {"pool": cache + "/p", "state_dir": cache + "/s", "batch": 256, "low_water": 0}
link = connect(target, protocol=protocol, attention="rlwe", page_tokens=4, cache=cache, **options)
inputs = link.tokenizer("the quick brown fox", return_tensors="pt", return_token_type_ids=False)
while True:
    link.model.generate(**inputs, max_new_tokens=40, min_new_tokens=40, do_sample=False)
"""


def test_a_killed_client_leaves_nothing(hosted: InProcessServer, tmp_path: Path) -> None:
    gc.collect()
    assert wait_until(lambda: not hosted.pages.used_bytes)
    command = [sys.executable, "-W", "ignore", "-c", _ANSWERS, target_of(hosted), str(tmp_path), "rlwe"]
    client = subprocess.Popen(command)
    try:
        assert wait_until(lambda: hosted.pages.used_bytes > 8 * PAGE_BYTES, 60)
    finally:
        client.kill()
        client.wait()
    assert wait_until(lambda: not hosted.pages.used_bytes and not hosted.pages._sessions)


@pytest.fixture
def masks_taken(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Every mask row that anybody in this process was given."""
    taken: Counter[bytes] = Counter()
    for owner in (PoolKeeper, JustInTime):
        real = owner.take

        def take(self: Any, group: str, rows: int, real: Any = real) -> Any:
            r, wr = real(self, group, rows)
            taken.update(row.tobytes() for row in r)
            return r, wr

        monkeypatch.setattr(owner, "take", take)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["masked", "auto", "rlwe"])
@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_server_that_restarts_in_the_middle(
    bundles: Callable[..., Path], tmp_path: Path, masks_taken: Counter[bytes], protocol: str, end: str
) -> None:
    """The answer ends with an error that says what to do; the next one is right."""
    options: dict[str, Any] = {}
    if protocol == "auto":
        options = {"pool": tmp_path / "pool", "state_dir": tmp_path / "client-state", "refill": False}
    with ServerProcess(bundles("llama"), tmp_path / "server") as mortal:
        link = connect_to(mortal, tmp_path, protocol=protocol, attention="rlwe", page_tokens=4, **options)
        with link.session:
            truth = answer(link, tokens=TOKENS)
            for number in (1, 4):

                def restart() -> None:
                    getattr(mortal, end)()
                    mortal.restart()

                with pytest.raises(KvEvictedError, match="anew"):
                    answer_with(link, number, restart)
                assert answer(link, tokens=TOKENS) == truth
    assert not masks_taken or max(masks_taken.values()) == 1


# -- others who want the room ------------------------------------------------------------------------------------------


def test_who_loses_pages_in_the_middle_is_told_and_the_others_are_right(
    bundles: Callable[..., Path], tmp_path: Path, masks_taken: Counter[bytes]
) -> None:
    """Three sessions where there is room for one, and any that rested for an instant makes room: each answer is right
    or an error, and no mask is used twice."""
    limits = Limits(max_page_bytes=4 * 9 * PAGE_BYTES, max_page_bytes_per_session=4 * 8 * PAGE_BYTES, kv_evict_s=0.02)
    server = InProcessServer(bundles("llama"), limits)
    plain = join(target_of(server), tmp_path, attention="local", page_tokens=None)
    truth = answer(plain, tokens=TOKENS)
    plain.session.close()
    links = [join(target_of(server), tmp_path, protocol) for protocol in ("masked", "auto", "rlwe")]
    ends: Counter[str] = Counter()
    over = threading.Event()

    def work(link: Connected) -> None:
        for _ in range(200):
            try:
                ends["right" if answer(link, tokens=TOKENS) == truth else "wrong"] += 1
            except SordinoError as error:
                ends[type(error).__name__] += 1
            if ends["KvEvictedError"] >= 3:
                over.set()
            if over.is_set():
                return

    threads = [threading.Thread(target=work, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ends.keys() <= {"right", "KvEvictedError", "LimitError"}
    assert ends["KvEvictedError"] >= 3
    assert max(masks_taken.values()) == 1
    for link in links[1:]:
        link.session.close()
    assert answer(links[0], tokens=TOKENS) == truth
    links[0].session.close()
    assert wait_until(lambda: not server.pages.used_bytes and not server.pages._sessions)
    server.close()


def test_queries_of_a_long_turn_wait_for_their_turn(hosted: InProcessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few messages are encrypted ahead of the answers, not all: those would be gigabytes."""
    rng = np.random.default_rng(1)
    arrived, speaks = [], threading.Event()

    def tamper(method: str, direction: str, index: int, raw: bytes) -> bytes:
        if method == "Attend" and direction == "up" and pb.AttendRequest.FromString(raw).HasField("products"):
            arrived.append(index)
        elif method == "Attend" and direction == "down" and arrived:
            speaks.wait(30)
        return raw

    with RecordingProxy(target_of(hosted), tamper=tamper, keep_bytes=()) as proxy:
        connection = Connection(proxy.target)
        attention = EncryptedAttention(connection, 4)
        monkeypatch.setattr(attention, "_limit", 45_000)  # a query each
        keys, queries = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 4, 16), (1, 40, 16)))
        pages = attention.seal(keys, keys)
        scores: list[Any] = []
        thread = threading.Thread(target=lambda: scores.append(attention.scores(queries, pages, 4)))
        thread.start()
        under_way = attend_module._UNDER_WAY
        assert wait_until(lambda: len(arrived) == under_way)
        assert not wait_until(lambda: len(arrived) > under_way, 0.5)
        speaks.set()
        thread.join(30)
        assert np.abs(scores[0][0, :, 0] - queries[0] @ keys[0, 0].T).max() < 1e-4
        assert len(arrived) == 40
        attention.close()
        connection.close()


# -- caches that go back -----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["more", "more", "more", "crop", "choose"]), st.integers(1, 9)), min_size=4, max_size=12
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, tokens=st.integers(2, 5), window=st.none() | st.integers(1, 9), seed=st.integers(0, 1000))
def test_any_way_forth_and_back_is_that_of_a_cache_in_clear(
    hosted: InProcessServer, steps: list[tuple[str, int]], tokens: int, window: int | None, seed: int
) -> None:
    """One layer of two heads over one, rows that part and meet, crops around the ends of pages, a sliding window."""
    connection = Connection(target_of(hosted))
    attention = EncryptedAttention(connection, tokens)
    layer, module = EncryptedLayer(attention, window), SimpleNamespace(is_causal=True)
    generator = torch.Generator().manual_seed(seed)
    keys = values = torch.empty(2, 1, 0, 8)
    try:
        for step, number in steps:
            length = keys.shape[2]
            if step == "crop" and length:
                back, in_clear, refused = min(number, length), layer.start, False
                try:
                    layer.crop(-back)
                except RangeError:
                    refused = True
                assert not refused or length - back < in_clear
                if not refused:
                    keys, values = keys[:, :, : length - back], values[:, :, : length - back]
            elif step == "choose" and length:
                rows = torch.tensor([number % 2, number // 2 % 2])
                layer.reorder_cache(rows)
                keys, values = keys[rows], values[rows]
            else:
                new = [torch.randn(2, 1, number, 8, generator=generator) for _ in range(2)]
                query = torch.randn(2, 2, number, 8, generator=generator)
                keys, values = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
                held = layer.update(*new)
                at, past = torch.arange(keys.shape[2])[None], torch.arange(length, keys.shape[2])[:, None]
                seen = (at <= past) & (at > past - (window or 1 << 30))
                got, _ = encrypted_attention(module, query, *held, seen[None, None])  # type: ignore[arg-type]
                scores = (query @ keys.repeat(1, 2, 1, 1).transpose(2, 3)) * 8**-0.5
                weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
                want = (weights @ values.repeat(1, 2, 1, 1)).transpose(1, 2)
                assert float((got - want).abs().max()) < 1e-3
            assert layer.get_seq_length() == keys.shape[2]
    finally:
        attention.close()
        connection.close()


def test_a_crop_that_a_window_cannot_follow_is_refused(hosted: InProcessServer) -> None:
    """At once, and the cache goes on as it was, rather than at the next pass, when the tokens are gone."""
    connection = Connection(target_of(hosted))
    layer, states = EncryptedLayer(EncryptedAttention(connection, 4), 8), torch.ones(1, 1, 6, 8)
    for _ in range(5):
        layer.update(states, states)
    with pytest.raises(RangeError, match="sliding window"):
        layer.crop(-22)  # the end of a page
    assert layer.get_seq_length() == 30
    layer.crop(-30)
    assert layer.get_seq_length() == 0
    layer.attention.close()
    connection.close()


SPECULATING = "the quick brown fox, the quick brown dog, the quick"
KINDS: dict[str, dict[str, Any]] = {
    "drafts": {"temperature": 0, "speculate": "ngram", "draft_tokens": 7},
    "fixed drafts": {"temperature": 0, "speculate": "ngram", "draft_tokens": 5, "fixed_drafts": True},
    "sampled drafts": {"temperature": 1.0, "seed": 5, "speculate": "ngram", "draft_tokens": 6},
    "beams": {"beams": 3, "n": 2},
    "several": {"temperature": 1.0, "n": 2, "seed": 2},
    "padded": {"temperature": 0, "pad_prompt": 16},
}


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_ways_of_decoding_over_pages(bundles: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Drafts that are taken back over the ends of pages, rows that share pages: the tokens of local attention."""
    server = InProcessServer(bundles(family))
    local = join(target_of(server), tmp_path, attention="local", page_tokens=None)
    for page_tokens in (5,):
        link = join(target_of(server), tmp_path, page_tokens=page_tokens)
        for name, kind in KINDS.items():
            outs = []
            for side in (link, local):
                options = Options(max_tokens=8, end_ids=(), **kind)
                answers = Generation(side, encode_prompt(side, SPECULATING, raw=True), options).run()
                outs.append([[token.id for token in one.tokens] for one in answers.answers])
            assert outs[0] == outs[1], f"{name}, pages of {page_tokens}"
        link.session.close()
    local.session.close()
    server.close()


# -- what stays with the client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "local", [{"local_modules": ("o_proj",), "local_layers": (0,)}, {"local_modules": ("q_proj", "k_proj", "v_proj")}]
)
def test_modules_that_stay_with_the_client(bundles: Callable[..., Path], tmp_path: Path, local: dict[str, Any]) -> None:
    server = InProcessServer(bundles("llama", **local))
    with (clear := join(target_of(server), tmp_path, attention="local", page_tokens=None)).session:
        truth = answer(clear, tokens=TOKENS)
    for protocol in ("rlwe", "auto"):
        with (link := join(target_of(server), tmp_path, protocol)).session:
            assert answer(link, tokens=TOKENS) == truth
            assert link.session.traffic.up["attention"]
    server.close()


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["rlwe", "auto"])
def test_messages_of_the_least_size(bundles: Callable[..., Path], tmp_path: Path, protocol: str) -> None:
    """64 KiB: the bundle, blocks and pages are cut to fit."""
    server = InProcessServer(bundles("llama"), Limits(max_message_bytes=64 << 10))
    answers = []
    for options in ({"protocol": protocol}, {"attention": "local", "page_tokens": None}):
        with (link := join(target_of(server), tmp_path, **options)).session:
            answers.append(answer(link, tokens=TOKENS))
    assert answers[0] == answers[1]
    server.close()


def test_weights_kept_for_whole_answers_are_checked_anew_for_switched_ones() -> None:
    """These bear less noise: whoever asked before, and for what, a block that could decode wrongly is refused."""
    norm = 52
    assert PARAMS.max_norm(SWITCH_BITS) < 1024 * norm < PARAMS.max_norm()
    matrix = RingMatrix(torch.full((1024, 1024), norm, dtype=torch.int8), 1, Int8Kernel())
    part = Part(slice(0, 1024), slice(0, 1024), BlockShape(1, 2, 1024, 1024, 1024))
    products, c0 = BlockProducts(1 << 30, CompiledBlocks(parallel=False)), np.zeros((2, PARAMS.n, 512), np.uint32)
    products.products(matrix, Wanted(0, False, part, 0), [(bytes(32), c0)])
    assert products._kept
    with pytest.raises(RangeError, match="noise bound"):
        products.products(matrix, Wanted(0, False, part, SWITCH_BITS), [(bytes(32), c0)])


@pytest.mark.slow
def test_two_hundred_short_answers_take_no_more_memory(server: ServerProcess, tmp_path: Path) -> None:
    """At either end: pages that nobody needs any more are dropped, and their memory is used again."""
    rng = random.Random(3)  # lengths, not secrets
    link = connect_to(
        server,
        tmp_path,
        protocol="auto",
        attention="rlwe",
        page_tokens=4,
        pool=tmp_path / "pool",
        state_dir=tmp_path / "client-state",
        refill=False,
    )

    def both() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return server.rss(), pages * 4096

    with link.session:
        for number in range(200):
            if number == 60:
                before = both()
            answer(link, "the quick brown fox"[: rng.randrange(5, 19)], tokens=3)
        for then, now in zip(before, both(), strict=True):
            assert now - then < 24 << 20


def test_a_server_that_is_gone_for_good(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """The linear layers give up after ``retry_s``; nothing of pages hides it."""
    server = InProcessServer(bundles("llama"))
    with (link := join(target_of(server), tmp_path, retry_s=0.5)).session, pytest.raises(TransportError):
        answer_with(link, 2, server.close)
