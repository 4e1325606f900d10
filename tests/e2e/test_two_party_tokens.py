"""Profile two-party where the provider opens the next token alone: between real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stack import PROMPT, ServerProcess, connect_to
from twoparty import DealerProcess, serve_with, share_with

from sordino.client.answers import Generation
from sordino.client.options import Options
from sordino.client.twoparty.connect import TwoPartyConnected
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import ProtocolError, RangeError, SordinoError

# Of a tiny model's tokens, none ends an answer: how long they are must not depend on what is chosen.
NO_END: dict[str, Any] = {"eos_token_id": None}


@pytest.fixture(scope="module")
def dealer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DealerProcess]:
    with DealerProcess(tmp_path_factory.mktemp("dealer")) as process:
        yield process


@pytest.fixture(scope="module")
def server(
    bundles: Callable[..., Path], dealer: DealerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with serve_with(dealer, bundles("llama"), folder, extra=("--opens", "token"), allow_clear=True) as process:
        yield process


@pytest.fixture(scope="module")
def clear(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    connected = connect_to(server, tmp_path_factory.mktemp("clear"), protocol="clear")
    with connected.session:
        yield connected


@pytest.fixture(scope="module")
def shared(
    server: ServerProcess, dealer: DealerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoPartyConnected]:
    connected = share_with(server, dealer, tmp_path_factory.mktemp("client"), ahead=256)
    with connected.session:
        yield connected


def ask(connected: Any, tokens: int = 8, prompt: str = PROMPT, **options: Any) -> list[int]:
    inputs = connected.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = connected.model.generate(**inputs, max_new_tokens=tokens, **{"do_sample": False, **NO_END, **options})
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_greedy_answers_are_those_of_clear(shared: TwoPartyConnected, clear: Any) -> None:
    before = shared.session._next_pass
    assert ask(shared, 12) == ask(clear, 12)
    assert shared.session._next_pass - before == 12 + 1, "what comes next was not foreseen"


def test_all_rows_of_a_prompt_choose(shared: TwoPartyConnected, clear: Any) -> None:
    """One logit is 0 and all others -inf: of the likeliest token, or of one that was as likely."""
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        found, right = shared.model(input_ids=ids).logits, clear.model(input_ids=ids).logits
    assert torch.equal(found.isfinite().sum(dim=-1), torch.ones(1, 40))
    chosen = found.argmax(dim=-1)
    lead = right.max(dim=-1).values - right.gather(-1, chosen[..., None])[..., 0]
    assert lead.max() < 0.05 * right.abs().max()
    assert (chosen == right.argmax(dim=-1)).sum() > 30


def test_nothing_else_is_received(shared: TwoPartyConnected) -> None:
    """A pass more opens as many wires more as its steps say, and at the end one word of each row."""
    session = shared.session
    choice, d = session.plan.choice, session.plan.shape.d
    assert choice is not None
    received, rounds = [], []
    with torch.no_grad():
        for kept in (1, 2):
            spent = session.spent.received, session.spent.rounds
            shared.model(input_ids=torch.tensor([[5, 6, 7]]), logits_to_keep=kept)
            received.append(session.spent.received - spent[0])
            rounds.append(session.spent.rounds - spent[1])
    bits = sum(-(-2 * pairs // 8) - -(-pairs // 8) for pairs in choice.pairs)
    assert received[1] - received[0] == 8 * d + 8 * (choice.tokens - 1) + bits + 8
    assert rounds == [17 * session.plan.shape.layers + 3 + 1 + 2 * len(choice.pairs)] * 2


def test_drafts_are_verified_in_one_pass(shared: TwoPartyConnected) -> None:
    """transformers' prompt lookup, and our own speculation: the same tokens."""
    text = f"{PROMPT} {PROMPT}"
    right = ask(shared, 10, text)
    assert ask(shared, 10, text, prompt_lookup_num_tokens=3) == right
    inputs = shared.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    answers = Generation(shared, inputs, Options(max_tokens=10, temperature=0, speculate="ngram", end_ids=())).run()
    assert [token.id for token in answers.answers[0].tokens] == right


def test_a_batch_with_padding(shared: TwoPartyConnected, clear: Any) -> None:
    clear.tokenizer.padding_side = "left"
    inputs = clear.tokenizer([PROMPT, PROMPT[:5]], padding=True, return_tensors="pt", return_token_type_ids=False)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **NO_END}
    assert torch.equal(shared.model.generate(**inputs, **options), clear.model.generate(**inputs, **options))


def test_tokens_are_drawn_at_a_temperature(shared: TwoPartyConnected, clear: Any) -> None:
    """Of a prompt that comes 16 times: hot ones differ, cold ones are the likeliest, or as likely; ``generate()`` sets
    what the passes take."""
    ids = torch.full((16, 1), 9)
    with torch.no_grad():
        right = clear.model(input_ids=ids[:1]).logits[0, -1]
    lead = right.max() - right
    hot = shared.model.generate(input_ids=ids, max_new_tokens=1, do_sample=True, temperature=4.0, **NO_END)
    assert shared.session.temperature == 4.0
    assert len(set(hot[:, 1].tolist())) > 4
    assert lead[hot[:, 1]].max() > 0.2 * right.abs().max()
    cold = shared.model.generate(input_ids=ids, max_new_tokens=1, do_sample=True, temperature=1e-3, **NO_END)
    assert lead[cold[:, 1]].max() < 0.05 * right.abs().max()
    inputs = {"input_ids": ids[:1], "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    Generation(shared, inputs, Options(max_tokens=1, temperature=0.5)).run()
    assert shared.session.temperature == 0.5
    ask(shared, 1)
    assert shared.session.temperature == 0.0
    with pytest.raises(RangeError, match="temperatures from 0 to 4"):
        shared.session.temperature = 4.5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"do_sample": True, "top_p": 0.9}, "TopPLogitsWarper"),
        ({"do_sample": True, "top_k": 3}, "TopKLogitsWarper"),
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"min_new_tokens": 2, "eos_token_id": 1}, "MinNewTokens"),
        ({"num_beams": 2}, "beams"),
        ({"do_sample": True, "num_return_sequences": 2}, "several answers"),
        ({"do_sample": True, "temperature": 9.0}, "temperatures from 0 to 4"),
    ],
)
def test_what_needs_logits_is_refused(shared: TwoPartyConnected, options: dict[str, Any], text: str) -> None:
    before = shared.session.spent.passes
    with pytest.raises(RangeError, match=text):
        ask(shared, 2, **options)
    assert shared.session.spent.passes == before


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.0}])
def test_options_that_need_logits_are_refused(shared: TwoPartyConnected, options: dict[str, Any]) -> None:
    inputs = shared.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with pytest.raises(RangeError, match="opens the next token alone"):
        Generation(shared, inputs, Options(max_tokens=1, **options)).run()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda request: setattr(request.numbers, "tokens", 0), ProtocolError, "hidden states of none"),
        (lambda request: setattr(request.numbers, "tokens", 2), ProtocolError, "tokens"),
        (lambda request: setattr(request, "temperature", 1 << 15), RangeError, "temperatures up to 4"),
    ],
)
def test_a_client_that_asks_for_something_else_is_refused(
    server: ServerProcess,
    dealer: DealerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pb.Forward], None],
    error: type[SordinoError],
    text: str,
) -> None:
    """By the server, whatever the client would make of the answer."""
    connected = share_with(server, dealer, tmp_path)
    put = connected.session._put

    def changed(request: pb.ComputeRequest) -> None:
        if request.WhichOneof("kind") == "forward":
            change(request.forward)
        put(request)

    monkeypatch.setattr(connected.session, "_put", changed)
    with connected.session, pytest.raises(error, match=text):
        connected.model(input_ids=torch.tensor([[5]]))


def test_other_families(bundles: Callable[..., Path], dealer: DealerProcess, tmp_path: Path) -> None:
    """A bias of the last norm, which the head meets as a constant."""
    folder = bundles("gpt2")
    with serve_with(dealer, folder, tmp_path / "server", extra=("--opens", "token"), allow_clear=True) as process:
        clear = connect_to(process, tmp_path / "clear", protocol="clear")
        shared = share_with(process, dealer, tmp_path / "shared")
        with clear.session, shared.session:
            assert ask(shared, 6) == ask(clear, 6)
