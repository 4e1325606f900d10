"""A forward pass on shares (docs/two-party.md, §6): the same program for both parties, and its list of steps for the
dealer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import UnsupportedModelError
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.cells import Domain
from sordino.shared.twoparty.numbers import Layer, Norm, Plan, Shape, Sizes, integers, rotary
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.steps import Trunc, TruncMul, TruncSquare, WithCache
from sordino.shared.twoparty.tables import Curve, Exp, Gated, Highest, exp_tables, gate_table
from sordino.shared.twoparty.tokens import Head

U64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]

QKV, OUT, GATE_UP, DOWN = MATRICES = range(4)  # of a layer
_SUM: Final = np.uint64(nb.SUM)
_ROOM: Final = 128  # rows of a new cache


class Linear(Protocol):
    """Products of one party's shares with the server's matrices (§3)."""

    def product(self, party: Party, layer: int, matrix: int, x: U64) -> U64:
        """``[rows, in]`` to ``[rows, out]``."""
        ...

    def constant(self, party: Party, layer: int, matrix: int) -> U64:
        """A share of what biases add to a matrix's outputs, once they are normed, or to the residual."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """What both parties know of a model. ``head``: if they choose tokens."""

    plan: Plan
    layers: tuple[Layer, ...]
    last_norm: Norm
    head: Head | None

    def hidden(self, words: U64) -> nb.F64:
        """What :func:`forward` gives, put together, as real numbers; less the bias of the last norm."""
        out: nb.F64 = words.view(np.int64) * (2.0**-nb.HIDDEN * self.plan.shape.d**0.5 * self.last_norm.factor)
        return out

    def digest(self) -> bytes:
        """SHA-256 of all public numbers, tables among them: shares of parties whose numbers differ add up to noise."""
        out = hashlib.sha256(self.plan.to_json())
        for layer, sizes in zip(self.layers, self.plan.sizes, strict=True):
            own = (layer.out_mean, layer.down_mean, layer.heads, layer.head_norms)
            all_have = (layer.norm1.weights, layer.norm2.weights, layer.out, layer.gate, layer.up, layer.down)
            for one in (*all_have, *(one for one in own if one is not None)):
                out.update(one.tobytes())
            out.update(layer.turned.tobytes())
            out.update(gate_table(nb.GATE_BITS, sizes.gate_cell, self.plan.shape.activation).tobytes())
        out.update(self.last_norm.weights.tobytes())
        out.update(np.float64(self.last_norm.factor).tobytes())
        for table in (*rotary(self.plan.shape, np.arange(nb.LONGEST)), *exp_tables()):
            out.update(table.tobytes())
        if self.head is not None:
            out.update(self.head.digest())
        return out.digest()

    @classmethod
    def of(cls, plan: Plan, tensors: Mapping[str, nb.F32]) -> Model:
        """From the client bundle's tensors.

        Raises:
            UnsupportedModelError: a tensor is missing: the model is of another kind.
        """
        try:
            layers = [Layer.of(plan.shape, sizes, tensors, i) for i, sizes in enumerate(plan.sizes)]
            norm = Norm.of(tensors, plan.shape.kind.last)
        except KeyError as error:
            raise UnsupportedModelError(f"profile two-party needs tensor {error} in the client bundle") from None
        head = Head.of(plan.shape, tensors) if plan.choice is not None else None
        return cls(plan, tuple(layers), norm, head)


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """The steps of one layer, in order. ``kept`` is how many rows its cache has, with those of this pass."""

    square: TruncSquare
    root: Curve
    normed: TruncMul
    head_square: TruncSquare | None
    head_root: Curve | None
    head_normed: TruncMul | None
    turned: Trunc
    dot: WithCache
    highest: Highest
    exp: Exp
    total: Curve
    mix: WithCache
    attended: TruncMul
    cut: Trunc
    square2: TruncSquare
    root2: Curve
    normed2: TruncMul
    gated: Gated
    cut2: Trunc

    @classmethod
    def of(cls, shape: Shape, sizes: Sizes, rows: int, kept: int) -> LayerSteps:
        attention = (rows, shape.heads, shape.groups, shape.head, kept)
        square = TruncSquare(rows, shape.d, nb.SUM)
        root = inverse_norm(rows, shape.d, shape.eps)
        cut = root.domain.result_fraction - nb.ROOT
        qkv, turning = shape.matrix(QKV)[1], rows * (shape.heads + shape.groups)
        own = bool(shape.kind.head_norms)
        head_root = inverse_norm(turning, shape.head, shape.eps)
        head_cut = head_root.domain.result_fraction - nb.ROOT
        return cls(
            square=square,
            root=root,
            normed=TruncMul(rows, qkv, nb.CUT_OUT, cut),
            head_square=TruncSquare(turning, shape.head, nb.CUT_HEAD) if own else None,
            head_root=head_root if own else None,
            head_normed=TruncMul(turning, shape.head, nb.CUT_HEAD_OUT, head_cut) if own else None,
            turned=Trunc(rows * qkv, nb.CUT_TURNED),
            dot=WithCache(*attention, values=False),
            highest=Highest(rows * shape.heads, kept, sizes.score_bits, nb.SCORE_CELL, -48, 96),
            exp=Exp(rows * shape.heads * kept, sizes.score_bits + 2, nb.SCORE),
            total=Curve(
                rows * shape.heads, Domain("reciprocal", nb.EXP - 6, nb.EXP + 11, nb.EXP, nb.TOTAL + nb.CUT_TOTAL)
            ),
            mix=WithCache(*attention, values=True),
            attended=TruncMul(rows * shape.heads, shape.head, nb.EXP + sizes.value - nb.MIXED, nb.CUT_TOTAL),
            cut=Trunc(rows * shape.heads * shape.head, nb.CUT_ATTENDED),
            square2=square,
            root2=root,
            normed2=TruncMul(rows, shape.matrix(GATE_UP)[1], nb.CUT_OUT, cut),
            gated=Gated(
                rows * shape.inner, nb.GATE_BITS, nb.GATE_CELL, sizes.gate_cell, sizes.cut_up, shape.activation
            ),
            cut2=Trunc(rows * shape.inner, nb.CUT_GATED),
        )

    def __iter__(self) -> Iterator[Any]:
        return (step for name in self.__slots__ if (step := getattr(self, name)) is not None)


def inverse_norm(rows: int, size: int, eps: float) -> Curve:
    """1 / sqrt of sums of squares, to which d * eps has been added, with as many fraction bits as there is room for."""
    least = math.floor(math.log2(size * eps)) + 2 * nb.RESIDUAL
    bits = math.floor(61.8 + least / 2) - nb.RESIDUAL
    return Curve(rows, Domain("rsqrt", least, nb.LARGEST + 2 * nb.RESIDUAL, 2 * nb.RESIDUAL, bits))


@dataclass(frozen=True, slots=True)
class LastSteps:
    """After the last layer."""

    square: TruncSquare
    root: Curve
    normed: TruncMul

    @classmethod
    def of(cls, shape: Shape, rows: int) -> LastSteps:
        root = inverse_norm(rows, shape.d, shape.eps)
        cut = root.domain.result_fraction - nb.ROOT
        return cls(TruncSquare(rows, shape.d, nb.SUM), root, TruncMul(rows, shape.d, nb.CUT_LAST, cut))

    def __iter__(self) -> Iterator[Any]:
        return iter([self.square, self.root, self.normed])


@dataclass(slots=True)
class Cache:
    """Keys and values in shares: each row opened once under a mask of its own, and this party's share of that mask.

    ``opened`` and ``masks`` are ``[2, layers, rows, groups, head]``; row i belongs to append counter ``counters[i]``.
    """

    opened: U64
    masks: U64
    counters: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, shape: Shape) -> Cache:
        size = (2, shape.layers, _ROOM, shape.groups, shape.head)
        return cls(np.zeros(size, np.uint64), np.zeros(size, np.uint64))

    def __len__(self) -> int:
        return len(self.counters)

    def extend(self, counters: Sequence[int], masks: U64) -> slice:
        """Room for rows of these counters. masks: this party's shares, ``[rows, 2, layers, groups, head]``."""
        start, stop = len(self), len(self) + len(counters)
        while stop > self.opened.shape[2]:
            self.opened, self.masks = (np.concatenate([a, np.zeros_like(a)], axis=2) for a in (self.opened, self.masks))
        self.masks[:, :, start:stop] = masks.transpose(1, 2, 0, 3, 4)
        self.counters += counters
        return slice(start, stop)

    def crop(self, rows: int) -> None:
        del self.counters[rows:]


@dataclass(frozen=True, slots=True)
class Sight:
    """Positions of a pass's rows, ``[rows]``, and which rows of the cache they see, with theirs: ``[rows, kept]``. Each
    sees itself."""

    positions: NDArray[np.int64]
    visible: Bool

    @classmethod
    def causal(cls, new: slice) -> Sight:
        """Of one sequence: a row's place in the cache is its position, and it sees those before it."""
        positions = np.arange(new.start, new.stop)
        return cls(positions, np.arange(new.stop) <= positions[:, None])


def forward(
    party: Party,
    model: Model,
    linear: Linear,
    cache: Cache,
    new: slice,
    sight: Sight,
    x: U64,
) -> tuple[U64, U64]:
    """Shares of the normed hidden states ``[rows, d]``, with ``HIDDEN`` fraction bits, and of how many wires left the
    domain of a table: anything but 0 means that the hidden states are wrong.

    Args:
        x: shares of the embedded rows ``[rows, d]``, with ``RESIDUAL`` fraction bits.
        new: the rows of the cache that are those of this pass.
    """
    rows, kept, shape = x.shape[0], new.stop, model.plan.shape
    turn = rotary(shape, sight.positions)
    outside = np.zeros(1, np.uint64)
    x = x << _SUM
    for number, (layer, sizes) in enumerate(zip(model.layers, model.plan.sizes, strict=True)):
        s = LayerSteps.of(shape, sizes, rows, kept)
        x, t, y, out = _normed(party, s.square, s.root, x, layer.norm1, linear, number, QKV, shape)
        outside += out
        qkv = s.normed.run(party, y, t) + linear.constant(party, number, QKV)
        attended, out = _attention(party, model, s, qkv, turn, cache, number, new, sight.visible)
        outside += out
        y = linear.product(party, number, OUT, attended)
        x = (x << _SUM) + _scaled(y, layer.out, layer.out_mean) + linear.constant(party, number, OUT)
        x, t, y, out = _normed(party, s.square2, s.root2, x, layer.norm2, linear, number, GATE_UP, shape)
        outside += out
        both = s.normed2.run(party, y, t) + linear.constant(party, number, GATE_UP)
        gate, up = both[:, : shape.inner] * layer.gate, both[:, shape.inner :] * layer.up
        if not shape.kind.gated:
            up = party.public(np.full_like(gate, 1 << (sizes.cut_up + nb.UP)))
        gated = s.cut2.run(party, s.gated.run(party, gate.reshape(-1), up.reshape(-1)))
        y = linear.product(party, number, DOWN, gated.reshape(rows, -1))
        x = (x << _SUM) + _scaled(y, layer.down, layer.down_mean) + linear.constant(party, number, DOWN)
    last = LastSteps.of(shape, rows)
    x, squares = last.square.run(party, x)
    t, inside = last.root.run(party, squares + party.public(_epsilon(shape, rows)))
    outside += party.public(np.full(1, rows, np.uint64)) - inside.sum()
    return last.normed.run(party, x * model.last_norm.weights, t), outside


def _scaled(y: U64, scales: U64, mean: U64 | None) -> U64:
    """What a matrix adds to the residual, without its mean if that is to go."""
    return y * scales if mean is None else y * scales - (y @ mean)[:, None]


def _epsilon(shape: Shape, rows: int) -> U64:
    return np.full(rows, round(shape.d * shape.eps * 4**nb.RESIDUAL), np.uint64)


def _normed(
    party: Party,
    square: TruncSquare,
    root: Curve,
    x: U64,
    norm: Norm,
    linear: Linear,
    number: int,
    matrix: int,
    shape: Shape,
) -> tuple[U64, U64, U64, U64]:
    """x truncated, 1 / its root mean square, the product of what is not normed yet, and how many are out of domain."""
    x, squares = square.run(party, x)
    y = linear.product(party, number, matrix, x * norm.weights)
    t, inside = root.run(party, squares + party.public(_epsilon(shape, len(x))))
    return x, t, y, party.public(np.full(1, len(x), np.uint64)) - inside.sum()


def _attention(
    party: Party,
    model: Model,
    s: LayerSteps,
    qkv: U64,
    turn: tuple[nb.F64, nb.F64],
    cache: Cache,
    number: int,
    new: slice,
    visible: Bool,
) -> tuple[U64, U64]:
    rows, kept, shape = len(qkv), new.stop, model.plan.shape
    qkv, outside = _head_normed(party, shape, model.layers[number], s, qkv)
    q, k, v = _split(shape, s.turned.run(party, _turned(model, number, qkv, turn)))
    opened, masks = cache.opened[:, number, :kept], cache.masks[:, number, :kept]
    masked, material = s.dot.begin(party, q)
    shown, opened[0, new], opened[1, new] = party.open(masked, k - masks[0, new], v - masks[1, new])
    scores = s.dot.end(party, shown, material, opened[0], masks[0])
    seen = np.broadcast_to(visible[:, None, :], scores.shape)
    top, above = s.highest.run(party, scores.reshape(-1, kept), seen.reshape(-1, kept))
    e = s.exp.run(party, (scores - top.reshape(rows, -1, 1)).reshape(-1)).reshape(scores.shape) * seen
    to_open, curve = s.total.begin(party, e.sum(axis=2, dtype=np.uint64).reshape(-1))
    masked, material = s.mix.begin(party, e)
    total, shown = party.open(to_open, masked)
    z, inside = s.total.end(party, total, curve)
    mixed = s.mix.end(party, shown, material, opened[1], masks[1])
    attended = s.attended.run(party, mixed.reshape(-1, shape.head), z)
    outside = outside + party.public(np.full(1, len(z), np.uint64)) - inside.sum() + above.sum()
    return s.cut.run(party, attended).reshape(rows, -1), outside


def _head_normed(party: Party, shape: Shape, layer: Layer, s: LayerSteps, qkv: U64) -> tuple[U64, U64]:
    """Queries and keys after norms of their own, where the family has them; and how many are out of their domain."""
    outside = np.zeros(1, np.uint64)
    if s.head_square is None or s.head_root is None or s.head_normed is None:
        return qkv, outside
    if layer.heads is None or layer.head_norms is None:
        raise TypeError("a family with norms of heads, and a layer without")
    both = (shape.heads + shape.groups) * shape.head
    heads = (qkv[:, :both] * layer.heads).reshape(-1, shape.head)
    x, squares = s.head_square.run(party, heads)
    epsilon = np.full(len(x), round(shape.head * shape.eps * 4**nb.RESIDUAL), np.uint64)
    t, inside = s.head_root.run(party, squares + party.public(epsilon))
    weighed = (x.reshape(-1, both) * layer.head_norms).reshape(-1, shape.head)
    normed = s.head_normed.run(party, weighed, t).reshape(-1, both)
    outside += party.public(np.full(1, len(x), np.uint64)) - inside.sum()
    return np.concatenate([normed, qkv[:, both:]], axis=1), outside


def _turned(model: Model, number: int, qkv: U64, turn: tuple[nb.F64, nb.F64]) -> U64:
    """q and k turned by their positions, and all three by their scales: products with public integers."""
    shape, layer, value = model.plan.shape, model.layers[number], model.plan.sizes[number].value
    cos, sin = turn
    rows, half = len(qkv), shape.head // 2
    turning = shape.heads + shape.groups
    heads = qkv.reshape(rows, -1, shape.head)
    scales = layer.turned.reshape(-1, shape.head) * 2.0**nb.TURNED
    other = np.concatenate([heads[:, :turning, half:], heads[:, :turning, :half]], axis=2)
    crossed = np.concatenate([-scales[:turning, half:], scales[:turning, :half]], axis=1)
    out = np.empty_like(heads)
    out[:, :turning] = heads[:, :turning] * integers(cos[:, None, :] * scales[:turning])
    out[:, :turning] += other * integers(sin[:, None, :] * crossed)
    out[:, turning:] = heads[:, turning:] * integers(scales[turning:] * 2.0 ** (value - nb.QUERY))
    return out.reshape(rows, -1)


def _split(shape: Shape, qkv: U64) -> tuple[U64, U64, U64]:
    heads = qkv.reshape(len(qkv), -1, shape.head)
    first, second = shape.heads, shape.heads + shape.groups
    return heads[:, :first], heads[:, first:second], heads[:, second:]
