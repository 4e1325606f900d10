"""Guides: answers match, whatever is drawn; rows go back and on; what is forced is spelt as the tokenizer does; and
what cannot be, or is too much, is an error before anything is generated."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jsonschema
import models
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from sordino.client import engines, guide
from sordino.client.engines import KINDS
from sordino.client.guide import GuideProcessor, GuideSpec, compile_guide
from sordino.shared.errors import RangeError

WIDTH = models.VOCABULARY + 4  # logits beyond the tokenizer
END = 1
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "minLength": 1, "maxLength": 5},
        "temperature_celsius": {"type": "integer"},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "confirmed": {"type": "boolean"},
    },
    "required": ["full_name", "temperature_celsius", "colours", "confirmed"],
    "additionalProperties": False,
}
MAYBE = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "size": {"type": "integer", "minimum": -12, "maximum": 345},
                "label": {"type": ["string", "null"], "minLength": 2, "maxLength": 4},
                "inner": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["size", "label", "inner"],
            "additionalProperties": False,
        }
    },
}
ODD = {
    "type": "object",
    "properties": {'say "é\\"': {"const": 'x"\\\n'}},
    "required": ['say "é\\"'],
    "minProperties": 1,
}
PATTERN = r"[a-z]{2,4}@(example|test)\.org [0-9]{3}"
CHOICES = ["yes", "no", "no way", 'é"\\\n{}']
SUM = 'root ::= "sum: " number (" + " number){1,3}\nnumber ::= [0-9]{1,3}\n'
ASKED: dict[str, Any] = {"json": None, "json_schema": PERSON, "regex": PATTERN, "choice": CHOICES, "grammar": SUM}
ALL = [(engine, kind) for engine, kinds in KINDS.items() for kind in kinds]


def link_of(tokenizer: Any, width: int = WIDTH, end: Any = END) -> Any:
    """What a guide asks of a connection: a tokenizer, the width of the logits, and what ends an answer."""
    weight = np.zeros((width, 1))
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=end),
        get_input_embeddings=lambda: SimpleNamespace(weight=weight),
    )
    return SimpleNamespace(tokenizer=tokenizer, model=model)


@pytest.fixture(scope="module")
def link() -> Any:
    return link_of(models.make_tokenizer())


@pytest.fixture(scope="module")
def merging() -> Any:
    """A tokenizer that has more than one way to spell a text."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(
        ['{"full_name": "red temperature", "temperature_celsius": 1, "confirmed": true}'] * 9, trainer
    )
    return link_of(PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>"), 400)


def spec(kind: str, value: Any, engine: str = "xgrammar", **more: Any) -> GuideSpec:
    return GuideSpec(kind=kind, value=value, engine=engine, **more)  # type: ignore[arg-type]


def left(made: Any, ids: Sequence[int], row: int = 0) -> list[int]:
    return [int(token) for token in np.flatnonzero(made.allowed(row, ids))]


def draw(made: Any, seed: int, most: int = 160) -> tuple[list[int], bool]:
    """An answer of any tokens that are left, brackets rather often; whether it came to its end."""
    chance, ids = random.Random(seed), list[int]()
    while len(ids) < most:
        tokens = left(made, ids)
        if END in tokens and (len(tokens) == 1 or chance.random() < 0.5):
            return ids, True
        tokens = [token for token in tokens if token != END]
        closing = [token for token in tokens if token in CLOSING]
        ids.append(chance.choice(closing if closing and chance.random() < 0.3 else tokens))
        assert made._follow(made._rows[0], ids), "a token was left that is then refused"
    return ids, False


CLOSING = models.make_tokenizer().convert_tokens_to_ids(['"', "}", "]", ","])


def text_of(link: Any, ids: Sequence[int]) -> str:
    return str(link.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def matches(kind: str, value: Any, text: str) -> bool:
    if kind in ("json", "json_schema"):
        jsonschema.validate(json.loads(text), value or {"type": "object"})
        return True
    if kind == "choice":
        return text in value
    return bool(re.fullmatch(value if kind == "regex" else r"sum: \d{1,3}( \+ \d{1,3}){1,3}", text))


# -- what is left matches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "kind"), ALL)
def test_whatever_is_drawn_matches(link: Any, engine: str, kind: str) -> None:
    made, whole = compile_guide(spec(kind, ASKED[kind], engine), link), 0
    for seed in range(12):
        ids, ended = draw(made, seed)
        text = text_of(link, ids)
        if ended and "�" not in text:
            whole += 1
            assert matches(kind, ASKED[kind], text), text
    assert whole >= 3


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("schema", [TREE, ODD, MAYBE])
def test_harder_schemas(link: Any, engine: str, schema: Any) -> None:
    made, whole = compile_guide(spec("json_schema", schema, engine), link), 0
    for seed in range(12):
        ids, ended = draw(made, seed)
        if ended and "�" not in text_of(link, ids):
            whole += 1
            assert matches("json_schema", schema, text_of(link, ids))
    assert whole >= 3


@pytest.mark.parametrize("schema", [MAYBE, {"type": "array", "items": {"type": ["number", "object"]}, "maxItems": 3}])
def test_what_lm_format_enforcer_would_get_wrong(link: Any, schema: Any) -> None:
    """A comma before a bracket, "1." and "1e5" of an integer, a token that it allows and then refuses."""
    made, whole = compile_guide(spec("json_schema", schema, "lm-format-enforcer"), link), 0
    for seed in range(30):
        ids, ended = draw(made, seed)
        if ended and "�" not in text_of(link, ids):
            whole += 1
            assert matches("json_schema", schema, text_of(link, ids))
    assert whole >= 10


def test_the_end_is_left_where_the_guide_is_complete_and_nowhere_else(link: Any) -> None:
    several = compile_guide(spec("choice", ["no", "no way"]), link_of(link.tokenizer, end=[END, 2]))
    n, o, space = link.tokenizer.convert_tokens_to_ids(["n", "o", "Ġ"])
    assert left(several, [n]) == [o]
    assert set(left(several, [n, o])) == {END, 2, space}
    # The option's tokens end it, not the model's: one of text, too, where the text is complete.
    own = compile_guide(spec("choice", ["no", "no way"]), link, end_ids=[space])
    assert left(own, [n]) == [o]
    assert left(own, [n, o]) == [space]
    with pytest.raises(RangeError, match="no end token"):
        compile_guide(spec("json", None), link, end_ids=[])


def test_special_tokens_and_logits_without_a_token_are_never_left(link: Any) -> None:
    tokens = left(compile_guide(spec("regex", r"[^x]*"), link), [])
    assert END in tokens
    assert len(tokens) > 200  # bytes that begin no character are not among them
    assert not {0, 2, *range(models.VOCABULARY, WIDTH)} & set(tokens)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "kind"), ALL)
def test_rows_go_back_and_change_places(link: Any, engine: str, kind: str) -> None:
    """As beams do: what is left depends on the answer so far, not on what the row held before."""
    asked = spec(kind, ASKED[kind], engine)
    made, chance = compile_guide(asked, link), random.Random(5)
    answers = [draw(compile_guide(asked, link), seed, 40)[0] for seed in range(3)]
    for _ in range(25):
        ids = chance.choice(answers)
        ids = ids[: chance.randint(0, len(ids))]
        assert left(made, ids, chance.randint(0, 1)) == left(compile_guide(asked, link), ids)


@pytest.mark.parametrize(("engine", "kind"), ALL)
def test_rows_that_ended_or_do_not_match_have_an_end(link: Any, engine: str, kind: str) -> None:
    """The others of a batch go on, drafts are judged by their own row: never is there nothing."""
    made = compile_guide(spec(kind, ASKED[kind], engine), link)
    ids, ended = next(answer for answer in (draw(made, seed) for seed in range(20)) if answer[1])
    assert ended
    wrong = next(token for token in range(3, 20) if token not in left(made, []))
    for over in ([*ids, END], [*ids, END, END, 2, 5], [wrong], [*ids[:1], 2, 2]):
        assert left(made, over) == [END]
        assert left(made, ids[:1]) == left(compile_guide(spec(kind, ASKED[kind], engine), link), ids[:1])


def test_the_guide_wins_where_everything_it_leaves_was_taken_away(link: Any) -> None:
    made = compile_guide(spec("choice", ["no"]), link)
    n, o = link.tokenizer.convert_tokens_to_ids(["n", "o"])
    scores = torch.zeros(2, WIDTH)
    scores[0, END] = -torch.inf  # min_tokens
    scores[1, n] = 3.0
    out = GuideProcessor(made, prompt=1)(torch.tensor([[9, n, o], [9, n, o]])[:, :3], scores)
    assert torch.isfinite(out).nonzero().tolist() == [[0, END], [1, END]]


# -- what is forced ----------------------------------------------------------------------------------------------------


def test_forced_text_is_spelt_as_the_tokenizer_does(merging: Any) -> None:
    made = compile_guide(spec("json_schema", PERSON), merging)
    text = '{"full_name": "'
    own = merging.tokenizer(text, add_special_tokens=False)["input_ids"]
    forced = made.forced([])
    assert len(own) >= len(forced) > len(own) - 3 > 0
    assert forced == own[: len(forced)]
    for place in range(len(forced)):
        assert left(made, forced[:place]) == [forced[place]]
        assert made.forced(forced[:place]) == forced[place:]
    assert len(left(made, forced)) > 1


def test_the_tokenizers_own_spelling_is_always_left(merging: Any) -> None:
    """Also where forced text ends inside of a token that the model may want to say."""
    texts = ["temperature is", "temperature_celsius", "tempered red", "tempered_red"]
    made = compile_guide(spec("choice", texts), merging)
    start = '{"full_name": "red", "temperature_celsius": '
    lines = [f'{start}{size}, "colours": [{colours}], "confirmed": true}}' for size, colours in PAIRS]
    for guided, written in [(made, texts), (compile_guide(spec("json_schema", PERSON), merging), lines)]:
        for text in written:
            ids = merging.tokenizer(text, add_special_tokens=False)["input_ids"]
            for place, token in enumerate(ids):
                assert token in left(guided, ids[:place])
            assert END in left(guided, ids)
    assert made.forced([]) == []


PAIRS = [(1, ""), (-20, '"red"'), (305, '"red", "blue"')]


@pytest.mark.parametrize(("engine", "kind"), ALL)
def test_forced_tokens_are_the_only_ones_left(merging: Any, engine: str, kind: str) -> None:
    made = compile_guide(spec(kind, ASKED[kind], engine), merging)
    other = compile_guide(spec(kind, ASKED[kind], engine, jump=False), merging)
    assert made.forces
    assert not other.forces
    for seed in range(3):
        ids, _ = draw(made, seed, 40)
        for place in range(len(ids)):
            forced = made.forced(ids[:place])
            assert left(other, ids[:place]) == left(made, ids[:place])
            assert forced == ids[place : place + len(forced)] or place + len(forced) > len(ids)


def test_what_is_forced_for_ever_is_forced_in_part(link: Any) -> None:
    made = compile_guide(spec("grammar", 'root ::= "a" root'), link)
    forced = made.forced([])
    assert 100 < len(forced) <= 1024
    assert set(forced) == {link.tokenizer.convert_tokens_to_ids("a")}


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ("json_schema", {"enum": []}, "does not take"),
        ("json_schema", {"$ref": "#/nowhere"}, "does not take"),
        ("json_schema", {"type": "array", "items": {"$ref": "http://127.0.0.1:9/x"}}, "nothing is fetched"),
        ("json_schema", {"not": {"type": "string"}}, "'not'"),
        ("json_schema", {"type": "integer", "multipleOf": 7}, "'multipleOf'"),
        ("json_schema", {"type": "string", "pattern": "(?!a)b"}, "no look-around"),
        ("json_schema", "{", "text in JSON"),
        ("json_schema", [1], "text in JSON"),
        ("json_schema", {"const": float("nan")}, "text in JSON"),
        ("json_schema", "[" * 100_000, "characters"),
        ("json_schema", '{"a":' * 10_000 + "1" + "}" * 10_000, "nested deeper"),
        ("json_schema", None, "text in JSON"),
        ("json", {}, "no value"),
        ("regex", r"[^\s\S]", "nothing that the model can spell"),
        ("regex", "(a|b", "does not take"),
        ("regex", r"a\bb", "no look-around"),
        ("regex", "a$b", "anchors"),
        ("regex", "", "not empty"),
        ("regex", "a" * 70_000, "characters"),
        ("regex", "\ud800", "halves"),
        ("choice", [], "list of texts"),
        ("choice", ["a", ""], "list of texts"),
        ("choice", "abc", "list of texts"),
        ("choice", [str(number) for number in range(1001)], "1001 texts"),
        ("choice", ["☃" * 70_000], "characters"),
        ("grammar", "root ::= missing", "missing"),
        ("grammar", "root ::= root", "nothing that the model can spell"),
        ("grammar", 'root ::= "b" | "a" none\nnone ::= none "y"', "nothing that the model can spell"),
        ("grammar", 7, "not empty"),
    ],
)
def test_what_nothing_matches_or_means_nothing_is_one_line(link: Any, kind: str, value: Any, text: str) -> None:
    with pytest.raises(RangeError, match=text) as caught:
        compile_guide(spec(kind, value), link)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "schema", "text"),
    [
        ("outlines", TREE, "'maximum'"),
        ("outlines", {"type": "array", "items": {"$ref": "#"}}, "refers to itself"),
        ("outlines", {"type": "object", "properties": {'"': {}}}, "does not escape"),
        ("lm-format-enforcer", {"const": '"'}, "does not escape"),
        ("lm-format-enforcer", {"type": ["string", "null"], "maxLength": 3}, "use anyOf"),
        ("llguidance", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("llguidance", {"type": "integer", "minimum": 10**30, "maximum": 10**40}, "where floats are exact"),
        ("llguidance", {"items": {"const": (1 << 53) + 1}}, "where floats are exact"),
        ("llguidance", {"enum": [1, 1 << 54]}, "where floats are exact"),
        ("xgrammar", {"type": "number", "minimum": 1e-7}, "six decimals"),
        ("xgrammar", {"type": "number", "exclusiveMinimum": 1e-6, "exclusiveMaximum": 2e-6}, "nothing that the model"),
    ],
)
def test_what_an_engine_would_pass_over_is_refused(link: Any, engine: str, schema: Any, text: str) -> None:
    with pytest.raises(RangeError, match=text):
        compile_guide(spec("json_schema", schema, engine), link)


@pytest.mark.parametrize(
    ("engine", "kind", "value"),
    [
        ("outlines", "regex", "((a{1000}){1000}){1000}"),
        ("outlines", "json_schema", {"type": "array", "minItems": 1_000_000}),
        ("lm-format-enforcer", "regex", "(a|b)*a(a|b){24}"),
        ("llguidance", "regex", "((a{1000}){1000}){1000}"),
    ],
)
def test_a_hostile_guide_ends_in_time(
    link: Any, monkeypatch: pytest.MonkeyPatch, engine: str, kind: str, value: Any
) -> None:
    monkeypatch.setattr(engines, "CPU_S", 1)
    with pytest.raises(RangeError, match=r"more than 1 s|too complex"):
        compile_guide(spec(kind, value, engine), link)


def test_large_counts_are_no_reason_to_refuse(link: Any) -> None:
    asked = {"type": "array", "items": {"type": "null"}, "minItems": 1_000_000, "maxItems": 10**9}
    assert len(left(compile_guide(spec("json_schema", asked), link), [])) == 1


@pytest.mark.parametrize(
    "asked", [{"kind": "xml"}, {"kind": "json", "engine": "guidance"}, {"kind": "json", "jump": 1}]
)
def test_a_guide_of_no_kind(asked: dict[str, Any]) -> None:
    with pytest.raises(RangeError, match="guide"):
        GuideSpec(**asked)


def test_a_kind_that_an_engine_lacks_names_those_that_have_it() -> None:
    with pytest.raises(RangeError, match="outlines has no guides of kind grammar: xgrammar, llguidance have"):
        spec("grammar", SUM, "outlines")


@pytest.mark.parametrize(("engine", "module"), [("llguidance", "llguidance"), ("outlines", "outlines_core")])
def test_an_engine_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, engine: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RangeError, match=r"pip install 'sordino\[guides\]'"):
        compile_guide(spec("choice", ["a"], engine), link_of(models.make_tokenizer()))


# -- once --------------------------------------------------------------------------------------------------------------


def test_a_guide_is_tried_once_and_the_tokenizer_read_once(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(name: str) -> list[int]:
        calls: list[int] = []
        real: Callable[..., Any] = getattr(guide, name)
        monkeypatch.setattr(guide, name, lambda *given: calls.append(1) or real(*given))
        return calls

    tried, read = counted("try_apart"), counted("_tokens")
    fresh = link_of(models.make_tokenizer())
    for _ in range(3):
        compile_guide(spec("regex", "a+b"), fresh)
        compile_guide(spec("regex", "a+b", jump=False), fresh)
    compile_guide(spec("regex", "a+c"), fresh)
    assert (len(tried), len(read)) == (2, 1)
