"""Guided generation: what an answer must match decides, before each token, which tokens are left.

A guide is compiled by one of four libraries (:mod:`sordino.client.engines`). It runs here, on the client: the server
sees nothing of it but, where tokens are forced and go through in one pass, the rows of that pass.

Text that must follow is spelt in one way alone, the tokenizer's own: whoever spells it otherwise has left the ways that
the model was trained on. So forced tokens are the same whether or not they go through in one pass.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor

from sordino.client.engines import (
    ANY_OBJECT,
    KEYWORDS,
    KINDS,
    Bools,
    Engine,
    EngineName,
    GuideKind,
    Matcher,
    Vocabulary,
    load_engine,
    try_apart,
    words,
)
from sordino.shared.errors import RangeError, SordinoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sordino.client.session import Connected

MAX_CHARACTERS: Final = 1 << 16  # of a schema, a pattern, a grammar, or all choices together
MAX_CHOICES: Final = 1000
MAX_DEPTH: Final = 64  # of lists and objects in a schema, one inside the other
_MAX_FORCED_BYTES: Final = 1024  # looked ahead; what is forced may have no end
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_EXACT: Final = 1 << 53
_KEPT: Final = 32  # compiled guides of a tokenizer
# What is not regular, or is passed over by one library or another, in patterns. Escapes and classes are read first.
_PATTERN_PARTS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|[\^$]", re.DOTALL)
_NOT_REGULAR: Final = re.compile(r"\\[bBAZzG1-9]|\(\?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSpec:
    """What an answer must match.

    Attributes:
        kind: any JSON object, JSON of a schema, a regular expression, one of several texts, or a grammar in EBNF.
        value: the schema (an object, or its text), the pattern, the texts, or the grammar; None for ``json``.
        engine: the library. jump: tokens that are forced go through in one pass.

    Raises:
        RangeError: there is no such kind or engine, or the engine lacks the kind.
    """

    kind: GuideKind
    value: Any = None
    engine: EngineName = "xgrammar"
    jump: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            raise RangeError(f"a guide is {', '.join(get_args(GuideKind))}; not {str(self.kind)[:40]!r}")
        if self.engine not in tuple(KINDS):  # of anything, such as a list out of JSON
            raise RangeError(f"the engine of a guide is {', '.join(KINDS)}; not {str(self.engine)[:40]!r}")
        if self.kind not in KINDS[self.engine]:
            able = ", ".join(engine for engine, kinds in KINDS.items() if self.kind in kinds)
            raise RangeError(f"{self.engine} has no guides of kind {self.kind}: {able} have")
        if not isinstance(self.jump, bool):
            raise RangeError("jump of a guide is true or false")

    def text(self) -> str:
        """The value as engines take it.

        Raises:
            RangeError: it is not of its kind, too large, or has parts that the engine would pass over.
        """
        if self.kind == "json":
            if self.value is not None:
                raise RangeError("a guide of kind json has no value: json_schema takes one")
            return ANY_OBJECT
        if self.kind == "choice":
            return _choices(self.value)
        if self.kind == "json_schema":
            return _schema(self.value, self.engine)
        if not isinstance(self.value, str) or not self.value:
            raise RangeError(f"the value of a guide of kind {self.kind} is a text that is not empty")
        _check_size(self.value, self.kind)
        return _pattern(self.value) if self.kind == "regex" else self.value


class Guide(Protocol):
    """A compiled guide. Rows may come in any order and go back: what counts is the answer's tokens so far."""

    forces: bool

    def allowed(self, row: int, ids: Sequence[int]) -> Bools:
        """``[vocabulary]``: which tokens may follow the answer ``ids`` of a row; at least one.

        Raises:
            RangeError: nothing can follow.
        """
        ...

    def forced(self, ids: Sequence[int]) -> list[int]:
        """The tokens that must follow ``ids``, of row 0, one after the other; none where there is a choice."""
        ...


class GuideProcessor(LogitsProcessor):  # type: ignore[misc]
    """Takes the tokens away that the guide does not allow.

    Where whatever it allows was taken away before, by ``min_tokens`` or ``bad_words``, the guide wins.

    Args:
        prompt: columns of the prompt, padding included.
    """

    def __init__(self, guide: Guide, prompt: int) -> None:
        self._guide, self._prompt = guide, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids [rows, columns]``, ``scores [rows, vocabulary]``."""
        out = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids[:, self._prompt :].tolist()):
            left = torch.from_numpy(np.flatnonzero(self._guide.allowed(row, ids))).to(scores.device)
            kept = scores[row, left]
            out[row, left] = kept if bool(torch.isfinite(kept).any()) else torch.zeros_like(kept)
        return out


def compile_guide(spec: GuideSpec, link: Connected, end_ids: Collection[int] | None = None) -> Guide:
    """Compiles a guide for the model's tokenizer, or takes one from memory.

    Args:
        end_ids: tokens that end the answer; None takes the model's own.

    Raises:
        RangeError: it cannot be matched by anything, is too large to compile or not of its kind, or the engine is not
            installed.
    """
    if end_ids is None:
        own = link.model.generation_config.eos_token_id
        end_ids = [own] if isinstance(own, int) else own or ()
    width = int(link.model.get_input_embeddings().weight.shape[0])
    ends = np.array(sorted({token for token in end_ids if token < width}), dtype=np.int64)
    if not len(ends):
        raise RangeError("the model has no end token, and a guide ends with one: give end_ids")
    text = spec.text()
    with _LOCK:
        bench = _BENCHES.get(link.tokenizer)
        if bench is None:
            bench = _BENCHES[link.tokenizer] = _Bench(link.tokenizer, width)
    return _Guide(bench, bench.compiled(spec, text), ends, spec)


# -- what is asked for -----------------------------------------------------------------------------------------------


def _check_size(text: str, kind: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise RangeError(f"this {kind} has {len(text)} characters, a guide at most {MAX_CHARACTERS}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RangeError(f"this {kind} has halves of characters") from error


def _choices(value: Any) -> str:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(text, str) and text for text in value):
        raise RangeError("the value of a guide of kind choice is a list of texts that are not empty")
    if len(value) > MAX_CHOICES:
        raise RangeError(f"a guide of kind choice has {len(value)} texts, of at most {MAX_CHOICES}")
    _check_size("".join(value), "choice")
    return json.dumps(list(dict.fromkeys(value)))


def _schema(value: Any, engine: str) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False, ensure_ascii=False)
        _check_size(text, "json_schema")
        schema = json.loads(text)
    except RangeError:
        raise
    except RecursionError as error:
        raise RangeError(f"this json_schema is nested deeper than {MAX_DEPTH}") from error
    except (ValueError, TypeError) as error:
        raise RangeError("the value of a guide of kind json_schema is an object, or its text in JSON") from error
    if not isinstance(schema, dict):
        raise RangeError("the value of a guide of kind json_schema is an object, or its text in JSON")
    if _depth(schema) > MAX_DEPTH:
        raise RangeError(f"this json_schema is nested deeper than {MAX_DEPTH}")
    known = KEYWORDS.get(engine)
    for part in _parts(schema):
        reference = part.get("$ref", "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise RangeError("$ref in a json_schema begins with '#': nothing is fetched")
        if isinstance(part.get("pattern"), str):
            _pattern(part["pattern"])
        _check_numbers(part, engine)
        if known is not None and (unknown := sorted(set(part) - known)):
            raise RangeError(f"{engine} does not enforce {unknown[0][:40]!r} of a json_schema: leave it out")
        if engine in ("outlines", "lm-format-enforcer"):
            _check_simple(part, engine)
    if engine == "outlines" and _is_recursive(schema):
        raise RangeError("outlines cuts a json_schema that refers to itself: take another engine")
    return json.dumps(schema, ensure_ascii=False)


def _check_numbers(part: Mapping[str, Any], engine: str) -> None:
    """Numbers that the libraries read as another: all as floats, and xgrammar bounds as six decimals."""
    bounds = [part[name] for name in _BOUNDS if name in part]
    listed = part.get("enum")
    exact = [part.get("const"), *(listed if isinstance(listed, list) else ())]
    for number in (*bounds, *exact):
        if isinstance(number, int | float) and abs(number) > _MOST_EXACT:
            raise RangeError(
                f"numbers in a json_schema are from -{_MOST_EXACT} to {_MOST_EXACT}, where floats are exact"
            )
    if engine == "xgrammar" and any(isinstance(bound, float) and round(bound, 6) != bound for bound in bounds):
        raise RangeError("xgrammar takes six decimals of a bound in a json_schema: leave out the rest")


def _check_simple(part: Mapping[str, Any], engine: str) -> None:
    """What these engines get wrong, found by validating answers of theirs."""
    texts = list(part.get("properties") or ())
    if engine == "lm-format-enforcer":
        texts += [part.get("const"), *(part.get("enum") or ())]
        if isinstance(part.get("type"), list) and set(part) & (KEYWORDS[engine] - {"type", "title", "description"}):
            raise RangeError("lm-format-enforcer takes nothing else beside a list of types: use anyOf")
    for text in texts:
        if isinstance(text, str) and json.dumps(text, ensure_ascii=False)[1:-1] != text:
            raise RangeError(f"{engine} does not escape quotes in names of a json_schema: take another engine")


def _is_recursive(schema: Mapping[str, Any]) -> bool:
    needed = {part["$ref"]: set[str]() for part in _parts(schema) if "$ref" in part}
    for reference, inner in needed.items():
        inner |= {part["$ref"] for part in _parts(_resolved(schema, reference)) if "$ref" in part}
    while ends := [reference for reference, inner in needed.items() if not inner & needed.keys()]:
        for reference in ends:
            del needed[reference]
    return bool(needed)


def _resolved(schema: Any, reference: str) -> Any:
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _depth(value: Any) -> int:
    depth, layer = 0, [value]
    while layer := [inner for outer in layer for inner in _inside(outer)]:
        depth += 1
    return depth


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


_SCHEMAS: Final = words(
    "additionalProperties items not if then else contains propertyNames unevaluatedItems unevaluatedProperties"
)
_LISTS_OF_SCHEMAS: Final = words("prefixItems items allOf anyOf oneOf")
_SCHEMAS_BY_NAME: Final = words("properties patternProperties $defs definitions dependentSchemas")


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it; what is data, such as ``const`` and ``enum``, is left alone."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name, value in part.items():
            if name in _SCHEMAS:
                waiting.append(value)
            if name in _LISTS_OF_SCHEMAS and isinstance(value, list):
                waiting += value
            if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                waiting += value.values()


def _pattern(pattern: str) -> str:
    """The pattern, without anchors at its ends: the whole answer matches it anyway."""
    for found in _PATTERN_PARTS.finditer(pattern):
        if _NOT_REGULAR.match(found[0]):
            raise RangeError(f"a pattern cannot have {found[0]!r}: no look-around, no back reference, no boundary")
        inside = found.start() > 0 if found[0] == "^" else found.end() < len(pattern)
        if found[0] in ("^", "$") and inside:
            raise RangeError("a pattern has anchors at its ends alone")
    start = pattern.startswith("^")
    end = pattern.endswith("$") and len(pattern[:-1]) - len(pattern[:-1].rstrip("\\")) & 1 == 0
    return pattern[start : len(pattern) - end]


# -- what is made of it ----------------------------------------------------------------------------------------------


class _Bench:
    """What a tokenizer's guides have in common."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, width: int) -> None:
        self.vocabulary = Vocabulary(_tokens(tokenizer, width))
        backend = getattr(tokenizer, "backend_tokenizer", None)  # the tokenizer itself holds this bench by its key
        self._encode: Callable[[str], list[int]] | None = None
        if backend is not None:
            self._encode = lambda text: list(backend.encode(text, add_special_tokens=False).ids)
        self._engines: dict[str, Engine] = {}
        self._kept: dict[tuple[str, str, str], Callable[[], Matcher]] = {}  # the oldest first
        self._lock = threading.Lock()

    def compiled(self, spec: GuideSpec, text: str) -> Callable[[], Matcher]:
        key = (spec.engine, spec.kind, text)
        # Whoever asks for one that is there does not wait for another's.
        found = self._kept.get(key)
        if found is None:
            with self._lock:
                found = self._kept.get(key) or self._compile(spec, text)
                self._kept[key] = found
                while len(self._kept) > _KEPT:
                    del self._kept[next(iter(self._kept))]
        return found

    def _compile(self, spec: GuideSpec, text: str) -> Callable[[], Matcher]:
        if spec.engine not in self._engines:
            self._engines[spec.engine] = load_engine(spec.engine, self.vocabulary)
        if spec.kind not in ("json", "choice"):  # these are small whatever they hold
            try_apart(spec.engine, spec.kind, text, self.vocabulary)
        return self._engines[spec.engine].compile(spec.kind, text)

    def spell(self, text: bytes) -> list[int]:
        """As the tokenizer does, where that gives these very bytes; whole characters only."""
        whole = text.decode(errors="ignore")
        if not text.startswith(whole.encode()):
            return []
        ids = self._encode(whole) if self._encode else []
        if not self._gives(ids, whole):  # it begins with a space of its own, say
            ids = self.vocabulary.spell(whole.encode())
        return ids if self._gives(ids, whole) else []

    def _gives(self, ids: Sequence[int], text: str) -> bool:
        return b"".join(self.vocabulary.tokens[token] for token in ids) == text.encode()


_LOCK: Final = threading.Lock()
_BENCHES: Final[WeakKeyDictionary[PreTrainedTokenizerBase, _Bench]] = WeakKeyDictionary()


def _tokens(tokenizer: PreTrainedTokenizerBase, width: int) -> tuple[bytes, ...]:
    """The bytes of every token; none for special ones, those that were added, and those that the tokenizer lacks."""
    import xgrammar

    # Its reading of tokenizers (byte-level, byte fallback, plain) serves all engines.
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=width, stop_token_ids=[0])
    tokens = [bytes(token) for token in info.decoded_vocab][:width]
    tokens += [b""] * (width - len(tokens))
    for index in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
        if index < width:
            tokens[index] = b""
    return tuple(tokens)


@dataclass(slots=True)
class _Row:
    """One answer: the tokens that the matcher took, and what must follow each of them.

    Attributes:
        runs: before each token and after the last, the forced tokens. mask: of what may follow now, as the engine says.
    """

    matcher: Matcher
    ids: list[int] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    mask: Bools | None = None


class _Guide:
    def __init__(self, bench: _Bench, start: Callable[[], Matcher], ends: NDArray[np.int64], spec: GuideSpec) -> None:
        self.forces = spec.jump
        self._bench, self._start, self._ends = bench, start, ends
        self._end_set = frozenset(ends.tolist())
        # Some libraries take them inside of strings, where JSON has none.
        self._never = bench.vocabulary.controls if spec.kind in ("json", "json_schema") else None
        self._rows: dict[int, _Row] = {}

    def allowed(self, row: int, ids: Sequence[int]) -> Bools:
        state, width = self._rows.setdefault(row, _Row(self._start())), self._bench.vocabulary.width
        allowed = np.zeros(width, dtype=np.bool_)
        if not self._follow(state, ids):
            allowed[self._ends] = True  # it has ended, or is a draft or a beam that comes to nothing
            return allowed
        if run := self._run(state):
            allowed[run[0]] = True
            return allowed
        allowed |= self._mask(state)
        allowed[self._ends] = state.matcher.complete()
        if not allowed.any():
            raise RangeError("nothing that the model can spell matches the guide from here on: make it simpler")
        return allowed

    def forced(self, ids: Sequence[int]) -> list[int]:
        state = self._rows.setdefault(0, _Row(self._start()))
        return list(self._run(state)) if self._follow(state, ids) else []

    def _follow(self, row: _Row, ids: Sequence[int]) -> bool:
        """Brings the row to ``ids``; False where these have an end token, or one that does not match."""
        ids = list(ids)
        common = len(row.ids)
        if ids[:common] != row.ids:
            pairs = zip(ids, row.ids, strict=False)
            common = next((place for place, (new, old) in enumerate(pairs) if new != old), min(len(ids), common))
            row.matcher.pop(len(row.ids) - common)
            del row.ids[common:], row.runs[common + 1 :]
            row.mask = None
        for token in ids[common:]:
            run = self._run(row)
            if token in self._end_set or (run and token != run[0]):
                return False
            if not self._push(row.matcher, token):
                if token < len(self._mask(row)) and self._mask(row)[token]:
                    raise SordinoError("the guide's engine leaves a token that it then refuses: take another engine")
                return False
            row.ids.append(token)
            row.mask = None
            if len(run) > 1:
                row.runs.append(run[1:])
        return True

    def _run(self, row: _Row) -> list[int]:
        """The forced tokens after ``row.ids``, which depend on these alone."""
        if len(row.runs) <= len(row.ids):
            row.runs.append(self._look_ahead(row))
        return row.runs[-1]

    def _mask(self, row: _Row) -> Bools:
        if row.mask is None:
            row.mask = self._left(row.matcher)
        return row.mask

    def _left(self, matcher: Matcher) -> Bools:
        mask = matcher.mask()
        return mask if self._never is None else mask & ~self._never

    def _push(self, matcher: Matcher, token: int) -> bool:
        return not (self._never is not None and self._never[token]) and matcher.push(token)

    def _look_ahead(self, row: _Row) -> list[int]:
        """Forced text, as far as it goes, as the tokenizer spells it.

        xgrammar's own search does not return where what is forced has no end; this one has the same steps for all.
        """
        matcher, tokens, lengths = row.matcher, self._bench.vocabulary.tokens, self._bench.vocabulary.lengths
        text, reach = b"", list[tuple[int, int]]()
        mask = self._mask(row)
        while len(text) < _MAX_FORCED_BYTES and not matcher.complete():
            left = np.flatnonzero(mask)
            token = self._beginning(left)
            if token is None or not self._push(matcher, token):
                break
            reach.append((len(text), len(text) + int(lengths[left].max())))
            text += tokens[token]
            mask = self._left(matcher)
        matcher.pop(len(reach))
        # How the end is spelt may depend on what the model chooses to say after it: from where a token goes beyond it.
        sure = next((start for start, end in reach if end > len(text)), len(text))
        ids = self._bench.spell(text) if sure else []
        ends = np.cumsum(lengths[np.array(ids, dtype=np.int64)])
        ids = [token for token, end in zip(ids, ends, strict=True) if end <= sure]
        return [] if self._end_set.intersection(ids) else ids

    def _beginning(self, left: NDArray[np.int64]) -> int | None:
        """The token that all that are left begin with: usually a byte."""
        if not len(left):
            return None
        vocabulary = self._bench.vocabulary
        first = int(left[np.argmin(vocabulary.lengths[left])])
        beginning = vocabulary.tokens[first]
        return first if all(vocabulary.tokens[token].startswith(beginning) for token in left) else None
