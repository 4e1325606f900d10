"""Protocol ``auto`` without a single mask: time to the first token, and time and traffic of a long answer.

The server is a process of its own, with TLS on loopback. The first run is the first that the server sees, which also
encodes its weights; the last lets the pool fill beside the answer.

    python bench/cold_start.py --bundle .demo/bundle --json bench/results/cold-start-2-cores.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sordino.client.bench import machine
from sordino.client.local_server import server_process
from sordino.client.terminal import connected, timed_streamer

PROMPT = (
    "Explain in a few sentences why the sky is blue in the daytime and red in the evening, what clouds change about it "
    "and why astronauts see it black."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, default=Path(".demo/bundle"))
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sordino-cold-") as folder:
        work = Path(folder)
        with server_process(options.bundle, work / "server", allow_clear=True) as (target, ca, token, _):
            truth: list[int] = []
            for name, protocol, refill in (
                ("clear", "clear", True),
                ("first of a server, just-in-time masks alone", "auto", False),
                ("the next, just-in-time masks alone", "auto", False),
                ("the next, with the pool filled beside it", "auto", True),
            ):
                start = time.perf_counter()
                pooled = {"pool": work / name, "state_dir": work / "ledger", "refill": refill}
                with connected(
                    target,
                    ca=ca,
                    token_file=token,
                    protocol=protocol,
                    cache=work / "cache",
                    **(pooled if protocol == "auto" else {}),
                ) as link:
                    connecting = time.perf_counter() - start
                    ids = link.tokenizer(PROMPT, return_tensors="pt")["input_ids"][:, : options.prompt_tokens]
                    streamer = timed_streamer(link.tokenizer, silent=True)
                    start = time.perf_counter()
                    link.model.generate(
                        input_ids=ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=False,
                        max_new_tokens=options.tokens,
                        min_new_tokens=options.tokens,
                        streamer=streamer,
                    )
                    total = time.perf_counter() - start
                    traffic, masks = link.session.traffic, link.session.masks_left
                truth = truth or streamer.ids
                runs.append(
                    {
                        "run": name,
                        "prompt_tokens": ids.shape[1],
                        "tokens": options.tokens,
                        "connect_seconds": round(connecting, 2),
                        "ttft_seconds": round(streamer.times[0] - start, 2),
                        "answer_seconds": round(total, 1),
                        "tpot_ms_p50": round(1e3 * statistics.median(b - a for a, b in pairwise(streamer.times)), 1),
                        "bytes_up": sum(traffic.up.values()),
                        "bytes_down": sum(traffic.down.values()) - traffic.down.get("bundle", 0),
                        "masks_left": masks,
                        "tokens_equal_clear": streamer.ids == truth,
                    }
                )
                print(json.dumps(runs[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
