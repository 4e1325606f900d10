"""By columns or by rows: what the collective operations of one product cost a tensor-parallel server.

By columns of the output, a row goes to all ranks and their parts of the answer are gathered. By rows of W's transpose,
each rank gets its share of the row alone, and all answers are summed: less to send where a matrix is much wider than
tall, but sums of the whole width, 64 bits an element. No multiplication is measured: both ways share them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from sordino.shared.address import free_port

# in, out: of SmolLM2-135M, of an 8B model, and shapes that no model has.
SHAPES = ((1536, 576), (4096, 4096), (14336, 4096), (16384, 1024), (32768, 512))
TURNS = 5


def rank(number: int, ranks: int, port: int, repeats: int, out: Path) -> None:
    """Measures, as one of the processes; rank 0 writes microseconds by shape."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=ranks)
    torch.set_num_threads(1)
    found = []
    for n, m in SHAPES:
        ways = (by_columns(n, m, ranks), by_rows(n, m, ranks))
        turns = [[microseconds(way, repeats) for way in ways] for _ in range(TURNS)]
        columns, rows = (median(times) for times in zip(*turns, strict=True))
        found.append({"in": n, "out": m, "columns_us": round(columns), "rows_us": round(rows)})
    if number == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def by_columns(n: int, m: int, ranks: int) -> Callable[[], None]:
    row, part = torch.zeros(n, dtype=torch.int32), torch.zeros(m // ranks, dtype=torch.int32)
    parts = [torch.zeros_like(part) for _ in range(ranks)] if dist.get_rank() == 0 else None

    def product() -> None:
        dist.broadcast(row, 0)
        dist.gather(part, parts)

    return product


def by_rows(n: int, m: int, ranks: int) -> Callable[[], None]:
    share, answer = torch.zeros(n // ranks, dtype=torch.int32), torch.zeros(m, dtype=torch.int64)
    shares = [torch.zeros_like(share) for _ in range(ranks)] if dist.get_rank() == 0 else None

    def product() -> None:
        dist.scatter(share, shares)
        dist.reduce(answer, 0)

    return product


def microseconds(product: Callable[[], None], repeats: int) -> float:
    product()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        product()
    dist.barrier()
    return (time.perf_counter() - start) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from sordino.client.bench import machine  # not by each rank: it takes seconds

    console, results = Console(), []
    table = Table("ranks", "in", "out", "by columns µs", "by rows µs", "rows / columns")
    with console.status("measuring"):
        for ranks in options.ranks:
            out = Path(f".collectives-{os.getpid()}.json")
            try:
                mp.spawn(rank, (ranks, free_port("127.0.0.1"), options.repeats, out), nprocs=ranks)
                found = json.loads(out.read_text())
            finally:
                out.unlink(missing_ok=True)
            for one in found:
                ratio = round(one["rows_us"] / one["columns_us"], 2)
                results.append({"ranks": ranks, **one, "ratio": ratio})
                table.add_row(*(str(value) for value in results[-1].values()))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
