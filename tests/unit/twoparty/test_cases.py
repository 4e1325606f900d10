"""Cases that broke other libraries, for profile two-party: what is sent, ends of domains, where a pass goes wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parties import Run, links, signed, uniform
from safetensors.numpy import load_file
from scipy.stats import chisquare

from sordino.client.twoparty.session import check_rows
from sordino.dealer.layers import PassMaker
from sordino.server.store import MatrixStore
from sordino.server.twoparty.session import StreamLink, TwoPartyModel
from sordino.shared.errors import LimitError, RangeError, SessionLostError, TransportError
from sordino.shared.manifest import CLIENT_DIR
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.forward import HIDDEN, Cache, Model, Sight, forward
from sordino.shared.twoparty.numbers import rotary
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.source import Dealer
from sordino.shared.twoparty.steps import Trunc, TruncMul, TruncSquare
from sordino.shared.twoparty.tape import CLIENT, Given, Tape, append_masks

Array = np.ndarray[Any, Any]
Places = dict[tuple[int, int], Array]

CHANCE = 1e-7
NAMES = ("attention's input", "attention's output", "the MLP's input", "the MLP's inner rows")
SECRET = 0x0123456789ABCDE
RUNS = 10_000


def bytes_of(messages: list[bytes]) -> Array:
    return np.frombuffer(b"".join(messages), np.uint8)


# -- 5.5: a share that is sent without a fresh mask --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trunc", "square", "product"])
def test_shares_that_are_sent_are_uniform_and_say_nothing(name: str) -> None:
    """One secret 10,000 times: every byte of what either party sends is uniform; and with secrets that differ, nothing
    that is sent goes with them."""
    step: Any = {
        "trunc": Trunc(RUNS, 20),
        "square": TruncSquare(RUNS, 1, 30),
        "product": TruncMul(RUNS, 1, 20, 20),
    }[name]
    shape = (RUNS,) if name == "trunc" else (RUNS, 1)
    factor = [np.full(RUNS, SECRET)] if name == "product" else []
    same = Run([step], step.run, np.full(shape, SECRET), *factor)
    secrets = uniform(RUNS, 50).reshape(shape)
    other = Run([step], step.run, secrets, *factor)
    for link in same.links:
        for place in bytes_of(link.sent).reshape(-1, 8).T:
            assert chisquare(np.bincount(place, minlength=256)).pvalue > CHANCE
    for link in other.links:
        sent = np.frombuffer(b"".join(link.sent), np.int64)[:RUNS]
        assert abs(np.corrcoef(sent.astype(np.float64), secrets.ravel().astype(np.float64))[0, 1]) < 6 / RUNS**0.5


def test_products_of_shares_that_are_all_one() -> None:
    """x * y * y, y of shares 1 and 1: what is sent for the second product is as uniform as for the first."""
    step = TruncMul(RUNS, 1, 1, 1)

    def program(party: Party, x: Array) -> Array:
        y = np.full(RUNS, 4, np.uint64)  # shares 4 + 4 stand for 8, truncated 4
        once = step.run(party, x, y)
        return step.run(party, once << np.uint64(1), y)

    run = Run([step, step], program, np.full((RUNS, 1), 1 << 20))
    assert np.abs(signed(run.result) - (1 << 19) * 16).max() <= 64
    for link in run.links:
        for message in link.sent:
            for place in bytes_of([message]).reshape(-1, 8).T:
                assert chisquare(np.bincount(place, minlength=256)).pvalue > CHANCE


# -- 5.6: what is insecure is no default -------------------------------------------------------------------------------


def test_a_dealer_without_tls_is_refused_unless_on_loopback() -> None:
    with pytest.raises(TransportError, match=r"grpcs://|loopback|TLS"):
        Dealer("grpc://dealer.example:50552", None, "token")


# -- a client that goes on without waiting -----------------------------------------------------------------------------


def test_words_that_a_pass_has_not_come_to_are_few() -> None:
    """A server keeps no more of them in memory; the end of the client always gets through."""
    with asyncio.Runner() as runner:
        link = StreamLink(runner.get_loop(), lambda words: None, 60.0)
        for _ in range(8):
            link.put(bytes(8))
        with pytest.raises(LimitError, match="wait for its answers"):
            link.put(bytes(8))
        link.put(None)
        assert [link.receive() for _ in range(8)] == [bytes(8)] * 8
        with pytest.raises(SessionLostError, match="client is gone"):
            link.receive()


# -- 5.7: at the ends of a domain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 20, 61])
def test_truncation_at_its_limit(k: int) -> None:
    """2^62 - 1 and -2^62 are right, each time. From 2^62 on the scale budget keeps wires out: see test_steps."""
    limits = np.array([(1 << 62) - 1, (1 << 62) - 2, -(1 << 62), -(1 << 62) + 1])
    x = np.repeat(limits, RUNS // 4)
    step = Trunc(len(x), k)
    over = signed(Run([step], step.run, x).result) - (x >> np.int64(k))
    assert set(np.unique(over)) <= {0, 1}


@pytest.mark.parametrize(("of_limit", "told"), [(0.5, False), (0.97, False), (1.05, True), (1.5, True), (100.0, True)])
def test_rows_at_the_end_of_the_domain(model: TwoPartyModel, bundle: Path, of_limit: float, told: bool) -> None:
    """Sums of squares to 2^33: below, right; a sixteenth and more above, told. In between is a cell that straddles."""
    d = model.plan.shape.d
    rows = np.full((1, d), (2.0**33 * of_limit / d) ** 0.5)
    hidden, outside, _ = Whole(model, bundle)(rows)
    assert bool(outside) == told
    if not told:
        # The layers add little to so much.
        norm = load_file(bundle / CLIENT_DIR / "client.safetensors")["model.norm.weight"]
        assert np.abs(hidden - norm).max() < 0.05 * np.abs(norm).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**15, 1e300])
def test_what_cannot_be_a_row_is_refused(value: float) -> None:
    rows = np.zeros((2, 8))
    check_rows(rows)
    rows[1, 3] = value
    with pytest.raises(RangeError, match="nothing was sent"):
        check_rows(rows)


def test_a_row_whose_squares_wrap_is_refused_at_the_door(model: TwoPartyModel, bundle: Path) -> None:
    """A pass would take the rest of its sum of squares mod 2^64 for a small one, and give a number like any other."""
    d = model.plan.shape.d
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (1, d))
    rows = signs * ((2.0**36 + 2.0**32.9) / d) ** 0.5
    _, outside, _ = Whole(model, bundle)(rows)
    assert outside == 0, "the pass itself cannot tell it"
    with pytest.raises(RangeError, match="nothing was sent"):
        check_rows(rows)
    wide = np.full((1, 9 * d), abs(rows[0, 0]) / 3)  # no entry of which is large
    with pytest.raises(RangeError, match="nothing was sent"):
        check_rows(wide)
    check_rows(wide * 0.9)


# -- 5.4 and 5.9: what a pass shows, and where it is wrong -------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("llama")


@pytest.fixture(scope="module")
def model(bundle: Path) -> TwoPartyModel:
    return TwoPartyModel(MatrixStore(bundle, "cpu"))


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
        maker = PassMaker(keys, self.model.plan, 0, count, counters, {})
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
        hidden = signed(first[0] + second[0]) * 2.0**-HIDDEN * shape.d**0.5
        inputs = {
            place: signed(share + self._shares[1][place]) * 2.0 ** -(nb.RESIDUAL + nb.NORM if place[1] % 2 == 0 else 16)
            for place, share in self._shares[0].items()
        }
        return hidden, int((first[1] + second[1])[0]), inputs

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


def first_bad(found: Places, right: Places, tolerance: float) -> str | None:
    """The first matrix whose input is off by more than ``tolerance`` of its largest entry."""
    for (layer, matrix), value in right.items():
        if not np.abs(found[layer, matrix] - value).max() <= tolerance * np.abs(value).max():
            return f"layer {layer}, {NAMES[matrix]}"
    return None


def prompt(bundle: Path) -> Array:
    return load_file(bundle / CLIENT_DIR / "client.safetensors")["model.embed_tokens.weight"][40:46].astype(np.float64)


def test_each_layer_is_that_of_float64(model: TwoPartyModel, bundle: Path) -> None:
    """Case 5.9. An error is named where it begins, not seen at the end alone."""
    x = prompt(bundle)
    whole = Whole(model, bundle)
    right = clear_inputs(model, whole.tensors, x)
    _, outside, found = whole(x)
    assert outside == 0
    assert len(found) == len(right) == 4 * model.plan.shape.layers
    worst = max(np.abs(found[place] - value).max() / np.abs(value).max() for place, value in right.items())
    print(f"largest error of an input of a matrix: {worst:.2g} of its largest entry")
    assert first_bad(found, right, 0.02) is None
    layers = list(model.public.layers)
    layers[1] = replace(layers[1], norm2=layers[1].norm2 + np.uint64(1 << (nb.NORM - 2)))
    _, _, found = Whole(model, bundle, replace(model.public, layers=tuple(layers)))(x)
    assert first_bad(found, right, 0.02) == "layer 1, the MLP's input"


def test_rows_of_a_prompt_are_in_no_message(model: TwoPartyModel, bundle: Path) -> None:
    """Case 5.4. Nothing is opened beside masked wires: as many messages as rounds and products, whatever the prompt is,
    and the canary's entries are in none of them."""
    canary = np.full((3, model.plan.shape.d), 1234.5) + np.arange(model.plan.shape.d)
    sizes = []
    for x in (prompt(bundle)[:3], canary):
        whole = Whole(model, bundle)
        whole(x)
        sizes.append([[len(message) for message in link.sent] for link in whole.links])
        assert len(whole.links[0].sent) == (17 + 4) * model.plan.shape.layers + 3
        assert len(whole.links[1].sent) == 17 * model.plan.shape.layers + 3
        secret = np.rint(x * 2.0**nb.RESIDUAL).astype(np.int64).view(np.uint64).ravel()
        secret = np.concatenate([secret, secret << np.uint64(nb.SUM), -secret])
        sent = np.concatenate(
            [np.frombuffer(m, np.uint64) for link in whole.links for m in link.sent if not len(m) % 8]
        )
        assert not np.isin(secret[secret != 0], sent).any()
    assert sizes[0] == sizes[1]
