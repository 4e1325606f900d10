"""Attention over encrypted pages beside local attention: families, batches, beams, crops, limits, bad messages.

Pages are small, so that short prompts have many of them.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import models
import numpy as np
import pytest
import torch
from pairs import InProcessServer

from sordino.client import Connected, connect
from sordino.client.attend import EncryptedAttention, PageStream
from sordino.client.kvcache import EncryptedCache
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.proto.v1 import sordino_pb2_grpc as pb_grpc
from sordino.server.service import Limits
from sordino.server.split import split_model
from sordino.shared.errors import KvEvictedError, LimitError, ProtocolError, RangeError, SessionLostError
from sordino.shared.pages import KEYS, VALUES, N
from sordino.shared.rlwe import PAGE_PARAMS, pack

TOKENS = 4  # of a page
PAGE_BYTES = KEYS.page_bytes + VALUES.page_bytes  # of keys and values of one head
# Scores here are right to 2^-20, outputs to 2^-16; the activation scale of the linear layers turns that, like the other
# order of float32 sums, into steps of one quantisation unit. Logits of these models are of size 10.
ATOL = 0.08
PROMPT = "the quick brown fox jumps"  # 25 tokens: 6 pages, and one open


class Beside(NamedTuple):
    """Two clients of one server: attention with encrypted pages, and local."""

    rlwe: Connected
    local: Connected
    server: InProcessServer
    folder: Path

    def generate(self, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
        chosen = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, **options}
        chosen |= {"return_dict_in_generate": True, "output_logits": True}
        return tuple(side.model.generate(**inputs, **chosen) for side in (self.rlwe, self.local))


def open_beside(
    family: str, folder: Path, limits: Limits | None = None, page_tokens: int | None = TOKENS, **config: Any
) -> Iterator[Beside]:
    split_model(models.make_tiny(family, folder / "model", **config), folder / "bundle", rounding="nearest")
    server = InProcessServer(folder / "bundle", limits)
    target = f"grpc://127.0.0.1:{server.port}"
    common: dict[str, Any] = {"cache": folder / "cache", "retry_s": 5, "protocol": "clear"}
    with ExitStack() as stack:
        stack.callback(server.close)
        rlwe = connect(target, attention="rlwe", page_tokens=page_tokens, **common)
        stack.enter_context(rlwe.session)
        local = connect(target, **common)
        stack.enter_context(local.session)
        yield Beside(rlwe, local, server, folder)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "gemma3", "phi3", "mistral", "qwen3", "gpt_neox"])
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    yield from open_beside(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    yield from open_beside("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[..., Beside]]:
    """A llama whose server has other limits."""
    with ExitStack() as stack:

        def make(**limits: Any) -> Beside:
            each = open_beside("llama", tmp_path, Limits(**limits))
            stack.callback(each.close)
            return next(each)

        yield make


def tokens(side: Connected, text: str | list[str] = PROMPT) -> dict[str, torch.Tensor]:
    side.tokenizer.padding_side = "left"
    return dict(side.tokenizer(text, return_tensors="pt", padding=True, return_token_type_ids=False))


def same(rlwe: Any, local: Any) -> float:
    assert torch.equal(rlwe.sequences, local.sequences)
    worst = max(float((a - b).abs().max()) for a, b in zip(rlwe.logits, local.logits, strict=True))
    assert worst <= ATOL
    return worst


def sent(side: Connected) -> int:
    return side.session.traffic.up.get("attention", 0)


# -- the same answers ------------------------------------------------------------------------------------------------


def test_greedy_is_that_of_local_attention(beside: Beside) -> None:
    before = sent(beside.rlwe)
    same(*beside.generate(tokens(beside.rlwe)))
    assert sent(beside.rlwe) > before + 1e6  # it did go over the wire


def test_a_left_padded_batch(beside: Beside) -> None:
    """Some rows begin with whole pages of padding."""
    same(*beside.generate(tokens(beside.rlwe, ["fox", PROMPT, "a lazy dog"]), max_new_tokens=6, min_new_tokens=6))


def test_beams(beside: Beside) -> None:
    """Their caches are reordered at every step, and share pages."""
    options = {"num_beams": 2, "max_new_tokens": 6, "min_new_tokens": 6}
    assert torch.equal(*(out.sequences for out in beside.generate(tokens(beside.rlwe), **options)))


def test_assisted_decoding_crops(beside: Beside) -> None:
    """Prompt lookup: several tokens at once, of which few are accepted; the cache goes back into sealed pages."""
    inputs = tokens(beside.rlwe, "one two one two one two one")
    options = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 2, "max_new_tokens": 14}
    options |= {"min_new_tokens": 14, "do_sample": False}
    plain, assisted = (side.model.generate(**inputs, **options) for side in (beside.local, beside.rlwe))
    assert torch.equal(plain, assisted)


def test_several_rows_against_pages(beside: Beside) -> None:
    """A second turn: many queries at once to pages of the first, causal among themselves."""
    ids = tokens(beside.rlwe)["input_ids"]
    outs = []
    for side in (beside.rlwe, beside.local):
        with torch.inference_mode():
            first = side.model(input_ids=ids[:, :14], use_cache=True)
            name = "cache" if "cache" in first else "past_key_values"
            second = side.model(input_ids=ids[:, 14:], use_cache=True, **{name: first[name]})
            whole = side.model(input_ids=ids, use_cache=False).logits[:, 14:]
        assert (second.logits - whole).abs().max() <= ATOL
        outs.append(second.logits)
    assert (outs[0] - outs[1]).abs().max() <= ATOL


@pytest.mark.parametrize(
    "config",
    [{"num_key_value_heads": 1, "head_dim": 20}, {"num_key_value_heads": 4, "head_dim": 6}],
    ids=["one shared head of size 20", "a head each of size 6"],
)
def test_other_heads(tmp_path: Path, config: dict[str, Any]) -> None:
    for beside in open_beside("llama", tmp_path, page_tokens=TOKENS, **config):
        same(*beside.generate(tokens(beside.rlwe)))


@pytest.mark.parametrize(("head_size", "pages"), [(128, 3), (80, 2), (64, 1)])
def test_full_pages(tmp_path: Path, head_size: int, pages: int) -> None:
    """As many tokens as fit: 32, 51, 64; the prompt has 110."""
    for beside in open_beside("llama", tmp_path, page_tokens=None, num_key_value_heads=1, head_dim=head_size):
        text = "a text that goes on and on " * 5
        same(*beside.generate(tokens(beside.rlwe, text), max_new_tokens=3, min_new_tokens=3))
        assert sent(beside.rlwe) > 0
        cache = EncryptedCache(attention(beside), beside.rlwe.model.config)
        forward(beside, cache, tokens(beside.rlwe, text)["input_ids"][:, :110])
        assert cache.layers[0].sealed == pages * (N // head_size)


def test_sampling_takes_the_same_tokens(llama: Beside) -> None:
    inputs, outs = tokens(llama.rlwe), []
    for side in (llama.rlwe, llama.local):
        torch.manual_seed(7)
        outs.append(side.model.generate(**inputs, do_sample=True, max_new_tokens=8, min_new_tokens=8))
    assert torch.equal(*outs)


def test_without_a_cache_nothing_is_sent(llama: Beside) -> None:
    before = sent(llama.rlwe)
    with torch.inference_mode():
        a, b = (side.model(**tokens(side), use_cache=False).logits for side in (llama.rlwe, llama.local))
    assert (a - b).abs().max() <= ATOL
    assert sent(llama.rlwe) == before


# -- the cache -------------------------------------------------------------------------------------------------------


def attention(beside: Beside) -> EncryptedAttention:
    assert beside.rlwe.session.attention is not None
    return beside.rlwe.session.attention


def forward(beside: Beside, cache: EncryptedCache, ids: torch.Tensor) -> torch.Tensor:
    name = "cache" if transformers_takes_cache(beside) else "past_key_values"
    with torch.inference_mode():
        out: torch.Tensor = beside.rlwe.model(input_ids=ids, use_cache=True, **{name: cache}).logits
    return out


def transformers_takes_cache(beside: Beside) -> bool:
    import inspect

    return "cache" in inspect.signature(beside.rlwe.model.forward).parameters


def test_crop_goes_back_as_far_as_it_says(llama: Beside) -> None:
    ids = torch.arange(10, 40)[None]
    cache = EncryptedCache(attention(llama), llama.rlwe.model.config)
    whole = forward(llama, cache, ids[:, :14])
    assert cache.get_seq_length() == 14
    cache.crop(-9)  # what the last pass brought is all here, in clear
    assert cache.get_seq_length() == 5
    again = forward(llama, cache, ids[:, 5:14])
    assert (again - whole[:, 5:]).abs().max() <= ATOL
    one = forward(llama, cache, ids[:, 14:15])
    cache.crop(-4)  # into the last sealed page
    assert (forward(llama, cache, ids[:, 11:15])[:, -1] - one[:, -1]).abs().max() <= ATOL
    forward(llama, cache, ids[:, 15:16])
    forward(llama, cache, ids[:, 16:17])  # 17 tokens: pages to 16, in clear from 12 on
    before = cache.get_seq_length()
    for too_far in (-7, -11):
        with pytest.raises(RangeError, match="goes back to token"):
            cache.crop(too_far)
        assert cache.get_seq_length() == before
    cache.crop(-9)  # the end of a page, where nothing is needed in clear
    assert cache.get_seq_length() == 8
    assert (forward(llama, cache, ids[:, 8:14]) - whole[:, 8:]).abs().max() <= ATOL
    cache.crop(-14)
    assert cache.get_seq_length() == 0
    assert (forward(llama, cache, ids[:, :14]) - whole).abs().max() <= ATOL


def test_rows_share_pages_and_let_them_go(llama: Beside) -> None:
    ids = torch.arange(10, 24)[None].repeat(2, 1)
    ids[1] += 30
    store = llama.server.pages
    gc.collect()
    cache = EncryptedCache(attention(llama), llama.rlwe.model.config)
    forward(llama, cache, ids[:, :13])
    pages = store.used_bytes // PAGE_BYTES
    forward(llama, cache, ids[:, 13:])
    expected = forward_alone(llama, ids)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1, 0]))
    assert store.used_bytes // PAGE_BYTES == pages  # four rows, then three: no page was sent again
    cache.reorder_cache(torch.tensor([2, 0]))
    cache.crop(-1)
    assert (forward(llama, cache, ids[:, 13:]) - expected[:, 13:]).abs().max() <= ATOL
    cache.batch_select_indices(torch.tensor([1]))
    cache.crop(-1)
    assert (forward(llama, cache, ids[1:, 13:]) - expected[1:, 13:]).abs().max() <= ATOL
    # 2 layers, 2 heads, 3 pages: one row's went with it
    cache.crop(-1)
    forward(llama, cache, ids[1:, 13:])
    assert store.used_bytes // PAGE_BYTES == 2 * 2 * 3
    cache.reset()
    forward(llama, cache, ids[1:, :5])
    forward(llama, cache, ids[1:, 5:6])
    assert store.used_bytes // PAGE_BYTES == 2 * 2


def test_a_copy_of_a_prompts_cache_goes_on_by_itself(llama: Beside) -> None:
    ids = torch.arange(10, 26)[None]
    cache = EncryptedCache(attention(llama), llama.rlwe.model.config)
    forward(llama, cache, ids[:, :10])
    other = copy.deepcopy(cache)
    expected = forward_alone(llama, ids)[:, 10:]
    assert (forward(llama, other, ids[:, 10:]) - expected).abs().max() <= ATOL
    assert cache.get_seq_length() == 10
    del other
    gc.collect()
    assert (forward(llama, cache, ids[:, 10:]) - expected).abs().max() <= ATOL


def forward_alone(beside: Beside, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = beside.local.model(input_ids=ids, use_cache=False).logits
    return out


def test_a_window_that_has_passed_drops_pages(tmp_path: Path) -> None:
    """Mistral with a window of 16: after 60 tokens the server keeps the window's pages, and those behind the crop."""
    for beside in open_beside("mistral", tmp_path):
        same(*beside.generate(tokens(beside.rlwe), max_new_tokens=35, min_new_tokens=35))
        assert beside.server.pages.used_bytes // PAGE_BYTES <= 2 * 2 * (16 + 3 * TOKENS) // TOKENS


# -- sessions, limits, loss ------------------------------------------------------------------------------------------


def test_pages_are_gone_with_the_session(llama: Beside) -> None:
    target = f"grpc://127.0.0.1:{llama.server.port}"
    gc.collect()
    before = llama.server.pages.used_bytes
    other = connect(target, protocol="clear", attention="rlwe", page_tokens=TOKENS, cache=llama.folder / "cache")
    with other.session:
        cache = EncryptedCache(other.session.attention, other.model.config)
        forward(llama._replace(rlwe=other), cache, torch.arange(10, 20)[None])
        assert llama.server.pages.used_bytes == before + 2 * 2 * 2 * PAGE_BYTES
    deadline = time.monotonic() + 10
    while llama.server.pages.used_bytes > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert llama.server.pages.used_bytes == before
    with pytest.raises(SessionLostError):
        forward(llama._replace(rlwe=other), cache, torch.arange(10, 20)[None])


def test_a_prompt_over_the_limit(limited: Callable[..., Beside]) -> None:
    beside = limited(max_page_bytes_per_session=2 * 2 * 3 * PAGE_BYTES)
    with pytest.raises(LimitError, match="a session may keep"):
        beside.generate(tokens(beside.rlwe))
    same(*beside.generate(tokens(beside.rlwe, "fox"), max_new_tokens=8, min_new_tokens=8))


def test_an_idle_session_is_evicted_and_told(limited: Callable[..., Beside]) -> None:
    """Two sessions where there is room for one."""
    beside = limited(max_page_bytes=2 * 2 * 4 * PAGE_BYTES, kv_evict_s=0.2)
    target = f"grpc://127.0.0.1:{beside.server.port}"
    ids = torch.arange(10, 23)[None]
    first = EncryptedCache(attention(beside), beside.rlwe.model.config)
    forward(beside, first, ids)
    common: dict[str, Any] = {"page_tokens": TOKENS, "cache": beside.folder / "cache", "retry_s": 5}
    with (other := connect(target, protocol="clear", attention="rlwe", **common)).session:
        two = beside._replace(rlwe=other)
        second = EncryptedCache(other.session.attention, other.model.config)
        with pytest.raises(LimitError, match="in use"):
            forward(two, second, ids)
        time.sleep(0.3)
        second = EncryptedCache(other.session.attention, other.model.config)
        forward(two, second, ids)
        with pytest.raises(KvEvictedError, match="made room for others"):
            forward(beside, first, ids[:, :1])
        with pytest.raises(KvEvictedError, match="gone"):
            forward(beside, first, ids[:, :1])
        forward(two, second, ids[:, :1])  # unharmed
        del second
    deadline = time.monotonic() + 10
    while beside.server.pages.used_bytes and time.monotonic() < deadline:
        time.sleep(0.05)
    same(*beside.generate(tokens(beside.rlwe, "fox")))  # and the evicted one works on


def test_a_broken_stream_takes_its_pages_along(llama: Beside) -> None:
    cache = EncryptedCache(attention(llama), llama.rlwe.model.config)
    forward(llama, cache, torch.arange(10, 20)[None])
    call = attention(llama).stream._call
    assert call is not None
    call.cancel()
    with pytest.raises(KvEvictedError, match="broke"):
        forward(llama, cache, torch.arange(10, 11)[None])
    with pytest.raises(KvEvictedError, match="gone"):
        forward(llama, cache, torch.arange(10, 11)[None])
    same(*llama.generate(tokens(llama.rlwe)))


def test_a_stream_that_rests_too_long_loses_its_pages(limited: Callable[..., Beside]) -> None:
    beside = limited(kv_idle_s=0.2)
    cache = EncryptedCache(attention(beside), beside.rlwe.model.config)
    forward(beside, cache, torch.arange(10, 20)[None])
    assert beside.server.pages.used_bytes
    deadline = time.monotonic() + 20
    while beside.server.pages.used_bytes and time.monotonic() < deadline:
        beside.server.do(beside.server.waits.end_overdue)  # twice a second where a server runs by itself
        time.sleep(0.05)
    assert not beside.server.pages.used_bytes
    with pytest.raises(KvEvictedError, match="too long"):
        forward(beside, cache, torch.arange(10, 11)[None])
    same(*beside.generate(tokens(beside.rlwe, "fox"), max_new_tokens=3, min_new_tokens=3))


def test_closing_ends_a_wait_for_the_server(limited: Callable[..., Beside], monkeypatch: pytest.MonkeyPatch) -> None:
    beside = limited()
    cache = EncryptedCache(attention(beside), beside.rlwe.model.config)
    forward(beside, cache, torch.arange(10, 20)[None])
    waiting, released = threading.Event(), threading.Event()

    def wait(*_: Any, **__: Any) -> Any:
        waiting.set()
        released.wait(20)
        raise ProtocolError("too late")

    monkeypatch.setattr("sordino.server.service.evaluate", wait)
    caught: list[type] = []

    def run() -> None:
        try:
            forward(beside, cache, torch.arange(10, 11)[None])
        except Exception as error:
            caught.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(20)
    start = time.monotonic()
    beside.rlwe.session.close()
    thread.join(10)
    released.set()
    assert time.monotonic() - start < 5
    assert caught == [SessionLostError]


def test_more_than_fits_in_a_message(llama: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by queries, and by pages; the sum of outputs is then made here."""
    for limit in (90_000, 200_000, 1_000_000):
        monkeypatch.setattr(attention(llama), "_limit", limit)
        same(*llama.generate(tokens(llama.rlwe), max_new_tokens=3, min_new_tokens=3))


def test_sizes_on_the_wire_depend_on_lengths_alone(llama: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[tuple[str, int]]] = []
    exchange = PageStream._exchange

    def record(self: PageStream, call: Any, messages: Any, receive: Any) -> None:
        def seen() -> Iterator[pb.AttendRequest]:
            for message in messages:
                kind = message.WhichOneof("kind")
                size = len(getattr(message, kind).operands.c0) if kind == "products" else 0
                shapes[-1].append((kind, size))
                yield message

        def received(number: int, answer: pb.AttendResponse) -> None:
            shapes[-1].append(("answer", len(answer.c0) + len(answer.c1) + len(answer.c2)))
            receive(number, answer)

        exchange(self, call, seen(), received)

    monkeypatch.setattr(PageStream, "_exchange", record)
    for text in (PROMPT, PROMPT[::-1], "0" * len(PROMPT)):
        shapes.append([])
        llama.rlwe.model.generate(**tokens(llama.rlwe, text), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        gc.collect()
    assert shapes[1] == shapes[0]
    assert shapes[2] == shapes[0]


# -- bad messages ----------------------------------------------------------------------------------------------------


def ciphertexts(count: int = 1, **fields: Any) -> pb.Ciphertexts:
    c0 = np.random.default_rng(0).integers(0, min(PAGE_PARAMS.primes), (3, count, N), dtype=np.uint32)
    return pb.Ciphertexts(**{"count": count, "seed": bytes(32), "c0": pack(c0), "primes": 3, **fields})


def append(first: int = 0, **fields: Any) -> pb.AttendRequest:
    return pb.AttendRequest(id=2, append=pb.PageAppend(first=first, pages=ciphertexts(**fields)))


def products(sums: list[tuple[list[int], list[int]]] | None = None, **fields: Any) -> pb.AttendRequest:
    each = [pb.PageSum(operands=a, pages=b) for a, b in ([([0], [0])] if sums is None else sums)]
    chosen: dict[str, Any] = {"first": 63, "step": 64, "count": 64, "operands": ciphertexts(), **fields}
    return pb.AttendRequest(id=3, products=pb.PageProducts(sums=each, **chosen))


def opening(beside: Beside, **fields: Any) -> pb.AttendRequest:
    chosen = {"fingerprint": beside.server.store.manifest.fingerprint, "protocol": pb.PROTOCOL_RLWE, **fields}
    return pb.AttendRequest(id=1, open=pb.Open(**chosen))


def ask(beside: Beside, *requests: pb.AttendRequest) -> tuple[int, grpc.StatusCode, str]:
    """How many answers came, and how the stream ended."""
    answers = 0
    with grpc.insecure_channel(f"127.0.0.1:{beside.server.port}") as channel:
        try:
            for _ in pb_grpc.SordinoStub(channel).Attend(iter(requests), timeout=20):
                answers += 1
        except grpc.RpcError as error:
            return answers, error.code(), error.details() or ""
    return answers, grpc.StatusCode.OK, ""


def over_the_prime() -> bytes:
    c0 = np.zeros((3, 1, N), np.uint32)
    c0[2, 0, 17] = PAGE_PARAMS.primes[2]
    return pack(c0)


def at_two_primes() -> bytes:
    return pack(np.zeros((2, 1, N), np.uint32))


INVALID, TOO_MUCH = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("requests", "code", "why"),
    [
        ([append(seed=bytes(31))], INVALID, "a seed has 32 bytes"),
        ([append(c0=over_the_prime())], INVALID, "not below its prime"),
        ([append(c0=pack(np.zeros((2, 1, N), np.uint32)))], INVALID, "bytes for"),
        ([append(c0=pack(np.zeros((3, 1, N // 2), np.uint32)))], INVALID, "bytes for"),
        ([append(primes=2)], INVALID, "bytes for"),
        ([append(primes=1)], INVALID, "2 or 3 primes"),
        ([append(), products(operands=ciphertexts(primes=4))], INVALID, "2 or 3 primes"),
        ([append(), products(operands=ciphertexts(primes=2, c0=at_two_primes()))], INVALID, "another level"),
        ([append(count=0)], INVALID, "without a ciphertext"),
        ([append(c0=b"")], INVALID, "bytes for"),
        ([append(), append()], INVALID, "twice or out of order"),
        ([append(first=1)], INVALID, "twice or out of order"),
        ([products()], INVALID, "never appended"),
        ([append(), pb.AttendRequest(drop=pb.PageDrop(pages=[0])), products()], INVALID, "was dropped"),
        ([pb.AttendRequest(drop=pb.PageDrop(pages=[3]))], INVALID, "never appended"),
        ([append(), products(sums=[])], INVALID, "without a sum"),
        ([append(), products(sums=[([], [])])], INVALID, "one at least"),
        ([append(), products(sums=[([0], [0, 0])])], INVALID, "as many operands"),
        ([append(), products(sums=[([1], [0])])], INVALID, "of those that are sent"),
        ([append(), products(sums=[([0] * 9, [0] * 9)])], INVALID, "more products than both together"),
        ([append(), products(sums=[([0], [0])] * 300)], TOO_MUCH, "ask in parts"),
        ([append(), products(count=65)], INVALID, "are not below"),
        ([append(), products(step=0)], INVALID, "are not below"),
        ([append(), products(count=0)], INVALID, "are not below"),
        ([append(), products(operands=ciphertexts(seed=b""))], INVALID, "a seed has 32 bytes"),
        ([append(), products(operands=ciphertexts(c0=over_the_prime()))], INVALID, "not below its prime"),
        ([pb.AttendRequest(id=9)], INVALID, "does nothing"),
    ],
)
def test_bad_messages_end_their_stream_alone(
    llama: Beside, requests: list[pb.AttendRequest], code: grpc.StatusCode, why: str
) -> None:
    cache = EncryptedCache(attention(llama), llama.rlwe.model.config)
    forward(llama, cache, torch.arange(10, 20)[None])
    answers, ended, text = ask(llama, opening(llama), *requests)
    assert (answers, ended) == (len(requests), code)
    assert why in text
    forward(llama, cache, torch.arange(20, 22)[None])  # unharmed


def test_a_stream_is_opened_once_and_first(llama: Beside) -> None:
    assert ask(llama, opening(llama), append(), products())[:2] == (3, grpc.StatusCode.OK)
    assert ask(llama, append())[1] is INVALID
    assert ask(llama, opening(llama), opening(llama))[:2] == (1, INVALID)
    assert ask(llama, opening(llama, protocol=pb.PROTOCOL_MASKED))[1] is INVALID
    assert ask(llama, opening(llama, fingerprint="0" * 64))[1] is grpc.StatusCode.FAILED_PRECONDITION


def test_options_that_cannot_be(llama: Beside) -> None:
    target = f"grpc://127.0.0.1:{llama.server.port}"
    for options, why in (
        ({"attention": "remote"}, "does not exist"),
        ({"attention": "rlwe", "attn_implementation": "eager"}, "leave the other out"),
    ):
        with pytest.raises(ProtocolError, match=why):
            connect(target, protocol="clear", cache=llama.folder / "cache", **options)


# -- as a user has it ------------------------------------------------------------------------------------------------


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from sordino.shared.cli import main

    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for beside in open_beside("llama", tmp_path, page_tokens=None, num_key_value_heads=1, head_dim=64):
        outs = []
        for kind in ("local", "rlwe"):
            command = ["sordino", "generate", "many words " * 7, "--raw", "--max-new-tokens", "4", "--temperature", "0"]
            command += ["--server", f"grpc://127.0.0.1:{beside.server.port}", "--protocol", "clear"]
            monkeypatch.setattr("sys.argv", [*command, "--attention", kind])
            capfd.readouterr()
            with pytest.raises(SystemExit) as end:
                main()
            assert not end.value.code
            outs.append(capfd.readouterr())
        assert outs[0].out == outs[1].out
        down = [float(out.err.split(" MB down")[0].rsplit(" ", 1)[1]) for out in outs]
        assert down[0] + 1 < down[1]


def test_over_tls_with_the_servers_options(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """Two MiB hold 12 pages of keys and values: a short answer fits."""
    from stack import PROMPT as WORDS
    from stack import ServerProcess, answer, connect_to

    options = ("--kv-mib", "2", "--kv-session-mib", "2")
    with ServerProcess(bundles("llama"), tmp_path, arguments=options) as server:
        link = connect_to(server, tmp_path, protocol="rlwe", attention="rlwe", page_tokens=TOKENS)
        with link.session, pytest.raises(LimitError, match="may keep 2 MiB"):
            answer(link, WORDS)
        assert server.serves()
        link = connect_to(server, tmp_path, protocol="rlwe", attention="rlwe", page_tokens=TOKENS)
        local = connect_to(server, tmp_path, protocol="rlwe")
        with link.session, local.session:
            assert answer(link, "the fox", tokens=3) == answer(local, "the fox", tokens=3)
            assert link.session.traffic.up["attention"]
