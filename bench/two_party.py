"""What a token costs in profile two-party: time, rounds, bytes and memory of all three processes, and agreement.

The same server answers by ``clear``, with the same integer matrices and no shares, for comparison: greedy tokens one by
one, then the distributions of the next token over clear's answer. Client, server and dealer are processes of their own,
with TLS on loopback. Figures are of decoding, after the first token; bytes are payloads, and what the dealer sends is
counted in a session of its own, for amounts depend on sizes alone.

With ``--crypten`` CrypTen first answers the same prompt by the same weights, on shares of its own (``peers/crypten``),
and its distributions of the next token are compared with clear's over CrypTen's answer.

    python bench/two_party.py --bundle .demo/bundle --tokens 16 --crypten 4 --json bench/results/two-party-2-cores.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from sordino.client import Connected, connect
from sordino.client.bench import cpu_seconds, machine
from sordino.client.bench_block import DealerProcess, dealer_process, dealt_bytes
from sordino.client.local_server import server_process
from sordino.client.terminal import progress_bar, timed_streamer
from sordino.client.twoparty import connect as two_party
from sordino.client.twoparty.connect import TwoPartyConnected
from sordino.client.twoparty.session import MOST_ROWS, PartySession
from sordino.shared.errors import SordinoError
from sordino.shared.manifest import CLIENT_DIR, ModelManifest
from sordino.shared.twoparty.tape import CLIENT, SERVER

PROMPT: Final = "The capital of France is"
# Of any kind: perplexities are of it, and what CrypTen's norms expect of a row is found from it.
TEXT: Final = (
    "It was late in the autumn when three of them set out for the coast, with two horses, a map and enough bread for a"
    " week."
)


@dataclass(frozen=True, slots=True)
class Parties:
    """A client of profile two-party, and the processes of all three. ``clear`` connects to the same server."""

    shared: TwoPartyConnected
    clear: Callable[[], Connected]
    dealer: DealerProcess
    processes: dict[str, psutil.Process]

    @property
    def session(self) -> PartySession:
        return self.shared.session

    def counters(self) -> dict[str, float]:
        """Rounds, bytes, and seconds of CPU so far."""
        spent = self.session.spent
        counted = {"rounds": spent.rounds, "bytes_up": spent.sent, "bytes_down": spent.received}
        return counted | {f"cpu_s_{name}": cpu_seconds(process) for name, process in self.processes.items()}


@contextmanager
def started(bundle: Path) -> Iterator[Parties]:
    """
    Raises:
        SordinoError: a process does not start, or the bundle is of a kind that the profile does not know.
    """
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-two-party-")))
        dealer = stack.enter_context(dealer_process(work / "dealer"))
        arguments = ["--threads", "1", *dealer.server_options]
        target, ca, token, server = stack.enter_context(
            server_process(bundle, work / "server", allow_clear=True, arguments=arguments)
        )
        own: dict[str, Any] = {"ca": ca, "token": token.read_text().strip(), "cache": work / "cache", "timeout_s": 300}
        of_dealer: dict[str, Any] = {
            "dealer": dealer.target,
            "dealer_ca": dealer.ca,
            "dealer_token": dealer.token(CLIENT),
        }
        shared = two_party.connect(target, **own, **of_dealer, ahead=0)
        stack.enter_context(shared.session)
        processes = {"client": psutil.Process(), "server": server, "dealer": dealer.process}
        yield Parties(shared, partial(connect, target, **own, protocol="clear"), dealer, processes)


def answer(link: Any, inputs: Any, tokens: int, on_first: Callable[[], None] | None = None) -> Any:
    """Exactly so many greedy tokens: a streamer with their ``ids``, and the ``times`` at which they came."""
    streamer = timed_streamer(link.tokenizer, silent=True, on_first=on_first)
    link.model.generate(**inputs, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, streamer=streamer)
    return streamer


def decoded(parties: Parties, inputs: Any, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """An answer's tokens, and what each cost after the first."""
    first: dict[str, float] = {}
    start = time.perf_counter()
    streamer = answer(parties.shared, inputs, tokens, lambda: first.update(parties.counters()))
    spent = {key: (value - first[key]) / (tokens - 1) for key, value in parties.counters().items()}
    seconds = [b - a for a, b in pairwise(streamer.times)]
    return streamer.ids, {
        "prompt_s": round(streamer.times[0] - start, 3),
        "token_s_p50": round(statistics.median(seconds), 3),
        "token_s_min": round(min(seconds), 3),
        "token_s": [round(one, 3) for one in seconds],
        **{key: round(value, 3) if "cpu" in key else round(value) for key, value in spent.items()},
    }


def dealt(parties: Parties, fingerprint: str, prompt: int, tokens: int) -> dict[str, int]:
    """Bytes for the prompt, and for a token after the first, to each party."""
    before = [min(MOST_ROWS, prompt - start) for start in range(0, prompt, MOST_ROWS)]
    passes = dealt_bytes(parties.dealer, fingerprint, parties.session.plan, [*before, *[1] * (tokens - 1)])
    sent = {}
    for party, name in ((CLIENT, "client"), (SERVER, "server")):
        amounts = [one[party] for one in passes]
        sent[f"prompt_to_{name}"] = sum(amounts[: len(before)])
        sent[f"token_to_{name}"] = round(statistics.mean(amounts[len(before) :]))
    return sent


def compared(shared: TwoPartyConnected, clear: Connected, ids: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Distributions of the next token, in nats, at every place of an answer: ``ids [1, prompt + answer]``."""
    return diverging(*(logits_over(link, ids, prompt) for link in (clear, shared)))


def over_a_text(shared: TwoPartyConnected, clear: Connected, text: str) -> dict[str, Any]:
    """Every token of a text but the first: distributions, and perplexities of both."""
    ids = shared.tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    right, found = (logits_over(link, ids, 1) for link in (clear, shared))
    wrong = [-one.log_softmax(-1).gather(1, ids[0, 1:, None]).mean() for one in (right, found)]
    return diverging(right, found) | {
        "perplexity_clear": wrong[0].exp().item(),
        "perplexity_shared": wrong[1].exp().item(),
    }


def logits_over(link: Connected | TwoPartyConnected, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """``[answer, vocabulary]``, float64."""
    with torch.inference_mode():
        logits: torch.Tensor = link.model(input_ids=ids).logits[0, prompt - 1 : -1]
    return logits.double()


def diverging(right: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """Of logits ``[places, vocabulary]``, in nats."""
    logs = right.log_softmax(-1), found.log_softmax(-1)
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    return {
        "places": len(kl),
        "same_top_token": int((right.argmax(-1) == found.argmax(-1)).sum()),
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "logit_error_mean": (right - found).abs().mean().item(),
        "logit_error_max": (right - found).abs().max().item(),
        "logit_deviation": right.std().item(),
    }


def crypten_answer(bundle: Path, prompt: str, tokens: int) -> Any:
    """An :class:`~peers.crypten.model.Answer`, in which an end of the text is a token like others.

    Raises:
        SordinoError: as that module's ``load_model`` and ``answer``.
    """
    from peers.crypten.model import answer, calibrated, load_model

    tokenizer = AutoTokenizer.from_pretrained(bundle / CLIENT_DIR)
    model = load_model(bundle)
    shifts = calibrated(model, tokenizer(TEXT)["input_ids"])
    with progress_bar("passes by CrypTen") as on_turn:
        return answer(model, tokenizer(prompt)["input_ids"], tokens, shifts=shifts, on_turn=on_turn)


_CRYPTEN_NOTES: Final = (
    "the whole model is on shares, with CrypTen's settings as they come; the prompt's rows go one after the other",
    "public powers of two scale what norms are given: found from another text, of a first row and of all others",
    "tuples of a pass are there before it, in ahead_s_p50 and token_to_; recording what it asks for is in no figure",
    "the result is opened to the client, within a pass; its own answer is what it is compared over",
)


def measure(bundle: Path, prompt: str, tokens: int, crypten: int = 0) -> dict[str, Any]:
    """All figures; ``crypten``, so many tokens of CrypTen's. Raises as :func:`started` and :func:`crypten_answer`."""
    manifest = ModelManifest.load(bundle)
    peer = crypten_answer(bundle, prompt, crypten) if crypten else None
    with started(bundle) as parties:
        inputs = parties.shared.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        length = inputs["input_ids"].shape[1]
        rows, spent = 2 * (length + tokens), parties.session.spent
        parties.session.provision(rows)
        ids, online = decoded(parties, inputs, tokens)
        memory = {name: round(one.memory_info().rss / 2**20) for name, one in parties.processes.items()}
        clear = parties.clear()
        with clear.session:
            right = answer(clear, inputs, tokens).ids
            whole = torch.cat([inputs["input_ids"], torch.tensor([right])], 1)
            distributions = compared(parties.shared, clear, whole, length)
            ahead = {
                "rows_at_a_time": rows,
                "seconds": round(spent.ahead_s / rows, 3),
                "bytes_up": round(spent.ahead_sent / rows),
                "bytes_down": round(spent.ahead_received / rows),
            }
            text = over_a_text(parties.shared, clear, TEXT)
            of_peer = {}
            if peer:
                theirs = torch.cat([inputs["input_ids"], torch.tensor([peer.tokens])], 1)
                clear_answer = right if crypten <= tokens else answer(clear, inputs, crypten).ids
                of_peer["crypten"] = {
                    "tokens": crypten,
                    "tokens_equal_clear": sum(a == b for a, b in zip(peer.tokens, clear_answer, strict=False)),
                    "over_its_own_tokens": diverging(logits_over(clear, theirs, length), peer.logits.double()),
                    **peer.figures,
                    "notes": list(_CRYPTEN_NOTES),
                }
        return {
            "machine": machine() | {"server_threads": 1, "load": round(psutil.getloadavg()[0], 2)},
            "model": manifest.model_name,
            "prompt_tokens": length,
            "tokens": tokens,
            "tokens_equal_clear": sum(a == b for a, b in zip(ids, right, strict=True)),
            "over_the_tokens_of_clear": distributions,
            "over_a_text": text,
            "online_a_token": online,
            "dealer_bytes": dealt(parties, manifest.fingerprint, length, tokens),
            "ahead_a_row": ahead,
            "resident_mib": memory,
            **of_peer,
        }


def show(result: dict[str, Any], console: Console) -> None:
    """What a token costs by two-party, and by CrypTen if it was asked for."""
    table = Table(title=f"a token of {result['model']}, after the first")
    for column in ("", "seconds", "seconds ahead", "rounds", "MB", "dealer MB", "MB ahead", "top token right"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    made = result["ahead_a_row"]
    rows = [("two-party", result["online_a_token"], result["dealer_bytes"], result["over_the_tokens_of_clear"])]
    seconds, megabytes = [made["seconds"]], [f"{(made['bytes_up'] + made['bytes_down']) / 1e6:,.1f}"]
    if peer := result.get("crypten"):
        rows.append(("CrypTen", peer, peer, peer["over_its_own_tokens"]))
        seconds.append(peer["ahead_s_p50"])
        megabytes.append("")
    for (name, costs, dealer, agreement), ahead_s, ahead_mb in zip(rows, seconds, megabytes, strict=True):
        table.add_row(
            name,
            f"{costs['token_s_p50']:.2f}",
            f"{ahead_s:.2f}",
            str(costs["rounds"]),
            f"{(costs['bytes_up'] + costs['bytes_down']) / 1e6:,.1f}",
            f"{(dealer['token_to_client'] + dealer['token_to_server']) / 1e6:,.1f}",
            ahead_mb,
            f"{agreement['same_top_token']} of {agreement['places']}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, default=Path(".demo/bundle"))
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--crypten", type=int, default=0, metavar="N", help="tokens by CrypTen, 10 to 20 s each; 2 or more"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.tokens < 2:
        parser.error("--tokens is at least 2: the first is the prompt's")
    if options.crypten < 0 or options.crypten == 1:
        parser.error("--crypten is 0, or at least 2: the first is the prompt's")
    try:
        result = measure(options.bundle, options.prompt, options.tokens, options.crypten)
    except SordinoError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console())


if __name__ == "__main__":
    main()
