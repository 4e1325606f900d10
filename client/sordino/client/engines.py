"""The libraries behind a guide, each with the same few calls, and the trial that keeps a hostile schema out.

A schema of a hundred characters can ask for an automaton of terabytes, and some make a library crash or never return.
So each is first compiled and tried in a process of its own with little time and memory, where this module is all that
is loaded; only what passes is compiled here.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.client.chat import MEMORY_BYTES, limit_to
from sordino.shared.errors import RangeError, SordinoError, printable

GuideKind = Literal["json", "json_schema", "regex", "choice", "grammar"]
EngineName = Literal["xgrammar", "llguidance", "outlines", "lm-format-enforcer"]
Bools = NDArray[np.bool_]

KINDS: Final[Mapping[str, tuple[GuideKind, ...]]] = {
    "xgrammar": ("json", "json_schema", "regex", "choice", "grammar"),
    "llguidance": ("json", "json_schema", "regex", "choice", "grammar"),
    "outlines": ("json_schema", "regex", "choice"),
    "lm-format-enforcer": ("json", "json_schema", "regex", "choice"),
}
ANY_OBJECT: Final = '{"type": "object"}'
CPU_S = 10
_WALL_S: Final = 120  # a machine under load has little processor time to give
_TRIED_TOKENS: Final = 48  # of each of two answers
_REFUSED, _IMPOSSIBLE, _TOO_MUCH = 3, 4, 5  # exit codes
_START: Final = (
    "import json, sys; request = json.load(sys.stdin.buffer); sys.path[:] = request['path']; "
    "from sordino.client.engines import main; main(request)"
)
_MARK: Final = b"\0"  # around the answer: whatever else starts with Python may print, too


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Annotations, and the keywords that a library enforces; it passes over others in silence, or with a line on stderr.
_NOTES: Final = words(
    "title description default examples format $schema $id $comment $defs definitions deprecated readOnly writeOnly"
)
_COMMON: Final = words(
    "type enum const properties required additionalProperties items minItems maxItems minLength maxLength pattern "
    "anyOf oneOf $ref"
)
_MORE: Final = words(
    "prefixItems minimum maximum exclusiveMinimum exclusiveMaximum minProperties maxProperties patternProperties"
)
KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "xgrammar": _NOTES | _COMMON | _MORE,
    "outlines": _NOTES | _COMMON | {"prefixItems"},
    "lm-format-enforcer": _NOTES | _COMMON - {"oneOf"},
}


class Matcher(Protocol):
    """An answer in the making. Tokens go in at its end, and out again."""

    def push(self, token: int) -> bool:
        """The next token; False, and nothing is changed, where it cannot be."""
        ...

    def pop(self, count: int) -> None:
        """Takes the last ``count`` tokens back."""
        ...

    def mask(self) -> Bools:
        """``[width]``: the tokens that may follow. The end of the answer is not among them."""
        ...

    def complete(self) -> bool:
        """Whether the answer may end here."""
        ...


class Engine(Protocol):
    """A library, made ready for a vocabulary."""

    def compile(self, kind: GuideKind, value: str) -> Callable[[], Matcher]:
        """What starts an answer.

        Args:
            value: of ``json`` and ``json_schema`` the schema's text, of ``choice`` a list in JSON.

        Raises:
            Exception: of the library's own, with its reason.
        """
        ...


@dataclass(frozen=True)
class Vocabulary:
    """The tokens' bytes, by id, as many as the model has logits; none for those that are not text."""

    tokens: tuple[bytes, ...]

    @property
    def width(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(token) for token in self.tokens])

    @cached_property
    def controls(self) -> Bools:
        """Tokens that have control characters, which no JSON has but around its values."""
        return np.array([any(byte < ord(" ") for byte in token) for token in self.tokens])

    def spell(self, text: bytes) -> list[int]:
        """Token ids of ``text``, the longest first; what no token has is left out."""
        ids, place = [], 0
        while place < len(text):
            for size in range(min(self._longest, len(text) - place), 0, -1):
                if (token := self._ids.get(text[place : place + size])) is not None:
                    ids.append(token)
                    break
            place += size
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: index for index, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _longest(self) -> int:
        return max((len(token) for token in self.tokens), default=0)


# -- the libraries ---------------------------------------------------------------------------------------------------
#
# Each is told of one token more than the model has: the end. So none of the model's own means the end to a library, and
# whether the answer may end is asked apart.


class _Xgrammar:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._xgrammar, self._width = xgrammar, vocabulary.width
        info = xgrammar.TokenizerInfo(
            [*vocabulary.tokens, b""],
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.width + 1,
            stop_token_ids=[vocabulary.width],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: GuideKind, value: str) -> Callable[[], Matcher]:
        compiler = self._compiler
        if kind in ("json", "json_schema"):
            compiled = compiler.compile_json_schema(value, any_whitespace=False)
        elif kind == "regex":
            compiled = compiler.compile_regex(value)
        else:
            if kind == "choice":
                value = "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(value))
            compiled = compiler.compile_grammar(value)
        return lambda: _XgrammarMatcher(self._xgrammar.GrammarMatcher(compiled), self._width)


class _XgrammarMatcher:
    def __init__(self, matcher: Any, width: int) -> None:
        self._matcher, self._width = matcher, width
        self._bits = np.zeros((1, (width + 1 + 31) // 32), dtype=np.int32)

    def push(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def pop(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def mask(self) -> Bools:
        self._bits.fill(-1)  # what the library leaves alone is allowed
        self._matcher.fill_next_token_bitmask(self._bits)
        return _from_bits(self._bits, self._width)

    def complete(self) -> bool:
        return bool(self._matcher.is_completed())


class _Llguidance:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._llguidance, self._width = llguidance, vocabulary.width
        wrapper = llguidance.TokenizerWrapper(_Spelling(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.width + 1, eos_token=[vocabulary.width])
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, kind: GuideKind, value: str) -> Callable[[], Matcher]:
        library, matcher = self._llguidance, self._llguidance.LLMatcher
        if kind in ("json", "json_schema"):
            grammar = matcher.grammar_from_json_schema(
                value,
                overrides={
                    "whitespace_flexible": False,
                    "item_separator": ", ",
                    "key_separator": ": ",
                    "coerce_one_of": True,
                },
            )
        else:
            grammar = library.grammar_from(kind, value)

        def start() -> Any:
            return matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

        if reason := start().get_error():
            raise ValueError(reason)
        return lambda: _LlguidanceMatcher(start(), self._width)


class _Spelling:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id, self.bos_token_id = vocabulary.width, None
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = [vocabulary.width]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._vocabulary.spell(text.encode() if isinstance(text, str) else text)


class _LlguidanceMatcher:
    def __init__(self, matcher: Any, width: int) -> None:
        self._matcher, self._width = matcher, width

    def push(self, token: int) -> bool:
        taken: bool = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def pop(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def mask(self) -> Bools:
        if self._matcher.is_stopped():
            return np.zeros(self._width, dtype=np.bool_)
        bits = self._matcher.compute_bitmask()
        self._check()
        return _from_bits(np.frombuffer(bits, dtype=np.uint8), self._width)

    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RangeError("what the guide takes became too complex for llguidance: make it simpler")


class _Outlines:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import outlines_core

        self._core, self._width = outlines_core, vocabulary.width
        self._vocabulary = outlines_core.Vocabulary(vocabulary.width, {})
        for index, token in enumerate(vocabulary.tokens):
            if token:
                self._vocabulary.insert(token, index)

    def compile(self, kind: GuideKind, value: str) -> Callable[[], Matcher]:
        if kind == "json_schema":
            value = self._core.json_schema.build_regex_from_schema(value)
        elif kind == "choice":
            value = "|".join(re.escape(text) for text in json.loads(value))
        index = self._core.Index(value, self._vocabulary)
        return lambda: _OutlinesMatcher(index, self._width)


class _OutlinesMatcher:
    def __init__(self, index: Any, width: int) -> None:
        self._index, self._width = index, width
        self._states = [index.get_initial_state()]

    def push(self, token: int) -> bool:
        state = self._index.get_next_state(self._states[-1], token) if token < self._width else None
        if state is None:
            return False
        self._states.append(state)
        return True

    def pop(self, count: int) -> None:
        del self._states[len(self._states) - count :]

    def mask(self) -> Bools:
        return _from_ids(self._index.get_allowed_tokens(self._states[-1]) or (), self._width)

    def complete(self) -> bool:
        return bool(self._index.is_final_state(self._states[-1]))


class _LmFormatEnforcer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        from lmformatenforcer import TokenEnforcerTokenizerData

        self._texts = {index: text for index, text in enumerate(map(_text_of, vocabulary.tokens)) if text}
        regular = [(index, text, True) for index, text in self._texts.items()]
        width = vocabulary.width
        self._data = TokenEnforcerTokenizerData(regular, lambda _: "", width, use_bitmask=False, vocab_size=width)
        # It takes single characters that are tokens, and then refuses others in the middle of a token that it allowed.
        self._data.tokenizer_alphabet = "".join(sorted(set("".join(self._texts.values()))))

    def compile(self, kind: GuideKind, value: str) -> Callable[[], Matcher]:
        import lmformatenforcer as library

        make: Callable[[], Any]
        if kind == "regex":
            made = library.RegexParser(value)
            make = lambda: library.RegexParser(made.context)  # noqa: E731
        elif kind == "choice":
            texts = json.loads(value)
            make = lambda: library.UnionParser([library.StringParser(text) for text in texts])  # noqa: E731
        else:
            schema = json.loads(value)
            make = lambda: _StrictJson(library.JsonSchemaParser(schema))  # noqa: E731
        make()
        return lambda: _LmFormatEnforcerMatcher(make(), self._data, self._texts)


class _StrictJson:
    """A parser of lm-format-enforcer without liberties of its own: brackets after commas, exponents of integers, points
    without digits after them, ends inside of values. One white space, and none but a space, between parts."""

    def __init__(
        self, parser: Any, *, quoted: bool = False, escaped: bool = False, open_brackets: int = 0, last: str = ""
    ) -> None:
        self._parser, self._quoted, self._escaped = parser, quoted, escaped
        self._open, self._last = open_brackets, last

    @property
    def config(self) -> Any:
        return self._parser.config

    @config.setter
    def config(self, config: Any) -> None:
        self._parser.config = config

    def add_character(self, character: str) -> _StrictJson:
        return _StrictJson(
            self._parser.add_character(character),
            quoted=self._quoted != (character == '"' and not self._escaped),
            escaped=self._quoted and character == "\\" and not self._escaped,
            open_brackets=self._open if self._quoted else self._open + (character in "{[") - (character in "}]"),
            last=self._last[-1:] + character if character == " " else character,
        )

    def get_allowed_characters(self) -> str:
        allowed = str(self._parser.get_allowed_characters())
        if self._quoted:
            return allowed
        if self._last in (".", "-"):
            return "".join(filter(str.isdecimal, allowed))
        taken = "\t\n\r\v\f"
        taken += " " if self._last.endswith(" ") else ""
        taken += "}]" if self._last.startswith(",") else ""
        taken += "eE" if self._last.isdecimal() else ""
        return "".join(character for character in allowed if character not in taken)

    def can_end(self) -> bool:
        return not self._quoted and not self._open and bool(self._parser.can_end())

    def shortcut_key(self) -> Any:
        return self._parser.shortcut_key()

    def cache_key(self) -> Any:
        key = self._parser.cache_key()
        return None if key is None else (key, self._quoted, self._escaped, self._open, self._last)


class _LmFormatEnforcerMatcher:
    def __init__(self, parser: Any, data: Any, texts: Mapping[int, str]) -> None:
        from lmformatenforcer import CharacterLevelParserConfig, TokenEnforcer

        # Its own way from tokens to parsers logs the answer where it fails: only the search of its tree is used.
        self._enforcer, self._data, self._texts = TokenEnforcer(data, parser), data, texts
        parser.config = CharacterLevelParserConfig(
            alphabet=data.tokenizer_alphabet,
            max_consecutive_whitespaces=1 << 20,  # it counts those in strings, too
            force_json_field_order=True,
            max_json_array_length=1 << 20,
        )
        self._parsers = [parser]
        self._masks: dict[Any, Bools] = {}

    def push(self, token: int) -> bool:
        text = self._texts.get(token)
        if text is None:
            return False
        parser = self._parsers[-1]
        for character in text:
            if character not in parser.get_allowed_characters():
                return False
            parser = parser.add_character(character)
        self._parsers.append(parser)
        return True

    def pop(self, count: int) -> None:
        del self._parsers[len(self._parsers) - count :]

    def mask(self) -> Bools:
        from lmformatenforcer.tokenlist import TokenList

        parser = self._parsers[-1]
        key = parser.cache_key()
        if key is not None and key in self._masks:
            return self._masks[key].copy()
        found = TokenList(False, self._data.vocab_size)
        self._enforcer._collect_allowed_tokens(parser, self._data.tokenizer_tree.root, found, parser.shortcut_key())
        mask = _from_ids(found.allowed_tokens, self._data.vocab_size)
        if key is not None:
            self._masks[key] = mask.copy()
        return mask

    def complete(self) -> bool:
        return bool(self._parsers[-1].can_end())


def _from_bits(bits: NDArray[Any], width: int) -> Bools:
    return np.unpackbits(bits.reshape(-1).view(np.uint8), count=width, bitorder="little").astype(np.bool_)


def _from_ids(ids: Any, width: int) -> Bools:
    mask = np.zeros(width + 1, dtype=np.bool_)
    mask[list(ids)] = True
    return mask[:width]


def _text_of(token: bytes) -> str:
    """Nothing for parts of characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


_ENGINES: Final[Mapping[str, tuple[Callable[[Vocabulary], Engine], str]]] = {
    "xgrammar": (_Xgrammar, "xgrammar"),
    "llguidance": (_Llguidance, "llguidance"),
    "outlines": (_Outlines, "outlines_core"),
    "lm-format-enforcer": (_LmFormatEnforcer, "lmformatenforcer"),
}


def load_engine(name: str, vocabulary: Vocabulary) -> Engine:
    """
    Raises:
        RangeError: it is not installed.
    """
    make, module = _ENGINES[name]
    try:
        importlib.import_module(module)
    except ImportError as error:
        extra = "client" if name == "xgrammar" else "guides"
        raise RangeError(f"{name} is not installed: pip install 'sordino[{extra}]', or take another engine") from error
    return make(vocabulary)


# -- the trial -------------------------------------------------------------------------------------------------------


def try_apart(name: str, kind: GuideKind, value: str, vocabulary: Vocabulary) -> None:
    """Compiles and tries a guide in a process of its own.

    Raises:
        RangeError: the library refuses it, nothing matches it, or it takes too much.
        SordinoError: there is no Python to start.
    """
    request = {
        "engine": name,
        "kind": kind,
        "value": value,
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "cpu_s": CPU_S,
        "path": sys.path,
    }
    # Standard input, not arguments: those are for all users of the machine to see.
    code, out = _run(json.dumps(request).encode())
    parts = out.rsplit(_MARK, 2)
    reason = printable(json.loads(parts[1]))[:160] if len(parts) == 3 else ""
    if code == _REFUSED:
        raise RangeError(f"{name} does not take this {kind}: {reason}")
    if code == _IMPOSSIBLE:
        raise RangeError(f"nothing that the model can spell matches this {kind}")
    if code == _TOO_MUCH or code < 0:
        raise RangeError(
            f"this {kind} takes {name} more than {CPU_S} s or {MEMORY_BYTES >> 20} MB, or ends it: make it smaller, "
            "above all its counts of repetition"
        )
    if code or reason:
        raise _no_python(f"{sys.executable} ends with code {code}")


def _run(request: bytes) -> tuple[int, bytes]:
    if not sys.executable or getattr(sys, "frozen", False):  # there, it is the application itself
        raise _no_python("this application has none")
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise _no_python(f"{sys.executable}: {error.strerror}") from error
    with process:
        try:
            out, _ = process.communicate(request, _WALL_S)
            return process.returncode, out
        except subprocess.TimeoutExpired:
            return _TOO_MUCH, b""
        finally:  # after an interrupt, too
            process.kill()
            process.wait()


def _no_python(why: str) -> SordinoError:
    return SordinoError(f"a guide is tried in a Python of its own, which cannot be started here ({why})")


class _Absent(ModuleType):
    """A module whose names are there and do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


def _without_torch(engine: str) -> None:
    """Has libraries do without torch, which takes seconds to load and is not used here."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    if engine != "xgrammar":  # the others ask whether it is there
        return
    try:
        importlib.import_module("tvm_ffi")
        sys.modules.update({name: _Absent(name) for name in ("torch", "transformers")})
        importlib.import_module("xgrammar")
    except Exception:  # it is not installed, or another version that wants more of torch: then so be it
        for name in [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "xgrammar")]:
            del sys.modules[name]


def _answers(start: Callable[[], Matcher], lengths: NDArray[np.int64]) -> Iterator[bool]:
    """Two answers, one of long tokens and one of any: at each token, whether there was one, or an end."""
    for longest in (True, False):
        matcher = start()
        for step in range(_TRIED_TOKENS):
            left = np.flatnonzero(matcher.mask())
            yield bool(len(left)) or matcher.complete()
            if not len(left):
                break
            matcher.push(int(left[np.argmax(lengths[left])] if longest else left[step * 2654435761 % len(left)]))


def _answer(request: dict[str, Any]) -> tuple[int, str]:
    vocabulary = Vocabulary(tuple(token.encode("latin-1") for token in request["tokens"]))
    _without_torch(request["engine"])
    engine = load_engine(request["engine"], vocabulary)
    limit_to(request["cpu_s"])
    try:
        start = engine.compile(request["kind"], request["value"])
        # No JSON is empty: xgrammar says so of bounds with nothing between them.
        empty = request["kind"] == "json_schema" and start().complete()
        possible = not empty and all(_answers(start, vocabulary.lengths))
    except MemoryError:
        return _TOO_MUCH, ""
    except RecursionError:
        return _REFUSED, "it is nested too deep"
    except BaseException as error:  # of a library, whatever it is: a panic of one in Rust is no Exception
        if "bad_alloc" in str(error):
            return _TOO_MUCH, ""
        # Without the time and the place in its own source.
        return _REFUSED, re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error)).strip() or type(error).__name__
    return (0, "") if possible else (_IMPOSSIBLE, "")


def main(request: dict[str, Any]) -> None:
    """What the other process does; the reason goes to its standard output."""
    code, reason = _answer(request)
    sys.stdout.buffer.write(_MARK + json.dumps(reason).encode() + _MARK)
    sys.stdout.buffer.flush()
    sys.exit(code)
