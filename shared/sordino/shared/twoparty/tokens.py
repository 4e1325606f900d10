"""The next token chosen on shares: logits, noise, and a tournament of which the winner's number alone is opened
(docs/two-party.md, §6.7).

A *key* is a logit and under it, in the lowest bits, the number of its token: what wins brings its number along.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.shared.jit import compiled
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty import points
from sordino.shared.twoparty.numbers import Choice, Norm, Shape, head_of
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.steps import Trunc
from sordino.shared.twoparty.tables import index

U64 = NDArray[np.uint64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@compiled
def _products(weights: I32, x: U64, out: U64) -> None:
    """``weights [V, d]`` times ``x [n, d]``, mod 2^64, to ``out [n, V]``."""
    for v in range(len(weights)):
        for i in range(len(x)):
            total = np.uint64(0)
            for j in range(x.shape[1]):
                total += np.uint64(np.int64(weights[v, j])) * x[i, j]
            out[i, v] = total


@dataclass(frozen=True, slots=True)
class Head:
    """The public head as integers.

    Attributes:
        weights: ``[V, d]``, times the root of d and the last norm's factor, with ``WEIGHT`` fraction bits. constant:
            ``[V]``, what the bias of the last norm adds to logits.
    """

    weights: I32
    constant: U64

    @classmethod
    def of(cls, shape: Shape, tensors: Mapping[str, F32]) -> Head:
        """From the client bundle's tensors.

        Raises:
            UnsupportedModelError: they have no head.
        """
        weights = head_of(tensors)
        bias = tensors.get(f"{shape.kind.last}.bias")
        added = np.zeros(len(weights)) if bias is None else weights.astype(np.float64) @ bias
        factor = math.sqrt(shape.d) * Norm.of(tensors, shape.kind.last).factor
        return cls(
            np.rint(weights * np.float32(factor * 2**nb.WEIGHT)).astype(np.int32),
            nb.integers(added * 2.0**nb.LOGIT),
        )

    def digest(self) -> bytes:
        out = hashlib.sha256(self.weights.tobytes())
        out.update(self.constant.tobytes())
        return out.digest()

    def logits(self, party: Party, x: U64) -> U64:
        """``[n, d]`` with ``STATE`` fraction bits to ``[n, V]`` with ``LOGIT``."""
        out = np.empty((len(x), len(self.weights)), np.uint64)
        _products(self.weights, np.ascontiguousarray(x), out)
        return out + party.public(self.constant)


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel noise of the dealer's, ``[n]`` with ``NOISE`` fraction bits. No round."""

    n: int

    def run(self, party: Party) -> U64:
        return party.tape.given(self.n)


@dataclass(frozen=True, slots=True)
class Larger:
    """The larger of two wires, and either of them if they are less than a cell apart: ``[n]`` each to ``[n]``, two
    rounds (§6.7, Lemmas 8 and 9).

    Attributes:
        bits: of a cell's number; wires differ by less than 2^(bits - 1) - 1 cells. k: log2 of a cell.
    """

    n: int
    bits: int
    k: int

    def run(self, party: Party, a: U64, b: U64) -> U64:
        tape, n, below = party.tape, self.n, self.bits - 1
        r = tape.words(n)
        corrections, roots = tape.points(n, points.width(below - points.BIT_LEAVES))
        flip = tape.small(np.uint8, n) & np.uint8(1)
        s, sr = tape.given(n), tape.given(n)
        (opened,) = party.open(a - b + r)
        place = index(opened, self.k, self.bits)
        top, rest = (place >> np.uint64(below)).astype(np.uint8), place & np.uint64((1 << below) - 1)
        borrow = points.above(corrections, roots, party.index, below, rest)
        shown = party.open_bits(borrow ^ flip)
        # [a >= b] is s where this is 0, and 1 - s where it is 1; times a - b = opened - r
        turned = (shown ^ np.uint8(1) ^ top).astype(np.bool_)
        bit: U64 = np.where(turned, party.public(np.ones_like(s)) - s, s)
        masked: U64 = np.where(turned, r - sr, sr)
        return b + bit * opened - masked


def steps_of_choice(choice: Choice, rows: int, d: int, part: int) -> list[Any]:
    """Of the choice for so many rows: part 0 is what comes before the tournament, the others are its rounds."""
    if part == 0:
        return [Trunc(rows * d, nb.HIDDEN - nb.STATE), Noise(rows * choice.tokens)]
    return [Larger(rows * choice.pairs[part - 1], choice.bits, choice.cell)]


def choose(party: Party, choice: Choice, head: Head, hidden: U64, temperature: int) -> U64:
    """Shares mod 2^``number_bits`` of the tokens that rows ``hidden [n, d]`` choose: ``[n]``, and of nothing else.

    Args:
        temperature: with ``TEMPERATURE`` fraction bits.
    """
    rows, d = hidden.shape
    cut, noise = steps_of_choice(choice, rows, d, 0)
    logits = head.logits(party, cut.run(party, hidden))
    logits += noise.run(party).reshape(logits.shape) * np.uint64(temperature)
    keys = (logits << np.uint64(choice.number_bits)) + party.public(np.arange(choice.tokens, dtype=np.uint64))
    for part, pairs in enumerate(choice.pairs, 1):
        (larger,) = steps_of_choice(choice, rows, d, part)
        first, second, rest = keys[:, :pairs], keys[:, pairs : 2 * pairs], keys[:, 2 * pairs :]
        won = larger.run(party, first.reshape(-1), second.reshape(-1)).reshape(rows, pairs)
        keys = np.concatenate([won, rest], axis=1)
    return keys[:, 0] & np.uint64((1 << choice.number_bits) - 1)
