"""What may be asked of an answer, checked before anything is sent: one set of options for every way in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from sordino.shared.errors import RangeError

if TYPE_CHECKING:
    from sordino.client.guide import GuideSpec
    from sordino.client.session import Connected

Speculation = Literal["off", "ngram", "draft", "mixed"]
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1000
MAX_LOGPROBS: Final = 20
MAX_ANSWERS: Final = 64
MAX_DRAFT: Final = 32
_COLDEST: Final = 1e-6  # colder, a logit divided by it leaves float32; the choice is greedy's long before
_HOTTEST: Final = 1e6
# What sampling depends on, with the values that transformers takes where neither the user nor the model's repository
# says otherwise; it passes over them in silence, too, where nothing is drawn.
_SAMPLING: Final[Mapping[str, Any]] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an answer is chosen, what ends it, and what of its making the server may notice.

    None means: as the model's repository says, or else as ``transformers`` does.

    Attributes:
        max_tokens, min_tokens: of an answer; the model's last position ends it, too. Nothing ends it before
            ``min_tokens``.
        temperature: 0 is greedy. top_k (0 is none), top_p, min_p: applied after it, in this order.
        repetition_penalty: divides positive and multiplies negative logits of all tokens so far (Keskar et al. 2019).
        frequency_penalty, presence_penalty: subtracted from a logit for each time, and once, that the answer has the
            token (as OpenAI defines them).
        beams: width of a beam search; 1 is none. n: answers to one prompt.
        seed: the same seed and prompt give the same tokens, whoever shares the batch; None draws one.
        stop: texts that end an answer and are not part of it. end_ids: tokens that end it, instead of the model's own.
        logprobs: number of alternatives, 0 to 20, to report beside each token: logarithms of the model's own
            probabilities, before penalties, guides and temperature.
        bad_words: texts that the answer must not have, as the tokenizer spells them. logit_bias: added, by token.
        guide: what the answer must match; see :mod:`sordino.client.guide`.
        speculate: where drafts come from that one pass verifies; see :mod:`sordino.client.speculate`.
        draft_tokens: most drafts in a pass; None chooses by measurement.
        fixed_drafts: exactly ``draft_tokens`` in every pass, so that rows tell nothing about what was drafted.
        pad_prompt: rows of the prompt are made a multiple of this. fixed_length: goes on to ``max_tokens`` after the
            answer has ended, and throws away what comes.

    Raises:
        RangeError: a value that means nothing, or two options that exclude each other; the text names them.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    beams: int = 1
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    guide: GuideSpec | None = None
    speculate: Speculation = "off"
    draft_tokens: int | None = None
    fixed_drafts: bool = False
    pad_prompt: int = 1
    fixed_length: bool = False

    def __post_init__(self) -> None:
        self._whole("max_tokens", 1)
        self._whole("min_tokens", 0, self.max_tokens)
        if self.temperature != 0 or self.temperature is False:
            self._number("temperature", _COLDEST, _HOTTEST, instead="0, for greedy, or ")
        self._whole("top_k", 0)
        self._number("top_p", 0, 1, above=True)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0, 1e3, above=True)
        self._number("frequency_penalty", -2, 2)
        self._number("presence_penalty", -2, 2)
        self._whole("beams", 1, MAX_ANSWERS)
        self._whole("n", 1, MAX_ANSWERS)
        self._whole("seed", -(1 << 63), (1 << 64) - 1)
        self._whole("logprobs", 0, MAX_LOGPROBS)
        self._whole("draft_tokens", 1, MAX_DRAFT)
        self._whole("pad_prompt", 1, 1 << 20)
        self._texts("stop", MAX_STOPS)
        self._texts("bad_words", 1000)
        biases = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else [(None, None)]
        for token, bias in biases:
            if not _is_whole(token) or not _is_number(bias) or not -100 <= bias <= 100:
                raise RangeError("logit_bias gives numbers from -100 to 100 by token, which is a whole number")
        ends = self.end_ids if self.end_ids is not None else ()
        if not isinstance(ends, tuple) or not all(_is_whole(token) and token >= 0 for token in ends):
            raise RangeError("end_ids are tokens: whole numbers, 0 or more")
        for name in ("fixed_drafts", "fixed_length"):
            if not isinstance(getattr(self, name), bool):
                raise RangeError(f"{name} is true or false")
        if self.speculate not in get_args(Speculation):
            raise RangeError(f"speculate is {', '.join(get_args(Speculation))}; not {str(self.speculate)[:40]!r}")
        self._check_together()

    def _check_together(self) -> None:
        clash = None
        if self.beams > 1:
            sampling = self.temperature or self.logprobs is not None or self.seed is not None
            clash = "beams keep the likeliest: leave out temperature, seed and logprobs" if sampling else clash
            clash = "a beam search has no drafts: leave out beams or speculate" if self.speculate != "off" else clash
            clash = f"{self.beams} beams do not give {self.n} answers" if self.n > self.beams else clash
            if self.frequency_penalty or self.presence_penalty:
                clash = "frequency_penalty and presence_penalty are for answers without beams"
        if self.speculate != "off" and self.n > 1:
            clash = "speculation is for one answer at a time: leave out n or speculate"
        if self.fixed_drafts and (self.speculate == "off" or self.draft_tokens is None):
            clash = "fixed_drafts needs speculate and draft_tokens"
        if self.fixed_length and (self.speculate != "off" or self.beams > 1):
            # The number of passes would tell how many drafts were right, and a beam search ends when it is sure.
            clash = "fixed_length does not go with speculation or beams, whose number of passes depends on the text"
        if clash:
            raise RangeError(clash)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Options:
        """From names and values as they come out of JSON.

        Raises:
            RangeError: a name that no option has, or a value out of range.
        """
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(said) - known):
            raise RangeError(f"there is no option {unknown[0][:40]!r}: known are {', '.join(sorted(known))}")
        values = dict(said)
        for name in ("stop", "bad_words", "end_ids"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)

    def settings(self, link: Connected, prompt_tokens: int) -> dict[str, Any]:
        """Arguments of ``generate()``: what was said, then what the model's repository says.

        Args:
            prompt_tokens: of the longest prompt, padding included.
        """
        config = link.model.generation_config
        limit = getattr(link.model.config, "max_position_embeddings", None)
        room = min(self.max_tokens, limit - prompt_tokens) if limit else self.max_tokens
        settings: dict[str, Any] = {"max_new_tokens": room, "num_beams": self.beams, "num_return_sequences": self.n}
        if self.min_tokens:
            settings["min_new_tokens"] = min(self.min_tokens, room)
        drawn = bool(config.do_sample) if self.temperature is None else self.temperature > 0
        drawn = drawn and self.beams == 1
        settings["do_sample"] = drawn
        if self.n > 1 and not drawn and self.beams == 1:
            raise RangeError(f"{self.n} greedy answers would be the same one: give a temperature, or beams")
        settings |= _SAMPLING
        if drawn:
            for name, default in _SAMPLING.items():
                values = (getattr(self, name), getattr(config, name, None), default)
                value: Any = next((value for value in values if value is not None), None)
                # transformers refuses a whole number where it wants a fraction.
                settings[name] = float(value) if _is_whole(value) and name != "top_k" else value
        if self.repetition_penalty is not None:
            settings["repetition_penalty"] = float(self.repetition_penalty)
        size = link.model.get_input_embeddings().weight.shape[0]
        if self.end_ids is not None:
            if beyond := [token for token in self.end_ids if token >= size]:
                raise RangeError(f"end_ids names token {_shown(beyond[0])}, the model has {size}")
            ends = list(dict.fromkeys(self.end_ids))
            if self.beams > 1 and len(ends) == size:
                raise RangeError("end_ids are all tokens of the model: beams need one that ends nothing")
            settings["eos_token_id"] = ends
        if self.bad_words:
            settings["bad_words_ids"] = _spellings(link, self.bad_words)
        if self.logit_bias:
            if beyond := [token for token in self.logit_bias if not 0 <= token < size]:
                raise RangeError(f"logit_bias names token {_shown(beyond[0])}, the model has {size}")
            settings["sequence_bias"] = [[[token], float(bias)] for token, bias in self.logit_bias.items()]
        return settings

    def _whole(self, name: str, lowest: int, highest: int | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not _is_whole(value) or value < lowest or (highest is not None and value > highest):
            upto = f" to {highest}" if highest is not None else " up"
            raise RangeError(f"{name} is a whole number from {lowest}{upto}, not {_shown(value)}")

    def _number(self, name: str, lowest: float, highest: float, *, above: bool = False, instead: str = "") -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not _is_number(value) or not lowest <= value <= highest or (above and value == lowest):
            start = "above" if above else "from"
            raise RangeError(f"{name} is {instead}a number {start} {lowest:g} to {highest:g}, not {_shown(value)}")

    def _texts(self, name: str, most: int) -> None:
        texts = getattr(self, name)
        if not isinstance(texts, tuple) or not all(isinstance(text, str) and text for text in texts):
            raise RangeError(f"{name} takes texts that are not empty")
        if len(texts) > most or any(len(text) > MAX_STOP_CHARACTERS for text in texts):
            raise RangeError(f"{name} takes at most {most} texts of {MAX_STOP_CHARACTERS} characters")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise RangeError(f"{name} has halves of characters") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: object) -> str:
    """The beginning of a value; Python does not write out whole numbers of thousands of digits."""
    try:
        return str(value)[:40]
    except ValueError:
        return "a number of thousands of digits"


def _spellings(link: Connected, words: tuple[str, ...]) -> list[list[int]]:
    """Each text as it is spelt at the start of an answer and after a space."""
    found = []
    for word in words:
        for text in (word, " " + word):
            ids = link.tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids and ids not in found:
                found.append(ids)
    return found
