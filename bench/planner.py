"""Is the planner right? Predicted against measured times of block products, and what its choices cost.

For some numbers of rows and the shapes of SmolLM2-135M the products are really made (both halves in this process, no
network) in the block shape that the planner picks and in others around it. Reported: the ratio of measured to predicted
time, what the choice costs against the best shape measured, at three bandwidths, and the constants that a non-negative
least-squares fit to these measurements would give instead of those in ``sordino.client.blocks``.

    python bench/planner.py --json bench/results/planner-2-cores.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy.optimize import nnls

from sordino.client.bench import machine
from sordino.client.blocks import Block, prices
from sordino.client.rlwe import SecretKey
from sordino.server.blockkernels import CompiledBlocks
from sordino.server.blocks import BlockProducts, Wanted
from sordino.server.kernel import RingMatrix, choose_kernel
from sordino.shared.manifest import GroupSpec, MemberSpec
from sordino.shared.packing import BlockShape, Part, plan
from sordino.shared.rlwe import PARAMS, RESIDUE_BITS, SWITCH_BITS, pack, unpack

SHAPES: Final = {"qkv": (576, 960), "o": (576, 576), "gate, up": (576, 3072), "down": (1536, 576)}
ROWS: Final = (1, 8, 32, 256)
MBIT: Final = (100, 1000, 10000)
_NEIGHBOURS: Final = (0.25, 0.5, 0.7, 1.4, 2.0, 4.0)  # times the inputs of the block that was picked


@dataclass(frozen=True, slots=True)
class Measured:
    """A product in one block shape: seconds of both halves, bytes, and what it counts."""

    shape: str
    rows: int
    block: tuple[int, int]
    bits: int
    seconds: float
    parts: tuple[Part, ...]

    def predicted(self, mbit: float) -> float:
        whole, switched = prices(mbit * 125_000)
        return (switched if self.bits else whole).of(self.parts, 1)

    def total(self, mbit: float) -> float:
        """Seconds with the network: the bytes are known, and the price of a message is the planner's own."""
        choice = prices(mbit * 125_000)[0]
        size = sum(part.shape.upload_bytes() + part.shape.download_bytes(self.bits) for part in self.parts)
        return self.seconds + size * choice.byte + choice.message * len(self.parts)


def neighbours(rows: int, n: int, m: int, bits: int) -> Iterator[tuple[Part, ...]]:
    """The planner's choices at all bandwidths, and blocks of other sizes, each once."""
    room, seen = PARAMS.n // rows, set[int]()
    for mbit in MBIT:
        chosen = plan(rows, n, m, prices=next(p for p in prices(mbit * 125_000) if p.bits == bits))
        for factor in (1.0, *_NEIGHBOURS):
            inputs = min(room, n, max(1, round(chosen[0].shape.inputs * factor)))
            for size in {-(-n // -(-n // inputs)), 1 << (inputs.bit_length() - 1)} - seen:
                seen.add(size)
                shape = BlockShape(rows, size, max(1, room // size), n, m)
                whole = (Part(slice(0, n), slice(0, m), shape),)
                yield chosen if factor == 1.0 and size == chosen[0].shape.inputs else whole


def measure(name: str, rows: int, parts: tuple[Part, ...], bits: int, matrix: RingMatrix, repeats: int) -> Measured:
    """The median over products; the weights are encoded before."""
    n, m = matrix.in_features, matrix.out_features
    members = (MemberSpec(name="w", out_features=m),)
    group = GroupSpec(name=name, layer=0, in_features=n, members=members, weight_bits=8, l1_max=127 * n, l2_max=127 * n)
    products, key = BlockProducts(4 << 30, CompiledBlocks(parallel=True)), SecretKey(parallel=True)
    x = np.random.default_rng(0).integers(0, 1 << 31, (rows, n), dtype=np.uint32)
    width = bits or RESIDUE_BITS

    def once() -> None:
        for part in parts:
            block = Block(0, group, part, transposed=False, bits=bits)
            seed, c0, _ = block.encrypt(x, key)
            shape = (2, PARAMS.n, part.shape.input_blocks)
            ((out0, out1),) = products.products(matrix, Wanted(0, False, part, bits), [(seed, unpack(c0, shape))])
            block.decrypt(pack(out0, width), pack(out1, width), key)

    once()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    first = parts[0].shape
    return Measured(name, rows, (first.inputs, first.outputs), bits, statistics.median(times), parts)


def fit(measured: list[Measured]) -> dict[str, float]:
    """Microseconds for an encrypted block, an answered one (whole, switched, folded), a pair of them, and a message."""
    counts, seconds = [], []
    for one in measured:
        blocks_in = sum(part.shape.input_blocks for part in one.parts)
        blocks_out = sum(part.shape.output_blocks for part in one.parts)
        pairs = sum(part.shape.input_blocks * part.shape.output_blocks for part in one.parts)
        folds = one.parts[0].shape.folds
        answered = [not one.bits, bool(one.bits) and not folds, bool(one.bits) and folds]
        row = (blocks_in, *(blocks_out if kind else 0 for kind in answered), pairs, len(one.parts))
        # Weighted so that a short product counts as much as a long one.
        counts.append(np.array(row) / one.seconds)
        seconds.append(1.0)
    found, _ = nnls(np.array(counts), np.array(seconds))
    names = ("encrypt", "answer", "answer_switched", "answer_folded", "pair", "message")
    return {name: round(1e6 * value, 2) for name, value in zip(names, found, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng, kernel = np.random.default_rng(1), choose_kernel(torch.device("cpu"))
    measured: list[Measured] = []
    for name, (n, m) in SHAPES.items():
        weights = torch.from_numpy(rng.integers(-40, 41, (m, n), dtype=np.int8))
        matrix = RingMatrix(weights, 1, kernel)
        for rows, bits in itertools.product(ROWS, (0, SWITCH_BITS)):
            for parts in neighbours(rows, n, m, bits):
                measured.append(measure(name, rows, parts, bits, matrix, options.repeats))
        print(f"{name}: {sum(one.shape == name for one in measured)} block shapes measured", flush=True)
    result: dict[str, Any] = {
        "machine": machine(),
        "fit_us": fit(measured),
        "choices": [],
        "measured": [
            {
                "shape": one.shape,
                "rows": one.rows,
                "block": f"{one.block[0]} x {one.block[1]}",
                "bits": one.bits,
                "ms": round(1e3 * one.seconds, 3),
            }
            for one in measured
        ],
    }
    for mbit, name, rows in itertools.product(MBIT, SHAPES, ROWS):
        tried = [one for one in measured if (one.shape, one.rows) == (name, rows)]
        chosen = min(tried, key=lambda one: one.predicted(mbit))
        best = min(tried, key=lambda one: one.total(mbit))
        result["choices"].append(
            {
                "mbit": mbit,
                "shape": name,
                "rows": rows,
                "block": f"{chosen.block[0]} x {chosen.block[1]}",
                "bits": chosen.bits,
                "predicted_ms": round(1e3 * chosen.predicted(mbit), 2),
                "measured_ms": round(1e3 * chosen.total(mbit), 2),
                "measured_to_predicted": round(chosen.total(mbit) / chosen.predicted(mbit), 2),
                "best_block": f"{best.block[0]} x {best.block[1]}",
                "cost_of_choice": round(chosen.total(mbit) / best.total(mbit), 3),
            }
        )
    ratios = [choice["measured_to_predicted"] for choice in result["choices"]]
    losses = [choice["cost_of_choice"] for choice in result["choices"]]
    result["summary"] = {
        "measured_to_predicted": [min(ratios), statistics.median(ratios), max(ratios)],
        "cost_of_choice": [statistics.median(losses), max(losses)],
    }
    print(json.dumps({"fit_us": result["fit_us"], **result["summary"]}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
