"""Private generation, end to end, on one machine: split, serve in a process of its own with TLS, connect, answer.

    make demo

Everything it makes lies in ``.demo/``. The answer is repeated with ``protocol=clear`` (nothing hidden) for comparison,
and its first tokens once more through a recording proxy, to show what the server sees.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the core that the other process needs; must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from rich.console import Console
from rich.table import Table

from sordino.client.local_server import server_process
from sordino.client.proxy import RecordingProxy
from sordino.client.session import Connected
from sordino.client.terminal import connected, encode_prompt, timed_streamer
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import SordinoError

console = Console()
DEMO = Path(".demo")
MODEL = DEMO / "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description="Private generation, end to end, on one machine.")
    parser.add_argument("prompt", nargs="?", default="Give me three tips for a calm evening after a stressful day.")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--fresh", action="store_true", help="forget masks left over from an earlier run")
    options = parser.parse_args()
    bundle = DEMO / "bundle"
    if not bundle.exists():
        _split(bundle)
    if options.fresh:
        import shutil

        shutil.rmtree(DEMO / "pool", ignore_errors=True)
    with ExitStack() as stack:
        console.rule("server in its own process, TLS on loopback")
        target, ca, token, server = stack.enter_context(server_process(bundle, DEMO / "server", allow_clear=True))
        console.print(f"{target}, process {server.pid}", highlight=False)
        link_options = {"ca": ca, "token_file": token, "pool": DEMO / "pool", "cache": DEMO / "cache"}
        link_options["state_dir"] = DEMO / "ledger"
        private = _private(target, link_options, options.prompt, options.tokens)
        seen = _seen(target, link_options, options.prompt)
        console.rule("the same question with protocol=clear, for comparison")
        with connected(target, ca=ca, token_file=token, protocol="clear", cache=DEMO / "cache") as link:
            clear = _answer(link, options.prompt, options.tokens, silent=True)
        equal = private["ids"] == clear["ids"]
        console.print("same tokens" if equal else "[red]different tokens[/]")
        _summary(private, seen, equal)
        return 0 if equal else 1


def _split(bundle: Path) -> None:
    from sordino.server.split import split_model

    console.rule("splitting the model (once)")
    with console.status("splitting") as status:
        report = split_model(MODEL, bundle, progress=lambda what, share: status.update(f"{what} {100 * share:.0f} %"))
    console.print(report.table())


def _private(target: str, options: dict[str, Any], prompt: str, tokens: int) -> dict[str, Any]:
    console.rule("client: masks")
    start = time.perf_counter()
    with connected(target, **options) as link:
        ready = time.perf_counter() - start
        traffic = link.session.traffic
        made = traffic.up.get("provision", 0) + traffic.down.get("provision", 0)
        console.print(f"{link.session.masks_left} masks ready after {ready:.1f} s")
        console.rule("private answer")
        console.print(f"[bold]> {prompt}[/]")
        answer = _answer(link, prompt, tokens, silent=False)
        online = traffic.up.get("online", 0) + traffic.down.get("online", 0)
        return answer | {
            "ready_s": ready,
            "provision_bytes": made,
            "online_bytes": online,
            "left": link.session.masks_left,
        }


def _seen(target: str, options: dict[str, Any], prompt: str) -> list[bytes]:
    """What the server gets for the first tokens of the answer, message by message."""
    with RecordingProxy(target, ca=options["ca"], keep_bytes=("Evaluate",)) as proxy:
        # Without TLS between client and proxy, so that it can look inside; proxy and server speak TLS.
        with connected(proxy.target, **{**options, "ca": None}) as link:
            _answer(link, prompt, 4, silent=True)
        return [message.raw for message in proxy.messages("Evaluate", "up") if message.raw is not None]


def _answer(link: Connected, prompt: str, tokens: int, *, silent: bool) -> dict[str, Any]:
    inputs = encode_prompt(link, prompt)
    streamer = timed_streamer(link.tokenizer, silent=silent)
    start = time.perf_counter()
    link.model.generate(**inputs, do_sample=False, max_new_tokens=tokens, streamer=streamer)
    gaps = np.diff(streamer.times)
    return {
        "ids": streamer.ids,
        "prompt_tokens": int(inputs["input_ids"].shape[1]),
        "ttft_s": streamer.times[0] - start,
        "tpot_ms": 1e3 * statistics.median(gaps.tolist()) if len(gaps) else float("nan"),
    }


def _summary(private: dict[str, Any], seen: list[bytes], equal: bool) -> None:
    rows = [pb.EvaluateRequest.FromString(raw).data for raw in seen]
    data = b"".join(rows)
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    sample = next(row for row in rows if row)[:16].hex(" ")
    table = Table(title="private generation", show_header=False)
    for label, value in (
        ("prompt and answer", f"{private['prompt_tokens']} and {len(private['ids'])} tokens"),
        ("same tokens as protocol=clear", "yes" if equal else "NO"),
        ("connected and provisioned after", f"{private['ready_s']:.1f} s"),
        ("provisioning traffic", f"{private['provision_bytes'] / 1e6:,.0f} MB"),
        ("time to first token", f"{private['ttft_s']:.2f} s"),
        ("time per output token", f"{private['tpot_ms']:.0f} ms"),
        ("online traffic", f"{private['online_bytes'] / 1e6:.1f} MB"),
        ("masks left", str(private["left"])),
        ("what the server saw", f"{sample} ..."),
        ("  its bytes", f"{len(data):,}, chi-square {chi2:.0f} for 255 degrees of freedom (uniform: 255 +- 23)"),
    ):
        table.add_row(label, value)
    console.print(table)
    console.print("next: .venv/bin/sordino serve .demo/bundle", highlight=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SordinoError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(1)
