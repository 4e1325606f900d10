"""Guided answers of a model, hidden and in clear: whole ones match, forced tokens save passes and change none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pairs import Pair, open_pair

from sordino.client import Connected
from sordino.client.answers import Answer, Answers, Generation
from sordino.client.engines import KINDS
from sordino.client.guide import GuideSpec
from sordino.client.options import Options
from sordino.client.terminal import encode_prompt

TOKENS = 100
REPORT = {
    "type": "object",
    "properties": {
        "measurement": {"type": "integer", "minimum": 0, "maximum": 99},
        "instrument": {"enum": ["thermometer", "hygrometer"]},
        "confirmed": {"type": "boolean"},
    },
    "required": ["measurement", "instrument", "confirmed"],
    "additionalProperties": False,
}
SMALL = {
    "type": "object",
    "properties": {"instrument": {"enum": ["thermometer", "hygrometer"]}, "confirmed": {"type": "boolean"}},
    "required": ["instrument", "confirmed"],
    "additionalProperties": False,
}
PATTERN = r"[a-c]{2,4} (left|right) [0-9]{3}"
CHOICES = ["north", "north east", "south"]
SUM = 'root ::= "sum: " number (" + " number){1,3}\nnumber ::= [0-9]{1,3}\n'
ASKED: dict[str, Any] = {"json": None, "json_schema": SMALL, "regex": PATTERN, "choice": CHOICES, "grammar": SUM}
ALL = [(engine, kind) for engine, kinds in KINDS.items() for kind in kinds]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from open_pair("llama", tmp_path_factory.mktemp("guided"))


def run(
    link: Connected, kind: str, value: Any, engine: str = "xgrammar", *, jump: bool = True, **options: Any
) -> Answers:
    guide = GuideSpec(kind=kind, value=value, engine=engine, jump=jump)  # type: ignore[arg-type]
    given = {"max_tokens": TOKENS, "temperature": 0, **options}
    inputs = encode_prompt(link, "a report: ", raw=True)
    return Generation(link, inputs, Options(guide=guide, **given)).run()


def ids(answers: Answers, number: int = 0) -> list[int]:
    return [token.id for token in answers.answers[number].tokens]


def check(answer: Answer, kind: str, value: Any) -> None:
    if answer.finish == "length":  # a random model may say digits, or text, for ever
        assert len(answer.tokens) == TOKENS
        assert kind == "json"
    elif kind in ("json", "json_schema"):
        jsonschema.validate(json.loads(answer.text), value or {"type": "object"})
    elif kind == "choice":
        assert answer.text in value
    else:
        assert re.fullmatch(value if kind == "regex" else r"sum: \d{1,3}( \+ \d{1,3}){1,3}", answer.text)


@pytest.mark.parametrize(("engine", "kind"), ALL)
def test_a_masked_answer_matches_and_is_that_in_clear(pair: Pair, engine: str, kind: str) -> None:
    masked, clear = (run(link, kind, ASKED[kind], engine) for link in (pair.masked, pair.clear))
    check(masked.answers[0], kind, ASKED[kind])
    assert ids(masked) == ids(clear)


@pytest.mark.parametrize(("engine", "kind"), ALL)
@pytest.mark.parametrize("rows", [{"n": 3, "temperature": 1.5, "seed": 8}, {"beams": 3, "n": 2, "temperature": None}])
def test_several_rows(pair: Pair, engine: str, kind: str, rows: dict[str, Any]) -> None:
    made = run(pair.clear, kind, ASKED[kind], engine, **rows)
    for answer in made.answers:
        check(answer, kind, ASKED[kind])
    assert len({answer.text for answer in made.answers}) > 1 or not rows.get("beams")
    assert [ids(made, row) for row in range(rows["n"])] == [
        ids(run(pair.clear, kind, ASKED[kind], engine, jump=False, **rows), row) for row in range(rows["n"])
    ]


@pytest.mark.parametrize("engine", list(KINDS))
@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 5}, {"speculate": "ngram", "draft_tokens": 4}])
def test_forced_tokens_go_through_together_and_are_the_same(pair: Pair, engine: str, options: dict[str, Any]) -> None:
    """Keys of a fixed spelling, half of an instrument's name, the rest of true or false."""
    step = run(pair.clear, "json_schema", SMALL, engine, jump=False, **options)
    jump = run(pair.clear, "json_schema", SMALL, engine, **options)
    assert ids(jump) == ids(step)
    assert jump.answers[0].finish == "stop"
    counts = jump.speculation
    assert counts is not None
    assert counts.forced >= 30
    assert 1 + counts.passes + counts.forced + counts.accepted == len(ids(jump))
    assert 1 + counts.passes <= len(ids(jump)) / 2


def test_passes_that_forced_tokens_save(pair: Pair) -> None:
    """The server's own count of messages says the same."""
    passes = {}
    for jump in (True, False):
        before = pair.clear.session.traffic.rounds
        answers = run(pair.clear, "json_schema", REPORT, jump=jump)
        passes[jump] = pair.clear.session.traffic.rounds - before
        assert answers.answers[0].finish == "stop"
    assert passes[True] < passes[False] / 3


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance", "lm-format-enforcer"])
@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_a_model_that_loves_line_breaks(pair: Pair, engine: str, kind: str) -> None:
    """Case 3.13: JSON that is valid, or cut for length; no more than one white space in a row outside of strings."""
    value = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"type": "array"}}, "required": ["a", "b"]}
    white = pair.clear.tokenizer.convert_tokens_to_ids(["Ċ", "ĉ", "č", "Ġ"])
    bias = dict.fromkeys(white, 100.0)
    for most in (5, 40, TOKENS):
        made = run(
            pair.clear, kind, value if kind == "json_schema" else None, engine, logit_bias=bias, max_tokens=most
        ).answers[0]
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', made.text)
        assert not re.search(r"\s\s", outside)
        assert "\n" not in made.text
        if made.finish == "stop":
            assert isinstance(json.loads(made.text), dict)
        else:
            assert (made.finish, len(made.tokens)) == ("length", most)


def test_answers_of_a_guide_have_their_length_kept(pair: Pair) -> None:
    """Rows that ended go on for show; min_tokens gives way to the guide."""
    shown = run(pair.clear, "choice", CHOICES, fixed_length=True, n=2, temperature=1.0, seed=1)
    assert {answer.finish for answer in shown.answers} == {"stop"}
    assert {answer.text for answer in shown.answers} <= set(CHOICES)
    least = run(pair.clear, "choice", CHOICES, min_tokens=20).answers[0]
    assert least.text in CHOICES
    assert least.finish == "stop"
