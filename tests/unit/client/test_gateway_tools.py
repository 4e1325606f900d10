"""Calls of tools as models write them: which template means which way, what is a call, and what a stream may show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sordino.client.answers import Token
from sordino.client.gateway.schema import Function
from sordino.client.gateway.tools import Dialect, Reader, dialect_of, forced_schema
from sordino.shared.errors import RangeError

NAMES = frozenset({"weather", "time"})
MARK = 7  # the token of [TOOL_CALLS], where texts do not show it

# What templates of the field say, in short.
QWEN = (
    '{%- if tools %}# Tools ... <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
)
LLAMA = '{%- if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary ...}'
MISTRAL = "{%- if tools is not none %}[AVAILABLE_TOOLS] ... {{- '[TOOL_CALLS][' }}"
CODER = "{%- if tools %}<tool_call>\\n<function=example_function_name>\\n<parameter=value>"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("template", "expected"), [(QWEN, "hermes"), (LLAMA, "llama"), (MISTRAL, "mistral")])
def test_the_template_says_how(template: str, expected: Dialect) -> None:
    assert dialect_of(template) == expected


@pytest.mark.parametrize(
    ("template", "text"), [(PLAIN, "no tools"), (CODER, "not known"), ("{{ tools }}", "not known")]
)
def test_a_template_that_does_not(template: str, text: str) -> None:
    with pytest.raises(RangeError, match=text):
        dialect_of(template)


OSLO = '{"name": "weather", "arguments": {"town": "Oslo, \\"N\\""}}'
NOW = '{"name": "time", "arguments": {}}'
LLAMA_OSLO = OSLO.replace("arguments", "parameters")
Called = list[tuple[str, Any]]
BOTH: Called = [("weather", {"town": 'Oslo, "N"'}), ("time", {})]
CASES: list[tuple[Dialect, str, str, Called]] = [
    ("hermes", f"<tool_call>\n{OSLO}\n</tool_call>", "", BOTH[:1]),
    ("hermes", f"So. <tool_call>{OSLO}</tool_call>\n<tool_call>{NOW}</tool_call>", "So. ", BOTH),
    ("hermes", f"<tool_call>{OSLO}", "", BOTH[:1]),  # the end token came instead of the last mark
    ("hermes", "1 < 2 <tool> <tool_", "1 < 2 <tool> <tool_", []),
    ("hermes", f"<tool_call>{OSLO[:-3]}", f"<tool_call>{OSLO[:-3]}", []),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "time", "arguments": [1]}</tool_call>', "=", []),
    ("hermes", "<tool_call></tool_call>", "=", []),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "\\ud800"}}</tool_call>', "=", []),  # half a character
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>', "=", []),  # which is no JSON
    ("llama", '{"name": "time", "parameters": {"a": 1e999}}', "=", []),
    ("llama", LLAMA_OSLO, "", BOTH[:1]),
    ("llama", f"  {LLAMA_OSLO}; {NOW}", "  ", BOTH),
    ("llama", f"<|python_tag|>{LLAMA_OSLO}", "", BOTH[:1]),
    ("llama", f"It is {LLAMA_OSLO}", "=", []),
    ("llama", f"{LLAMA_OSLO} or so", "=", []),
    ("llama", '{"name": "time"}', "=", []),
    ("mistral", f"[TOOL_CALLS][{OSLO}, {NOW}]", "", BOTH),
    ("mistral", f"[{OSLO}]", "", BOTH[:1]),  # with a mark that texts do not show
    ("mistral", 'Well[TOOL_CALLS]weather[ARGS]{"town": "Oslo, \\"N\\""}[TOOL_CALLS]time{}', "Well", BOTH),
    ("mistral", "[1] is a footnote", "=", []),
    ("mistral", "[TOOL_CALLS]nothing", "=", []),
    ("forced", OSLO, "", BOTH[:1]),
    ("forced", OSLO[:20], "=", []),
    ("hermes", "[" * 5000 + "<tool_call>" + "[" * 5000, "=", []),
    ("llama", "{" * 5000, "=", []),
]


@pytest.mark.parametrize("step", [1, 2, 5, 10_000])
@pytest.mark.parametrize(("dialect", "said", "content", "calls"), CASES)
def test_calls_and_text_are_told_apart_in_any_pieces(
    dialect: Dialect, said: str, content: str, calls: Called, step: int
) -> None:
    if len(said) > 1000:
        step *= 500
    reader, shown = Reader(dialect, NAMES), ""
    for start in range(0, len(said), step):
        reader.push(said[start : start + step], ())
        shown += reader.show()
    rest, found = reader.finish()
    assert (said if content == "=" else content) == shown + rest
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    if calls:
        assert not shown.strip() or shown == content  # nothing of a call was shown before
    assert all(len(call.id) == 9 and call.id.isalnum() for call in found)


def test_text_that_is_no_call_is_shown_at_once() -> None:
    reader = Reader("hermes", NAMES)
    reader.push("Hello <", ())
    assert reader.show() == "Hello "
    reader.push("b>", ())
    assert reader.show() == "<b>"


def test_a_mark_that_texts_do_not_show() -> None:
    """As Mistral's: a special token, left out when tokens are decoded."""
    reader = Reader("mistral", NAMES, MARK)
    reader.push("Well", [Token(1, "Well", None)])
    assert reader.show() == "Well"
    reader.push("time", [Token(MARK, "", None), Token(2, "time", None)])
    assert reader.show() == ""
    reader.push("{}", [Token(3, "{}", None), Token(MARK, "", None)])
    reader.push(f"[{OSLO}]", [Token(4, f"[{OSLO}]", None)])
    text, calls = reader.finish()
    assert (text, [call.name for call in calls]) == ("", ["time", "weather"])


def test_a_forced_call_keeps_definitions_apart() -> None:
    def function(name: str, kind: str) -> Function:
        part = {"$ref": "#/$defs/Part"}
        parameters = {"type": "object", "properties": {"a": part}, "$defs": {"Part": {"type": kind, "items": part}}}
        return Function(name=name, parameters=parameters)

    schema = forced_schema([function("one", "string"), function("two", "array")])
    assert schema["$defs"]["one.Part"]["type"] == "string"
    assert schema["$defs"]["two.Part"] == {"type": "array", "items": {"$ref": "#/$defs/two.Part"}}
    arguments = [choice["properties"]["arguments"] for choice in schema["anyOf"]]
    assert arguments[0] == {"type": "object", "properties": {"a": {"$ref": "#/$defs/one.Part"}}}
    with pytest.raises(RangeError, match="defs alone"):
        forced_schema([Function(name="x", parameters={"properties": {"a": {"$ref": "#"}}})])
