"""How long a server takes until it is ready, with a warm page cache, and how that grows with the bytes that it reads.

Measured from the start of the command until the port file is there, as one process and as tensor-parallel ranks, for a
whole bundle and for stages of a quarter and a half of its layers; beside it what importing the libraries takes alone,
the bytes that each rank hashes and holds, and what the parts of loading take in one process.

    python bench/start.py --bundle .demo/bundle --json bench/results/start-2-cores.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sordino.client.bench import machine
from sordino.client.local_server import server_process
from sordino.server.kernel import known_answer_test
from sordino.server.store import MatrixStore
from sordino.shared.errors import RangeError, SordinoError
from sordino.shared.manifest import ModelManifest

Layers = tuple[int, int] | None

# What `sordino serve` imports, and what its agent of several ranks does before it starts them.
RANK: Final = "import sordino.shared.cli as cli; cli.build(); import torch, sordino.server.app, sordino.shared.logs"
AGENT: Final = f"{RANK}, sordino.server.launch"
_PARTS: Final = ("manifest", "files", "slices", "map", "bounds", "kernel", "test")


def imported(statement: str, processes: int) -> float:
    """Seconds until so many processes, started together, have run it."""
    command = [sys.executable, "-c", f"{statement}; print(flush=True)"]
    start = time.perf_counter()
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    answers = [child.stdout.readline() if child.stdout else b"" for child in children]
    seconds = time.perf_counter() - start
    for child in children:
        child.communicate()
    if not all(answers):
        raise SordinoError("the libraries of a server cannot be imported: see above")
    return seconds


def started(bundle: Path, state: Path, arguments: Sequence[str]) -> float:
    """Seconds from the command to its port file."""
    begun = time.time()
    with server_process(bundle, state, allow_clear=False, arguments=arguments):
        return (state / "port").stat().st_mtime - begun


def loaded(bundle: Path, layers: Layers, ranks: int, repeats: int) -> dict[str, Any]:
    """What each rank hashes and holds, and for rank 0 the milliseconds of each part. In a process of its own: there
    the kernel is chosen for the first time."""
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        store = MatrixStore(bundle, layers=layers, shard=(0, ranks))
        start = time.perf_counter()
        known_answer_test(store.kernel, store.device)
        store.seconds["test"] = time.perf_counter() - start
        for name, seconds in store.seconds.items():
            times.setdefault(name, []).append(1e3 * seconds)
        del store  # before the next maps the same file
    figures = []
    for rank in range(ranks):
        store = MatrixStore(bundle, layers=layers, shard=(rank, ranks), verify=rank == 0)
        held = sum(matrix.weights.nbytes for matrix in store.matrices.values())
        figures.append({"hashed_bytes": store.hashed_bytes, "held_bytes": held})
    parts = {name: round(statistics.median(values), 2) for name, values in times.items()}
    return {
        "ranks": figures,
        "parts_ms": parts | {"kernel": round(times["kernel"][0], 2)},
        "threads": torch.get_num_threads(),
    }


def measure(bundle: Path, work: Path, layers: Layers, ranks: int, repeats: int) -> dict[str, Any]:
    """One way to start; the first start, which makes certificates and fills the page cache, is not counted."""
    arguments = ["--tensor-parallel", str(ranks)] if ranks > 1 else []
    arguments += [f"--layers={layers[0]}-{layers[1]}"] if layers else []
    started(bundle, work, arguments)
    ready, imports = [], []
    for _ in range(repeats):
        agent = imported(AGENT, 1) if ranks > 1 else 0.0
        imports.append(agent + imported(RANK, ranks))
        ready.append(started(bundle, work, arguments))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        inside = pool.submit(loaded, bundle, layers, ranks, repeats).result()
    middle, alone = statistics.median(ready), statistics.median(imports)
    return {
        "processes": ranks,
        "layers": list(layers) if layers else None,
        "ready_s": round(middle, 3),
        "ready_s_least_most": [round(min(ready), 3), round(max(ready), 3)],
        "import_s": round(alone, 3),
        "ready_less_import_s": round(middle - alone, 3),
        "ready_to_import": round(middle / alone, 3),
        **inside,
    }


def stages(layers: int) -> list[Layers]:
    """A quarter, a half, and all of them."""
    counts = sorted({max(1, layers // 4), max(1, layers // 2)} - {layers})
    return [*((0, count - 1) for count in counts), None]


def growth(runs: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """The straight line through (bytes hashed, time until ready), and how far from it a run is. None where stages hash
    the same: a bundle without slices is hashed whole."""
    size = np.array([run["ranks"][0]["hashed_bytes"] for run in runs], np.float64) / 1e9
    if np.ptp(size) == 0:
        return None
    ready = np.array([run["ready_s"] for run in runs])
    slope, base = np.polyfit(size, ready, 1)
    return {
        "seconds_per_gb": round(float(slope), 3),
        "seconds_without_bytes": round(float(base), 3),
        "farthest_from_line_ms": round(1e3 * float(np.abs(slope * size + base - ready).max()), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, default=Path(".demo/bundle"))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        if options.repeats < 1 or not all(1 <= ranks <= 8 for ranks in options.processes):
            raise RangeError("a start takes 1 to 8 processes, and at least one repeat")
        manifest = ModelManifest.load(options.bundle)
        series = stages(1 + max(group.layer for group in manifest.groups))
        with tempfile.TemporaryDirectory(prefix="sordino-start-") as folder:
            ways = [(layers, 1) for layers in series] + [(None, ranks) for ranks in options.processes if ranks > 1]
            runs = [measure(options.bundle, Path(folder), layers, ranks, options.repeats) for layers, ranks in ways]
    except SordinoError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")
    result: dict[str, Any] = {
        "machine": machine(),
        "model": manifest.model_name,
        "repeats": options.repeats,
        "runs": runs,
        "growth": growth(runs[: len(series)]),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, Console())


def show(result: dict[str, Any], console: Console) -> None:
    columns = ("ready s", "import s", "less import", "ratio", "MB hashed", "held", "others")
    times = Table("layers, ranks", *columns, title="until ready", box=SIMPLE)
    parts = Table("layers, ranks", *_PARTS, title="of which rank 0's bundle, ms", box=SIMPLE)
    for run in result["runs"]:
        name = f"{'-'.join(map(str, run['layers'])) if run['layers'] else 'all'}, {run['processes']}"
        first, *others = run["ranks"]
        most = f"{max(rank['hashed_bytes'] for rank in others) / 1e6:.1f}" if others else ""
        seconds = (run[key] for key in ("ready_s", "import_s", "ready_less_import_s", "ready_to_import"))
        sizes = (f"{first[key] / 1e6:.1f}" for key in ("hashed_bytes", "held_bytes"))
        times.add_row(name, *(f"{one:.2f}" for one in seconds), *sizes, most)
        parts.add_row(name, *(f"{run['parts_ms'].get(part, 0.0):.1f}" for part in _PARTS))
    console.print(times, parts)
    if result["growth"]:
        console.print(f"one process: {result['growth']}", highlight=False)


if __name__ == "__main__":
    main()
