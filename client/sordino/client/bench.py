"""``sordino bench decode``: protocols and plain transformers in one run, as ratios.

The server is a process of its own (``sordino serve`` with TLS on loopback); answers of all contestants are interleaved,
so that a drifting machine drifts for all. CPU figures are CPU-seconds of all threads, from the operating system.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from sordino.client.local_server import server_process
from sordino.client.provision import plan_batch
from sordino.client.session import Connected, ProtocolName, check_batch
from sordino.client.terminal import connected, encode_prompt, progress_bar, timed_streamer
from sordino.shared.errors import RangeError, SordinoError, UnsupportedModelError
from sordino.shared.manifest import ModelManifest

PROMPT = "Explain in a few sentences why the sky is blue in the daytime and red in the evening."


class Contestant:
    """One way to generate, and what its answers cost between their first and their last token."""

    def __init__(self, model: Any, inputs: dict[str, Any], tokens: int, tokenizer: Any, link: Connected | None) -> None:
        self._model, self._inputs, self._tokens, self._tokenizer, self._link = model, inputs, tokens, tokenizer, link
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.ids: list[list[int]] = []
        self.spent: dict[str, float] = {}
        self.decoded = 0

    @classmethod
    def like(cls, other: Contestant) -> Contestant:
        """The same way to generate, with nothing measured yet."""
        return cls(other._model, other._inputs, other._tokens, other._tokenizer, other._link)

    def answer(self, counters: Callable[[], dict[str, float]], *, count: bool) -> None:
        """One greedy answer of exactly ``tokens`` tokens; kept unless it is for warming up."""
        at_first: dict[str, float] = {}
        streamer = timed_streamer(
            self._tokenizer, silent=True, on_first=lambda: at_first.update(self._counters(counters))
        )
        start = time.perf_counter()
        self._model.generate(
            **self._inputs,
            do_sample=False,
            max_new_tokens=self._tokens,
            min_new_tokens=self._tokens,
            streamer=streamer,
        )
        at_end = self._counters(counters)
        if not count:
            return
        self.ttft.append(1e3 * (streamer.times[0] - start))
        self.tpot += [1e3 * (b - a) for a, b in itertools.pairwise(streamer.times)]
        self.ids.append(streamer.ids)
        self.decoded += len(streamer.times) - 1
        for key, value in at_end.items():
            self.spent[key] = self.spent.get(key, 0.0) + value - at_first.get(key, 0.0)

    def per_token(self, key: str, scale: float = 1.0) -> float:
        return scale * self.spent.get(key, 0.0) / self.decoded

    def figures(self) -> dict[str, Any]:
        return {
            "tpot_ms_p50": round(statistics.median(self.tpot), 2),
            "tpot_ms_p95": round(float(np.percentile(self.tpot, 95)), 2),
            "ttft_ms": round(statistics.median(self.ttft), 1),
            "client_cpu_ms_per_token": round(self.per_token("client_cpu", 1e3), 2),
        }

    def wire_figures(self, element_bytes: int) -> dict[str, Any]:
        steps = {key[5:]: round(self.per_token(key, 1e3), 3) for key in sorted(self.spent) if key.startswith("time.")}
        local = statistics.fmean(self.tpot) - sum(value for step, value in steps.items() if step != "server")
        return {
            "server_cpu_ms_per_token": round(self.per_token("server_cpu", 1e3), 2),
            "online_bytes_per_token": round(self.per_token("bytes")),
            "online_bytes_ratio_vs_elements": round(self.per_token("bytes") / element_bytes, 4),
            "rounds_per_token": round(self.per_token("rounds"), 2),
            "time_of_a_token_ms": steps | {"local_model": round(local, 3)},
        }

    def _counters(self, shared: Callable[[], dict[str, float]]) -> dict[str, float]:
        values = shared()
        if self._link is not None:
            traffic = self._link.session.traffic
            values["bytes"] = traffic.up.get("online", 0) + traffic.down.get("online", 0)
            values["attention_bytes"] = traffic.up.get("attention", 0) + traffic.down.get("attention", 0)
            values["rounds"] = traffic.rounds
            values |= {f"time.{step}": seconds for step, seconds in self._link.session.timings.items()}
        return values


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of all threads of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def run_decode(
    bundle: Path,
    *,
    model: Path | None,
    protocols: list[str],
    reference: str,
    tokens: int,
    repeats: int,
    batch: int,
    contexts: list[int],
    json_path: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Runs the benchmark; returns what is written to ``json_path``.

    Args:
        contexts: lengths of prompt at which encrypted attention is measured beside the client's own, under the first
            of ``protocols``; none leaves it out.

    Raises:
        RangeError: too few tokens or repeats to measure anything, or more tokens than the model has positions.
        SordinoError: an unknown protocol, an impossible batch, no reference model, or a server that does not start.
    """
    if tokens < 2 or repeats < 1:
        raise RangeError(f"the benchmark needs 2 tokens and 1 repeat at least, not {tokens} and {repeats}")
    check_batch(batch)
    unknown = set(protocols) - set(get_args(ProtocolName))
    if unknown or not protocols:
        names = ", ".join(get_args(ProtocolName))
        raise SordinoError(f"--protocols takes {names}, not {', '.join(sorted(unknown)) or 'nothing'}")
    if any(length < 1 for length in contexts):
        raise RangeError(f"contexts are numbers of tokens, not {', '.join(map(str, contexts))}")
    if reference not in ("transformers", "none"):
        raise SordinoError(f"--reference is transformers or none, not {reference!r}")
    if json_path and not json_path.absolute().parent.is_dir():
        raise SordinoError(f"--json {json_path}: there is no such folder")
    manifest = ModelManifest.load(bundle)
    plain = plain_model(model, bundle) if reference == "transformers" else None
    me = psutil.Process()
    result: dict[str, Any] = {"machine": machine(), "model": manifest.model_name, "tokens": tokens, "protocols": {}}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sordino-bench-")))
        target, ca, token, server = stack.enter_context(server_process(bundle, work / "server", allow_clear=True))
        loaded = server.memory_info().rss
        links: dict[str, Connected] = {}

        def linked(name: str, **more: Any) -> Connected:
            return stack.enter_context(
                connected(
                    target,
                    ca=ca,
                    token_file=token,
                    protocol=name,
                    pool=work / f"pool-{name}",
                    refill=name != "auto",  # a batch beside it would be measured with everybody's answers
                    batch=batch,
                    cache=work / "cache",
                    state_dir=work / "ledger",
                    low_water=0,
                    **more,
                )
            )

        for name in dict.fromkeys(protocols):
            before = cpu_seconds(server), cpu_seconds(me), time.perf_counter()
            links[name] = link = linked(name)
            if name == "auto":
                result["cold_start"] = _cold_start(link, tokens, time.perf_counter() - before[2])
            if name == "masked":
                result["provisioning"] = _provisioning(
                    link, batch, before, (cpu_seconds(server), cpu_seconds(me), time.perf_counter())
                )
        contestants = {
            name: Contestant(link.model, encode_prompt(link, PROMPT), tokens, link.tokenizer, link)
            for name, link in links.items()
        }
        first = links[protocols[0]]
        prompt = encode_prompt(first, PROMPT)
        limit = getattr(first.model.config, "max_position_embeddings", None)
        for length in (prompt["input_ids"].shape[1], *contexts):
            if limit and length + tokens > limit:
                raise RangeError(f"a prompt of {length} and {tokens} tokens are over the model's {limit} positions")
        if plain is not None:
            contestants["reference"] = Contestant(plain, prompt, tokens, first.tokenizer, None)

        def counters() -> dict[str, float]:
            return {"server_cpu": cpu_seconds(server), "client_cpu": cpu_seconds(me)}

        with progress_bar("answers") as answered:
            for turn in range(repeats + 1):
                answered(turn, repeats + 1)
                for contestant in contestants.values():
                    contestant.answer(counters, count=turn > 0)
        if contexts:
            result["attention"] = _attention(first, linked(protocols[0], attention="rlwe"), contexts, tokens, counters)
        if "masked" in contestants:
            result["sustained"] = _sustained(contestants["masked"], links["masked"], counters, batch)
        result["server_memory"] = _memory(manifest, loaded, server.memory_info().rss)
    result["linear_cpu_ms_per_token"] = _linear_cpu(manifest)
    _compare(result, contestants, manifest)
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    _show(result, console)
    return result


def _cold_start(link: Connected, tokens: int, connecting: float) -> dict[str, Any]:
    """A first answer without any mask. Its server has not yet encoded weights for this shape of block either."""
    prompt = encode_prompt(link, PROMPT)
    first = Contestant(link.model, prompt, tokens, link.tokenizer, link)
    first.answer(dict, count=True)
    traffic = link.session.traffic
    up, down = traffic.up, traffic.down
    return {
        "prompt_tokens": prompt["input_ids"].shape[1],
        "connect_seconds": round(connecting, 2),
        "ttft_seconds": round(first.ttft[0] / 1e3, 2),
        "answer_seconds": round((first.ttft[0] + sum(first.tpot)) / 1e3, 2),
        "tpot_ms_p50": round(statistics.median(first.tpot), 2),
        "bytes_up": up["provision"] + up["online"],
        "bytes_down": down["provision"] + down["online"],
        "note": "connecting includes the bundle, where it was not cached, and the check vectors",
    }


def _attention(
    local: Connected, remote: Connected, contexts: list[int], tokens: int, counters: Callable[[], dict[str, float]]
) -> list[dict[str, Any]]:
    """Answers after prompts of some lengths, with the client's own attention and with encrypted pages on the server."""
    measured = []
    for length in contexts:
        text = local.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        ids = text.repeat(1, -(-length // text.shape[1]))[:, :length]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        own, paged = (Contestant(link.model, inputs, tokens, link.tokenizer, link) for link in (local, remote))
        traffic = remote.session.traffic
        before = traffic.up.get("attention", 0) + traffic.down.get("attention", 0)
        for contestant in (own, paged):
            contestant.answer(counters, count=True)
        sent = traffic.up.get("attention", 0) + traffic.down.get("attention", 0) - before
        decoding = paged.per_token("attention_bytes")
        own_ms, paged_ms = statistics.median(own.tpot), statistics.median(paged.tpot)
        measured.append(
            {
                "context": length,
                "tpot_ms_p50": round(paged_ms, 1),
                "tpot_ms_p50_local_attention": round(own_ms, 1),
                "attention_ms_per_token": round(paged_ms - own_ms, 1),
                "attention_bytes_per_token": round(decoding),
                "attention_bytes_of_the_prompt": round(sent - decoding * paged.decoded),
                "ttft_ms": round(paged.ttft[0], 1),
                "ttft_ms_local_attention": round(own.ttft[0], 1),
                "server_cpu_ms_per_token": round(paged.per_token("server_cpu", 1e3), 1),
                "client_cpu_ms_per_token": round(paged.per_token("client_cpu", 1e3), 1),
                "tokens_equal_local_attention": paged.ids == own.ids,
            }
        )
    return measured


def _sustained(
    masked: Contestant, link: Connected, counters: Callable[[], dict[str, float]], batch: int
) -> dict[str, float]:
    """Decoding while a batch of masks is made beside it, and what follows for decoding without end.

    In the steady state a share f of the time goes by with a refill running: it makes M masks a second, and tokens take
    Tb then and Ti otherwise; masks made equal masks used when f M = f/Tb + (1-f)/Ti.
    """
    idle = statistics.median(masked.tpot)
    beside = Contestant.like(masked)
    start = time.perf_counter()
    pool = ThreadPoolExecutor(1)
    refill = pool.submit(link.session.provision)
    pool.shutdown(wait=False)  # the thread ends with the batch, or with the session if an answer fails
    while not beside.decoded or not refill.done():
        beside.answer(counters, count=True)
    seconds = time.perf_counter() - start
    refill.result()
    busy = statistics.median(beside.tpot)
    made, while_busy, otherwise = batch / seconds, 1e3 / busy, 1e3 / idle
    share = min(1.0, otherwise / max(made - while_busy + otherwise, 1e-9))
    return {
        "tpot_ms_p50_during_refill": round(busy, 2),
        "refill_seconds_per_batch": round(seconds, 1),
        "share_of_time_refilling": round(share, 3),
        "tpot_ms": round(1e3 / (share * while_busy + (1 - share) * otherwise), 2),
    }


def _compare(result: dict[str, Any], contestants: dict[str, Contestant], manifest: ModelManifest) -> None:
    element_bytes = 4 * sum(group.in_features + group.out_features for group in manifest.groups)
    reference = contestants.get("reference")
    if reference is not None:
        result["reference"] = reference.figures()
    for name, contestant in contestants.items():
        if name == "reference":
            continue
        figures = contestant.figures() | contestant.wire_figures(element_bytes)
        for kind, spent in result["linear_cpu_ms_per_token"].items():
            figures[f"server_cpu_ratio_vs_{kind}"] = round(figures["server_cpu_ms_per_token"] / spent, 3)
        if "clear" in contestants:
            figures["tokens_equal_clear"] = contestant.ids == contestants["clear"].ids
        if reference is not None:
            ratio = statistics.median(contestant.tpot) / statistics.median(reference.tpot)
            figures["tpot_ratio_vs_reference"] = round(ratio, 3)
        if name == "masked":
            made = result["provisioning"]
            figures["offline_bytes_per_token"] = made["bytes_per_token"]
            figures["provision_cpu_ms_per_token"] = made["cpu_ms_per_token"]
            server = figures["server_cpu_ms_per_token"] + made["cpu_ms_per_token"]["server"]
            fp32 = result["linear_cpu_ms_per_token"]["fp32"]
            figures["server_cpu_ratio_vs_fp32_with_provisioning"] = round(server / fp32, 3)
            figures["sustained_tpot_ms"] = result["sustained"]["tpot_ms"]
            if reference is not None:
                ratio = result["sustained"]["tpot_ms"] / statistics.median(reference.tpot)
                figures["sustained_tpot_ratio_vs_reference"] = round(ratio, 3)
        result["protocols"][name] = figures


def _provisioning(link: Connected, slots: int, before: tuple[float, ...], after: tuple[float, ...]) -> dict[str, Any]:
    traffic = link.session.traffic
    plan = plan_batch(link.session.manifest, slots, checks=1)
    server, client, seconds = (b - a for a, b in zip(before, after, strict=True))
    return {
        "slots": slots,
        "seconds": round(seconds, 1),
        "bytes_up": traffic.up.get("provision", 0),
        "bytes_down": traffic.down.get("provision", 0),
        "check_vector_bytes": plan.check_bytes,
        "bytes_per_token": round((traffic.up["provision"] + traffic.down["provision"] - plan.check_bytes) / slots),
        "cpu_ms_per_token": {"server": round(1e3 * server / slots, 2), "client": round(1e3 * client / slots, 2)},
        "note": "CPU includes connecting, the check vectors, and fetching the bundle where it was not cached",
    }


_BARE_SERVER: Final = """
import asyncio, grpc, psutil, torch, sordino.server.cli
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from sordino.server.app import ServerConfig, build_server
from sordino.server.kernel import choose_kernel
from sordino.server.service import Limits, SordinoService
from sordino.shared.tls import make_certificates
device = torch.device("cpu")
choose_kernel(device)
config = ServerConfig(bundle=Path(), tls=None, tokens=None)
async def serve():
    server, _ = build_server(SordinoService(SimpleNamespace(device=device, matrices={}), Limits()), config)
    with TemporaryDirectory() as state:
        credentials = grpc.ssl_server_credentials([make_certificates(Path(state)).read()])
    server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(psutil.Process().memory_info().rss)
    await server.stop(0)
asyncio.run(serve())
"""


def _memory(manifest: ModelManifest, loaded: int, at_end: int) -> dict[str, float]:
    """Resident memory of the server above a server that has compiled its kernel and holds no weights, against the int8
    weights."""
    code = _BARE_SERVER
    bare = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    weights = sum(group.planes * group.out_features * group.in_features for group in manifest.groups)
    return {
        "bare_mib": round(bare / 2**20, 1),
        "int8_weights_mib": round(weights / 2**20, 1),
        "ratio_when_ready": round((loaded - bare) / weights, 3),
        "ratio_at_the_end": round((at_end - bare) / weights, 3),
    }


def plain_model(model: Path | None, bundle: Path) -> Any:
    """The original model in float32; None takes the one ``.gguf`` file beside the bundle.

    Raises:
        SordinoError: it is not there. UnsupportedModelError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    if model is None:
        found = sorted(bundle.parent.glob("*.gguf"))
        if len(found) != 1:
            raise SordinoError("--model is needed for the reference: the folder or .gguf file that was split")
        model = found[0]
    if not model.exists():
        raise SordinoError(f"--model {model}: there is no such file or folder")
    folder, extra = (model.parent, {"gguf_file": model.name}) if model.suffix == ".gguf" else (model, {})
    try:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **extra)
    except Exception as error:  # whatever the library makes of a file that is no model
        raise UnsupportedModelError(f"--model {model} cannot be loaded: {str(error).partition(chr(10))[0]}") from None
    return plain.eval()


@torch.inference_mode()
def _linear_cpu(manifest: ModelManifest) -> dict[str, float]:
    """CPU-milliseconds a token for the remote layers' products in plain fp32, bf16 and int8 (weights only, 4 rows)."""
    shapes = [(group.out_features, group.in_features) for group in manifest.groups]
    timed: dict[str, float] = {}
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        weights = [torch.ones(shape, dtype=dtype) for shape in shapes]
        rows = {n: torch.ones((1, n), dtype=dtype) for _, n in shapes}

        def once(weights: list[torch.Tensor] = weights, rows: dict[int, torch.Tensor] = rows, kind: str = kind) -> None:
            for weight in weights:
                row = rows[weight.shape[1]]
                if kind == "int8":
                    torch._int_mm(row, weight.t())
                else:
                    torch.nn.functional.linear(row, weight)

        once()
        start, rounds = time.process_time(), 10
        for _ in range(rounds):
            once()
        timed[kind] = round(1e3 * (time.process_time() - start) / rounds, 3)
    return timed


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cpus": psutil.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _show(result: dict[str, Any], console: Console) -> None:
    names = [*result["protocols"], *(["reference"] if "reference" in result else [])]
    table = Table(title=f"decode, {result['tokens']} tokens, {result['model']}")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    rows = {name: result["protocols"].get(name) or result["reference"] for name in names}
    for key in (
        "tpot_ms_p50",
        "tpot_ratio_vs_reference",
        "sustained_tpot_ms",
        "sustained_tpot_ratio_vs_reference",
        "ttft_ms",
        "tokens_equal_clear",
        "online_bytes_per_token",
        "offline_bytes_per_token",
        "server_cpu_ms_per_token",
        "server_cpu_ratio_vs_fp32",
        "client_cpu_ms_per_token",
    ):
        table.add_row(key, *(str(rows[name].get(key, "")) for name in names))
    console.print(table)
    if "provisioning" in result:
        console.print(f"provisioning: {result['provisioning']}", highlight=False)
    if "cold_start" in result:
        console.print(f"cold start (auto): {result['cold_start']}", highlight=False)
    for figures in result.get("attention", []):
        console.print(f"encrypted attention: {figures}", highlight=False)
    for name, figures in result["protocols"].items():
        console.print(f"where a token's time goes ({name}, ms): {figures['time_of_a_token_ms']}", highlight=False)
