"""Where a model goes wrong in profile two-party: every layer beside float64, in one process.

Both parties and the dealer's material run here, without a network, and shares are put together, which nothing that is
deployed can do. For each layer the largest error of what goes into its matrices is printed, as a part of the largest
entry; the first one over the tolerance is named, and the exit status is 1. For Llamas.

    python bench/layer_check.py --bundle .demo/bundle --prompt "The capital of France is"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from sordino.client.terminal import progress_bar
from sordino.dealer.layers import PassMaker
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import TwoPartyModel
from sordino.shared.errors import SordinoError, UnsupportedModelError
from sordino.shared.manifest import CLIENT_DIR
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.forward import DOWN, MATRICES, OUT, QKV, Cache, Model, Sight, forward
from sordino.shared.twoparty.numbers import rotary
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.tape import CLIENT, Given, Tape, append_masks

Array = np.ndarray[Any, Any]
Places = dict[tuple[int, int], Array]

NAMES: Final = ("attention's input", "attention's output", "the MLP's input", "the MLP's inner rows")
# Of the largest entry. SmolLM2-135M has 0.012; rows that are wrong are off by all of it.
TOLERANCE: Final = 0.02


class QueueLink:
    """One end of two queues. ``sent`` keeps what went through."""

    def __init__(self, out: Queue[bytes], into: Queue[bytes]) -> None:
        self._out, self._into = out, into
        self.sent: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)
        self._out.put(message)

    def receive(self) -> bytes:
        return self._into.get(timeout=60)


def links() -> tuple[QueueLink, QueueLink]:
    first: Queue[bytes] = Queue()
    second: Queue[bytes] = Queue()
    return QueueLink(first, second), QueueLink(second, first)


class Whole:
    """One pass of both parties, and what goes into each matrix.

    Attributes:
        links: what each sent.
    """

    def __init__(self, model: TwoPartyModel, bundle: Path, public: Model | None = None) -> None:
        self.model, self.public = model, public or model.public
        self.tensors = load_file(bundle / CLIENT_DIR / "client.safetensors")
        self.links = links()
        self._shares: tuple[Places, Places] = ({}, {})
        self._r: Places = {}
        self._s: Places = {}

    def __call__(self, rows: Array) -> tuple[Array, int, Places]:
        """Hidden states, how many wires left their domain, and the inputs of matrices as real numbers."""
        shape, count, keys = self.model.plan.shape, len(rows), (os.urandom(32), os.urandom(32))
        counters = list(range(count))
        maker = PassMaker(keys, self.model.plan, 0, count, counters)
        points, corrections = (
            b"".join(parts) for parts in zip(*(maker.make() for _ in range(shape.layers + 1)), strict=True)
        )
        sources = Given(points, b""), Given(points, corrections)
        for layer in range(shape.layers):
            for matrix in range(4):
                m, n = self.model.matrix(layer, matrix).weights.shape
                self._r[layer, matrix], self._s[layer, matrix] = words(count, n), words(count, m)
        x = np.rint(rows * 2.0**nb.RESIDUAL).astype(np.int64).view(np.uint64)

        def run(i: int) -> tuple[Array, Array]:
            party, cache = Party(Tape(i, keys[i], 0, sources[i]), self.links[i]), Cache.empty(shape)
            new = cache.extend(counters, append_masks(keys[i], counters, 2, shape.layers, shape.groups, shape.head))
            return forward(party, self.public, self, cache, new, Sight.causal(new), x * np.uint64(1 - i))

        with ThreadPoolExecutor(2) as pool:
            first, second = (job.result(120) for job in [pool.submit(run, i) for i in (0, 1)])
        hidden = self.public.hidden(first[0] + second[0])
        inputs = {
            place: (share + self._shares[1][place]).view(np.int64) * self._unit(*place)
            for place, share in self._shares[0].items()
        }
        return hidden, int((first[1] + second[1])[0]), inputs

    def _unit(self, layer: int, matrix: int) -> float:
        """Of what goes into a matrix."""
        if matrix in (OUT, DOWN):
            return 2.0**-nb.INPUT
        one = self.public.layers[layer]
        return 2.0 ** -(nb.RESIDUAL + nb.NORM) * (one.norm1 if matrix == QKV else one.norm2).factor

    def product(self, party: Party, layer: int, matrix: int, x: Array) -> Array:
        self._shares[party.index][layer, matrix] = x
        weights, r, s = self.model.matrix(layer, matrix), self._r[layer, matrix], self._s[layer, matrix]
        if party.index == CLIENT:
            party.send(x - r)
            return weights.product(r) + s
        return weights.product(party.receive(x.size).reshape(x.shape) + x) - s

    def constant(self, party: Party, layer: int, matrix: int) -> Array:
        return np.zeros(1, np.uint64) if party.index == CLIENT else self.model.constant(layer, matrix)


def words(*shape: int) -> Array:
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


def clear_inputs(model: TwoPartyModel, tensors: Mapping[str, Array], x: Array) -> Places:
    """What goes into each matrix in float64; before those of norms, w * x that is not divided by its norm yet."""
    shape, out = model.plan.shape, Places()
    half = shape.head // 2
    cos, sin = (table[:, None] for table in rotary(shape, np.arange(len(x))))

    def times(layer: int, matrix: int, h: Array, *names: str) -> Array:
        scales = np.concatenate([tensors[f"model.layers.{layer}.{name}_proj.scale"] for name in names])
        return h @ (model.matrix(layer, matrix).weights.numpy() * scales[:, None].astype(np.float64)).T

    def normed(layer: int, matrix: int, x: Array, name: str) -> Array:
        out[layer, matrix] = x * tensors[f"model.layers.{layer}.{name}.weight"]
        return out[layer, matrix] / np.sqrt((x * x).mean(axis=1, keepdims=True) + shape.eps)

    def turned(a: Array) -> Array:
        return a * cos + np.concatenate([-a[..., half:], a[..., :half]], axis=-1) * sin

    for layer in range(shape.layers):
        y = times(layer, 0, normed(layer, 0, x, "input_layernorm"), "self_attn.q", "self_attn.k", "self_attn.v")
        q, k, v = np.split(y.reshape(len(x), -1, shape.head), [shape.heads, shape.heads + shape.groups], axis=1)
        k, v = (np.repeat(a, shape.heads // shape.groups, axis=1) for a in (turned(k), v))
        scores = np.einsum("rhd,thd->hrt", turned(q), k) / np.sqrt(shape.head)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        e = np.exp(scores - scores.max(axis=2, keepdims=True))
        e /= e.sum(axis=2, keepdims=True)
        out[layer, 1] = np.einsum("hrt,thd->rhd", e, v).reshape(len(x), -1)
        x = x + times(layer, 1, out[layer, 1], "self_attn.o")
        y = times(layer, 2, normed(layer, 2, x, "post_attention_layernorm"), "mlp.gate", "mlp.up")
        gate, up = np.split(y, 2, axis=1)
        out[layer, 3] = gate / (1 + np.exp(-gate)) * up
        x = x + times(layer, 3, out[layer, 3], "mlp.down")
    return out


def errors(found: Places, right: Places) -> dict[tuple[int, int], float]:
    """Of the input of each matrix: the largest error, as a part of the largest entry."""
    return {place: float(np.abs(found[place] - value).max() / np.abs(value).max()) for place, value in right.items()}


def first_bad(found: Places, right: Places, tolerance: float) -> str | None:
    """The first matrix whose input is off by more than ``tolerance`` of its largest entry."""
    for (layer, matrix), error in errors(found, right).items():
        if not error <= tolerance:
            return f"layer {layer}, {NAMES[matrix]}"
    return None


def check(bundle: Path, prompt: str, tolerance: float, console: Console) -> str | None:
    """Prints all layers' errors; returns where the first is that is too large.

    Raises:
        SordinoError: the bundle is damaged. UnsupportedModelError: it is no Llama.
    """
    model = TwoPartyModel(MatrixStore(bundle, "cpu"))
    config = json.loads((bundle / CLIENT_DIR / "config.json").read_bytes())
    if config["model_type"] != "llama":
        raise UnsupportedModelError("layers are compared of Llamas alone")
    whole = Whole(model, bundle)
    ids = AutoTokenizer.from_pretrained(bundle / CLIENT_DIR, local_files_only=True)(prompt)["input_ids"]
    rows = whole.tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    with progress_bar("three roles, one pass") as done:
        right = clear_inputs(model, whole.tensors, rows)
        done(1, 2)
        _, outside, found = whole(rows)
        done(2, 2)
    off = errors(found, right)
    table = Table(title=f"{config['model_type']}, {len(rows)} rows: largest error by largest entry")
    for column in ("layer", *NAMES):
        table.add_column(column, justify="right")
    for layer in range(model.plan.shape.layers):
        table.add_row(str(layer), *(_cell(off[layer, matrix], tolerance) for matrix in MATRICES))
    console.print(table)
    console.print(f"{outside} wires left the domain of a table")
    return first_bad(found, right, tolerance)


def _cell(error: float, tolerance: float) -> str:
    return f"{error:.1e}" if error <= tolerance else f"[bold red]{error:.1e}[/]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, default=Path(".demo/bundle"))
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        bad = check(options.bundle, options.prompt, options.tolerance, console)
    except SordinoError as error:
        sys.exit(f"error: {error}")
    if bad:
        sys.exit(f"error: the first that is off by more than {options.tolerance:g} is {bad}")
    console.print(f"every layer is within {options.tolerance:g}", highlight=False)


if __name__ == "__main__":
    main()
