"""From a prompt and options to answers: text as it comes, reasons for its end, counts that add up.

The loops are ``transformers``' own. Added to them are processors of :mod:`sordino.client.sampling`, drafts of
:mod:`sordino.client.speculate`, guides of :mod:`sordino.client.guide`, and one criterion that follows every row and
alone decides where it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from sordino.client.guide import Guide, GuideProcessor, compile_guide
from sordino.client.kvcache import CACHE_NAMES
from sordino.client.options import Options
from sordino.client.sampling import CountPenalty, Draw, Logprob, Record, row_keys
from sordino.client.speculate import Chain, DraftModel, Ngrams, Source, SpeculationCounts, Speculator
from sordino.shared.errors import RangeError, SordinoError

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

    from sordino.client.session import Connected

Finish = Literal["stop", "length", "cancelled"]
_UNFINISHED: Final = "�"  # what a tokenizer makes of half a character
_CONTEXT_IDS: Final = 6  # tokens before the new ones that decide how these are spelt


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer, how it is spelt here, and its logarithms of probability where these were asked for."""

    id: int
    text: str
    logprob: Logprob | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of an answer since the last piece. ``finish`` is set on its last one, whose text may be empty."""

    row: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, whole.

    Attributes:
        text: without what ended it. tokens: all that were chosen, the one that ended the answer included.
        finish: ``stop`` at an end token or a stop text, ``length`` at max_tokens or the model's last position,
            ``cancelled``. stop: the text that ended it.
        prompt_tokens: without padding.
    """

    text: str
    tokens: tuple[Token, ...]
    finish: Finish
    stop: str | None
    prompt_tokens: int


@dataclass(slots=True)
class Answers:
    """All answers of a call, by prompt and then by number; what speculation did, where there was some."""

    answers: list[Answer] = field(default_factory=list)
    speculation: SpeculationCounts | None = None


class Row:
    """One answer in the making: tokens in, text out. It holds back what may be the start of a stop text.

    Args:
        spell: token ids to text. end_ids: tokens that end the answer. least: tokens before anything ends it.
    """

    def __init__(
        self,
        spell: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str],
        end_ids: frozenset[int],
        least: int,
        most: int,
        prompt_tokens: int = 0,
    ) -> None:
        self._spell, self._stops, self._end_ids = spell, tuple(stop), end_ids
        self._least, self._most, self._prompt_tokens = least, most, prompt_tokens
        self._ids: list[int] = []
        self._spelt = 0  # ids whose text is final
        self._text = ""
        self._sent_text = self._sent_tokens = 0
        self.tokens: list[Token] = []
        self.finish: Finish | None = None
        self.stop: str | None = None

    def push(self, token: int, logprob: Logprob | None = None) -> None:
        """The next token; nothing is taken after the end."""
        if self.finish:
            return
        count, before = len(self.tokens) + 1, len(self._text)
        ended = token in self._end_ids and count >= self._least
        if not ended:
            self._ids.append(token)
        self._text += self._more(last=ended or count >= self._most)
        self.tokens.append(Token(token, self._text[before:], logprob))
        if count >= self._least:
            self._look_for_stop(before)
        if not self.finish and (ended or count >= self._most):
            self.finish = "stop" if ended else "length"

    def cancel(self) -> None:
        if not self.finish:
            self._text += self._more(last=True)
            self.finish = "cancelled"

    def take(self, number: int) -> Piece | None:
        """What can be shown since the last time; None where nothing can."""
        end = len(self._text) if self.finish else len(self._text) - self._held()
        text, tokens = self._text[self._sent_text : end], self.tokens[self._sent_tokens :]
        if not text and not self.finish:
            return None
        self._sent_text, self._sent_tokens = max(end, self._sent_text), len(self.tokens)
        return Piece(number, text, tuple(tokens), self.finish)

    def answer(self) -> Answer:
        return Answer(
            text=self._text,
            tokens=tuple(self.tokens),
            finish=self.finish or "length",
            stop=self.stop,
            prompt_tokens=self._prompt_tokens,
        )

    def _more(self, *, last: bool) -> str:
        """The text of tokens not yet spelt, if it is whole: what a token adds depends on those before it."""
        start = max(0, self._spelt - _CONTEXT_IDS)
        before, after = self._spell(self._ids[start : self._spelt]), self._spell(self._ids[start:])
        if not last and after.endswith(_UNFINISHED):
            return ""
        self._spelt = len(self._ids)
        return after[len(before) :]

    def _look_for_stop(self, before: int) -> None:
        found = []
        for stop in self._stops:
            place = self._text.find(stop, max(0, before - len(stop) + 1))
            if place >= 0:
                found.append((place, -len(stop), stop))
        if found:
            place, _, self.stop = min(found)
            # Never behind what was shown, where a stop text begins before anything was allowed to end the answer.
            self._text = self._text[: max(place, self._sent_text)]
            self.finish = "stop"

    def _held(self) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class _Follow(StoppingCriteria):  # type: ignore[misc]
    """Hands each new token to its row, and the pieces on; called by ``transformers`` after every pass."""

    def __init__(
        self,
        rows: list[Row],
        prompt: int,
        record: Record | None,
        on_piece: Callable[[Piece], None] | None,
        cancelled: threading.Event,
        *,
        to_the_end: bool,
    ) -> None:
        self._rows, self._read, self._record = rows, prompt, record
        self._on_piece, self._cancelled, self._to_the_end = on_piece, cancelled, to_the_end

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        del scores
        cancelled = self._cancelled.is_set()  # looked at once: it may be set while a piece is handed on
        new = input_ids[:, self._read :].tolist()
        for number, (row, tokens) in enumerate(zip(self._rows, new, strict=True)):
            finished = row.finish
            for place, token in enumerate(tokens, self._read):
                if not row.finish:
                    row.push(token, self._record.take(number, place, token) if self._record else None)
            if cancelled:
                row.cancel()
            if not finished and self._on_piece and (piece := row.take(number)):
                self._on_piece(piece)
        self._read = input_ids.shape[1]
        if self._record:
            self._record.forget(self._read)
        ends = [cancelled or (row.finish is not None and not self._to_the_end) for row in self._rows]
        return torch.tensor(ends, device=input_ids.device)


class _Cancel(StoppingCriteria):  # type: ignore[misc]
    """Ends every beam as it is."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        del scores
        return torch.full(input_ids.shape[:1], self._cancelled.is_set(), device=input_ids.device)


class _Steered:
    """The model to ``transformers``' loops, with what they have no argument for: drafts of ours, and a prompt that goes
    through once however many answers, or beams, it gets. Each of its rows costs a mask.
    """

    def __init__(self, model: PreTrainedModel, repeats: int, speculator: Speculator | None) -> None:
        self._model, self._repeats, self._speculator = model, repeats, speculator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        repeats, self._repeats = self._repeats, 1  # the first pass alone
        if repeats == 1:
            return self._model(**inputs)
        rows = inputs["input_ids"].shape[0]
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,):
                inputs[name] = value[::repeats]
        out = self._model(**inputs)
        cache = next(inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None)
        cache.batch_repeat_interleave(repeats)
        out.logits = out.logits.repeat_interleave(repeats, dim=0)
        return out

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._model)._prefill(self, *args, **kwargs)  # which calls this object, not the model

    def _get_candidate_generator(self, **_: Any) -> Speculator | None:
        return self._speculator


@dataclass(slots=True)
class Generation:
    """One call of ``generate()``: prompts of any lengths, ``options`` for all, ``n`` answers to each.

    Args:
        inputs: ``input_ids`` and ``attention_mask``, ``[prompts, columns]``, padded on the left.
        draft_model: for ``speculate`` of ``draft`` and ``mixed``. keys: of the rows' draws, where they are not to be
            made from ``options.seed``.
        on_piece: called with every piece, in the thread of :meth:`run`; a beam search has none before its end.

    Raises:
        RangeError: options that do not fit the model or the prompts.
    """

    link: Connected
    inputs: dict[str, torch.Tensor]
    options: Options
    draft_model: PreTrainedModel | None = None
    keys: Sequence[bytes] | None = None
    on_piece: Callable[[Piece], None] | None = None
    settings: dict[str, Any] = field(init=False)
    _cancelled: threading.Event = field(init=False, default_factory=threading.Event)
    _prompt: int = field(init=False)
    _most: int = field(init=False)
    _rows: list[Row] = field(init=False)
    _guide: Guide | None = field(init=False, default=None)
    _counts: SpeculationCounts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        options, tokenizer = self.options, self.link.tokenizer
        if options.pad_prompt > 1 and not getattr(self.link.session, "sends_padding", True):
            raise RangeError("padding is not sent in profile two-party, and would hide nothing: leave pad_prompt out")
        self.inputs = _padded(self.inputs, options.pad_prompt, tokenizer)
        prompts, self._prompt = self.inputs["input_ids"].shape
        # Where every pass has as many rows, those of the last go beyond the answer.
        beyond = options.draft_tokens or 0 if options.fixed_drafts else 0
        self.settings = options.settings(self.link, self._prompt + beyond)
        self._most = self.settings["max_new_tokens"]
        if self._most < 1:
            raise RangeError(f"the prompt's {self._prompt} rows leave no position for an answer: shorten it")
        self.settings["max_new_tokens"] += beyond
        if prompts > 1 and (options.speculate != "off" or options.beams > 1):
            raise RangeError("speculation and beams are for one prompt at a time")
        if options.speculate in ("draft", "mixed") and self.draft_model is None:
            raise RangeError(f"speculate={options.speculate!r} needs a draft model")
        if (options.logprobs, options.seed) != (None, None) and getattr(self.link.session, "opens_tokens", False):
            raise RangeError("this provider opens the next token alone, drawn by no seed: leave out logprobs and seed")
        if options.guide is not None:
            self._guide = compile_guide(options.guide, self.link, self._end_ids())
        lengths = self.inputs["attention_mask"].sum(dim=1).tolist()
        self._rows = [self._row(int(length)) for length in lengths for _ in range(options.n)]

    def cancel(self) -> None:
        """Ends the answers after the pass under way. From any thread."""
        self._cancelled.set()

    def run(self) -> Answers:
        """Generates. Errors are those of the session's protocol."""
        model, options = self.link.model, self.options
        processors: list[Any] = []
        if options.frequency_penalty or options.presence_penalty:
            processors.append(CountPenalty(self._prompt, options.frequency_penalty, options.presence_penalty))
        if self._guide is not None:
            processors.append(GuideProcessor(self._guide, self._prompt))
        inputs = {name: tensor.to(model.device) for name, tensor in self.inputs.items()}
        out = model.generate(**inputs, **self.settings, logits_processor=processors, custom_generate=self._decode)
        if options.beams > 1:
            for row, ids in zip(self._rows, out[:, self._prompt :].tolist(), strict=True):
                for token in ids:
                    row.push(token)
                if self._cancelled.is_set():
                    row.cancel()
                row.finish = row.finish or "length"
        return Answers([row.answer() for row in self._rows], self._counts)

    def __iter__(self) -> Iterator[Piece]:
        """Runs in a thread of its own and gives the pieces as they come, those of beams at the end; leaving the loop
        cancels."""
        queue: SimpleQueue[Piece | BaseException | None] = SimpleQueue()
        self.on_piece = queue.put

        def work() -> None:
            try:
                self.run()
                if self.options.beams > 1:  # what the answers are shows at the end
                    for number, row in enumerate(self._rows):
                        queue.put(row.take(number))
                queue.put(None)
            except BaseException as error:  # raised again by whoever reads
                queue.put(error)

        thread = threading.Thread(target=work, name="sordino-answer", daemon=True)
        thread.start()
        try:
            while (item := queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel()
            thread.join()

    def answers(self) -> Answers:
        """What has come so far, whole once :meth:`run` or the loop over pieces has ended."""
        return Answers([row.answer() for row in self._rows], self._counts)

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        """The decoding loop, after ``generate()`` has prepared everything for it."""
        options, loops = self.options, type(model)
        speculator = self._speculator(generation_config)
        steered: Any = _Steered(model, max(options.beams, options.n), speculator)
        if options.beams > 1:
            criteria = StoppingCriteriaList([*stopping_criteria, _Cancel(self._cancelled)])
            return loops._beam_search(steered, input_ids, logits_processor, criteria, generation_config, **kwargs)
        record = Record(options.logprobs) if options.logprobs is not None else None
        if record:
            logits_processor.insert(0, record)
        if generation_config.do_sample:
            prompts = len(self._rows) // options.n
            keys = self.keys or [key for _ in range(prompts) for key in row_keys(options.seed, options.n)]
            logits_processor.append(Draw(keys, self._prompt))
            generation_config.do_sample = False
        # What ends a row is decided in one place: an end token inside a draft, too, and never in constant length.
        kept = [criterion for criterion in stopping_criteria if not hasattr(criterion, "eos_token_id")]
        follow = _Follow(
            self._rows, self._prompt, record, self.on_piece, self._cancelled, to_the_end=options.fixed_length
        )
        criteria = StoppingCriteriaList([*kept, follow])
        if speculator is None:
            return loops._sample(steered, input_ids, logits_processor, criteria, generation_config, **kwargs)
        self._counts = speculator.counts
        generation_config._eos_token_tensor = None
        return loops._assisted_decoding(steered, input_ids, logits_processor, criteria, generation_config, **kwargs)

    def _speculator(self, settings: GenerationConfig) -> Speculator | None:
        options, source = self.options, self._source(settings)
        # In an answer of fixed length every token has a pass of its own: their number would tell what was forced.
        forced = self._guide is not None and self._guide.forces and len(self._rows) == 1 and not options.fixed_length
        if source is None and not forced:
            return None
        room, guide = settings.max_length, self._guide if forced else None
        return Speculator(options, source, guide, self._prompt, room, self._end_ids())

    def _source(self, settings: GenerationConfig) -> Source | None:
        kind = self.options.speculate
        if kind == "off":
            return None
        if kind == "ngram":
            return Ngrams()
        if self.draft_model is None:
            raise SordinoError("there is no draft model")  # refused before anything was sent
        size = int(self.link.model.get_input_embeddings().weight.shape[0])
        draft = DraftModel(self.draft_model, settings, size)
        return draft if kind == "draft" else Chain(Ngrams(), draft)

    def _row(self, prompt_tokens: int) -> Row:
        tokenizer, options = self.link.tokenizer, self.options
        return Row(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            stop=options.stop,
            end_ids=self._end_ids(),
            least=options.min_tokens,
            most=self._most,
            prompt_tokens=prompt_tokens,
        )

    def _end_ids(self) -> frozenset[int]:
        own = self.options.end_ids
        if own is None:
            own = self.link.model.generation_config.eos_token_id
        return frozenset([own] if isinstance(own, int) else own or ())


def _padded(inputs: dict[str, torch.Tensor], multiple: int, tokenizer: Any) -> dict[str, torch.Tensor]:
    """The prompts with padding on the left up to a multiple of rows."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = -ids.shape[1] % multiple
    if not more:
        return {"input_ids": ids, "attention_mask": mask}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return {
        "input_ids": torch.nn.functional.pad(ids, (more, 0), value=pad),
        "attention_mask": torch.nn.functional.pad(mask, (more, 0), value=0),
    }
