"""Profile two-party between real processes: a server, a dealer, and this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stack import PROMPT, ServerProcess, connect_to
from transformers import pipeline
from twoparty import DealerProcess, serve_with, share_with

from sordino.client.answers import Generation
from sordino.client.kvcache import CACHE_NAMES
from sordino.client.options import Options
from sordino.client.twoparty.connect import TwoPartyConnected
from sordino.shared.errors import ProtocolError, RangeError


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


@pytest.mark.parametrize(
    ("rows", "padding", "text"), [(2, False, "2 prompts at once"), (1, True, "a prompt with padding")]
)
def test_what_it_cannot_do_is_said(shared: TwoPartyConnected, rows: int, padding: bool, text: str) -> None:
    ids = torch.full((rows, 4), 3)
    mask = torch.ones_like(ids)
    if padding:
        mask[0, 0] = 0
    with pytest.raises(RangeError, match=text):
        shared.model(input_ids=ids, attention_mask=mask)
    assert ask(shared, 2), "and the session goes on"


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


def test_pipelines_work(shared: TwoPartyConnected) -> None:
    answer = pipeline("text-generation", model=shared.model, tokenizer=shared.tokenizer)
    assert answer(PROMPT, max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith(PROMPT)
