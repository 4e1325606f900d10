"""Tokens chosen on shares: comparisons at the ends of what they allow, the tournament, and what is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from parties import Run, signed, uniform
from scipy.stats import chisquare, kstest

from sordino.dealer import deal as dealing
from sordino.dealer.points import bit_points
from sordino.dealer.sessions import Session
from sordino.proto.v1 import dealer_pb2 as pb
from sordino.shared.errors import ProtocolError, RangeError, UnsupportedModelError
from sordino.shared.twoparty import aes, points
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.amounts import layer_bytes, size
from sordino.shared.twoparty.numbers import Choice, Plan, Shape, Sizes
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.tape import CLIENT, SERVER
from sordino.shared.twoparty.tokens import Head, Larger, Noise, choose, steps_of_choice

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]


@pytest.fixture(params=["chosen", "cryptography"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cryptography":
        monkeypatch.setattr(aes, "chosen", aes.LibraryHash)


def words(*shape: int) -> U64:
    return np.frombuffer(os.urandom(8 * int(np.prod(shape))), np.uint64).reshape(shape)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bits", [7, 8, 13, 40, 64])
def test_places_below_alpha_are_told(bits: int) -> None:
    """Its neighbours, the ends, whole blocks, and any two."""
    mask = np.uint64((1 << bits) - 1)
    alpha = np.concatenate([words(300), np.zeros(3, np.uint64), np.full(3, 2**64 - 1, np.uint64)]) & mask
    near = [(alpha + np.uint64(step % 2**64)) & mask for step in (0, 1, -1, 63, 64, -64, 128)]
    others = [words(len(alpha)) & mask, np.zeros_like(alpha), np.full_like(alpha, mask)]
    place, alpha = np.concatenate([*near, *others]), np.tile(alpha, len(near) + len(others))
    roots = [words(len(alpha), 2) for _ in range(2)]
    corrections, _ = bit_points(alpha, bits, *roots)
    shares = [points.above(corrections, roots[party], party, bits, place) for party in (0, 1)]
    assert ((shares[0] ^ shares[1]).astype(bool) == (alpha > place)).all()
    assert set(np.unique(shares[0])) == {0, 1}


def test_more_wires_than_are_made_at_once() -> None:
    n = points._CHUNK + 3
    alpha, place, roots = words(n) >> np.uint64(54), words(n) >> np.uint64(54), [words(n, 2) for _ in range(2)]
    corrections, _ = bit_points(alpha, 10, *roots)
    shares = [points.above(corrections, roots[party], party, 10, place) for party in (0, 1)]
    assert ((shares[0] ^ shares[1]).astype(bool) == (alpha > place)).all()


BITS, K = 12, 40
MOST = (1 << (K + BITS - 1)) - (1 << K)  # that two wires may differ by


def compared(a: NDArray[np.int64], b: NDArray[np.int64]) -> tuple[NDArray[np.int64], Run]:
    step = Larger(len(a), BITS, K)
    run = Run([step], step.run, a, b)
    return signed(run.result), run


def test_the_larger_wins() -> None:
    """At all distances from a cell to the largest, and either of the two within a cell, never a third number."""
    gap = np.concatenate([uniform(5000, K + BITS - 1).clip(-MOST + 1, MOST - 1), [MOST - 1, 1 - MOST, 1 << K, 0]])
    b = uniform(len(gap), 62)
    a = b + gap
    found, run = compared(a, b)
    far = (gap >= 0) | (gap < -(1 << K))
    assert (found[far] == np.maximum(a, b)[far]).all()
    assert ((found == a) | (found == b)).all()
    assert run.parties[0].count.rounds == 2
    assert sum(size(Larger(len(a), BITS, K))) == len(a) * (points.width(BITS - 1 - points.BIT_LEAVES) + 16)


def test_within_a_cell_both_may_win() -> None:
    """So a cell is what ties are: half of one below, and either wins about as often."""
    a = np.zeros(4000, np.int64)
    found, _ = compared(a - (1 << (K - 1)), a)
    assert 0.4 < (found == 0).mean() < 0.6


def test_beyond_the_bound_the_smaller_wins() -> None:
    """So the bound is one."""
    a = np.full(50, 1 << (K + BITS - 1), np.int64)
    assert (compared(a, np.zeros_like(a))[0] == 0).all()


# -- the choice ------------------------------------------------------------------------------------------------------

D = 16


class Tournament:
    """Rows whose logits are given: the head is the unit matrix, as far as there are so many."""

    def __init__(self, logits: F64, temperature: float = 0.0, bits: int = 18) -> None:
        self.rows, tokens = logits.shape
        self.choice = Choice(tokens, bits)
        self.choice.check()
        head = Head(np.eye(tokens, dtype=np.int32) << nb.WEIGHT, np.zeros(tokens, np.uint64))
        # The steps of another width: hidden states are logits here.
        steps = [
            step
            for part in range(1 + len(self.choice.pairs))
            for step in steps_of_choice(self.choice, self.rows, tokens, part)
        ]
        hidden = np.rint(logits * 2.0**nb.HIDDEN).astype(np.int64)
        heat = round(temperature * 2**nb.TEMPERATURE)

        def program(party: Party, hidden: U64) -> U64:
            return choose(party, self.choice, head, hidden, heat)

        self.run = Run(steps, program, hidden)
        self.tokens = self.run.result & np.uint64((1 << self.choice.number_bits) - 1)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64, 127])
def test_the_likeliest_token_is_chosen(tokens: int) -> None:
    logits = np.random.default_rng(tokens).normal(0, 8, (200, tokens))
    tournament = Tournament(logits)
    best = np.sort(logits, axis=1)
    clear = best[:, -1] - (best[:, -2] if tokens > 1 else -np.inf) > 2.0 ** (1 - nb.RESOLUTION)
    assert clear.sum() > 190
    assert (tournament.tokens == logits.argmax(axis=1))[clear].all()
    assert (logits[np.arange(200), tournament.tokens.astype(int)] > best[:, -1] - 0.01).all()
    assert tournament.run.parties[0].count.rounds == 1 + 2 * (tokens - 1).bit_length()


def test_it_may_be_any_token_and_the_extremes_of_logits() -> None:
    """The first, the last and those left over of a round; a lead of the whole span; ties, where any of them wins."""
    tokens, span = 37, 2.0 ** (17 - nb.RESOLUTION) - 1
    logits = np.full((tokens, tokens), -span / 2)
    np.fill_diagonal(logits, span / 2 - 0.01)
    assert (Tournament(logits).tokens == np.arange(tokens)).all()
    tied = np.zeros((50, tokens))
    tied[:, [3, 8, 36]] = 5.0
    assert np.isin(Tournament(tied).tokens, [3, 8, 36]).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_from_the_softmax(temperature: float) -> None:
    """And a temperature that is not this one is told apart."""
    logits, draws = np.array([1.0, 0.2, -0.5, 1.6, -2.0]), 20_000
    tournament = Tournament(np.tile(logits, (draws, 1)), temperature)
    seen = np.bincount(tournament.tokens.astype(int), minlength=5)

    def expected(temperature: float) -> F64:
        e = np.exp(logits / temperature)
        out: F64 = draws * e / e.sum()
        return out

    assert chisquare(seen, expected(temperature)).pvalue > 1e-7
    assert chisquare(seen, expected(1.5 * temperature)).pvalue < 1e-7


def noise(n: int) -> F64:
    step = Noise(n)
    out: F64 = signed(Run([step], step.run).result) * 2.0**-nb.NOISE
    return out


def test_noise_is_gumbels() -> None:
    """Of 30,000; and at the ends of what it is made of it is a number, and within the span that tables allow for."""
    assert kstest(noise(30_000), "gumbel_r").pvalue > 1e-7


@pytest.mark.parametrize(("byte", "least", "most"), [(0x00, 36.0, 37.0), (0xFF, -3.7, -3.5)])
def test_ends_of_noise(byte: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        @staticmethod
        def urandom(count: int) -> bytes:
            return bytes([byte]) * count

    monkeypatch.setattr(dealing, "os", Constant)
    assert least < noise(1)[0] < most


def test_what_is_sent_is_uniform_and_its_size_the_same() -> None:
    """Of any logits: all bytes, and no word twice."""
    sizes = set()
    for logits in (np.zeros((40, 48)), np.random.default_rng(1).normal(0, 8, (40, 48))):
        tournament = Tournament(logits)
        for link in tournament.run.links:
            sent = [message for message in link.sent if message]
            sizes.add(tuple(map(len, sent)))
            seen = np.bincount(np.frombuffer(b"".join(sent), np.uint8), minlength=256)
            assert chisquare(seen).pvalue > 1e-9
            large = np.concatenate([np.frombuffer(m, np.uint64) for m in sent if len(m) % 8 == 0 and len(m) > 512])
            assert len(np.unique(large)) == len(large)
    assert len(sizes) == 1


def test_the_bit_that_is_opened_says_nothing() -> None:
    """Always the same comparison, and half of the opened bits are 1."""
    a = np.full(8000, 5 << K, np.int64)
    _, run = compared(a, np.zeros_like(a))
    bits = [np.unpackbits(np.frombuffer(link.sent[1], np.uint8)) for link in run.links]
    assert 0.45 < (bits[0] ^ bits[1]).mean() < 0.55


def shape(d: int, family: str = "llama") -> Shape:
    return Shape(family, "silu", 1, d, 1, 1, d, d, 1e-5, 1e4, 64)


def test_bounds_are_reached_and_held() -> None:
    """Rows along the difference of two tokens reach the span, but for roundings; and no row goes beyond."""
    rng, d = np.random.default_rng(3), D
    head = rng.normal(0, 1, (9, d)).astype(np.float32)
    head[4] = -head[2]
    tensors = {"lm_head.weight": head, "model.norm.weight": rng.uniform(0.5, 2, d).astype(np.float32)}
    choice = Choice.of(shape(d), tensors)
    norm = tensors["model.norm.weight"].astype(np.float64)
    spread = 2 * np.sqrt(d) * np.linalg.norm(head * norm, axis=1).max()
    cells = (spread + nb.HOTTEST * 40.4) * 2.0**nb.RESOLUTION
    assert cells < 2.0 ** (choice.bits - 1) < 2.1 * cells
    x = rng.normal(0, 1, (500, d))
    logits = (np.sqrt(d) * x / np.linalg.norm(x, axis=1, keepdims=True) * norm) @ head.T
    assert np.ptp(logits, axis=1).max() <= spread


def test_the_head_is_that_of_the_bundle() -> None:
    """An own head before the embedding; a bias of the last norm goes in; rounding is what bits of fraction allow."""
    rng, d = np.random.default_rng(4), D
    head, other = rng.normal(0, 1, (2, 7, d)).astype(np.float32)
    norm, bias = np.ones(d, np.float32), rng.normal(0, 1, d).astype(np.float32)
    tied = {"transformer.wte.weight": head, "transformer.ln_f.weight": norm, "transformer.ln_f.bias": bias}
    made = Head.of(shape(d, "gpt2"), tied)
    x = rng.normal(0, 1, (5, d))
    shares = [(np.rint(x / np.sqrt(d) * 2.0**nb.STATE).astype(np.int64).view(np.uint64)), np.zeros((5, d), np.uint64)]
    step = steps_of_choice(Choice(7, 18), 5, d, 0)[1]

    def program(party: Party) -> U64:
        return made.logits(party, shares[party.index])

    found = signed(Run([], program).result) * 2.0**-nb.LOGIT
    assert isinstance(step, Noise)
    assert np.abs(found - (x + bias) @ head.T).max() < 0.01
    both = {"lm_head.weight": other, "model.embed_tokens.weight": head, "model.norm.weight": norm}
    assert (Head.of(shape(d), both).weights == np.rint(other * np.float32(np.sqrt(d) * 2**nb.WEIGHT))).all()


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({}, UnsupportedModelError, "has no head"),
        (
            {"model.embed_tokens.weight": np.ones((3, D), np.float32), "lm_head.scale": np.ones(3, np.float32)},
            UnsupportedModelError,
            "is not public",
        ),
        ({"lm_head.weight": np.full((3, D), 4e4, np.float32)}, RangeError, "do not fit"),
        ({"lm_head.weight": np.full((1 << 17, D), 2e3, np.float32)}, RangeError, "do not fit"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tensors: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Choice.of(shape(D), {"model.norm.weight": np.ones(D, np.float32), **tensors})


@pytest.mark.parametrize(
    "change",
    [
        lambda: Choice(0, 18),
        lambda: Choice(5, 7),
        lambda: Choice(1 << 21, 18),
        lambda: Choice(5, 41),
        lambda: Choice(5, True),
    ],
)
def test_impossible_choices_are_refused(change: Callable[[], Choice]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        change().check()


def joined(plan: Plan) -> Session:
    session = Session("client", "c", "f", plan, lambda *_: None)
    session.holders[SERVER] = "server"
    return session


@pytest.mark.parametrize(("choice", "most"), [(None, 0), (Choice(300, 18), 4)])
def test_the_dealer_deals_tokens_that_the_plan_has(choice: Choice | None, most: int) -> None:
    """Of as many rows as a pass has; in parts of which each is as large as its steps say."""
    plan = Plan(shape(D), (Sizes(value=14, score_bits=8, gate_cell=0.1, cut_up=30),), choice)
    assert Plan.from_json(plan.to_json()) == plan
    session = joined(plan)
    for tokens in range(most, -1, -1):
        number = most - tokens
        wanted = pb.Pass(number=number, rows=4, first_counter=4 * number, tokens=tokens)
        dealing = session.ask(CLIENT, wanted)
        assert session.ask(SERVER, wanted) is dealing
        assert dealing.layers == plan.parts(tokens)
        for layer in range(dealing.layers):
            assert sum(map(len, dealing.maker.make())) == layer_bytes(plan, layer, 4, 4, tokens)
    with pytest.raises(ProtocolError, match="the plan opens no such thing"):
        session.ask(CLIENT, pb.Pass(number=9, rows=4, first_counter=99, tokens=most + 1))


def test_parties_that_ask_for_different_tokens_end_their_session() -> None:
    plan = Plan(shape(D), (Sizes(value=14, score_bits=8, gate_cell=0.1, cut_up=30),), Choice(300, 18))
    session = joined(plan)
    session.ask(CLIENT, pb.Pass(number=0, rows=2, first_counter=0, tokens=1))
    with pytest.raises(ProtocolError, match="different passes under number 0: tokens"):
        session.ask(SERVER, pb.Pass(number=0, rows=2, first_counter=0, tokens=2))
