"""Answers as OpenAI's objects: whole, or in chunks as they come."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from sordino.client.answers import Answers, Piece, Token
from sordino.client.gateway.tools import Call, Reader

Spell = Callable[[Sequence[int]], str]
_CONTEXT_IDS: Final = 6  # tokens before one that decide how it is spelt
_UNFINISHED: Final = "�"  # what a tokenizer makes of half a character
_LOWEST: Final = -9999.0  # what OpenAI says for a probability of zero: JSON has no infinity


def usage_of(prompt_tokens: int, answers: Answers) -> dict[str, Any]:
    """Tokens of the prompts, each counted once, and all that were chosen, those that ended an answer included."""
    chosen = sum(len(answer.tokens) for answer in answers.answers)
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": chosen}
    usage["total_tokens"] = prompt_tokens + chosen
    if (counts := answers.speculation) is not None:
        rejected = counts.drafted - counts.accepted
        details = {"accepted_prediction_tokens": counts.accepted, "rejected_prediction_tokens": rejected}
        usage["completion_tokens_details"] = details
    return usage


class Reply(ABC):
    """What both kinds have in common.

    Args:
        spell: tokens to text, special ones included. reader: makes what tells calls from text, for one answer each;
            None where the model has no tools. most_calls: of an answer.
    """

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(
        self,
        *,
        model: str,
        fingerprint: str,
        spell: Spell,
        logprobs: bool,
        reader: Callable[[], Reader] | None = None,
        most_calls: int | None = None,
    ) -> None:
        self._head = {"id": f"{self.prefix}{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = f"fp_{fingerprint[:12]}"
        self._spell, self._logprobs, self._reader, self._most_calls = spell, logprobs, reader, most_calls
        self._rows: dict[int, _Row] = {}

    def whole(self, answers: Answers, prompt_tokens: int) -> dict[str, Any]:
        choices = []
        for number, answer in enumerate(answers.answers):
            row = self._row(number)
            row.push(answer.text, answer.tokens)
            text, calls = row.finish(self._most_calls)
            choices.append(
                {
                    "index": number,
                    **self.choice(text, calls),
                    "logprobs": self.logprobs(row.take(self._spell)) if self._logprobs else None,
                    "finish_reason": "tool_calls" if calls else answer.finish,
                }
            )
        usage = usage_of(prompt_tokens, answers)
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """None where there is nothing to tell yet: text that may become a call."""
        row = self._row(piece.row)
        row.push(piece.text, piece.tokens)
        calls: list[Call] = []
        if piece.finish:
            text, calls = row.finish(self._most_calls)
        else:
            text = row.show()
        if not text and not piece.finish:
            return None
        first, row.begun = not row.begun, True
        choice = {
            "index": piece.row,
            **self.delta(text, calls, first=first),
            "logprobs": self.logprobs(row.take(self._spell)) if self._logprobs else None,
            "finish_reason": "tool_calls" if calls else piece.finish,
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def last_chunk(self, answers: Answers, prompt_tokens: int) -> dict[str, Any]:
        """Usage alone."""
        usage = usage_of(prompt_tokens, answers)
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    @abstractmethod
    def choice(self, text: str, calls: Sequence[Call]) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, text: str, calls: Sequence[Call], *, first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(self, tokens: Sequence[_Spelt]) -> dict[str, Any]: ...

    def _row(self, number: int) -> _Row:
        if number not in self._rows:
            self._rows[number] = _Row(self._reader() if self._reader else None)
        return self._rows[number]


class ChatReply(Reply):
    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, calls: Sequence[Call]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [call.plain for call in calls]
        return {"message": message}

    def delta(self, text: str, calls: Sequence[Call], *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text and not (calls and not text.strip()):
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": index, **call.plain} for index, call in enumerate(calls)]
        return {"delta": delta}

    def logprobs(self, tokens: Sequence[_Spelt]) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = [_entry(text, value) for text, value in token.top]
            content.append({**_entry(token.text, token.value), "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionReply(Reply):
    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, text: str, calls: Sequence[Call]) -> dict[str, Any]:
        del calls
        return {"text": text}

    def delta(self, text: str, calls: Sequence[Call], *, first: bool) -> dict[str, Any]:
        del calls, first
        return {"text": text}

    def logprobs(self, tokens: Sequence[_Spelt]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.value for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


class _Spelt:
    """A token with its spelling at its place, and those of its alternatives."""

    __slots__ = ("offset", "text", "top", "value")

    def __init__(self, text: str, value: float, top: list[tuple[str, float]], offset: int) -> None:
        self.text, self.value, self.top, self.offset = text, value, top, offset


class _Row:
    """What has been seen of one answer."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._text = ""  # not yet shown, where there is no reader
        self._tokens: list[Token] = []  # whose logarithms have not been told
        self._ids: list[int] = []
        self._offset = 0
        self.begun = False

    def push(self, text: str, tokens: Sequence[Token]) -> None:
        self._tokens += tokens
        if self._reader:
            self._reader.push(text, tokens)
        else:
            self._text += text

    def show(self) -> str:
        if self._reader:
            return self._reader.show()
        text, self._text = self._text, ""
        return text

    def finish(self, most_calls: int | None) -> tuple[str, list[Call]]:
        if self._reader:
            text, calls = self._reader.finish()
            return text, calls[:most_calls]
        return self.show(), []

    def take(self, spell: Spell) -> list[_Spelt]:
        """The tokens since the last time. How one is spelt depends on those before it."""
        taken = []
        for token in self._tokens:
            before = self._ids[-_CONTEXT_IDS:]
            known = len(spell(before))
            told = token.logprob

            def spelt(one: int, before: list[int] = before, known: int = known) -> str:
                return spell([*before, one])[known:]

            top = [(spelt(other), max(value, _LOWEST)) for other, value in told.top] if told else []
            value = max(told.value, _LOWEST) if told else _LOWEST
            taken.append(_Spelt(spelt(token.id), value, top, self._offset))
            self._ids.append(token.id)
            self._offset += len(token.text)
        self._tokens = []
        return taken


def _entry(text: str, value: float) -> dict[str, Any]:
    whole = _UNFINISHED not in text
    return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def _by_text(token: _Spelt) -> dict[str, float] | None:
    found: dict[str, float] = {}
    for text, value in token.top:
        found.setdefault(text, value)  # the likelier of two that are spelt alike
    return found or None
