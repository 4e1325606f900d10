"""Calls of tools: whether a chat template knows them, how its model writes them, and how one is forced.

A template is trained with its model, and says in its own text how calls are written:

- ``hermes`` (Hermes, Qwen 2.5 and 3): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several of them;
- ``mistral``: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}``;
- ``llama`` (Llama 3.1 to 3.3): the whole answer is ``{"name": ..., "parameters": {...}}``, several with ``;`` between.

What looks like a call and is none (no JSON, an unknown name) stays text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sordino.client.answers import Token
from sordino.client.gateway.schema import Function
from sordino.shared.errors import RangeError

Dialect = Literal["hermes", "mistral", "llama", "forced"]  # the last: nothing but the JSON that a guide allows
_MARKS: Final[Mapping[str, str]] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_NAMED: Final = re.compile(r"\s*([a-zA-Z0-9_-]{1,64})\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_JSON: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` is the JSON text of an object; ``id`` nine letters and digits, as Mistral's templates want it."""

    id: str
    name: str
    arguments: str

    @property
    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def dialect_of(template: str) -> Dialect:
    """How a template's model writes calls.

    Raises:
        RangeError: the template knows no tools, or writes calls in another way than those above.
    """
    if not re.search(r"\btools\b", template):
        raise RangeError("the model's chat template knows no tools: leave out tools")
    if _MARKS["mistral"] in template:
        return "mistral"
    if _MARKS["hermes"] in template and "<function=" not in template:
        return "hermes"
    if _MARKS["hermes"] not in template and '"name"' in template and '"parameters"' in template:
        return "llama"
    raise RangeError("the model's chat template writes tool calls in a way that is not known here: leave out tools")


def forced_schema(functions: Sequence[Function]) -> dict[str, Any]:
    """The JSON schema of exactly one call of one of ``functions``.

    Raises:
        RangeError: parameters that refer to a place that moves when they become part of a larger schema.
    """
    shared: dict[str, Any] = {}
    choices = []
    for function in functions:
        parameters = _hoisted(function.parameters or {"type": "object"}, f"{function.name}.", shared)
        properties = {"name": {"const": function.name}, "arguments": parameters}
        closed = {"required": ["name", "arguments"], "additionalProperties": False}
        choices.append({"type": "object", "properties": properties, **closed})
    schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
    return {**schema, **({"$defs": shared} if shared else {})}


class Reader:
    """One answer of a model that may call: text and tokens in, what is text for the user out, calls at the end.

    Args:
        names: of the functions that were offered. mark_id: the token of the dialect's mark, where it is one of those
            that texts do not show.
    """

    def __init__(self, dialect: Dialect, names: frozenset[str], mark_id: int | None = None) -> None:
        self._dialect, self._names, self._mark_id = dialect, names, mark_id
        self._mark = _MARKS.get(dialect)
        self._text, self._spelt = "", 0
        self._marks: list[int] = []  # places in the text where a mark was that it does not show
        self._shown = 0

    def push(self, text: str, tokens: Sequence[Token]) -> None:
        """What came since the last time, as in :class:`~sordino.client.answers.Piece`."""
        self._text += text
        for token in tokens:
            if token.id == self._mark_id and self._mark_id is not None:
                self._marks.append(self._spelt)
            self._spelt += len(token.text)

    def show(self) -> str:
        """Text that is certainly none of a call, once."""
        end = max(self._shown, self._calls_from())
        text, self._shown = self._text[self._shown : end], end
        return text

    def finish(self) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls, at the end of the answer."""
        start = self._calls_from(ended=True)
        calls = self._read(start)
        text = self._text[self._shown : max(start, self._shown) if calls else None]
        self._shown = len(self._text)
        return text, calls

    def _calls_from(self, *, ended: bool = False) -> int:
        """Where calls begin, or may begin as long as the answer has not ended."""
        text = self._text
        first = len(text) - len(text.lstrip())
        opening = {"hermes": "", "mistral": "[", "llama": "{<", "forced": "{"}[self._dialect]
        if first == len(text):
            return len(text) if ended else 0
        if text[first] in opening:
            return first
        places = self._marks[:1]
        if self._mark and self._mark in text:
            places = [*places, text.index(self._mark)]
        if places:
            return min(*places, len(text))
        if self._mark and not ended:
            for size in range(min(len(self._mark) - 1, len(text)), 0, -1):
                if text.endswith(self._mark[:size]):
                    return len(text) - size
        return len(text)

    def _read(self, start: int) -> list[Call]:
        marked = self._text
        for place in reversed(self._marks):
            marked = f"{marked[:place]}{self._mark}{marked[place:]}"
        text = marked[start:].strip()
        if not text:
            return []
        try:
            found = {"hermes": _hermes, "mistral": _mistral, "llama": _llama, "forced": _llama}[self._dialect](text)
            written = [json.dumps(arguments, ensure_ascii=False, allow_nan=False) for _, arguments in found]
            "".join(written).encode()  # fails for halves of characters, which no answer could carry
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        if not all(name in self._names and isinstance(arguments, dict) for name, arguments in found):
            return []
        return [Call(_call_id(), name, arguments) for (name, _), arguments in zip(found, written, strict=True)]


def _hermes(text: str) -> list[tuple[str, Any]]:
    found = []
    for part in re.split(r"</?tool_call>", text):
        if part.strip():
            found.append(_call(json.loads(part)))
    return found


def _mistral(text: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for part in text.split(_MARKS["mistral"]):
        place = 0
        while rest := part[place:].strip():
            place = len(part) - len(part[place:].lstrip())
            if rest.startswith("["):
                calls, place = _JSON.raw_decode(part, place)
                found += [_call(call) for call in calls]
                continue
            named = _NAMED.match(part, place)
            if not named:
                raise ValueError("neither a list nor a name")
            arguments, place = _JSON.raw_decode(part, named.end())
            found.append((named[1], arguments))
    return found


def _llama(text: str) -> list[tuple[str, Any]]:
    text = text.removeprefix("<|python_tag|>")
    found, place = [], 0
    while place < len(text):
        place += len(text[place:]) - len(text[place:].lstrip(" \n\t;"))
        if place < len(text):
            call, place = _JSON.raw_decode(text, place)
            found.append(_call(call))
    return found


def _call(said: Any) -> tuple[str, Any]:
    arguments = said["arguments"] if "arguments" in said else said["parameters"]
    return str(said["name"]), json.loads(arguments) if isinstance(arguments, str) else arguments


def _call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def _hoisted(schema: Any, prefix: str, shared: dict[str, Any]) -> Any:
    """``schema`` with its definitions moved to ``shared``, under names of their own, and references to them."""
    if isinstance(schema, list):
        return [_hoisted(item, prefix, shared) for item in schema]
    if not isinstance(schema, dict):
        return schema
    for word in ("$defs", "definitions"):
        if isinstance(schema.get(word), dict):
            shared |= {prefix + name: _hoisted(part, prefix, shared) for name, part in schema[word].items()}
    moved = {}
    for word, part in schema.items():
        if word == "$ref" and isinstance(part, str):
            place, found = re.subn(r"^#/(?:\$defs|definitions)/", f"#/$defs/{prefix}", part)
            if not found:
                raise RangeError("parameters of a tool may refer to their own $defs alone")
            moved[word] = place
        elif word not in ("$defs", "definitions"):
            moved[word] = _hoisted(part, prefix, shared)
    return moved
