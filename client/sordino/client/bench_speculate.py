"""``sordino bench decode --speculate``: n-gram drafts, for prompts whose answers repeat them, beside plain decoding.

Four ways to a greedy answer take turns on every prompt: ``masked`` with drafts and without, and ``transformers`` in
float32 without and with its own prompt lookup. Answers end where the model ends them. With a round trip given, the same
is measured once more through a relay (:mod:`sordino.client.delay`).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers.generation.streamers import BaseStreamer

from sordino.client.answers import Generation, Piece
from sordino.client.bench import PROMPT, cpu_seconds, machine, plain_model
from sordino.client.delay import delayed
from sordino.client.local_server import server_process
from sordino.client.options import Options
from sordino.client.session import Connected, check_batch
from sordino.client.speculate import SpeculationCounts
from sordino.client.terminal import connected, encode_prompt, progress_bar
from sordino.shared.errors import RangeError, SordinoError
from sordino.shared.manifest import ModelManifest

# What people bring to a model to have it back a little different. A small model does these in part.
PROMPTS: Final = {
    "summarise": """\
Extract the most important sentences of this text, word for word.

The night train between Lisbon and Porto will run again from the first of May. The railway stopped it in 2020, when \
too few people travelled. Each train has four sleeping cars, a dining car and room for twenty bicycles. A bed costs \
39 euros, a seat 19 euros, and children under six travel free. The railway expects ninety thousand passengers in the \
first year. Two towns on the line, Aveiro and Coimbra, asked for a stop and will get one. Unions had warned that \
there are not enough drivers; the railway now says that it has hired thirty. Hotels in Porto fear that guests will \
stay one night less. The minister called the train a test: if it is full, a second one to Faro will follow next \
year.""",
    "translate": """\
Here is a program:

```python
def read_prices(path):
    # Liest die Preise aus einer Datei.
    prices = {}
    with open(path) as file:
        for line in file:
            # Leere Zeilen werden ignoriert.
            if not line.strip():
                continue
            name, price = line.split(";")
            prices[name.strip()] = float(price)
    return prices


def total(prices, basket):
    # Rechnet die Summe aus.
    result = 0.0
    for name, count in basket.items():
        # Unbekannte Artikel sind ein Fehler.
        if name not in prices:
            raise KeyError(name)
        result += prices[name] * count
    return round(result, 2)
```

Write the same program again, with its comments in English.""",
    "edit": """\
Dear Mrs Weber,

thank you for your letter of the third of March. We are sorry that the washing machine was delivered without its \
hose. Our driver tells us that he rang twice and left the machine with your neighbour, who kindly signed for it. The \
hose is on its way to you and should arrive before Friday. If it does not, please call me on the number below, and I \
will send somebody with a new one on the same day. For your trouble we have taken twenty euros off the bill, Mrs \
Weber, and you need not send anything back. I hope that you will enjoy your new machine.

Yours sincerely,
Jonas Hartmann

Write this letter again word for word, but to Mrs Lindner instead of Mrs Weber.""",
}
# The defaults of transformers' prompt lookup.
_LOOKUP: Final = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}
_SPECULATED, _MASKED, _PLAIN, _LOOKED_UP = "speculated", "masked", "plain", "transformers_lookup"
_WARM_TOKENS: Final = 8
# Through the relay every pass takes as long, drafts or not: so many tell what one without drafts takes.
_FAR_TOKENS: Final = 16
_ROWS_A_TOKEN: Final = 4  # masks laid in before an answer, so that none are made during it


@dataclass(slots=True)
class _Answer:
    """One answer: tokens, when they came (``times`` and how many then), and what the session spent after the first."""

    ids: list[int]
    start: float
    times: list[float]
    counts: list[int]
    spent: dict[str, float] = field(default_factory=dict)
    speculation: SpeculationCounts | None = None

    @property
    def decoded(self) -> int:
        """Tokens after those of the prompt's own pass."""
        return sum(self.counts[1:])

    @property
    def tpot_ms(self) -> float:
        return 1e3 * (self.times[-1] - self.times[0]) / max(1, self.decoded)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times[0] - self.start)


Ask = Callable[[dict[str, Any], int], _Answer]  # inputs and most tokens to a greedy answer


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come, and how many at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ids: list[list[int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
            self.ids.append(value.reshape(-1).tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _of_transformers(model: Any, **settings: Any) -> Ask:
    def ask(inputs: dict[str, Any], tokens: int) -> _Answer:
        clock, start = _Clock(), time.perf_counter()
        model.generate(**inputs, do_sample=False, max_new_tokens=tokens, streamer=clock, **settings)
        return _Answer([id_ for ids in clock.ids for id_ in ids], start, clock.times, [len(ids) for ids in clock.ids])

    return ask


def _of_sordino(link: Connected, counters: Callable[[], dict[str, float]], options: dict[str, Any]) -> Ask:
    def once(inputs: dict[str, Any], tokens: int) -> _Answer:
        times: list[float] = []
        counts: list[int] = []
        before: dict[str, float] = {}

        def note(piece: Piece) -> None:
            times.append(time.perf_counter())
            counts.append(len(piece.tokens))
            if len(times) == 1:
                before.update(counters())

        chosen = Options(max_tokens=tokens, temperature=0, **options)
        generation, start = Generation(link, inputs, chosen, on_piece=note), time.perf_counter()
        answers = generation.run()
        spent = {key: value - before.get(key, 0.0) for key, value in counters().items()}
        ids = [token.id for token in answers.answers[0].tokens]
        return _Answer(ids, start, times, counts, spent, answers.speculation)

    def ask(inputs: dict[str, Any], tokens: int) -> _Answer:
        while True:
            _lay_in(link, inputs["input_ids"].shape[1] + _ROWS_A_TOKEN * tokens)
            made = link.session.traffic.up.get("provision", 0)
            answer = once(inputs, tokens)
            if link.session.traffic.up.get("provision", 0) == made:
                return answer

    return ask


def _lay_in(link: Connected, rows: int) -> None:
    while (link.session.masks_left or 0) < rows:
        link.session.provision()


def load_prompts(names: Sequence[str]) -> dict[str, str]:
    """Prompts of this file by name, or of text files by path.

    Raises:
        RangeError: there is no such prompt.
    """
    found = {}
    for name in names:
        path = Path(name)
        if name in PROMPTS:
            found[name] = PROMPTS[name]
        elif path.suffix == ".txt" and path.is_file():
            found[path.stem] = path.read_text("utf-8", "replace")
        else:
            raise RangeError(f"--prompts takes {', '.join(PROMPTS)} or .txt files that are there, not {name[:60]!r}")
    if not found:
        raise RangeError("--prompts names none")
    return found


def run_speculation(
    bundle: Path,
    *,
    model: Path | None,
    speculate: str,
    prompts: Sequence[str],
    tokens: int,
    repeats: int,
    batch: int,
    rtt_ms: float | None,
    json_path: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Runs the benchmark; returns what is written to ``json_path``.

    Args:
        tokens: most in an answer. repeats: of every answer; through the relay there is one.

    Raises:
        RangeError: nothing to measure, a prompt that is not there or too long, an impossible round trip.
        SordinoError: no reference model, or a server that does not start.
    """
    if speculate != "ngram":
        raise RangeError(f"the benchmark's drafts are n-grams of the text: --speculate ngram, not {speculate[:40]!r}")
    if tokens < 2 or repeats < 1:
        raise RangeError(f"the benchmark needs 2 tokens and 1 repeat at least, not {tokens} and {repeats}")
    if rtt_ms is not None and not 0 < rtt_ms <= 1000:
        raise RangeError(f"--rtt-ms is above 0 and up to 1000, not {rtt_ms}")
    check_batch(batch)
    texts = load_prompts(prompts)
    if json_path and not json_path.absolute().parent.is_dir():
        raise SordinoError(f"--json {json_path}: there is no such folder")
    plain = plain_model(model, bundle)
    result: dict[str, Any] = {
        "machine": machine(),
        "model": ModelManifest.load(bundle).model_name,
        "speculate": speculate,
        "most_tokens": tokens,
        "repeats": repeats,
        "transformers_lookup": _LOOKUP,
        "load_average": {"before": _load()},
        "note": "ratios are medians of those of each repeat, in which all ways take turns; masks a token are those of "
        "decoding, those of the prompt come to prompt_tokens once",
    }
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-bench-")))
        target, ca, token, server = stack.enter_context(server_process(bundle, work / "server", allow_clear=False))

        def measure(address: str, turns: int, far: bool) -> dict[str, Any]:
            how: dict[str, Any] = {"ca": ca, "token_file": token, "pool": work / "pool", "batch": batch}
            how |= {"cache": work / "cache", "state_dir": work / "ledger", "low_water": 0, "provision": False}
            with connected(address, **how) as link:
                bench = _Bench(link, plain, server, texts, tokens)
                if far:
                    return bench.figures(turns, far=True)
                near = bench.figures(turns, far=False)
                if rtt_ms is not None:  # not through the relay, which is a bottleneck for gigabytes
                    _lay_in(link, bench.rows_far())
                return near

        result["speculation"] = measure(target, repeats, far=False)
        if rtt_ms is not None:
            with delayed(target, rtt_ms / 1e3) as address:
                result["speculation_rtt"] = measure(address, 1, far=True)
            for figures in result["speculation_rtt"].values():
                figures["rtt_ms"] = rtt_ms
    result["load_average"]["after"] = _load()
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _show(result, console)
    return result


class _Bench:
    """All ways to an answer, over one connection."""

    def __init__(self, link: Connected, plain: Any, server: psutil.Process, texts: dict[str, str], tokens: int) -> None:
        self._link, self._server, self._me, self._tokens = link, server, psutil.Process(), tokens
        self._inputs = {name: encode_prompt(link, text) for name, text in texts.items()}
        limit = getattr(link.model.config, "max_position_embeddings", None)
        for name, inputs in self._inputs.items():
            length = inputs["input_ids"].shape[1]
            if limit and length + tokens > limit:
                raise RangeError(
                    f"prompt {name}: its {length} and {tokens} tokens are over the model's {limit} positions"
                )
        self._ways: dict[str, Ask] = {
            _PLAIN: _of_transformers(plain),
            _LOOKED_UP: _of_transformers(plain, **_LOOKUP),
            _MASKED: _of_sordino(link, self._counters, {}),
            _SPECULATED: _of_sordino(link, self._counters, {"speculate": "ngram"}),
        }

    def rows_far(self) -> int:
        """Masks that :meth:`figures` takes through a relay, or thereabouts."""
        prompts = sum(int(inputs["input_ids"].shape[1]) for inputs in self._inputs.values())
        return 2 * prompts + len(self._inputs) * (_ROWS_A_TOKEN * self._tokens + _FAR_TOKENS) + 256

    def figures(self, turns: int, *, far: bool) -> dict[str, Any]:
        warm = encode_prompt(self._link, PROMPT)
        for ask in self._ways.values():
            ask(warm, min(_WARM_TOKENS, self._tokens))
        answers: dict[str, dict[str, list[_Answer]]] = {name: {way: [] for way in self._ways} for name in self._inputs}
        with progress_bar("answers over a longer way" if far else "answers") as answered:
            total = turns * len(self._inputs) * len(self._ways)
            for _ in range(turns):
                for name, inputs in self._inputs.items():
                    for way, ask in self._ways.items():
                        answered(sum(len(got) for ways in answers.values() for got in ways.values()), total)
                        short = far and way == _MASKED
                        tokens = min(_FAR_TOKENS, self._tokens) if short else self._tokens
                        answers[name][way].append(ask(inputs, tokens))
        return {name: self._compare(name, ways, far=far) for name, ways in answers.items()}

    def _compare(self, name: str, ways: dict[str, list[_Answer]], *, far: bool) -> dict[str, Any]:
        tpot = {way: [answer.tpot_ms for answer in answers] for way, answers in ways.items()}
        speculated, counts = ways[_SPECULATED], [answer.speculation for answer in ways[_SPECULATED]]
        prompt = int(self._inputs[name]["input_ids"].shape[1])

        def total(what: str) -> int:
            return sum(getattr(count, what) for count in counts if count)

        tokens = sum(len(answer.ids) for answer in speculated)
        passes, drafted = total("passes"), total("drafted")
        figures: dict[str, Any] = {
            "tpot_ms": round(statistics.median(tpot[_SPECULATED]), 2),
            "tpot_ratio_vs_plain": _ratio(tpot[_SPECULATED], tpot[_PLAIN]),
            "tpot_ratio_vs_transformers_lookup": _ratio(tpot[_SPECULATED], tpot[_LOOKED_UP]),
            "gain_vs_unspeculated": _ratio(tpot[_MASKED], tpot[_SPECULATED]),
            "acceptance": round(total("accepted") / drafted, 3) if drafted else None,
            "drafted": drafted,
            "accepted": total("accepted"),
            "passes": passes,
            "tokens": tokens,
            "tokens_per_pass": round(sum(answer.decoded for answer in speculated) / max(1, passes), 2),
            "masks_per_token": round((total("rows") - len(speculated) * prompt) / tokens, 2),
            "prompt_tokens": prompt,
            "ttft_ms": round(statistics.median(answer.ttft_ms for answer in speculated), 1),
            "time_of_a_pass_ms": _time_of_a_pass(speculated, passes),
        }
        for way in (_MASKED, _PLAIN, _LOOKED_UP):
            own = ways[way]
            figures[way] = {
                "tpot_ms": round(statistics.median(tpot[way]), 2),
                "tpot_ratio_vs_plain": _ratio(tpot[way], tpot[_PLAIN]),
                "tokens": sum(len(answer.ids) for answer in own),
                "passes": sum(len(answer.counts) - 1 for answer in own),
            }
        masked = ways[_MASKED]
        figures[_MASKED]["masks_per_token"] = round(sum(len(a.ids) - 1 for a in masked) / figures[_MASKED]["tokens"], 2)
        passes_alone = sum(len(answer.counts) - 1 for answer in masked)
        figures[_MASKED]["time_of_a_pass_ms"] = _time_of_a_pass(masked, passes_alone)
        figures["flips"] = self._flips(name, masked[0].ids, speculated, whole=not far)
        return figures

    def _flips(self, name: str, wanted: list[int], speculated: list[_Answer], *, whole: bool) -> dict[str, Any]:
        """Answers that leave the one without drafts, where first, and how near the two tokens were there.

        Args:
            whole: whether ``wanted`` is all of that answer, or its beginning.
        """
        places = []
        for answer in speculated:
            ids = answer.ids if whole else answer.ids[: len(wanted)]
            if ids != wanted:
                both = zip(ids, wanted, strict=False)
                places.append(next((place for place, (a, b) in enumerate(both) if a != b), min(len(ids), len(wanted))))
        figures: dict[str, Any] = {"answers": len(speculated), "differ": len(places), "first_places": places}
        if places:
            inputs, tokens = self._inputs[name], min(places) + 1
            options = Options(max_tokens=tokens, temperature=0, logprobs=2)
            token = Generation(self._link, inputs, options).run().answers[0].tokens[-1]
            if token.logprob is not None:
                first, second = token.logprob.top
                figures["logits_apart"] = round(first[1] - second[1], 5)
        return figures

    def _counters(self) -> dict[str, float]:
        session = self._link.session
        steps = {f"time.{step}": seconds for step, seconds in session.timings.items()}
        return steps | {"server_cpu": cpu_seconds(self._server), "client_cpu": cpu_seconds(self._me)}


def _load() -> float:
    """Processes that wanted a processor, on average of five minutes; far above 2, others than these did, too."""
    return round(psutil.getloadavg()[1], 1)


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return round(statistics.median(a / b if b else float("nan") for a, b in zip(over, under, strict=True)), 3)


def _time_of_a_pass(answers: Sequence[_Answer], passes: int) -> dict[str, float]:
    """Milliseconds by step; ``server`` is part of ``wait``, and CPU time stands beside the wall's."""
    spent: dict[str, float] = {}
    for answer in answers:
        for key, seconds in answer.spent.items():
            spent[key] = spent.get(key, 0.0) + seconds
    wall = sum(answer.times[-1] - answer.times[0] for answer in answers)
    each = {key.removeprefix("time."): 1e3 * seconds / max(1, passes) for key, seconds in sorted(spent.items())}
    steps = sum(value for key, value in each.items() if key not in ("server", "server_cpu", "client_cpu"))
    whole = 1e3 * wall / max(1, passes)
    return {key: round(value, 3) for key, value in (each | {"local_model": whole - steps, "all": whole}).items()}


def _show(result: dict[str, Any], console: Console) -> None:
    for part in ("speculation", "speculation_rtt"):
        if part not in result:
            continue
        rtt = next(iter(result[part].values())).get("rtt_ms")
        away = f", {rtt:g} ms away" if rtt else ""
        table = Table(title=f"n-gram drafts, {result['model']}{away}")
        table.add_column("")
        for name in result[part]:
            table.add_column(name, justify="right")
        for key in (
            "tpot_ms",
            "tpot_ratio_vs_plain",
            "tpot_ratio_vs_transformers_lookup",
            "gain_vs_unspeculated",
            "acceptance",
            "tokens_per_pass",
            "masks_per_token",
            "flips",
        ):
            values = [figures[key] for figures in result[part].values()]
            shown = [f"{value['differ']} of {value['answers']}" if key == "flips" else str(value) for value in values]
            table.add_row(key, *shown)
        for way in (_MASKED, _PLAIN, _LOOKED_UP):
            table.add_row(f"{way}: tpot_ms", *(str(figures[way]["tpot_ms"]) for figures in result[part].values()))
        console.print(table)
