"""``sordino batch``: a file of prompts to a file of answers, several at a time, whatever ends the process between.

The file of answers is the only record of what is done. Each call of ``generate()`` appends its lines with one write and
waits for the disk, so that a process killed at any moment leaves whole lines and perhaps a torn one, which the next run
drops. Each line carries a digest of what was asked: it is never taken for the answer to anything else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from sordino.client.answers import Answer, Generation
from sordino.client.chat import render
from sordino.client.guide import GuideSpec
from sordino.client.interrupts import interrupts
from sordino.client.options import MAX_DRAFT, Options
from sordino.client.provision import plan_batch
from sordino.client.sampling import row_keys
from sordino.client.terminal import check_text, encode_prompt, progress_bar
from sordino.shared.errors import BundleError, RangeError, SordinoError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from sordino.client.session import Connected

_OPTIONS: Final = frozenset(item.name for item in fields(Options))
_MOST_PADDING: Final = 0.25  # of a call's prompt tokens: each costs a mask


@dataclass(slots=True)
class Line:
    """A prompt of the file, with the options that were given for it.

    Attributes:
        messages: of a conversation; None where ``prompt`` is a text. digest: of all that was asked.
        inputs: its tokens, once they are known.
    """

    number: int
    id: str | int
    prompt: str
    messages: list[dict[str, str]] | None
    options: Options
    digest: str
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    room: int = 0

    @property
    def length(self) -> int:
        """Rows of its prompt, with the padding that its own options ask for."""
        multiple = self.options.pad_prompt
        return -(-int(self.inputs["input_ids"].shape[1]) // multiple) * multiple

    @property
    def shared(self) -> str:
        """Equal for lines that may go through one call; their seeds stay their own."""
        return repr(replace(self.options, seed=None))


def read_prompts(path: Path, defaults: Mapping[str, Any], *, raw: bool, system: str | None) -> list[Line]:
    """The lines of a file of prompts, each a JSON object: ``prompt`` or ``messages``, ``id`` (or else the number of the
    line), and any option of :class:`Options` by name.

    Args:
        defaults: options of lines that do not set them. raw: no chat template for a ``prompt``; messages always go
            through it. system: the system message of every ``prompt``.

    Raises:
        RangeError: a line that cannot be read, has a field that nothing knows, or an option that means nothing.
    """
    check_text("--system", system or "")
    lines: list[Line] = []
    first: dict[str, int] = {}
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        if not text.strip():
            continue
        with _of_line(path, number):
            line = _line(number, text, defaults, raw=raw, system=system)
            other = first.setdefault(json.dumps(line.id), number)
            if other != number:
                raise RangeError(f"line {other} has the same id")
            lines.append(line)
    if not lines:
        raise RangeError(f"{path.name} has no prompts")
    return lines


def _line(number: int, text: bytes, defaults: Mapping[str, Any], *, raw: bool, system: str | None) -> Line:
    said = _object(text)
    name, prompt, messages = said.pop("id", number), said.pop("prompt", None), said.pop("messages", None)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise RangeError("id is a text or a whole number")
    if unknown := sorted(set(said) - _OPTIONS):
        known = ", ".join(["id", "prompt", "messages", *sorted(_OPTIONS)])
        raise RangeError(f"there is no field {unknown[0][:40]!r}: known are {known}")
    if (prompt is None) == (messages is None):
        raise RangeError("it needs prompt or messages, one of them")
    if messages is not None:
        _check_messages(messages)
        if system:
            raise RangeError("messages bring their own system message: leave out --system")
    elif not isinstance(prompt, str) or not prompt.strip():
        raise RangeError("prompt is a text that is not empty")
    check_text("it", json.dumps([name, prompt, messages], ensure_ascii=False))
    asked = {"prompt": prompt, "messages": messages, "raw": raw, "system": system, "options": {**defaults, **said}}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return Line(number, name, prompt or "", messages, options_of({**defaults, **said}), digest)


def _object(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise RangeError("a field is there twice")
        return found

    try:
        said = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise RangeError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError:
        raise RangeError("it is not UTF-8 text") from None
    except RangeError:
        raise
    except (RecursionError, ValueError):  # the latter of a number of thousands of digits
        raise RangeError("its JSON is nested too deeply, or has a number too long to read") from None
    if not isinstance(said, dict):
        raise RangeError("it is not a JSON object")
    return said


def _check_messages(messages: object) -> None:
    sound = isinstance(messages, list) and all(
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    if not sound or not messages:
        raise RangeError('messages is a list of objects with the texts "role" and "content"')


def options_of(said: Mapping[str, Any]) -> Options:
    """:meth:`Options.of` for values out of JSON, where a mapping's names are texts and null says nothing.

    Raises:
        RangeError: see :class:`Options`.
    """
    values = {name: value for name, value in said.items() if value is not None}
    for name in ("stop", "bad_words"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    for name in ("fixed_drafts", "fixed_length"):
        if not isinstance(values.get(name, False), bool):
            raise RangeError(f"{name} is true or false")
    if not isinstance(values.get("end_ids", []), list):
        raise RangeError("end_ids is a list of tokens")
    bias, guide = values.get("logit_bias", {}), values.get("guide", {"kind": "json"})
    if not isinstance(bias, dict) or not all(str(token).isdecimal() and len(str(token)) < 20 for token in bias):
        raise RangeError("logit_bias is an object with numbers by token")
    if not isinstance(guide, dict) or not {"kind"} <= set(guide) <= {item.name for item in fields(GuideSpec)}:
        raise RangeError("guide is an object with a kind and its value; it may name an engine")
    if bias:
        values["logit_bias"] = {int(token): value for token, value in bias.items()}
    if "guide" in values:
        values["guide"] = GuideSpec(**guide)
    return Options.of(values)


def defaults_of(said: Sequence[str]) -> dict[str, Any]:
    """Options out of ``name=value``, where the value is JSON or else a text.

    Raises:
        RangeError: no option has that name, or the value means nothing.
    """
    found: dict[str, Any] = {}
    for text in said:
        name, equals, value = text.partition("=")
        if not equals or name not in _OPTIONS:
            raise RangeError(f"--set takes NAME=VALUE, not {text[:40]!r}; names are {', '.join(sorted(_OPTIONS))}")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    options_of(found)
    return found


@contextmanager
def _of_line(path: Path, number: int) -> Iterator[None]:
    """Errors name the line that they are about."""
    try:
        yield
    except (RangeError, BundleError) as error:
        raise type(error)(f"{path.name} line {number}: {error}") from None


class AnswersFile:
    """The answers so far, locked against a second process. A new file can be read by its owner alone.

    Raises:
        RangeError: it is in use, or has other lines than answers to these prompts.
    """

    def __init__(self, path: Path, lines: Sequence[Line]) -> None:
        self._path, self._lines = path, {json.dumps(line.id): line for line in lines}
        self._done: dict[str, str] = {}
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "r+b", 0)
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise RangeError(f"--out {path.name} is no file that answers can be kept in")
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def left(self) -> list[Line]:
        """Lines without an answer, as they stand in the file of prompts."""
        return [line for key, line in self._lines.items() if key not in self._done]

    def check_model(self, fingerprint: str) -> None:
        """
        Raises:
            RangeError: what is there was answered by another split.
        """
        if any(model != fingerprint for model in self._done.values()):
            raise RangeError(f"{self._path.name} has answers of another model than the server's: use another --out")

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines for good: when this returns, they are on the disk."""
        whole = b"".join(_text(record) + b"\n" for record in records)
        left = memoryview(whole)
        with interrupts:  # or what is written might not be counted
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            os.fsync(self._file.fileno())
            self._done |= {json.dumps(record["id"]): record["model"] for record in records}

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RangeError(f"{self._path.name} is in use by another process: wait for its end") from None
        folder = os.open(self._path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name of a file that was just made
        finally:
            os.close(folder)

    def _read(self) -> None:
        *whole, torn = self._file.read().split(b"\n")
        for number, text in enumerate(whole, 1):
            self._take(number, text)
        if torn:
            # Nothing but what began as an answer to one of these prompts is ever cut off.
            heads = (b'{"id": %s, "line": ' % _text(line.id) for line in self._lines.values())
            if not any(torn[: len(head)] == head[: len(torn)] for head in heads):
                raise self._foreign(len(whole) + 1)
            # What a killed process had written of its last call. Its prompts are answered again.
            self._file.truncate(sum(len(text) + 1 for text in whole))
            os.fsync(self._file.fileno())

    def _take(self, number: int, text: bytes) -> None:
        try:
            record = json.loads(text)
            key, digest, model = json.dumps(record["id"]), record["digest"], record["model"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._foreign(number) from None
        line = self._lines.get(key)
        if line is None:
            raise RangeError(
                f"{self._path.name} line {number} answers id {key[:40]}, which is not among the prompts: use another "
                "--out"
            )
        if line.digest != digest:
            raise RangeError(
                f"{self._path.name} line {number} answers id {key[:40]}, whose prompt or options are not the same any "
                "more: use another --out"
            )
        if key in self._done:
            raise RangeError(f"{self._path.name} line {number} answers id {key[:40]} again: use another --out")
        self._done[key] = str(model)

    def _foreign(self, number: int) -> RangeError:
        return RangeError(f"{self._path.name} line {number} is no answer of sordino batch: use another --out")

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _text(said: Any) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode()


@dataclass(slots=True)
class Call:
    """Lines that go through one call of ``generate()``."""

    lines: list[Line]

    @property
    def columns(self) -> int:
        return max(line.length for line in self.lines)

    def rows(self) -> int:
        """Most rows that travel, each of which takes a mask: padding, and drafts none of which are right, included."""
        options, room = self.lines[0].options, self.lines[0].room
        more = 0 if options.speculate == "off" else options.draft_tokens or MAX_DRAFT
        width = max(options.n, options.beams)
        return len(self.lines) * width * (self.columns + (room - 1) * (1 + more))

    def takes(self, line: Line, most: int, *, exact: bool) -> bool:
        """Whether one more line, not shorter than these, changes nothing for them and pads not too much."""
        lines = [*self.lines, line]
        padding = sum(line.length - other.length for other in lines)
        return (
            len(lines) <= most
            # Beside a longer prompt, fewer positions may be left than alone.
            and line.room == self.lines[0].room
            and (not padding if exact else padding <= _MOST_PADDING * sum(other.length for other in lines))
        )

    def run(self, link: Connected, draft_model: PreTrainedModel | None) -> list[dict[str, Any]]:
        """The records of its lines."""
        options = self.lines[0].options
        columns = max(line.inputs["input_ids"].shape[1] for line in self.lines)
        padded = [_pad_left(line.inputs, columns) for line in self.lines]
        inputs = {name: torch.cat([one[name] for one in padded]) for name in ("input_ids", "attention_mask")}
        keys = [key for line in self.lines for key in row_keys(line.options.seed, options.n)]
        generation = Generation(link, inputs, replace(options, seed=None), draft_model=draft_model, keys=keys)
        answers = generation.run()
        records = []
        for number, line in enumerate(self.lines):
            own = answers.answers[number * options.n : (number + 1) * options.n]
            record = _record(line, own, link.session.manifest.fingerprint)
            if answers.speculation is not None:
                record["speculation"] = asdict(answers.speculation)
            records.append(record)
        return records


def _pad_left(inputs: dict[str, torch.Tensor], columns: int) -> dict[str, torch.Tensor]:
    more = columns - inputs["input_ids"].shape[1]
    # Nothing looks at the padding: any token does.
    return {name: torch.nn.functional.pad(tensor, (more, 0)) for name, tensor in inputs.items()}


def _record(line: Line, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """What is written: ``id`` and ``line`` first, by which a torn line is known."""
    completion = sum(len(answer.tokens) for answer in answers)
    prompt = answers[0].prompt_tokens
    return {
        "id": line.id,
        "line": line.number,
        "answers": [_answer(answer) for answer in answers],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "model": model,
        "digest": line.digest,
    }


def _answer(answer: Answer) -> dict[str, Any]:
    said: dict[str, Any] = {"text": answer.text, "finish": answer.finish}
    if answer.stop is not None:
        said["stop"] = answer.stop
    said["tokens"] = [token.id for token in answer.tokens]
    if any(token.logprob for token in answer.tokens):
        said["logprobs"] = [
            {"value": token.logprob.value, "top": token.logprob.top} for token in answer.tokens if token.logprob
        ]
    return said


def plan_calls(lines: Sequence[Line], rows: int, *, exact: Callable[[Options], bool]) -> list[Call]:
    """Lines of equal options and similar length together, at most ``rows`` in a call; the first of the file first.

    Args:
        exact: whether lines of such options are to have one length, since padding would change what they get.
    """
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(line.shared, []).append(line)
    calls: list[Call] = []
    for same in kinds.values():
        options = same[0].options
        most = 1 if options.speculate != "off" or options.beams > 1 else rows
        own: list[Call] = []
        for line in sorted(same, key=lambda line: line.length):
            if own and own[-1].takes(line, most, exact=exact(options)):
                own[-1].lines.append(line)
            else:
                own.append(Call([line]))
        calls += own
    return sorted(calls, key=lambda call: min(line.number for line in call.lines))


def run_batch(
    link: Connected,
    lines: Sequence[Line],
    answers: AnswersFile,
    *,
    prompts: Path,
    rows: int,
    batch: int,
    raw: bool,
    system: str | None,
    draft_model: PreTrainedModel | None,
    console: Console,
) -> None:
    """Answers the lines that are left. Everything is checked before the first row is sent.

    Args:
        prompts: where the lines are from. rows: most prompts in a call. batch: masks made at a time.

    Raises:
        RangeError: a line that the model cannot take, or answers of another model. Others: those of the session.
    """
    answers.check_model(link.session.manifest.fingerprint)
    left = answers.left()
    _encode(link, left, prompts, draft_model, raw=raw, system=system)

    def exact(options: Options) -> bool:
        config = link.model.generation_config
        penalty = options.repetition_penalty or getattr(config, "repetition_penalty", None) or 1.0
        # Both look at the whole text, and not every release leaves out the padding.
        return penalty != 1.0 or bool(getattr(config, "no_repeat_ngram_size", None))

    calls = plan_calls(left, rows, exact=exact)
    _announce(link, len(lines), len(left), calls, batch, console)

    def done() -> int:
        return len(lines) - len(answers.left())

    try:
        with progress_bar("answers") as progressed:
            progressed(done(), len(lines))
            for call in calls:
                answers.append(call.run(link, draft_model))
                progressed(done(), len(lines))
    except (SordinoError, OSError, KeyboardInterrupt):
        console.print(f"{done()} of {len(lines)} answered: the same command goes on from there", highlight=False)
        raise
    console.print(f"{done()} of {len(lines)} answered", highlight=False)


def _encode(
    link: Connected,
    lines: Sequence[Line],
    prompts: Path,
    draft_model: PreTrainedModel | None,
    *,
    raw: bool,
    system: str | None,
) -> None:
    tried = set()
    with progress_bar("prompts") as progressed:
        for count, line in enumerate(lines):
            progressed(count, len(lines))
            with _of_line(prompts, line.number):
                line.inputs = _tokens(link, line, raw=raw, system=system)
                line.room = line.options.settings(link, line.length)["max_new_tokens"]
                if line.shared not in tried or line.room < 1:
                    # What the model or a guide's library does not take shows here.
                    Generation(link, line.inputs, line.options, draft_model=draft_model)
                    tried.add(line.shared)


def _tokens(link: Connected, line: Line, *, raw: bool, system: str | None) -> dict[str, torch.Tensor]:
    if line.messages is None:
        return encode_prompt(link, line.prompt, raw=raw, system=system)
    if link.tokenizer.chat_template is None:
        raise RangeError("the model has no chat template: give a prompt instead of messages")
    rendered = render(link.tokenizer, line.messages)
    encoded = link.tokenizer(rendered, return_tensors="pt", add_special_tokens=False)
    if not encoded["input_ids"].numel():
        raise BundleError("the model's chat template makes nothing of the messages: use prompt and --raw")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _announce(link: Connected, total: int, left: int, calls: Sequence[Call], batch: int, console: Console) -> None:
    """What will be sent, and what that takes of masks, before it is."""
    from sordino.client.session import describe_plan

    rows, masks = sum(call.rows() for call in calls), link.session.masks_left
    text = f"{left} of {total} prompts to answer, in {len(calls)} calls: at most {rows:,} rows"
    console.print(text + ("" if masks is None else f", {masks:,} masks in the pool"), highlight=False)
    if masks is not None and rows > masks:
        plan = plan_batch(link.session.manifest, batch, checks=0)
        console.print(f"up to {-(-(rows - masks) // batch)} times {describe_plan(plan)}", highlight=False)
