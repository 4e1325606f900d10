"""What each party receives of a run: nothing that a simulator without the other's input does not draw as well, and
nothing from which notebook 3's attack makes a matrix."""

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
from scipy.stats import chi2, chisquare, ks_2samp, kstest

from sordino.client.twoparty.linear import WordKey
from sordino.dealer.layers import PassMaker
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.server.store import MatrixStore
from sordino.server.twoparty.linear import Provisioner
from sordino.server.twoparty.session import TwoPartyModel
from sordino.shared.manifest import CLIENT_DIR
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.forward import Cache, Sight, forward
from sordino.shared.twoparty.lwe import word_shape
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.passes import Counters, ranges
from sordino.shared.twoparty.tape import CLIENT, SERVER, Given, Tape

Array = np.ndarray[Any, Any]

# Of a right program a test fails once in a million times, and there are some ten of them.
CHANCE = 1e-7


def words(*shape: int) -> Array:
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


class Watched(Tape):
    """Keeps the words that it draws by itself, which are shares of masks; ``cut`` makes worse ones of them."""

    def __init__(self, *arguments: Any, cut: int = 0) -> None:
        super().__init__(*arguments)
        self.drawn: list[Array] = []
        self._cut = np.uint64(cut)

    def words(self, *shape: int) -> Array:
        self.drawn.append(super().words(*shape) >> self._cut)
        return self.drawn[-1]

    def given(self, *shape: int) -> Array:
        try:
            return super().given(*shape)
        finally:
            if self.party == CLIENT:
                self.drawn.pop()

    def points(self, wires: int, width: int) -> tuple[Array, Array]:
        try:
            return super().points(wires, width)
        finally:
            self.drawn.pop()


class Run:
    """Pass after pass of both parties and a dealer, and what they got.

    Attributes:
        received: of each party, messages of the other. corrections: the server's, of the dealer. masks: that the
            parties' shares add up to; of the cache's rows and of products ahead too.
    """

    def __init__(self, model: TwoPartyModel, *, keys: tuple[bytes, bytes] | None = None, cut: int = 0) -> None:
        self.model, self.cut = model, cut
        self.keys = keys or (os.urandom(32), os.urandom(32))
        self.caches = [Cache.empty(model.plan.shape) for _ in range(2)]
        self.received: tuple[list[bytes], list[bytes]] = ([], [])
        self.corrections: list[bytes] = []
        self.masks: list[Array] = []
        self._counters = [Counters() for _ in range(2)]
        self._row = 0
        self._ahead: dict[tuple[int, int], tuple[Array, Array, Array]] = {}

    def __call__(self, rows: Array, kept: list[int], number: int) -> None:
        shape, count = self.model.plan.shape, len(rows)
        wanted = pb.Pass(number=number, rows=count, first_counter=self._row, kept=ranges(kept))
        self._row += count
        news = [self._counters[i].extend(self.caches[i], wanted, self.keys[i], shape) for i in (0, 1)]
        maker = PassMaker(self.keys, self.model.plan, number, count, self.caches[0].counters)
        made = [maker.make() for _ in range(shape.layers + 1)]
        points, corrections = (b"".join(parts) for parts in zip(*made, strict=True))
        both: tuple[QueueLink, QueueLink] = links()
        sources = Given(points, b""), Given(points, corrections)
        tapes = [Watched(i, self.keys[i], number, sources[i], cut=self.cut) for i in (0, 1)]
        x = np.rint(rows * 2.0**nb.RESIDUAL).astype(np.int64).view(np.uint64)
        for layer in range(shape.layers):
            for matrix in range(4):
                weights = self.model.matrix(layer, matrix)
                m, n = weights.weights.shape
                r, s = words(count, n), words(count, m)
                self._ahead[layer, matrix] = r, weights.product(r) + s, s
                self.masks.append(r)
        parties = [Party(tape, link) for tape, link in zip(tapes, both, strict=True)]
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(
                    forward, party, self.model.public, self, cache, new, Sight.causal(new), x * (1 - party.index)
                )
                for party, cache, new in zip(parties, self.caches, news, strict=True)
            ]
            hidden, outside = jobs[SERVER].result(timeout=120)
            jobs[CLIENT].result(timeout=120)
        both[SERVER].send(np.concatenate([outside, hidden.reshape(-1)]).tobytes())
        self.received[CLIENT].extend(both[SERVER].sent)
        self.received[SERVER].extend(both[CLIENT].sent)
        self.corrections.append(corrections)
        self.masks += [a + b for a, b in zip(tapes[0].drawn, tapes[1].drawn, strict=True)]
        new = news[0]
        self.masks.append(self.caches[0].masks[:, :, new] + self.caches[1].masks[:, :, new])

    def product(self, party: Party, layer: int, matrix: int, x: Array) -> Array:
        r, c, s = self._ahead[layer, matrix]
        if party.index == CLIENT:
            party.send(x - r)
            return c
        return self.model.matrix(layer, matrix).product(party.receive(x.size).reshape(x.shape) + x) - s

    def constant(self, party: Party, layer: int, matrix: int) -> Array:
        return np.zeros(1, np.uint64) if party.index == CLIENT else self.model.constant(layer, matrix)

    def view(self, party: int) -> Array:
        """All that the other sent, as words of 8 bytes."""
        whole = b"".join(self.received[party])
        return np.frombuffer(whole[: len(whole) // 8 * 8], np.uint64)


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("llama")


@pytest.fixture(scope="module")
def model(bundle: Path) -> TwoPartyModel:
    return TwoPartyModel(MatrixStore(bundle, "cpu"))


@pytest.fixture(scope="module")
def prompts(bundle: Path) -> tuple[Array, Array]:
    """Embedded rows of two prompts that could not differ more: words, and one token again and again, large."""
    embedding = load_file(bundle / CLIENT_DIR / "client.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    return embedding[10:14], np.full((4, embedding.shape[1]), 100.0)


def of_bytes(view: Array) -> float:
    return float(chisquare(np.bincount(view.view(np.uint8), minlength=256)).pvalue)


def of_bits(view: Array) -> float:
    """Each of the 64 places of a word has as many ones as zeros."""
    ones = np.array([int(((view >> np.uint64(i)) & np.uint64(1)).sum()) for i in range(64)])
    return float(chi2.sf((((2 * ones - len(view)) ** 2) / len(view)).sum(), 64))


def with_crops(model: TwoPartyModel, prompts: tuple[Array, Array], **options: Any) -> Run:
    """A prompt, tokens, and after a crop others in their places; then another prompt."""
    run, (x, other) = Run(model, **options), prompts
    run(x, [], 0)
    run(x[:1], [0, 1, 2, 3], 1)
    run(x[1:2], [0, 1, 2, 3], 2)
    run(x[2:4], [0, 1, 2, 3, 5], 3)
    run(other, [0], 4)
    return run


@pytest.fixture(scope="module")
def cropped(model: TwoPartyModel, prompts: tuple[Array, Array]) -> Run:
    return with_crops(model, prompts)


def test_all_that_is_received_is_uniform(cropped: Run) -> None:
    """By bytes and by places of bits: messages of each party, and the dealer's corrections."""
    for view in (cropped.view(CLIENT), cropped.view(SERVER), np.frombuffer(b"".join(cropped.corrections), np.uint64)):
        assert len(view) > 10_000
        assert of_bytes(view) > CHANCE
        assert of_bits(view) > CHANCE


def again(masks: list[Array]) -> int:
    """How many words are there for the second time. Of n random ones: n^2 / 2^65."""
    every = np.concatenate([one.reshape(-1) for one in masks])
    return len(every) - len(np.unique(every))


def test_no_mask_is_used_twice(model: TwoPartyModel, prompts: tuple[Array, Array], cropped: Run) -> None:
    """Over passes with crops, of all wires, of rows of the cache, and of products ahead."""
    assert sum(one.size for one in cropped.masks) > 20_000
    assert again(cropped.masks) == 0
    for view in (cropped.view(CLIENT), cropped.view(SERVER)):
        assert again([view]) == 0
    # And such a thing is seen: two passes under one number.
    first, second = (Run(model, keys=cropped.keys) for _ in range(2))
    first(prompts[0], [], 7)
    second(prompts[1], [], 7)
    assert again(first.masks + second.masks) > 1000


def unit(view: Array) -> Array:
    """Words to [0, 1)."""
    return view * 2.0**-64


RUNS = 12


def views(model: TwoPartyModel, rows: Array, party: int, **options: Any) -> Array:
    """``[RUNS, words]``: of so many sessions, of one pass each."""
    out = []
    for _ in range(RUNS):
        run = Run(model, **options)
        run(rows, [], 0)
        out.append(run.view(party))
    return np.stack(out)


def smallest(real: Array, other: Array) -> float:
    """The least p-value of several tests whether ``real`` is as ``other``, of the same shape: of words; of differences
    of two sessions at one place, where masks used twice would show; of means of a place over all sessions."""
    steps = real[1:] - real[:-1], other[1:] - other[:-1]
    places = unit(real).mean(axis=0), unit(other).mean(axis=0)
    pairs = ((unit(real), unit(other)), (unit(steps[0]), unit(steps[1])), places)
    return min(float(ks_2samp(a.reshape(-1), b.reshape(-1)).pvalue) for a, b in pairs)


@pytest.mark.parametrize("party", [CLIENT, SERVER])
def test_a_simulator_draws_the_same(model: TwoPartyModel, prompts: tuple[Array, Array], party: int) -> None:
    """It knows the sizes alone. Neither prompt's view is told from it, nor one prompt's from the other's."""
    first, second = (views(model, rows, party) for rows in prompts)
    simulated = words(*first.shape)
    p = [smallest(first, simulated), smallest(second, simulated), smallest(first, second)]
    print(f"party {party}: real and simulated differ with p = {min(p):.2g}, over {first.size} words each")
    assert min(p) > CHANCE


def test_the_simulator_is_told_from_a_worse_program(model: TwoPartyModel, prompts: tuple[Array, Array]) -> None:
    """So the test above can fail: masks without their top bits, and masks of a session in another."""
    cut = views(model, prompts[0], SERVER, cut=8)
    assert smallest(cut, words(*cut.shape)) < 1e-12
    keys = os.urandom(32), os.urandom(32)
    same = views(model, prompts[0], SERVER, keys=keys)
    assert smallest(same, words(*same.shape)) < 1e-12


# -- the attack of notebook 3 ------------------------------------------------------------------------------------------


def solve(a: Array, b: Array) -> Array:
    """X with a X = b mod 2^64, for ``a [R, n]`` of more rows than it needs: Gauss and Jordan, with odd pivots."""
    rows, n = np.concatenate([a, b], axis=1), a.shape[1]
    for k in range(n):
        odd = k + np.flatnonzero(rows[k:, k] & np.uint64(1))
        assert len(odd), "no odd pivot: more rows are needed"
        rows[[k, odd[0]]] = rows[[odd[0], k]]
        rows[k] *= np.uint64(pow(int(rows[k, k]), -1, 1 << 64))
        factors = rows[:, k].copy()
        factors[k] = 0
        rows -= factors[:, None] * rows[k]
    return rows[:n, n:]


def test_products_ahead_do_not_give_the_matrix(model: TwoPartyModel) -> None:
    """A client has r, which it chose, and c = W r + s of as many rows as it likes. The solve that gives W in the other
    profile, where there is no s, gives noise."""
    matrix = model.matrix(0, 0).weights.numpy()
    m, n = matrix.shape
    count = n + 24
    key, shape, r = WordKey(), word_shape(count, n, m), words(count, n)
    answers = list(Provisioner(key.public).answers(matrix, key.requests(r, shape), shape))
    c = key.open([message for message, _ in answers], shape)[:count]
    s = np.concatenate([part for _, part in answers], axis=1)[:count]

    def recovered(products: Array) -> tuple[float, float]:
        guess = solve(r, products).T.view(np.int64)
        return float((guess == matrix).mean()), float(abs(np.corrcoef(guess.ravel(), matrix.ravel())[0, 1]))

    other, here = recovered(c - s), recovered(c)
    print(f"of {m * n} weights: without s {100 * other[0]:g} %, with s {100 * here[0]:g} % (correlation {here[1]:.4f})")
    assert other == (1.0, pytest.approx(1.0))
    assert here[0] == 0
    assert here[1] < 6 / np.sqrt(m * n)


def test_the_same_rows_twice_give_no_difference(model: TwoPartyModel) -> None:
    """A client that asks again for the rows that it has gets products with another s."""
    matrix = model.matrix(0, 0).weights.numpy()
    m, n = matrix.shape
    key, shape, r = WordKey(), word_shape(40, n, m), words(40, n)
    provisioner = Provisioner(key.public)
    both = []
    for _ in range(2):
        answers = provisioner.answers(matrix, key.requests(r, shape), shape)
        both.append(key.open([message for message, _ in answers], shape)[:40])
    assert kstest(unit(both[0] - both[1]).reshape(-1), "uniform").pvalue > CHANCE
