"""A whole pass on shares against float64, and what each party sees of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_check import QueueLink, links
from safetensors.numpy import load_file
from scipy.stats import chisquare

from sordino.dealer.layers import PassMaker
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import TwoPartyModel
from sordino.shared.manifest import CLIENT_DIR
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.forward import Cache, Sight, forward
from sordino.shared.twoparty.numbers import Shape, rotary
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.passes import Counters, ranges
from sordino.shared.twoparty.tape import CLIENT, Given, Tape, append_masks

Array = np.ndarray[Any, Any]


def words(*shape: int) -> Array:
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


class Ahead:
    """Products ahead as both parties have them after provisioning: W r + s for the client, s for the server."""

    def __init__(self, model: TwoPartyModel, rows: int) -> None:
        self._model = model
        self._made = {}
        for layer in range(model.plan.shape.layers):
            for matrix in range(4):
                weights = model.matrix(layer, matrix)
                m, n = weights.weights.shape
                r, s = words(rows, n), words(rows, m)
                self._made[layer, matrix] = r, weights.product(r) + s, s

    def product(self, party: Party, layer: int, matrix: int, x: Array) -> Array:
        r, c, s = self._made[layer, matrix]
        if party.index == CLIENT:
            party.send(x - r)
            return c
        return self._model.matrix(layer, matrix).product(party.receive(x.size).reshape(x.shape) + x) - s

    def constant(self, party: Party, layer: int, matrix: int) -> Array:
        return np.zeros(1, np.uint64) if party.index == CLIENT else self._model.constant(layer, matrix)


class Both:
    """Both parties with their caches, and a dealer, for pass after pass."""

    def __init__(self, model: TwoPartyModel) -> None:
        self.model = model
        self.keys = os.urandom(32), os.urandom(32)
        self.caches = [Cache.empty(model.plan.shape) for _ in range(2)]
        self.links: tuple[QueueLink, QueueLink]
        self.parties: list[Party]
        self._counters = [Counters() for _ in range(2)]
        self._next = self._row = 0

    def run(self, rows: Array, kept: list[int]) -> tuple[Array, int]:
        """Hidden states, and how many wires left their domain."""
        shape, count = self.model.plan.shape, len(rows)
        wanted = pb.Pass(number=self._next, rows=count, first_counter=self._row, kept=ranges(kept))
        self._next, self._row = self._next + 1, self._row + count
        news = [self._counters[i].extend(self.caches[i], wanted, self.keys[i], shape) for i in (0, 1)]
        maker = PassMaker(self.keys, self.model.plan, wanted.number, count, self.caches[0].counters)
        made = [maker.make() for _ in range(shape.layers + 1)]
        points, corrections = (b"".join(parts) for parts in zip(*made, strict=True))
        sources = Given(points, b""), Given(points, corrections)
        self.links = links()
        self.parties = [Party(Tape(i, self.keys[i], wanted.number, sources[i]), self.links[i]) for i in (0, 1)]
        x = np.rint(rows * 2.0**nb.RESIDUAL).astype(np.int64).view(np.uint64)
        ahead, sight = Ahead(self.model, count), Sight.causal(news[0])
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(
                    forward, self.parties[i], self.model.public, ahead, self.caches[i], news[i], sight, x * (1 - i)
                )
                for i in (0, 1)
            ]
            first, second = (job.result(timeout=120) for job in jobs)
        assert [source.rest for source in sources] == [0, 0]
        hidden = self.model.public.hidden(first[0] + second[0])
        return hidden, int((first[1] + second[1]).view(np.int64)[0])


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("llama")


@pytest.fixture(scope="module")
def model(bundle: Path) -> TwoPartyModel:
    return TwoPartyModel(MatrixStore(bundle, "cpu"))


def plain(model: TwoPartyModel, bundle: Path, x: Array) -> Array:
    """The same model in float64, with the same integer matrices."""
    shape: Shape = model.plan.shape
    stored = load_file(bundle / CLIENT_DIR / "client.safetensors")
    tensors = {name: value.astype(np.float64) for name, value in stored.items()}
    cos, sin = (table[:, None] for table in rotary(shape, np.arange(len(x))))

    def normed(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + shape.eps) * tensors[name]

    def times(x: Array, layer: int, matrix: int, *names: str) -> Array:
        scales = np.concatenate([tensors[f"model.layers.{layer}.{name}_proj.scale"] for name in names])
        return x @ (model.matrix(layer, matrix).weights.numpy() * scales[:, None]).T

    def turned(a: Array) -> Array:
        half = shape.head // 2
        return a * cos + np.concatenate([-a[..., half:], a[..., :half]], axis=-1) * sin

    for layer in range(shape.layers):
        h = normed(x, f"model.layers.{layer}.input_layernorm.weight")
        y = times(h, layer, 0, "self_attn.q", "self_attn.k", "self_attn.v")
        q, k, v = np.split(y.reshape(len(x), -1, shape.head), [shape.heads, shape.heads + shape.groups], axis=1)
        k, v = (np.repeat(a, shape.heads // shape.groups, axis=1) for a in (turned(k), v))
        scores = np.einsum("rhd,thd->hrt", turned(q), k) / np.sqrt(shape.head)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        e = np.exp(scores - scores.max(axis=2, keepdims=True))
        mixed = np.einsum("hrt,thd->rhd", e / e.sum(axis=2, keepdims=True), v).reshape(len(x), -1)
        x = x + times(mixed, layer, 1, "self_attn.o")
        y = times(normed(x, f"model.layers.{layer}.post_attention_layernorm.weight"), layer, 2, "mlp.gate", "mlp.up")
        gate, up = np.split(y, 2, axis=1)
        x = x + times(gate / (1 + np.exp(-gate)) * up, layer, 3, "mlp.down")
    return normed(x, "model.norm.weight")


def rows_of(bundle: Path, count: int) -> Array:
    embedding = load_file(bundle / CLIENT_DIR / "client.safetensors")["model.embed_tokens.weight"]
    return embedding[np.arange(7, 7 + count) % len(embedding)].astype(np.float64)


def test_passes_are_the_model(model: TwoPartyModel, bundle: Path) -> None:
    """A prompt, tokens after it, and another continuation after a crop: close to float64 at every row."""
    both, x = Both(model), rows_of(bundle, 9)
    right = plain(model, bundle, x)
    hidden, outside = both.run(x[:6], [])
    assert outside == 0
    assert np.abs(hidden - right[:6]).max() < 0.02 * np.abs(right).max()
    for at in range(6, 9):
        hidden, outside = both.run(x[at : at + 1], list(both.caches[0].counters))
        assert outside == 0
        assert np.abs(hidden - right[at]).max() < 0.02 * np.abs(right).max()
    counters = both.caches[0].counters[:5]
    hidden, _ = both.run(x[5:7], counters)
    assert np.abs(hidden - right[5:7]).max() < 0.02 * np.abs(right).max()
    assert both.caches[0].counters == [*counters, 9, 10]


def test_rounds_and_bytes(model: TwoPartyModel, bundle: Path) -> None:
    """17 rounds a layer and 3; bytes of a token do not grow with the rows that the cache has, times their width."""
    both, x = Both(model), rows_of(bundle, 60)
    both.run(x[:4], [])
    assert both.parties[0].count.rounds == 17 * model.plan.shape.layers + 3
    both.run(x[4:5], list(both.caches[0].counters))
    short = both.parties[0].count.sent
    for start in (5, 36):
        both.run(x[start : start + 31][:23], list(both.caches[0].counters))
    both.run(x[59:], list(both.caches[0].counters))
    shape = model.plan.shape
    grown = both.parties[0].count.sent - short
    # Scores to look up, scores less their bound, probabilities: three words a row and head.
    assert grown == (len(both.caches[0]) - 5) * shape.heads * shape.layers * 24


def test_what_is_sent_is_uniform(model: TwoPartyModel, bundle: Path) -> None:
    """All bytes that either party sends of a pass, and no word comes twice."""
    both, x = Both(model), rows_of(bundle, 8)
    for rows in (x, np.zeros_like(x)):
        both.run(rows, [])
        for link in both.links:
            sent = np.frombuffer(b"".join(link.sent), np.uint8)
            assert chisquare(np.bincount(sent, minlength=256)).pvalue > 1e-9
            large = np.concatenate([np.frombuffer(m, np.uint64) for m in link.sent if len(m) % 8 == 0 and len(m) > 512])
            assert len(np.unique(large)) == len(large)


def test_shares_without_masks_are_not_uniform(model: TwoPartyModel, bundle: Path) -> None:
    """So the test above can fail: a client that sends its rows as they are."""
    x = np.rint(rows_of(bundle, 64) * 2.0**nb.RESIDUAL).astype(np.int64)
    assert chisquare(np.bincount(x.view(np.uint8).reshape(-1), minlength=256)).pvalue < 1e-9


def test_rows_out_of_their_domain_are_told(model: TwoPartyModel, bundle: Path) -> None:
    both = Both(model)
    x = np.full((1, model.plan.shape.d), 2.0**16)
    _, outside = both.run(x, [])
    assert outside != 0


def test_counters_are_used_once(model: TwoPartyModel) -> None:
    shape = model.plan.shape
    cache, counters, key = Cache.empty(shape), Counters(), bytes(32)
    counters.extend(cache, pb.Pass(number=0, rows=3, first_counter=0), key, shape)
    for wrong in (
        pb.Pass(number=0, rows=1, first_counter=3, kept=ranges([0, 1, 2])),
        pb.Pass(number=1, rows=1, first_counter=2, kept=ranges([0, 1])),
        pb.Pass(number=1, rows=1, first_counter=3, kept=ranges([1, 2])),
        pb.Pass(number=1, rows=0, first_counter=3),
        pb.Pass(number=1, rows=nb.LONGEST, first_counter=3, kept=ranges([0])),
    ):
        with pytest.raises(Exception, match=r"counter|number|rows|cache"):
            Counters.extend(counters, cache, wrong, key, shape)
    masks = append_masks(key, [0, 1], 2, 1, 2)
    assert (masks[0] != masks[1]).all()
