"""Speculation: drafts that one pass over the server verifies together with the next token.

The loop that verifies is ``transformers``' assisted decoding (Leviathan, Kalman and Matias, "Fast inference from
transformers via speculative decoding", 2022). What is drafted is decided here: tokens that a guide forces, n-grams of
the text so far ("prompt lookup", Saxena 2023), a small model on this side, and how many of them, by measured times.

The server sees the rows of every pass: how many drafts, and from the next pass how many were right. Published attacks
tell prompts apart by that alone. ``fixed_drafts`` has every pass carry the same number of rows, whatever was found.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from sordino.client.options import MAX_DRAFT, Options
from sordino.shared.errors import RangeError, UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from sordino.client.guide import Guide

_LONGEST: Final = 3  # n-gram that is looked up, then shorter ones
_MEMORY: Final = 64  # passes from which times and hits are estimated
_FIRST_ROW: Final = 0.15  # of a pass's time, while nothing has been measured
_LEAST_ROW: Final = 0.02
_OF_A_MODEL: Final = 3  # evidence of a draft model: what it is good for shows soon
_FADE: Final = 0.9  # weight of a hit or miss after one more
MAX_FORCED: Final = 256  # rows of a pass, beyond which forced tokens wait for the next


class Source(Protocol):
    """Where drafts come from."""

    def evidence(self, ids: Sequence[int]) -> int:
        """What drafts after ``ids`` would rest on: those of equal evidence are right about as often. 0 is none."""
        ...

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``ids``; none where it has no idea."""
        ...


class Ngrams:
    """What followed the longest n-gram at the end of the text when it first came: what is copied, or changed a little,
    comes before its copies, which may have left it."""

    def __init__(self, longest: int = _LONGEST) -> None:
        self._longest = longest
        self._seen: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where what follows it begins

    def evidence(self, ids: Sequence[int]) -> int:
        """The length of the n-gram."""
        self._read(ids)
        lengths = range(min(self._longest, len(ids) - 1), 0, -1)
        return next((n for n in lengths if tuple(ids[-n:]) in self._after), 0)

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        n = self.evidence(ids)
        if not n:
            return []
        start = self._after[tuple(ids[-n:])]
        found = list(ids[start : start + most])
        while len(found) < most:  # what repeats itself goes on repeating
            found += found[: most - len(found)]
        return found

    def _read(self, ids: Sequence[int]) -> None:
        """Notes n-grams that something follows. Tokens that were taken back are forgotten by starting again."""
        known = len(self._seen)
        if list(ids[:known]) != self._seen:
            self._seen, self._after, known = [], {}, 0
        for end in range(max(1, known), len(ids)):
            for n in range(1, min(self._longest, end) + 1):
                self._after.setdefault(tuple(ids[end - n : end]), end)
        self._seen = list(ids)


class DraftModel:
    """A small model of the same vocabulary, run on this side by ``transformers``.

    Raises:
        RangeError: its vocabulary is another.
    """

    def __init__(self, model: PreTrainedModel, settings: Any, vocabulary: int) -> None:
        size = int(model.get_input_embeddings().weight.shape[0])
        if size != vocabulary:
            raise RangeError(f"the draft model has {size} tokens, the hosted model {vocabulary}: they do not match")
        self._model, self._settings = model, settings
        self._generator: AssistedCandidateGenerator | None = None

    def evidence(self, ids: Sequence[int]) -> int:
        del ids
        return _OF_A_MODEL

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        held = torch.tensor([list(ids)], device=self._model.device)
        if self._generator is None:
            mask = {"attention_mask": torch.ones_like(held)}
            config = self._model.generation_config
            config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0
            self._generator = AssistedCandidateGenerator(held, self._model, self._settings, mask)
        self._generator.num_assistant_tokens = most
        drafted, _ = self._generator.get_candidates(held)
        return [int(token) for token in drafted[0, len(ids) :]]


def load_draft_model(folder: Path) -> PreTrainedModel:
    """A small model of the user's own for :class:`DraftModel`, from a folder that ``transformers`` reads.

    Raises:
        UnsupportedModelError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the library makes of a folder that holds no model
        why = str(error).partition("\n")[0][:200]
        raise UnsupportedModelError(f"the draft model {folder} cannot be loaded: {why}") from None
    return model.eval()


class Chain:
    """The first of several sources that has an idea."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def evidence(self, ids: Sequence[int]) -> int:
        return next((found for source in self._sources if (found := source.evidence(ids))), 0)

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        for source in self._sources:
            if found := source.propose(ids, most):
                return found
        return []


class Pace:
    """How many drafts a pass should carry, by what passes of so many rows took and how often drafts were right.

    With hit rate p a pass of k drafts gives 1 + p + ... + p^k tokens on average (Leviathan et al., equation 1) and
    takes a + b (k + 1) seconds: a holds the round trips, b what a row costs. The k of the best rate is taken. There is
    a hit rate for each evidence: a long n-gram is worth many drafts where a single token is worth none.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=_MEMORY)
        self._judged: dict[int, tuple[float, float]] = {}  # evidence -> hits and tries, faded

    def hit_rate(self, evidence: int = _OF_A_MODEL) -> float:
        """Of drafts whose predecessors were right; before there is anything to go by, the higher the more evidence."""
        hits, tries = self._judged.get(evidence, (0.0, 0.0))
        return (hits + evidence - 0.5) / (tries + evidence)

    def passed(self, rows: int, seconds: float) -> None:
        self._passes.append((rows, seconds))

    def judged(self, drafted: int, right: int, evidence: int = _OF_A_MODEL) -> None:
        """Where nothing was drafted, what is known fades, so that it is tried again some time."""
        hits, tries = self._judged.get(evidence, (0.0, 0.0))
        self._judged[evidence] = _FADE * hits + right, _FADE * tries + min(drafted, right + 1)

    def choose(self, most: int, evidence: int = _OF_A_MODEL) -> int:
        """Drafts for the next pass, from 0 to ``most``."""
        if not evidence:
            return 0
        base_s, row_s = self._costs()
        p = min(self.hit_rate(evidence), 0.999)
        rates = [(1 - p ** (k + 1)) / (1 - p) / (base_s + row_s * (k + 1)) for k in range(most + 1)]
        return int(np.argmax(rates))

    def _costs(self) -> tuple[float, float]:
        """Seconds of a pass, and of each of its rows, by least squares."""
        rows = np.array([count for count, _ in self._passes], dtype=np.float64)
        if len(set(rows)) < 2:
            return 1.0, _FIRST_ROW
        row_s, base_s = np.polyfit(rows, [taken for _, taken in self._passes], 1)
        base_s = max(float(base_s), float(row_s), 1e-6)
        # Times that jump may say that rows cost nothing; each takes a mask, whose making costs as much as this.
        return base_s, max(float(row_s), _LEAST_ROW * base_s)


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did in an answer: passes after the prompt's, drafts sent and right, tokens that a guide forced,
    rows that carried no draft but filled a pass, and rows altogether: each costs a mask."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    filled: int = 0
    rows: int = 0

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclass(slots=True)
class _Pass:
    forced: int = 0
    drafted: int = 0
    evidence: int = 0
    filled: int = 0
    began: float = 0.0


@dataclass
class Speculator(CandidateGenerator):  # type: ignore[misc]
    """What ``transformers`` asks for drafts, of one answer.

    Args:
        source: None drafts nothing but what ``guide`` forces. room: columns that may be filled, prompt included.
        prompt: columns of the prompt. end_ids: after these nothing is drafted.
    """

    options: Options
    source: Source | None
    guide: Guide | None
    prompt: int
    room: int
    end_ids: frozenset[int]
    pace: Pace = field(default_factory=Pace)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    _now: _Pass = field(default_factory=_Pass)
    requires_model_outputs = False

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """``input_ids [1, columns]`` with the drafts behind them; no logits, since only the arg max is compared."""
        began = time.perf_counter()
        ids = input_ids[0].tolist()
        space = self.room - len(ids) - 1  # a pass gives one token more than it has drafts
        first = len(ids) == self.prompt
        forced = self._forced(ids, space)
        # Forced tokens are right whatever the model says: they do not count as drafts, and carry others behind them.
        drafts, evidence = self._drafts([*ids, *forced], space - len(forced))
        filled = 0
        if self.options.fixed_drafts:
            # Any tokens do: they are thrown away.
            wanted = min(self._most, space)
            forced = forced[:wanted]
            drafts = drafts[: wanted - len(forced)]
            filled = wanted - len(forced) - len(drafts)
        self._now = _Pass(len(forced), len(drafts), evidence, filled, 0.0 if first else began)
        self.counts.rows += len(forced) + len(drafts) + filled + (len(ids) if first else 1)
        more = [*forced, *drafts, *[ids[-1]] * filled]
        return torch.cat([input_ids, input_ids.new_tensor([more])], dim=1) if more else input_ids, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """How many of the drafts were right; ``transformers`` calls it after each pass."""
        del input_ids, scores
        now, matched = self._now, int(num_matches)
        right = min(max(0, matched - now.forced), now.drafted)
        self.counts.forced += min(now.forced, matched)
        self.counts.drafted += now.drafted
        self.counts.accepted += right
        self.counts.filled += now.filled
        if now.evidence:
            self.pace.judged(now.drafted, right, now.evidence)
        if now.began:
            self.counts.passes += 1
            self.pace.passed(1 + now.forced + now.drafted + now.filled, time.perf_counter() - now.began)

    @property
    def _most(self) -> int:
        return self.options.draft_tokens or MAX_DRAFT

    def _forced(self, ids: Sequence[int], space: int) -> list[int]:
        if self.guide is None or space < 1:
            return []
        return self.guide.forced(ids[self.prompt :])[: min(space, MAX_FORCED)]

    def _drafts(self, ids: Sequence[int], space: int) -> tuple[list[int], int]:
        """Drafts, and the evidence for them."""
        evidence = self.source.evidence(ids) if self.source is not None else 0
        most = self._most if self.options.draft_tokens else self.pace.choose(self._most, evidence)
        most = min(most, space)
        if self.source is None or not evidence or most < 1:
            return [], evidence
        drafts = self.source.propose(ids, most)
        ends = (place for place, token in enumerate(drafts) if token in self.end_ids)
        return drafts[: next(ends, len(drafts))], evidence
