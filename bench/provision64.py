"""What a token costs ahead of need in profile two-party: bytes and CPU of W r + s by encryption; and W u online.

The four matrices of a layer of SmolLM2-135M, and their sum over its 30 layers. A request is of few rows, for an answer
of known length, or of all 8192 slots of a polynomial; of the latter some outputs are measured, and the others are taken
to cost as much. CPU time is that of one thread. Every result is compared with W r + s.

    python bench/provision64.py [--rows 16 32 8192] [--json F]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sordino.client.twoparty.linear import WordKey
from sordino.server.twoparty.linear import Provisioner, WordMatrix, choose_kernel
from sordino.shared.twoparty.lwe import WORD_PARAMS, random_words, word_shape

LAYERS: Final = 30
GROUPS: Final = ((960, 576), (576, 576), (3072, 576), (576, 1536))
MEASURED: Final = 64  # outputs of a batch
CPU: Final = torch.device("cpu")


@dataclass(slots=True)
class Cost:
    """Of a token: bytes, and seconds of CPU."""

    up: float = 0.0
    down: float = 0.0
    client_s: float = 0.0
    server_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def times(self, factor: float) -> Cost:
        return Cost(*(factor * a for a in asdict(self).values()))


@dataclass(slots=True)
class Watch:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = time.process_time() - start


def matrix(m: int, n: int) -> NDArray[np.int8]:
    return random_words((m, n)).astype(np.int8).clip(-127, 127)


def cost(rows: int, m: int, n: int) -> Cost:
    """Of one matrix ``[m, n]``, a token.

    Raises:
        SystemExit: a result is wrong.
    """
    shape = word_shape(rows, n, m)
    part = replace(shape, out_features=min(m, MEASURED)) if shape.rows == WORD_PARAMS.n else shape
    weights, r, watch, key = matrix(part.out_features, n), random_words((rows, n)), Watch(), WordKey()
    with watch.of("ask"):
        request = key.requests(r, part)
    with watch.of("read"):
        answers = Provisioner(key.public).answers(weights, request, part)
    with watch.of("serve"):
        answer, s = zip(*answers, strict=True)
    with watch.of("open"):
        c = key.open(answer, part)
    expected = WordMatrix(torch.from_numpy(weights), choose_kernel(CPU)).product(r) + np.concatenate(s, axis=1)[:rows]
    if not np.array_equal(c[:rows], expected):
        raise SystemExit(f"a wrong result for {rows} rows of a matrix [{m}, {n}]")
    scale, took = m / part.out_features, watch.seconds
    client, server = took["ask"] + scale * took["open"], took["read"] + scale * took["serve"]
    return Cost(shape.upload_bytes(), shape.download_bytes(), client, server).times(1 / rows)


def online() -> float:
    """Milliseconds for one row through the matrices of all layers, the least of five times."""
    kernel = choose_kernel(CPU)
    held = [WordMatrix(torch.from_numpy(matrix(m, n)), kernel) for m, n in GROUPS * LAYERS]
    rows = [random_words((1, one.weights.shape[1])) for one in held]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for one, row in zip(held, rows, strict=True):
            one.product(row)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, WORD_PARAMS.n])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cost(16, 16, 16)  # compiles
    table = Table("rows", "matrix", "KB up", "KB down", "client, ms", "server, ms", box=SIMPLE, title="a token")
    results = []
    for rows in options.rows:
        found = {f"{m} x {n}": cost(rows, m, n) for m, n in GROUPS}
        found["the model"] = sum(found.values(), Cost()).times(LAYERS)
        for name, one in found.items():
            results.append({"rows": rows, "matrix": name, **asdict(one)})
            shown = (one.up / 1e3, one.down / 1e3, one.client_s * 1e3, one.server_s * 1e3)
            table.add_row(str(rows), name, *(f"{v:,.2f}" for v in shown))
    milliseconds = online()
    Console().print(table)
    print(f"online, one row through all layers: {milliseconds:.1f} ms")
    if options.json:
        result = {"threads": 1, "results": results, "online_ms": milliseconds}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
