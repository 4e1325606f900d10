"""What users of ``generate()`` run into: the ways to call it, edge values, threads, masks that run out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from pairs import InProcessServer
from safetensors import safe_open
from transformers import StoppingCriteria, TextIteratorStreamer, pipeline

from sordino.client import Connected, connect
from sordino.server.split import split_model
from sordino.shared.errors import (
    FingerprintError,
    PoolError,
    PoolExhaustedError,
    PoolSealedError,
    ProtocolError,
    RangeError,
)
from sordino.shared.manifest import ModelManifest

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
TEXT = "the quick brown fox"
CHUNK = 64  # slots are reserved in chunks of this size

PROMPTS = [
    *("hello", "a", "The", "0", "42 is", "3.14159", "one two three", "Dear Sir or Madam,", "once upon a time"),
    *("def f(x):\n", "SELECT * FROM t;", '{"key": [1, 2', "<b>bold</b>", "C:\\temp\\", "a\tb\tc", "https://example.org/?q="),
    *("ünïcödé", "naïve café", "日本語", "привет", "שלום", "🎵🎶", "e\u0301", "ﬁ", "½ + ¼"),
    *("   leading", "trailing   ", "\n\n", " ", "....", "!?!?", "aaaaaaaaaaaaaaaaaaaaaaaa", "ABABABABABAB", "zZ" * 12),
    *("what is my balance?", "my password is hunter2", "diagnosis: ", "To: all\nSubject:", "yes", "no", "Q: 1+1\nA:"),
    *("the cat sat on", "the dog ran to", "rain in spain", "to be or not", "all work and no", "pack my box with"),
    *("sphinx of black", "jackdaws love", "how vexingly"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("llama")


@pytest.fixture(scope="module")
def target(bundle: Path) -> Iterator[str]:
    with closing(InProcessServer(bundle)) as server:
        yield address(server)


def address(server: InProcessServer) -> str:
    return f"grpc://127.0.0.1:{server.port}"


Link = Callable[..., Connected]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def link(target: str, cache: Path, tmp_path: Path) -> Iterator[Link]:
    """``link(**options of connect)``; closed at the end of the test."""
    opened: list[Connected] = []

    def make(**options: Any) -> Connected:
        common = {"cache": cache, "retry_s": 5, "batch": 128, "low_water": 0}
        if options.get("protocol", "masked") == "masked":
            common |= {"pool": tmp_path / "pool", "state_dir": tmp_path / "state"}
        opened.append(connect(target, **{**common, **options}))
        return opened[-1]

    yield make
    for connected in opened:
        connected.session.close()


@pytest.fixture(scope="module")
def masked(target: str, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    tmp = tmp_path_factory.mktemp("masked")
    link = connect(target, cache=cache, pool=tmp / "pool", state_dir=tmp / "state", batch=1024, low_water=0, retry_s=5)
    with link.session:
        yield link


@pytest.fixture(scope="module")
def clear(target: str, cache: Path) -> Iterator[Connected]:
    link = connect(target, cache=cache, protocol="clear", retry_s=5)
    with link.session:
        yield link


def encode(link: Connected, text: str = TEXT) -> dict[str, torch.Tensor]:
    return dict(link.tokenizer(text, return_tensors="pt"))


def answer(link: Connected, text: str = TEXT, **options: Any) -> list[int]:
    ids: list[int] = link.model.generate(**encode(link, text), **{**GREEDY, **options})[0].tolist()
    return ids


# -- the hidden path is the real path ----------------------------------------------------------------------------------


def test_fifty_prompts_give_the_tokens_of_clear(masked: Connected, clear: Connected) -> None:
    """Case 1.2."""
    assert len(set(PROMPTS)) == 50
    different = [text for text in PROMPTS if answer(masked, text) != answer(clear, text)]
    assert not different
    assert len({tuple(answer(clear, text)[-6:]) for text in PROMPTS}) > 30, "these prompts prove little"


def test_outlier_channels_through_the_wire(masked: Connected, bundle: Path) -> None:
    """Case 1.1: outliers in some channels, beside the server's own matrix, within the bound of x_max."""
    manifest = ModelManifest.load(bundle)
    spec = next(group for group in manifest.groups if len(group.members) == 1)
    weights = server_tensors(bundle)[spec.name].double()
    name = spec.members[0].name
    with safe_open(bundle / "client" / "client.safetensors", "pt") as file:
        scale = file.get_tensor(name + ".scale").double()
    module = masked.model.get_submodule(name)
    for base in (1e-7, 1.0, 1e6):
        for outlier in (1e2, 1e4, 1e6):
            x = torch.randn(3, spec.in_features, generator=torch.Generator().manual_seed(3)) * base
            x[:, 5] *= outlier
            exact = x.double() @ weights.T * scale
            step = x.double().abs().max(1, keepdim=True).values / spec.x_max
            bound = weights.abs().sum(1) * step / 2 * scale + exact.abs() * 2**-23
            assert ((module(x).double() - exact).abs() <= bound * (1 + 1e-9)).all()
    with pytest.raises(RangeError, match=spec.name):
        module(torch.full((1, spec.in_features), float("inf")))


def server_tensors(bundle: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((bundle / "server").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    return tensors


def test_each_role_has_its_own_tensors(bundle: Path, masked: Connected) -> None:
    """Case 1.10, docs/threat-model.md "Who sees what": at rest, the server's part is integer matrices by group; the
    embedding, norms, scales, biases and the tokenizer are the client's, the remote matrices are not. What passes
    between them is tested by tests/e2e/test_cases_wire.py."""
    manifest = ModelManifest.load(bundle)
    server = server_tensors(bundle)
    assert set(server) == {group.name for group in manifest.groups}
    assert {tensor.dtype for tensor in server.values()} == {torch.int8}
    others = {path.name for path in (bundle / "server").iterdir() if path.suffix != ".safetensors"}
    assert others == {"slices.json"}, "digests of the matrices"
    with safe_open(bundle / "client" / "client.safetensors", "pt") as file:
        client = set(file.keys())
    remote = {member.name for group in manifest.groups for member in group.members}
    assert not client & {f"{name}.weight" for name in remote}
    kinds = {name.rsplit(".", 1)[0].split(".")[-1] for name in client if name.endswith(".weight")}
    assert kinds == {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}
    assert {name.removesuffix(".scale") for name in client if name.endswith(".scale")} == remote
    assert not {p.shape for p in masked.model.parameters()} & {matrix.shape for matrix in server.values()}


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_the_embedding_lookup_costs_no_byte(masked: Connected) -> None:
    """Case 1.9: only the remote groups send, and in the phase ``online`` alone."""
    traffic = masked.session.traffic
    before = dict(traffic.up), dict(traffic.down), traffic.rounds
    masked.model.get_input_embeddings()(encode(masked)["input_ids"])
    masked.model.get_output_embeddings()(torch.ones(1, 3, 64))
    masked.model.model.norm(torch.ones(1, 3, 64))
    assert (traffic.up, traffic.down, traffic.rounds) == before
    with torch.inference_mode():
        masked.model(**encode(masked))
    changed = {phase for phase in traffic.up if traffic.up[phase] != before[0].get(phase)}
    assert changed == {"online"}
    assert traffic.rounds - before[2] == len(masked.session.manifest.groups)


@pytest.mark.parametrize("rows", [1, 19])
def test_bytes_and_rounds_are_those_declared(link: Link, rows: int) -> None:
    """Case 1.9: four bytes an element and a small envelope, the same for both protocols."""
    counted = {}
    for protocol in ("masked", "clear"):
        connected = link(protocol=protocol)
        session = connected.session
        answer(connected, "x", max_new_tokens=1, min_new_tokens=1)  # the stream is open from here on
        up, down, rounds = session.traffic.up["online"], session.traffic.down["online"], session.traffic.rounds
        masks = session.masks_left
        with torch.inference_mode():
            connected.model(input_ids=torch.full((1, rows), 70))
        up, down = session.traffic.up["online"] - up, session.traffic.down["online"] - down
        costs = [session.protocol.cost(group, rows) for group in session.manifest.groups]
        declared_up, declared_down = (sum(getattr(c, f"bytes_{way}") for c in costs) for way in ("up", "down"))
        envelope = 24 * len(costs)
        assert declared_up <= up <= declared_up + envelope
        assert declared_down <= down <= declared_down + envelope
        assert session.traffic.rounds - rounds == sum(c.rounds for c in costs)
        if masks is not None and session.masks_left is not None:
            assert {c.masks for c in costs} == {masks - session.masks_left}
        counted[protocol] = up, down
    assert counted["masked"] == counted["clear"]


@pytest.fixture(scope="module")
def wide_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of the width of SmolLM2-135M."""
    folder = tmp_path_factory.mktemp("wide")
    width = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = models.make_tiny("llama", folder / "model", num_hidden_layers=1, **width)
    split_model(model, folder / "bundle", rounding="nearest")
    return folder / "bundle"


@pytest.mark.parametrize("rows", [1, 40])
def test_envelopes_are_a_tenth_at_most_for_the_demo_models_shapes(wide_bundle: Path, cache: Path, rows: int) -> None:
    """Case 1.9, with the group shapes of SmolLM2-135M: 576 -> 960, 576 -> 576, 576 -> 3072, 1536 -> 576."""
    with (
        closing(InProcessServer(wide_bundle)) as server,
        connect(address(server), protocol="clear", cache=cache).session as session,
    ):
        groups, traffic = session.manifest.groups, session.traffic
        assert {(g.in_features, g.out_features) for g in groups} == {(576, 960), (576, 576), (576, 3072), (1536, 576)}
        session.protocol.apply(groups[0], np.ones((1, 576), np.int32))  # the stream is open from here on
        for group in groups:
            before = traffic.up["online"], traffic.down["online"]
            session.protocol.apply(group, np.ones((rows, group.in_features), np.int32))
            up, down = traffic.up["online"] - before[0], traffic.down["online"] - before[1]
            assert 1 <= up / (4 * rows * group.in_features) <= 1.1
            assert 1 <= down / (4 * rows * group.out_features) <= 1.1


# -- ways to call it ---------------------------------------------------------------------------------------------------


def test_positional_keyword_and_dict_inputs_are_the_same(masked: Connected) -> None:
    """Case 1.11."""
    encoded = masked.tokenizer(TEXT, return_tensors="pt")
    expected = answer(masked)
    ids = encoded["input_ids"]
    for out in (
        masked.model.generate(ids, **GREEDY),
        masked.model.generate(inputs=ids, **GREEDY),
        masked.model.generate(input_ids=ids, attention_mask=encoded["attention_mask"], **GREEDY),
        masked.model.generate(**encoded, **GREEDY),
        masked.model.generate(torch.tensor(ids.tolist()), **GREEDY),
    ):
        assert out[0].tolist() == expected


@pytest.mark.parametrize("use_cache", [True, False])
def test_with_and_without_cache_equals_clear(masked: Connected, clear: Connected, use_cache: bool) -> None:
    """Case 1.11; that both give the same text is tested, with the rule for ties, in tests/conformance."""
    assert answer(masked, use_cache=use_cache) == answer(clear, use_cache=use_cache)


def test_lists_of_texts_and_chats_in_a_pipeline(masked: Connected, clear: Connected) -> None:
    """Case 1.11."""
    both = []
    for link in (masked, clear):
        link.tokenizer.padding_side = "left"
        pipe = pipeline("text-generation", model=link.model, tokenizer=link.tokenizer)
        both.append(
            (
                pipe("hello", **GREEDY),
                pipe(["hello", "a much longer one"], batch_size=2, **GREEDY),
                pipe([{"role": "user", "content": "hi"}], **GREEDY),
            )
        )
    assert both[0] == both[1]
    one, many, chat = both[0]
    assert one[0]["generated_text"].startswith("hello")
    assert [out[0]["generated_text"][:5] for out in many] == ["hello", "a muc"]
    assert chat[0]["generated_text"][-1]["role"] == "assistant"


class Counting(TextIteratorStreamer):
    """Counts what comes: the prompt, then token by token (text comes word by word, and this model makes none)."""

    puts = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        super().put(value)


def test_streamed_text_in_a_thread(masked: Connected) -> None:
    """Case 1.11: the pieces together are the answer."""
    streamer = Counting(masked.tokenizer, skip_prompt=True, timeout=30)
    worker = threading.Thread(
        target=masked.model.generate, kwargs={**encode(masked), **GREEDY, "max_new_tokens": 12, "streamer": streamer}
    )
    worker.start()
    pieces = list(streamer)
    worker.join()
    ids = answer(masked, max_new_tokens=12)[len(encode(masked)["input_ids"][0]) :]
    assert "".join(pieces) == masked.tokenizer.decode(ids)
    assert streamer.puts == 1 + 12


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}], ids=str)
def test_strategies_equal_clear(masked: Connected, clear: Connected, options: dict[str, Any]) -> None:
    """Case 1.11: what reorders or crops the cache, or draws, does so from the same logits."""
    both = []
    for link in (masked, clear):
        torch.manual_seed(5)
        both.append(answer(link, **options))
    assert both[0] == both[1]


def test_eager_attention(link: Link, masked: Connected) -> None:
    eager = link(attn_implementation="eager")
    assert eager.model.config._attn_implementation == "eager"
    with torch.inference_mode():
        a, b = (m.model(**encode(m)).logits for m in (eager, masked))
    assert (a - b).abs().max() < 0.08  # SHAPE_ATOL of tests/conformance: another order of float32 sums
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() > 0.8


def test_two_threads_on_one_model(masked: Connected) -> None:
    """Each gets the answer it would get alone; no row is mixed up, none of the masks is used for two."""
    texts = ["the quick brown fox", "lorem ipsum", "a" * 30, "0123456789"]
    alone = {text: answer(masked, text) for text in texts}
    wrong: list[str] = []
    start = threading.Barrier(len(texts))

    def work(text: str) -> None:
        start.wait()
        for _ in range(4):
            if answer(masked, text) != alone[text]:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- padding and edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_pad_only_rows_and_prefixes_give_finite_logits(link: Link, attention: str) -> None:
    """Case 1.15: a row of padding alone, a long prefix of it, and very unequal lengths; its neighbours are unharmed."""
    connected = link(attn_implementation=attention, protocol="clear")
    pad, width = connected.tokenizer.pad_token_id, 70
    ids = torch.full((4, width), pad)
    mask = torch.zeros_like(ids)
    for row, length in ((1, 1), (2, 7), (3, width)):
        ids[row, -length:] = torch.arange(length) % 200 + 10
        mask[row, -length:] = 1
    positions = (mask.cumsum(-1) - 1).clip(0)
    with torch.inference_mode():
        out = connected.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        assert out.isfinite().all()
        alone = connected.model(input_ids=ids[2:3, -7:]).logits
    assert (out[2, -7:] - alone[0]).abs().max() < 0.08
    with_logits = {"output_logits": True, "return_dict_in_generate": True}
    generated = connected.model.generate(input_ids=ids, attention_mask=mask, **GREEDY, **with_logits)
    assert all(step.isfinite().all() for step in generated.logits)


class Stop(StoppingCriteria):
    """After so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


def test_edge_values_of_generate(masked: Connected) -> None:
    """Case 1.17. Nothing to evaluate is a RangeError, a length below one is transformers' ValueError, both before a
    byte is sent; white space is a prompt like any other; a limit of 2^31 is none, and what ends the answer is the end
    token or a stopping criterion. The next call works."""
    expected = answer(masked)
    ids = encode(masked)["input_ids"]
    sent = dict(masked.session.traffic.up)
    for call in (
        lambda: masked.model.generate(**masked.tokenizer("", return_tensors="pt"), **GREEDY),
        lambda: masked.model.generate(torch.empty((1, 0), dtype=torch.long), **GREEDY),
        lambda: masked.model(input_ids=torch.empty((1, 0), dtype=torch.long)),
    ):
        with pytest.raises(RangeError, match="prompt is empty"):
            call()
    for wrong in (0, -1, -(2**31)):
        with pytest.raises(ValueError, match="max_new_tokens"):
            masked.model.generate(ids, do_sample=False, max_new_tokens=wrong)
    assert masked.session.traffic.up == sent
    for text in (" ", "\n", " \t "):
        assert len(answer(masked, text)) == len(text) + 6
    out = masked.model.generate(
        ids, do_sample=False, max_new_tokens=2**31, eos_token_id=[], stopping_criteria=[Stop(4)]
    )
    assert out[0].tolist()[:-2] == expected[:-4]
    assert answer(masked) == expected


def test_prompts_around_the_last_position(bundles: Callable[..., Path], cache: Path) -> None:
    """Case 1.18, learned positions (GPT-2): max - 1 and max work, max + 1 is an error before a byte is sent."""
    with (
        closing(InProcessServer(bundles("gpt2"))) as server,
        (link := connect(address(server), protocol="clear", cache=cache)).session as session,
    ):
        limit = link.model.config.max_position_embeddings
        ids = (torch.arange(limit + 1) % 200 + 10)[None]
        for length in (limit - 1, limit):
            out = link.model.generate(ids[:, :length], do_sample=False, max_new_tokens=1)
            assert out.shape[1] == length + 1
        sent, start = dict(session.traffic.up), time.monotonic()
        with pytest.raises((IndexError, ValueError)):
            link.model.generate(ids, do_sample=False, max_new_tokens=1)
        assert time.monotonic() - start < 1
        assert session.traffic.up == sent
        assert link.model.generate(ids[:, :3], do_sample=False, max_new_tokens=1).shape[1] == 4


# -- masks while an answer is made -------------------------------------------------------------------------------------


def test_running_dry_refills_says_so_and_goes_on(link: Link, clear: Connected) -> None:
    notices: list[str] = []
    small = link(batch=CHUNK, on_notice=notices.append)
    made = small.session.traffic.up["provision"]
    assert answer(small, max_new_tokens=100, min_new_tokens=100) == answer(
        clear, max_new_tokens=100, min_new_tokens=100
    )
    assert notices
    assert "masks" in notices[0]
    assert small.session.traffic.up["provision"] > made
    prompt = len(encode(small)["input_ids"][0])
    assert (small.session.masks_left or 0) == -(prompt + 99) % CHUNK


def test_refills_in_the_background_below_the_low_water_mark(link: Link, clear: Connected) -> None:
    notices: list[str] = []
    busy = link(batch=128, low_water=100, on_notice=notices.append)
    long = {"max_new_tokens": 40, "min_new_tokens": 40}
    assert answer(busy, **long) == answer(clear, **long)
    deadline = time.monotonic() + 20
    while (busy.session.masks_left or 0) < 128 and time.monotonic() < deadline:
        time.sleep(0.05)
    used = len(encode(busy)["input_ids"][0]) + 39
    assert busy.session.masks_left == 2 * 128 - used
    assert not notices, "nobody had to wait"
    assert answer(busy) == answer(clear)


def test_a_batch_under_way_in_the_background_does_not_hold_up_close(link: Link) -> None:
    busy = link(batch=128, low_water=128)
    answer(busy)
    start = time.monotonic()
    busy.session.close()
    assert time.monotonic() - start < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "sordino-refill"]


def test_out_of_masks_without_refilling(link: Link, clear: Connected) -> None:
    with pytest.raises(PoolExhaustedError):
        answer(link(refill=False))
    filled = link(batch=CHUNK)
    filled.session.close()
    last = link(refill=False)
    assert answer(last) == answer(clear)
    with pytest.raises(PoolExhaustedError, match="needed"):
        answer(last, "x" * 100)
    assert last.session.traffic.up.get("provision") is None
    # Provisioning by hand is what is left.
    last.session.provision()
    assert answer(last) == answer(clear)


def test_connecting_without_provisioning_waits_for_the_first_use(link: Link, clear: Connected) -> None:
    lazy = link(provision=False, on_notice=lambda text: None)
    assert lazy.session.masks_left == 0
    assert answer(lazy) == answer(clear)
    assert lazy.session.masks_left


def test_a_sealed_pool_opens_with_its_passphrase_only(link: Link, clear: Connected) -> None:
    sealed = link(passphrase="correct horse")
    assert answer(sealed) == answer(clear)
    sealed.session.close()
    for wrong in (None, "battery staple"):
        with pytest.raises(PoolSealedError):
            link(passphrase=wrong)
    again = link(passphrase="correct horse", refill=False)
    assert again.session.masks_left
    assert again.session.traffic.up.get("provision") is None, "check vectors and masks were kept"
    assert answer(again) == answer(clear)


def test_a_passphrase_for_a_pool_that_is_not_sealed(link: Link) -> None:
    link().session.close()
    with pytest.raises(PoolSealedError, match="not sealed"):
        link(passphrase="x")


@pytest.mark.parametrize("batch", [0, 1, 100, -64])
def test_an_impossible_batch_is_refused(link: Link, batch: int) -> None:
    with pytest.raises(PoolError, match="multiple of 64"):
        link(batch=batch)


# -- who is at the other end -------------------------------------------------------------------------------------------


def test_fingerprint(link: Link, bundle: Path) -> None:
    right = ModelManifest.load(bundle).fingerprint
    assert link(fingerprint=right, protocol="clear").session.manifest.fingerprint == right
    with pytest.raises(FingerprintError, match="another split"):
        link(fingerprint="0" * 64, protocol="clear")


@pytest.mark.parametrize("protocol", ["", "MASKED", "plain", "ckks"])
def test_unknown_protocol(link: Link, protocol: str) -> None:
    with pytest.raises(ProtocolError, match="does not exist"):
        link(protocol=protocol)
