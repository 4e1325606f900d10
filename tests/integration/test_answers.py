"""Answers: drafts right, half right, wrong; seeds; stop texts; cancelling."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from pairs import Pair, open_pair

from sordino.client import Connected
from sordino.client.answers import Answers, Generation, Piece
from sordino.client.guide import GuideSpec
from sordino.client.options import Options
from sordino.client.protocols import ClearProtocol, MaskedProtocol
from sordino.client.terminal import encode_prompt
from sordino.shared.errors import RangeError

PROMPT = "the quick brown fox, the quick brown dog, the quick"
TOKENS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from open_pair("llama", tmp_path_factory.mktemp("answers"))


def generation(link: Connected, prompt: str = PROMPT, draft_model: Any = None, **options: Any) -> Generation:
    given = {"max_tokens": TOKENS, "temperature": 0, "end_ids": (), **options}
    return Generation(link, encode_prompt(link, prompt, raw=True), Options(**given), draft_model=draft_model)


def run(link: Connected, prompt: str = PROMPT, draft_model: Any = None, **options: Any) -> Answers:
    return generation(link, prompt, draft_model, **options).run()


def ids(answers: Answers, number: int = 0) -> list[int]:
    return [token.id for token in answers.answers[number].tokens]


# -- drafts ------------------------------------------------------------------------------------------------------------


class Oracle:
    """Drafts of which as many are right as is said."""

    def __init__(self, truth: Sequence[int], prompt: int, right: int) -> None:
        self.truth, self.prompt, self.right = truth, prompt, right

    def evidence(self, ids: Sequence[int]) -> int:
        return 3

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        ahead = list(self.truth[len(ids) - self.prompt :][:most])
        return [token if place < self.right else (token + 1) % 256 for place, token in enumerate(ahead)]


@pytest.mark.parametrize("right", [0, 1, 2, 4])
@pytest.mark.parametrize("side", ["clear", "masked"])
def test_drafts_change_no_token(pair: Pair, monkeypatch: pytest.MonkeyPatch, side: str, right: int) -> None:
    """Case 3.1: none, some, all of four right; the cache is exactly as long as the text before every pass."""
    link: Connected = getattr(pair, side)
    truth = ids(run(link))
    prompt = encode_prompt(link, PROMPT, raw=True)["input_ids"].shape[1]
    lengths, rows = [], []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        lengths.append(cache.get_seq_length())
        rows.append(kwargs["input_ids"].shape[1])

    monkeypatch.setattr(Generation, "_source", lambda *_: Oracle(truth, prompt, right))
    hook = link.model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        answers = run(link, speculate="ngram", draft_tokens=4)
    finally:
        hook.remove()
    assert ids(answers) == truth
    counts = answers.speculation
    assert counts is not None
    assert lengths[0] == 0
    known = prompt
    for length, count in zip(lengths[1:], rows[1:], strict=True):
        known += right + 1
        assert length == known - 1
        assert count == min(5, prompt + TOKENS - known)
    assert counts.passes == len(rows) - 1
    assert counts.rows == sum(rows)


def test_a_small_model_drafts(pair: Pair) -> None:
    """The model itself, run here, is the draft: everything that it drafts is right."""
    from transformers import AutoModelForCausalLM

    same = AutoModelForCausalLM.from_pretrained(pair.original).eval()
    plain, drafted = run(pair.clear), run(pair.clear, draft_model=same, speculate="draft", draft_tokens=4)
    assert ids(drafted) == ids(plain)
    assert drafted.speculation is not None
    assert drafted.speculation.accepted > 0.5 * drafted.speculation.drafted  # int8 weights against fp32 ones
    mixed = run(pair.clear, draft_model=same, speculate="mixed")
    assert ids(mixed) == ids(plain)


def test_a_draft_model_of_another_vocabulary_is_refused(pair: Pair) -> None:
    other = torch.nn.Module()
    other.get_input_embeddings = lambda: torch.nn.Embedding(7, 4)  # type: ignore[assignment]
    with pytest.raises(RangeError, match="7 tokens, the hosted model 300"):
        run(pair.clear, draft_model=other, speculate="draft")
    with pytest.raises(RangeError, match="draft model"):
        run(pair.clear, speculate="draft")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9},
        {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": 4, "min_tokens": 10, "end_ids": None},
        {"temperature": 0, "min_tokens": 10, "end_ids": None, "repetition_penalty": 1.2},
    ],
)
def test_speculation_heeds_seeds_penalties_and_least_lengths(pair: Pair, options: dict[str, Any]) -> None:
    """Case 3.10: the noise of a place is the same whether its token was drafted or not, so the text is, too."""
    plain = run(pair.clear, **options)
    for drafts in (None, 1, 5):
        drafted = run(pair.clear, speculate="ngram", draft_tokens=drafts, **options)
        assert drafted.answers == plain.answers


def test_rows_tell_nothing_where_every_round_has_as_many(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of one length, one that repeats itself and one that does not: the same rows in every pass."""
    seen: list[int] = []
    apply = MaskedProtocol.apply
    monkeypatch.setattr(MaskedProtocol, "apply", lambda self, group, x: (seen.append(len(x)), apply(self, group, x))[1])

    def passes(prompt: str, **options: Any) -> list[int]:
        seen.clear()
        run(pair.masked, prompt, speculate="ngram", draft_tokens=3, **options)
        return list(seen)

    repetitive, other = "abababababababab", "the lazy dog sle"
    groups = len(pair.masked.session.manifest.groups)
    for prompt in (repetitive, other):
        first, *rest = passes(prompt, fixed_drafts=True)[::groups]
        assert (first, set(rest)) == (len(encode_prompt(pair.clear, prompt, raw=True)["input_ids"][0]) + 3, {4})
    assert passes(repetitive) != passes(other)


# -- seeds, batches, threads -------------------------------------------------------------------------------------------


def test_a_seeded_answer_is_its_own_in_any_company(pair: Pair) -> None:
    """Case 3.9."""
    alone = run(pair.clear, temperature=1.0, seed=9)
    three = run(pair.clear, temperature=1.0, seed=9, n=3)
    assert ids(three) == ids(alone)
    assert len({tuple(ids(three, number)) for number in range(3)}) == 3
    assert ids(run(pair.clear, temperature=1.0, seed=9)) == ids(alone)
    assert ids(run(pair.clear, temperature=1.0)) != ids(run(pair.clear, temperature=1.0))


@pytest.mark.parametrize(
    "options", [{"n": 3, "temperature": 1.0, "seed": 2}, {"beams": 3, "n": 2, "temperature": None}]
)
def test_a_prompt_costs_its_rows_once(pair: Pair, options: dict[str, Any]) -> None:
    """However many answers it gets; the answers are those of a prompt for each, as transformers does it."""
    rows: list[int] = []
    hook = pair.clear.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        answers = run(pair.clear, **options)
    finally:
        hook.remove()
    inputs = encode_prompt(pair.clear, PROMPT, raw=True)
    prompt = inputs["input_ids"].shape[1]
    assert (rows[0], set(rows[1:])) == (prompt, {3})
    if "beams" in options:
        beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": TOKENS, "eos_token_id": None}
        own = pair.clear.model.generate(**inputs, do_sample=False, **beams)[:, prompt:].tolist()
        assert [ids(answers, number) for number in range(2)] == own


def test_the_users_random_numbers_are_left_alone(pair: Pair) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run(pair.clear, temperature=1.0, seed=9)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sessions", [2, 8])
def test_answers_do_not_depend_on_who_else_asks(pair: Pair, sessions: int) -> None:
    """Case 3.11."""
    truth = ids(run(pair.masked, max_tokens=6))
    found: list[list[int]] = []

    def ask() -> None:
        found.extend(ids(run(pair.masked, max_tokens=6)) for _ in range(20 // sessions))

    threads = [threading.Thread(target=ask) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [truth] * (20 // sessions * sessions)


def test_each_row_stops_by_itself(pair: Pair) -> None:
    """Case 3.5: its own length, and nothing of what fills the batch until the last one ends."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "n": 4}
    free = run(pair.clear, **options).answers
    texts = [answer.text for answer in free]
    stop = next(c for c in texts[0] if sum(c in text for text in texts) not in (0, len(texts)))
    stopped = run(pair.clear, **options, stop=(stop,)).answers
    for before, after in zip(free, stopped, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert (after.finish == "stop") == (stop in before.text)
        assert after.tokens == before.tokens[: len(after.tokens)]
    assert len({len(answer.tokens) for answer in stopped}) > 1


# -- what comes, and when ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"speculate": "ngram"}, {"stop": ("e",)}, {"n": 2, "temperature": 1.0}, {"beams": 3, "n": 2}],
)
def test_pieces_add_up_to_the_answers(pair: Pair, options: dict[str, Any]) -> None:
    """Case 3.6: text and tokens of all pieces are those of the answer; each row ends once, in its last piece."""
    made = generation(pair.clear, **options)
    pieces = list(made)
    answers = made.answers().answers
    for number, answer in enumerate(answers):
        own = [piece for piece in pieces if piece.row == number]
        assert "".join(piece.text for piece in own) == answer.text
        assert [token for piece in own for token in piece.tokens] == list(answer.tokens)
        assert [piece.finish for piece in own][:-1] == [None] * (len(own) - 1)
        assert own[-1].finish == answer.finish


def test_leaving_the_loop_cancels(pair: Pair) -> None:
    """Case 3.6: after the pass under way; what was counted is what came."""
    made = generation(pair.masked, max_tokens=100)
    for piece in made:
        if piece.text:
            break
    [answer] = made.answers().answers
    assert answer.finish == "cancelled"
    assert 0 < len(answer.tokens) < 50


def test_a_cancel_while_a_piece_is_handed_on_ends_the_answer_after_the_next(pair: Pair) -> None:
    """Its last piece comes, and says why."""
    pieces: list[Piece] = []
    made = generation(pair.clear, max_tokens=50)

    def hand_on(piece: Piece) -> None:
        pieces.append(piece)
        made.cancel()

    made.on_piece = hand_on
    [answer] = made.run().answers
    assert (answer.finish, pieces[-1].finish) == ("cancelled", "cancelled")
    assert "".join(piece.text for piece in pieces) == answer.text


def test_a_cancel_ends_a_beam_search_after_the_pass_under_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generation(pair.clear, beams=2, n=2, max_tokens=50)
    forward, passes = type(pair.clear.model).forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        if len(passes) == 3:
            made.cancel()
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(pair.clear.model), "forward", counted)
    answers = made.run().answers
    assert [(answer.finish, len(answer.tokens)) for answer in answers] == [("cancelled", 3)] * 2
    assert len(passes) == 3


def test_errors_reach_whoever_reads_the_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RangeError("no product today")

    monkeypatch.setattr(ClearProtocol, "apply", fail)
    with pytest.raises(RangeError, match="no product today"):
        list(generation(pair.clear))


def test_an_answer_of_fixed_length_goes_on_unseen(pair: Pair) -> None:
    calls: list[int] = []
    hook = pair.clear.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        whole = run(pair.clear)
        stop = whole.answers[0].text[3:5]
        answers = run(pair.clear, fixed_length=True, stop=(stop,))
    finally:
        hook.remove()
    [answer] = answers.answers
    assert len(calls) == 2 * TOKENS
    assert (answer.finish, answer.stop) == ("stop", stop)
    assert answer.text == whole.answers[0].text.split(stop)[0]


def test_forced_tokens_have_a_pass_each_in_an_answer_of_fixed_length(pair: Pair) -> None:
    """Else the number of passes would tell how many were forced."""
    guide = GuideSpec(kind="choice", value=["a long text without a choice", "a long text without a chance"])
    calls: list[int] = []
    hook = pair.clear.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        free = run(pair.clear, guide=guide, end_ids=None, max_tokens=40)
        jumped = len(calls)
        fixed = run(pair.clear, guide=guide, end_ids=None, max_tokens=40, fixed_length=True)
    finally:
        hook.remove()
    assert fixed.answers == free.answers
    assert jumped < len(ids(free))
    assert len(calls) - jumped == 40


def test_whole_numbers_do_where_transformers_wants_fractions(pair: Pair) -> None:
    """JSON has no other way to say 2.0 for many who write it."""
    whole = run(pair.clear, temperature=2, top_p=1, min_p=0, repetition_penalty=2, seed=1)
    parts = run(pair.clear, temperature=2.0, top_p=1.0, min_p=0.0, repetition_penalty=2.0, seed=1)
    assert whole.answers == parts.answers


def test_padding_hides_lengths_and_changes_no_count(pair: Pair) -> None:
    rows: list[int] = []
    hook = pair.clear.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        answers = [run(pair.clear, prompt, pad_prompt=64, max_tokens=1) for prompt in ("hi", PROMPT)]
    finally:
        hook.remove()
    assert rows == [64, 64]
    assert [answer.answers[0].prompt_tokens for answer in answers] == [
        encode_prompt(pair.clear, prompt, raw=True)["input_ids"].shape[1] for prompt in ("hi", PROMPT)
    ]


def test_the_last_position_ends_an_answer(pair: Pair) -> None:
    limit = pair.clear.model.config.max_position_embeddings
    answers = run(pair.clear, "x" * (limit - 3), max_tokens=50)
    assert (len(ids(answers)), answers.answers[0].finish) == (3, "length")
    with pytest.raises(RangeError, match="shorten"):
        run(pair.clear, "x" * (limit - 3), pad_prompt=limit)


def test_logarithms_of_probability_are_the_models_own(pair: Pair) -> None:
    """Before penalties and temperature, and the same for tokens that were drafted."""
    options: dict[str, Any] = {"logprobs": 2, "repetition_penalty": 1.5}
    plain, drafted = run(pair.clear, **options), run(pair.clear, speculate="ngram", **options)
    prompt = encode_prompt(pair.clear, PROMPT, raw=True)["input_ids"]
    whole = torch.cat([prompt, torch.tensor([ids(plain)])], dim=1)
    logs = torch.log_softmax(pair.clear.model(whole).logits[0].float(), dim=-1)
    for answers in (plain, drafted):
        for place, token in enumerate(answers.answers[0].tokens, prompt.shape[1] - 1):
            assert token.logprob is not None
            assert token.logprob.value == pytest.approx(float(logs[place, token.id]), abs=0.02)
            assert token.logprob.top[0][1] == pytest.approx(float(logs[place].max()), abs=0.02)
            assert len(token.logprob.top) == 2


def test_what_no_option_can_mean_is_refused_before_anything_is_sent(pair: Pair) -> None:
    sent = dict(pair.clear.session.traffic.up)
    two = {name: tensor.repeat(2, 1) for name, tensor in encode_prompt(pair.clear, PROMPT, raw=True).items()}
    for options in ({"speculate": "ngram"}, {"beams": 2}):
        with pytest.raises(RangeError, match="one prompt at a time"):
            Generation(pair.clear, two, Options(**options))
    with pytest.raises(RangeError, match="2 greedy answers"):
        generation(pair.clear, n=2)
    with pytest.raises(RangeError, match="token 300"):
        generation(pair.clear, logit_bias={300: 1.0})
    with pytest.raises(RangeError, match="end_ids names token 300"):
        generation(pair.clear, end_ids=(1, 300))
    with pytest.raises(RangeError, match="end_ids are all tokens"):
        generation(pair.clear, beams=2, end_ids=tuple(range(300)))
    assert pair.clear.session.traffic.up == sent
