"""Profile two-party between real processes: a server, a dealer, and this one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stack import PROMPT, ServerProcess, connect_to
from transformers import StaticCache, pipeline
from twoparty import DealerProcess, serve_with, share_with

from sordino.client.answers import Generation
from sordino.client.kvcache import CACHE_NAMES
from sordino.client.options import Options
from sordino.client.twoparty.connect import TwoPartyConnected
from sordino.client.twoparty.session import MOST_ROWS
from sordino.shared.errors import AuthError, LimitError, ProtocolError, RangeError, TransportError
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.numbers import LONGEST
from sordino.shared.twoparty.source import Dealer


@pytest.fixture(scope="module")
def dealer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DealerProcess]:
    with DealerProcess(tmp_path_factory.mktemp("dealer")) as process:
        yield process


@pytest.fixture(scope="module")
def server(
    bundles: Callable[..., Path], dealer: DealerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with serve_with(dealer, bundles("llama"), tmp_path_factory.mktemp("server"), allow_clear=True) as process:
        yield process


@pytest.fixture(scope="module")
def shared(
    server: ServerProcess, dealer: DealerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoPartyConnected]:
    connected = share_with(server, dealer, tmp_path_factory.mktemp("client"), ahead=128)
    with connected.session:
        yield connected


def ask(connected: Any, tokens: int = 8, prompt: str = PROMPT, **options: Any) -> list[int]:
    inputs = connected.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = connected.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_answers_are_those_of_clear(shared: TwoPartyConnected, server: ServerProcess, tmp_path: Path) -> None:
    clear = connect_to(server, tmp_path, protocol="clear")
    with clear.session:
        inputs = clear.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            right = clear.model(**inputs).logits
            found = shared.model(**inputs).logits
        assert (found - right).abs().max() < 0.05 * right.abs().max()
        assert ask(shared) == ask(clear)
    spent = shared.session.spent
    assert spent.rounds == spent.passes * (17 * shared.session.plan.shape.layers + 3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt2"])
def test_families(bundles: Callable[..., Path], dealer: DealerProcess, tmp_path: Path, family: str) -> None:
    """Biases; norms of heads; LayerNorm, GELU without a gate, and positions that are embedded."""
    with serve_with(dealer, bundles(family), tmp_path / "server", allow_clear=True) as server:
        clear = connect_to(server, tmp_path / "clear", protocol="clear")
        shared = share_with(server, dealer, tmp_path / "shared")
        with clear.session, shared.session:
            inputs = clear.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
            with torch.no_grad():
                right = clear.model(**inputs).logits
                found = shared.model(**inputs).logits
            assert (found - right).abs().max() < 0.05 * right.abs().max()
            assert ask(shared) == ask(clear)


def test_a_cache_that_is_cropped_goes_on(shared: TwoPartyConnected) -> None:
    """Two turns with one cache, then the first again: the same tokens."""
    inputs = shared.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        first = shared.model(**inputs, use_cache=True)
        name = next(name for name in CACHE_NAMES if name in first)
        cache = first[name]
        again = shared.model(input_ids=torch.tensor([[5]]), **{name: cache}).logits
        cache.crop(-1)
        other = shared.model(input_ids=torch.tensor([[5]]), **{name: cache}).logits
    assert (again - other).abs().max() < 0.05 * again.abs().max()


def padded(tokenizer: Any, *prompts: str) -> Any:
    tokenizer.padding_side = "left"
    return tokenizer(list(prompts), padding=True, return_tensors="pt", return_token_type_ids=False)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_batch_with_padding(bundles: Callable[..., Path], dealer: DealerProcess, tmp_path: Path, family: str) -> None:
    """Three prompts of different lengths, greedy and by beams: the answers of clear, in as many passes as of one."""
    with serve_with(dealer, bundles(family), tmp_path / "server", allow_clear=True) as server:
        clear = connect_to(server, tmp_path / "clear", protocol="clear")
        shared = share_with(server, dealer, tmp_path / "shared", ahead=64)
        with clear.session, shared.session:
            inputs = padded(clear.tokenizer, PROMPT, PROMPT[:5], PROMPT[3:])
            assert not inputs["attention_mask"].all()
            options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
            right = clear.model.generate(**inputs, **options)
            before = shared.session.spent.passes
            assert torch.equal(shared.model.generate(**inputs, **options), right)
            prompt_passes = -(-int(inputs["attention_mask"].sum()) // MOST_ROWS)
            assert shared.session.spent.passes - before == prompt_passes + 4
            one = padded(clear.tokenizer, PROMPT)
            beams = options | {"num_beams": 3}
            assert torch.equal(shared.model.generate(**one, **beams), clear.model.generate(**one, **beams))


def test_a_mask_hides_tokens(shared: TwoPartyConnected, server: ServerProcess, tmp_path: Path) -> None:
    """Of a prompt and of its cache, and positions may be given."""
    clear = connect_to(server, tmp_path, protocol="clear")
    ids, more = torch.tensor([[5, 9, 7, 3, 8], [4, 4, 6, 2, 1]]), torch.tensor([[6, 2], [1, 9]])
    mask = torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    later = torch.tensor([[1, 0, 1, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1, 1]])
    at = torch.tensor([[2, 3, 4, 9, 10], [0, 1, 2, 3, 4]])
    with clear.session, torch.no_grad():
        logits = []
        for link in (clear, shared):
            first = link.model(input_ids=ids, attention_mask=mask, position_ids=at, use_cache=True)
            name = next(name for name in CACHE_NAMES if name in first)
            second = link.model(input_ids=more, attention_mask=later, **{name: first[name]}).logits
            logits.append((first.logits[mask.bool()], second))
        plain = clear.model(input_ids=ids).logits[mask.bool()]
    for right, found in zip(*logits, strict=True):
        assert (found - right).abs().max() < 0.05 * right.abs().max()
    assert (plain - logits[0][0]).abs().max() > 0.2 * plain.abs().max(), "the mask does nothing"


def test_a_prompt_goes_on_from_one_of_a_batch(shared: TwoPartyConnected, server: ServerProcess, tmp_path: Path) -> None:
    """Of which the cache holds the other's rows too; the same for one of several answers, or a beam."""
    clear = connect_to(server, tmp_path, protocol="clear")
    ids, more = torch.tensor([[5, 9, 7, 3], [4, 8, 6, 2]]), torch.tensor([[7, 8]])
    with clear.session, torch.no_grad():
        first = shared.model(input_ids=ids, use_cache=True)
        name = next(name for name in CACHE_NAMES if name in first)
        first[name].batch_select_indices(torch.tensor([1]))
        found = shared.model(input_ids=more, **{name: first[name]}).logits
        right = clear.model(input_ids=torch.cat([ids[1:], more], 1)).logits[:, 4:]
    assert (found - right).abs().max() < 0.05 * right.abs().max()


def test_without_a_cache_each_token_takes_the_whole_prompt(
    shared: TwoPartyConnected, server: ServerProcess, tmp_path: Path
) -> None:
    clear = connect_to(server, tmp_path, protocol="clear")
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with clear.session:
        ids = torch.tensor([[50, 60, 70, 80]])
        right, found = (link.model.generate(ids, **options) for link in (clear, shared))
    for one, other in zip(right.logits, found.logits, strict=True):
        assert (one - other).abs().max() < 0.05 * one.abs().max()


def test_layers_alone_give_all_rows_whatever_was_asked_before(shared: TwoPartyConnected) -> None:
    """Places are of one call of the whole model and of its thread; one that fails before its layers leaves none."""
    inputs = shared.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        shared.model(**inputs, logits_to_keep=1)
        with pytest.raises(RangeError):
            shared.model(input_ids=torch.zeros(1, 0, dtype=torch.long), logits_to_keep=1)
        hidden = getattr(shared.model, shared.model.base_model_prefix)(**inputs).last_hidden_state
        assert (hidden.abs().sum(-1) > 0).all()

        def between(*_: Any) -> None:  # the call of the whole model and its layers' own
            handle.remove()
            assert other.submit(shared.model, **inputs, logits_to_keep=1).result().logits.shape[1] == 1

        handle = shared.model.get_input_embeddings().register_forward_hook(between)
        with ThreadPoolExecutor(1) as other:
            found = shared.model(**inputs).logits
        right = shared.model(**inputs).logits
    assert (found - right).abs().max() < 0.05 * right.abs().max()


def test_ctrl_c_at_the_dealers_door_waits_until_grpc_is_left(
    server: ServerProcess, dealer: DealerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, left = Dealer.begin, list[bool]()

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        answer = begin(*arguments)
        left.append(True)
        return answer

    monkeypatch.setattr(Dealer, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        share_with(server, dealer, tmp_path)
    assert left


def test_no_more_is_opened_than_logits_are_kept(shared: TwoPartyConnected) -> None:
    """The share of a row's hidden state is what comes last, by one message."""
    inputs = shared.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    received, d = [], shared.session.plan.shape.d
    with torch.no_grad():
        whole = shared.model(**inputs).logits
        for options in ({"logits_to_keep": 1}, {"logits_to_keep": 3}, {"logits_to_keep": torch.tensor([0, 2])}):
            before = shared.session.spent.received
            found = shared.model(**inputs, **options).logits
            received.append(shared.session.spent.received - before)
            kept = options["logits_to_keep"]
            right = whole[:, -kept:] if isinstance(kept, int) else whole[:, kept]
            assert (found - right).abs().max() < 0.05 * whole.abs().max()
    assert received[1] - received[0] == 8 * d * 2
    assert received[1] - received[2] == 8 * d


def test_one_answer_has_the_next_token_dealt_ahead(shared: TwoPartyConnected) -> None:
    """Every pass after the second was asked for before, and one for nothing: that after the last."""
    ask(shared, 1)
    numbers, passes = shared.session._next_pass, shared.session.spent.passes
    ask(shared, 6, min_new_tokens=6)
    assert shared.session.spent.passes - passes == 6
    assert shared.session._next_pass - numbers == 6 + 1
    ask(shared, 2, min_new_tokens=2)  # what was asked for is not what comes
    assert shared.session._next_pass - numbers == 6 + 1 + 2 + 1


@pytest.mark.parametrize(
    ("ids", "mask", "text"),
    [
        (torch.full((2, 4), 3), torch.ones(2, 5), r"a mask \[2, 5\] of 2 prompts with 4 tokens"),
        (torch.full((1, 4), 3), torch.ones(1, 1, 4, 4), "a mask"),
        (torch.full((1, 0), 3), None, "empty"),
    ],
)
def test_what_it_cannot_do_is_said(shared: TwoPartyConnected, ids: Any, mask: Any, text: str) -> None:
    with pytest.raises(RangeError, match=text):
        shared.model(input_ids=ids, attention_mask=mask)
    three = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        first = shared.model(input_ids=three, attention_mask=torch.tensor([[0, 1, 1]]), use_cache=True)
        name = next(name for name in CACHE_NAMES if name in first)
        with pytest.raises(RangeError, match="padding when it was cached"):
            shared.model(input_ids=three[:, :1], **{name: first[name]})
        with pytest.raises(LimitError, match="positions -1 to 2"):
            shared.model(input_ids=three, position_ids=torch.tensor([[-1, 0, 2]]))
        with pytest.raises(RangeError, match="they are shares"):
            shared.model(input_ids=three, output_hidden_states=True)
        with pytest.raises(RangeError, match="not a StaticCache"):
            shared.model(input_ids=three, **{name: StaticCache(shared.model.config, 8)})
    assert ask(shared, 2), "and the session goes on"


def test_a_provider_may_open_the_next_token_alone(
    bundles: Callable[..., Path], dealer: DealerProcess, tmp_path: Path
) -> None:
    with serve_with(dealer, bundles("llama"), tmp_path / "server", extra=("--opened-rows", "1")) as server:
        shared = share_with(server, dealer, tmp_path / "shared")
        with shared.session:
            answer = ask(shared, 3)
            with pytest.raises(RangeError, match="opens at most 1 of the rows"):
                shared.model(input_ids=torch.tensor([[1, 2]]))
            assert ask(shared, 3) == answer, "and the session goes on"


def test_a_server_without_a_dealer_says_so(clear_server: ServerProcess, dealer: DealerProcess, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="does not offer profile two-party"):
        share_with(clear_server, dealer, tmp_path)


def test_an_activation_out_of_its_domain_is_an_error(shared: TwoPartyConnected) -> None:
    """Never a token; and the session, whose cache is as before, goes on."""
    before = ask(shared, 2)
    huge = torch.full((1, 1, shared.session.plan.shape.d), 30_000.0)
    with pytest.raises(RangeError, match="left the domain"):
        shared.model(inputs_embeds=huge)
    assert ask(shared, 2) == before


def test_drafts_are_verified_in_one_pass(shared: TwoPartyConnected) -> None:
    """transformers' prompt lookup, which crops, and our own speculation: the same tokens in fewer passes."""
    text = f"{PROMPT} {PROMPT}"
    before = shared.session.spent.passes
    right = ask(shared, 10, text)
    plain = shared.session.spent.passes - before
    assert ask(shared, 10, text, prompt_lookup_num_tokens=3) == right
    inputs = shared.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    options = Options(max_tokens=10, temperature=0, speculate="ngram")
    answers = Generation(shared, inputs, options).run()
    assert [token.id for token in answers.answers[0].tokens] == right
    assert answers.speculation is not None
    assert answers.speculation.passes <= plain


def test_padding_that_is_not_sent_is_no_way_to_hide_a_length(shared: TwoPartyConnected) -> None:
    inputs = shared.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with pytest.raises(RangeError, match="would hide nothing"):
        Generation(shared, inputs, Options(max_tokens=2, pad_prompt=64)).run()


def test_products_that_run_out_are_made_and_told(server: ServerProcess, dealer: DealerProcess, tmp_path: Path) -> None:
    """What they cost before, how far they are meanwhile; and more at a time as more are used."""
    plans, turns = list[str](), list[tuple[int, int]]()
    told: dict[str, Any] = {"on_plan": plans.append, "on_provision": lambda done, total: turns.append((done, total))}
    connected = share_with(server, dealer, tmp_path, ahead=0, **told)
    with connected.session as session:
        for kept in (40, 60):
            session.forward(np.zeros((kept, session.plan.shape.d)), [])
        assert [plan.split(" rows")[0] for plan in plans] == [f"products ahead for {rows}" for rows in (32, 32, 40)]
        total = 4 * session.plan.shape.layers
        assert turns == [(done + 1, total) for done in range(total)] * 3
        megabytes = [float(word.replace(",", "")) for word in re.findall(r"([\d,]+) MB up", " ".join(plans))]
        assert abs(sum(megabytes) - session.spent.ahead_sent / 1e6) < 2


def test_a_cache_may_be_filled_to_its_end(shared: TwoPartyConnected, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then another prompt begins with an empty one: what is asked for ahead is no more than a cache can have."""
    monkeypatch.setattr(nb, "LONGEST", 24)
    session, d = shared.session, shared.session.plan.shape.d
    _, kept = session.forward(np.zeros((22, d)), [], opened=[])
    for left in (1, 0):
        _, new = session.forward(np.zeros((1, d)), kept)
        kept += new
        assert (session._ahead is not None) == bool(left), "no pass that the dealer would refuse"
    with pytest.raises(LimitError, match="shorten"):
        session.forward(np.zeros((1, d)), kept)
    monkeypatch.undo()
    assert ask(shared, 2)


def test_answers_end_where_the_profile_does(shared: TwoPartyConnected) -> None:
    """And not with an error in the middle."""
    inputs = shared.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    most = min(LONGEST, shared.session.plan.shape.positions)
    assert Options(max_tokens=9000).settings(shared, 5)["max_new_tokens"] == most - 5
    with pytest.raises(LimitError, match=rf"takes {LONGEST}|position {most}"):
        shared.session.forward(np.zeros((LONGEST + 1, shared.session.plan.shape.d)), [])
    assert inputs["input_ids"].shape[1] < most


def test_a_server_that_cannot_reach_its_dealer_says_so(
    bundles: Callable[..., Path], dealer: DealerProcess, tmp_path: Path
) -> None:
    """At its start, and to clients, whose own way to the dealer is open; and serves what needs none."""
    arguments = ("--dealer", "grpcs://localhost:9", "--dealer-ca", str(dealer.ca))
    arguments += ("--dealer-token-file", str(dealer.token_file("server")))
    with ServerProcess(bundles("llama"), tmp_path / "server", arguments=arguments, allow_clear=True) as server:
        assert "cannot be used for now: the dealer at grpcs://localhost:9" in server.log()
        with pytest.raises(TransportError, match="this server cannot use its dealer: tell its provider"):
            share_with(server, dealer, tmp_path / "client")
        clear = connect_to(server, tmp_path / "clear", protocol="clear")
        with clear.session:
            assert ask(clear, 2)


def test_errors_of_the_dealer_name_it_and_its_options(
    server: ServerProcess, dealer: DealerProcess, tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dealer_ca": server.ca}, r"the dealer at grpcs://localhost:\d+: the dealer's certificate .* --dealer-ca"),
        ({"dealer": "grpcs://localhost:9"}, "the dealer at grpcs://localhost:9: nothing listens there: is the dealer"),
        ({"dealer_token": "sord_of_nobody"}, "the dealer at .* token"),
        ({"dealer": server.target, "dealer_ca": server.ca}, "is it a Sordino dealer"),
    ]
    for wrong, text in cases:
        with pytest.raises((TransportError, AuthError), match=text):
            share_with(server, dealer, tmp_path, **wrong)


def test_pipelines_work(shared: TwoPartyConnected) -> None:
    answer = pipeline("text-generation", model=shared.model, tokenizer=shared.tokenizer)
    assert answer(PROMPT, max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith(PROMPT)
