"""The public numbers of a model in profile ``two-party``: norms, scales and biases as integers, and the scale budget
(docs/two-party.md, §7). Both parties make them from the same tensors, and compare digests.

The bounds come from the matrices, so the server makes :class:`Bounds` and publishes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import ProtocolError, RangeError, UnsupportedModelError
from sordino.shared.twoparty.tables import EXP_PUBLIC, EXP_SHARE, GATED, Activation

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]

# Goes up with every change of what the three do with the same plan: shares of different ones add up to noise.
PROTOCOL: Final = 2
RESIDUAL: Final = 13  # fraction bits
LARGEST: Final = 33  # log2 of a row's sum of squares; beyond it is an error
SUM: Final = 28  # more bits that the residual has until it is opened
NORM: Final = 14  # of norm weights, over a power of two
INPUT: Final = 16  # of the inputs of o_proj and down_proj
ROOT: Final = 26  # of 1 / norm of the residual, once it is cut
CUT_OUT: Final = 19  # of the outputs of a matrix before they are multiplied by it
# Fraction bits of such products, before the scale of their channel, the root of d and the norm's power of two.
NORMED: Final = RESIDUAL + NORM - CUT_OUT + ROOT
TURNED: Final = 18  # of the integers of rotary table and scales
CUT_TURNED: Final = 40
# Of heads with norms of their own: bits cut off of them, and of them times the weights of the norm.
CUT_HEAD: Final = NORMED + TURNED - RESIDUAL
CUT_HEAD_OUT: Final = 13
HEAD: Final = RESIDUAL + NORM - CUT_HEAD_OUT + ROOT
QUERY: Final = NORMED + TURNED - CUT_TURNED
SCORE: Final = 2 * QUERY
SCORE_CELL: Final = SCORE + 1  # log2: 2 nats
EXP: Final = EXP_SHARE + EXP_PUBLIC
MIXED: Final = 15  # of sums of values, cut
TOTAL: Final = 22  # of 1 / sum, once it is cut
CUT_TOTAL: Final = 33
CUT_ATTENDED: Final = MIXED + TOTAL - INPUT
LONGEST: Final = 2048  # positions of a cache, for which sums of values must fit
GATE_CELL: Final = 48  # log2 of a gate's cell
UP: Final = 14
CUT_GATED: Final = GATED + UP - INPUT
CUT_LAST: Final = 12
# Of the hidden states that come out, which are to be multiplied by the root of d.
HIDDEN: Final = RESIDUAL + NORM - CUT_LAST + ROOT
# Where tokens are chosen on shares: fraction bits of hidden states, weights of the head, logits, temperature and noise.
STATE: Final = 16
WEIGHT: Final = 14
LOGIT: Final = STATE + WEIGHT
TEMPERATURE: Final = 12
NOISE: Final = LOGIT - TEMPERATURE
HOTTEST: Final = 4.0  # temperature
GRAIN: Final = 52  # bits of the uniform number that noise is made of
RESOLUTION: Final = 10  # log2 of cells in a nat, within which either of two logits may win


@dataclass(frozen=True, slots=True)
class Family:
    """How models of one kind name their tensors, and what their layers are made of.

    Attributes:
        prefix: of a layer, before its number. norms: of attention and MLP. last: the norm after all layers.
        matrices: the four of a layer, as a bundle groups them. modules: whose scales and biases each has.
        centred: LayerNorm. Its mean is taken off all that is added to the residual, where that is a public linear map;
            what is left is RMSNorm, and a bias.
        gated: the MLP multiplies by ``up``. rotary: positions turn queries and keys; else they are embedded.
        head_norms: of queries and of keys, over each head; or none.
    """

    prefix: str
    norms: tuple[str, str]
    last: str
    matrices: tuple[str, str, str, str]
    modules: tuple[tuple[str, ...], ...]
    centred: bool = False
    gated: bool = True
    rotary: bool = True
    head_norms: tuple[str, ...] = ()


_LLAMA: Final = Family(
    prefix="model.layers.",
    norms=("input_layernorm", "post_attention_layernorm"),
    last="model.norm",
    matrices=("self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj"),
    modules=(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
)
_GPT2_MATRICES: Final = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_GPT2: Final = Family(
    prefix="transformer.h.",
    norms=("ln_1", "ln_2"),
    last="transformer.ln_f",
    matrices=_GPT2_MATRICES,
    modules=tuple((name,) for name in _GPT2_MATRICES),
    centred=True,
    gated=False,
    rotary=False,
)
_QWEN3: Final = replace(_LLAMA, head_norms=("self_attn.q_norm", "self_attn.k_norm"))
FAMILIES: Final = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _QWEN3, "gpt2": _GPT2}
ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder of one of :data:`FAMILIES`.

    Attributes:
        theta: of rotary positions; 0 where there are none.
    """

    family: str
    activation: Activation
    layers: int
    d: int
    heads: int
    groups: int
    head: int
    inner: int
    eps: float
    theta: float
    positions: int

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    def matrix(self, number: int) -> tuple[int, int]:
        """Inputs and outputs of a layer's matrix."""
        attended = self.heads * self.head
        return (
            (self.d, attended + 2 * self.groups * self.head),
            (attended, self.d),
            (self.d, self.inner * (2 if self.kind.gated else 1)),
            (self.inner, self.d),
        )[number]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From a ``config.json``.

        Raises:
            UnsupportedModelError: another kind of model, or one of a known kind with an option that is not.
        """
        family = config.get("model_type")
        activation = ACTIVATIONS.get(config.get("hidden_act") or config.get("activation_function") or "")
        if family not in FAMILIES or activation is None:
            known = ", ".join(FAMILIES)
            raise UnsupportedModelError(f"profile two-party knows {known}, not {family!r} with its activation")
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise UnsupportedModelError(f"profile two-party knows plain rotary positions, not {rope['rope_type']!r}")
        if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
            raise UnsupportedModelError("profile two-party knows no sliding windows")
        if config.get("scale_attn_by_inverse_layer_idx") or config.get("scale_attn_weights") is False:
            raise UnsupportedModelError("profile two-party knows scores that are divided by the root of a head's size")

        def number(*names: str) -> Any:
            return next((config[name] for name in names if config.get(name) is not None), None)

        heads, d = int(number("num_attention_heads", "n_head")), int(number("hidden_size", "n_embd"))
        return cls(
            family=family,
            activation=activation,
            layers=int(number("num_hidden_layers", "n_layer")),
            d=d,
            heads=heads,
            groups=int(number("num_key_value_heads") or heads),
            head=int(number("head_dim") or d // heads),
            inner=int(number("intermediate_size", "n_inner") or 4 * d),
            eps=float(number("rms_norm_eps", "layer_norm_epsilon")),
            theta=float(rope.get("rope_theta", number("rope_theta") or 10000.0)) if FAMILIES[family].rotary else 0.0,
            positions=int(number("max_position_embeddings", "n_positions")),
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one layer, proven by Cauchy and Schwarz from its norms and matrices: largest magnitudes, real numbers."""

    gate: float
    up: float
    value: float
    score: float
    head: float


SLACK: Final = 1 + 2**-9  # rsqrt's error, and roundings
_LEAST: Final = 2.0**-40  # of a bound that is a size: a norm's weights may all be 0
# What biases may add to a product that is normed and not scaled: the rounding of its scale adds little to a wire then.
MOST_CONSTANT: Final = 2.0**16


def bounds(
    shape: Shape, qkv: F64, norm1: F64, gate_up: F64, norm2: F64, added: tuple[F64, F64], head_norms: Sequence[F64] = ()
) -> Bounds:
    """By the real matrices ``[out, in]``, scales included, and the biases that are ``added`` to their outputs. The
    input of a matrix has norm <= sqrt(d) before the norm's weights, which go with the matrix."""
    root = math.sqrt(shape.d) * SLACK
    after = qkv * norm1
    q_rows, k_rows = shape.heads * shape.head, shape.groups * shape.head
    q = after[:q_rows].reshape(shape.heads, shape.head, -1)
    k = after[q_rows : q_rows + k_rows].reshape(shape.groups, shape.head, -1)
    biases = added[0].reshape(-1, shape.head)
    norms_q = root * _spectral(q) + np.linalg.norm(biases[: shape.heads], axis=1)
    norms_k = root * _spectral(k) + np.linalg.norm(biases[shape.heads : shape.heads + shape.groups], axis=1)
    largest = max(norms_q.max(), norms_k.max())
    if head_norms:
        norms_q, norms_k = (
            np.full_like(one, np.abs(w).max() * math.sqrt(shape.head) * SLACK)
            for one, w in zip((norms_q, norms_k), head_norms, strict=True)
        )
    scores = norms_q * np.repeat(norms_k, shape.heads // shape.groups) / math.sqrt(shape.head)
    rows = root * np.linalg.norm(gate_up * norm2, axis=1) + np.abs(added[1])
    values = root * np.linalg.norm(after[q_rows + k_rows :], axis=1) + np.abs(added[0][q_rows + k_rows :])
    return Bounds(
        gate=float(rows[: shape.inner].max(initial=_LEAST)),
        up=float(rows[shape.inner :].max(initial=1.0)),
        value=float(values.max(initial=_LEAST)),
        score=float(scores.max()),
        head=float(max(largest, norms_q.max() / math.sqrt(shape.head), norms_k.max(), _LEAST)),
    )


# What a row may grow by in one step, so that its sum of squares does not come back into the domain mod 2^64: a cell may
# straddle the domain's end by a sixteenth (docs/two-party.md, 6.1).
MOST_GROWTH: Final = 2.0 ** (32 - RESIDUAL) - 2.0 ** (LARGEST / 2) * math.sqrt(17 / 16)


def growth(
    shape: Shape, values: F64, out: F64, gate_up: F64, down: F64, added: tuple[F64, F64], own: tuple[F64, F64]
) -> tuple[float, float]:
    """The largest norm of what attention, and the MLP, can add to a row of the residual.

    Args:
        values, out, gate_up, down: real matrices ``[out, in]`` with scales, the first and the third with the weights of
            the norms before them. added: what biases add to ``values`` and ``gate_up``. own: and to the other two.
    """
    root = math.sqrt(shape.d) * SLACK
    heads = root * _spectral(values.reshape(shape.groups, shape.head, -1))
    heads += np.linalg.norm(added[0].reshape(shape.groups, shape.head), axis=1)
    attended = math.sqrt(float(np.square(heads).sum()) * (shape.heads // shape.groups))
    by_attention = attended * float(_spectral(out[None])[0]) + float(np.linalg.norm(own[0]))
    gate, up = gate_up[: shape.inner], gate_up[shape.inner :]
    biases = added[1][: shape.inner], added[1][shape.inner :]
    if not shape.kind.gated:  # |GELU(g)| <= |g|
        inner = root * float(_spectral(gate[None])[0]) + float(np.linalg.norm(biases[0]))
        return by_attention, inner * float(_spectral(down[None])[0]) + float(np.linalg.norm(own[1]))
    # |SiLU(g) u| <= |g u| <= (a g^2 + u^2 / a) / 2, each times its column's norm: a quadratic form in the normed row.
    columns, norms = np.linalg.norm(down, axis=0), (np.linalg.norm(gate, axis=1), np.linalg.norm(up, axis=1))
    a = (norms[1] + 1e-9) / (norms[0] + 1e-9)
    form = (gate.T * (columns * a)) @ gate + (up.T * (columns / a)) @ up
    mlp = root * root / 2 * float(np.linalg.eigvalsh(form)[-1])
    mlp += float(columns @ (root * (norms[0] * np.abs(biases[1]) + norms[1] * np.abs(biases[0]))))
    mlp += float(columns @ np.abs(biases[0] * biases[1]))
    return by_attention, mlp + float(np.linalg.norm(own[1]))


def _spectral(matrices: F64) -> F64:
    """Largest singular value of each of ``[n, rows, columns]``, of few rows: faster by products than by an SVD."""
    out: F64 = np.sqrt(np.linalg.eigvalsh(matrices @ matrices.transpose(0, 2, 1))[:, -1])
    return out


def integers(values: F64) -> U64:
    """Rounded, as words of Z_2^64."""
    return np.rint(values).astype(np.int64).view(np.uint64)


@dataclass(frozen=True, slots=True)
class Norm:
    """Public weights of a norm as integers, which have their bits whatever the weights' magnitude.

    Attributes:
        weights: ``[d]``, over ``factor``, with ``NORM`` fraction bits; their root mean square is in [1, 2).
        factor: a power of two, which goes into the scales of what the weighed row is multiplied by.
    """

    weights: U64
    factor: float

    @property
    def real(self) -> F64:
        """``[d]``, as they are rounded."""
        out: F64 = self.weights.view(np.int64).astype(np.float64) * (2.0**-NORM * self.factor)
        return out

    @classmethod
    def of(cls, tensors: Mapping[str, F32], name: str) -> Norm:
        """From the client bundle's tensors.

        Raises:
            UnsupportedModelError: a weight is no number.
        """
        weights = tensors[f"{name}.weight"].astype(np.float64)
        square = math.fsum(np.square(weights)) / len(weights)  # exact, so that both parties have the same power
        if not math.isfinite(square):
            raise UnsupportedModelError(f"profile two-party needs finite weights, and {name} has others")
        factor = 2.0 ** ((math.frexp(square)[1] - 1) // 2)
        return cls(integers(weights / factor * 2.0**NORM), factor)


GATE_BITS: Final = 10
_SCORE_BITS: Final = 8  # of a table at least: the window of maxima has 97 cells


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the tables and truncations of one layer must hold.

    Attributes:
        value: fraction bits of values. score_bits: of the numbers of cells of scores. gate_cell: of SiLU's table, a
            real number. cut_up: bits cut off of up.
    """

    value: int
    score_bits: int
    gate_cell: float
    cut_up: int

    @classmethod
    def of(cls, name: str, limit: Bounds) -> Sizes:
        """
        Raises:
            RangeError: a wire would not fit.
        """
        if math.log2(limit.gate * limit.up) + GATED + UP > 61:
            raise RangeError(f"{name}: products of gate and up do not fit")
        if math.log2(limit.head) + NORMED + TURNED > 61:
            raise RangeError(f"{name}: queries or keys do not fit")
        # Fraction bits that up may have before it is cut.
        up_bits = min(NORMED + TURNED, 60 - math.ceil(math.log2(limit.up)))
        return cls(
            value=min(QUERY + 2, 61 - EXP - math.ceil(math.log2(limit.value * LONGEST))),
            score_bits=max(_SCORE_BITS, math.ceil(math.log2(limit.score + 4))),
            gate_cell=2.02 * limit.gate / 2**GATE_BITS,
            cut_up=up_bits - UP,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What a tournament of tokens must hold (docs/two-party.md, §6.7).

    Attributes:
        tokens: of the vocabulary. bits: of a cell's number: two logits with their noise differ by less than
            2^(bits - 1) - 1 cells.
    """

    tokens: int
    bits: int

    @property
    def number_bits(self) -> int:
        """Of a token's number, which are the lowest of a key."""
        return (self.tokens - 1).bit_length()

    @property
    def cell(self) -> int:
        """log2 of a cell, of a key's integers."""
        return self.number_bits + LOGIT - RESOLUTION

    @property
    def pairs(self) -> list[int]:
        """How many meet in each round; one that is left over goes on."""
        out, left = [], self.tokens
        while left > 1:
            out.append(left // 2)
            left -= left // 2
        return out

    @classmethod
    def of(cls, shape: Shape, tensors: Mapping[str, F32]) -> Choice:
        """From the client bundle's tensors, by Cauchy and Schwarz.

        Raises:
            UnsupportedModelError: they have no head. RangeError: its logits would not fit.
        """
        head, last, root = head_of(tensors), shape.kind.last, math.sqrt(shape.d)
        norm = Norm.of(tensors, last)
        weights = np.abs(norm.real)
        added = head @ tensors.get(f"{last}.bias", np.zeros(shape.d, np.float32))
        # And roundings: of hidden states, less than a unit each, and of the head, half of one.
        rounding = weights.max() / norm.factor * 2.0 ** -(WEIGHT + 1)
        largest = root * SLACK * (np.sqrt(np.square(head) @ np.square(weights)) + rounding)
        largest += root * norm.factor * np.abs(head).sum(axis=1) * 2.0**-STATE
        span = float((added + largest).max() - (added - largest).min())
        noise = math.log((GRAIN + 1) * math.log(2)) + (GRAIN + 1) * math.log(2)  # its largest less its smallest
        cells = (span + HOTTEST * noise) * 2.0**RESOLUTION + 4
        choice = cls(len(head), max(_CHOICE_BITS, math.ceil(math.log2(cells)) + 1))
        try:
            choice.check()
            fits = np.abs(head).max() * root * norm.factor * 2.0**WEIGHT < 2.0**31 - 1
        except ValueError:
            fits = False
        if not fits:
            raise RangeError("tokens cannot be chosen on shares of this model: its logits, or its head, do not fit")
        return choice

    def check(self) -> None:
        """
        Raises:
            ValueError: a number is of another type, or out of its range.
        """
        _check_whole(self.tokens, 1, 1 << 20)
        _check_whole(self.bits, _CHOICE_BITS, 63 - self.cell)


_CHOICE_BITS: Final = 8  # at least: one more than a block of leaves has


def head_of(tensors: Mapping[str, F32]) -> F32:
    """``[V, d]``, its own or the embedding.

    Raises:
        UnsupportedModelError: the client bundle has none, or the provider keeps it.
    """
    if "lm_head.scale" in tensors:
        raise UnsupportedModelError("tokens cannot be chosen on shares: the head is not public, it is the provider's")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
        if name in tensors:
            return tensors[name]
    raise UnsupportedModelError("tokens cannot be chosen on shares: the client bundle has no head")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the dealer must know of a model, and both parties agree on: sizes, and no weights.

    Attributes:
        choice: where tokens are opened, and hidden states are not.
    """

    shape: Shape
    sizes: tuple[Sizes, ...]
    choice: Choice | None = None

    def parts(self, tokens: int) -> int:
        """In how many parts the dealer makes a pass of which so many rows choose a token."""
        rounds = len(self.choice.pairs) if self.choice is not None else 0
        return self.shape.layers + 1 + (1 + rounds if tokens else 0)

    def to_json(self) -> bytes:
        body = asdict(self) | {"protocol": PROTOCOL}
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Plan:
        """Parses untrusted bytes.

        Raises:
            ProtocolError: not JSON, or a missing or impossible number; or it is of a release that computes otherwise.
        """
        try:
            body = json.loads(raw)
            if body["protocol"] != PROTOCOL:
                raise ProtocolError(
                    "profile two-party is of another release there: client, server and dealer must fit together"
                )
            choice = Choice(**body["choice"]) if body["choice"] is not None else None
            plan = cls(Shape(**body["shape"]), tuple(Sizes(**one) for one in body["sizes"]), choice)
            plan.check()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"the plan of a model is malformed ({type(error).__name__})") from error
        return plan

    def check(self) -> None:
        """
        Raises:
            ValueError: a number is of another type, or out of its range.
        """
        shape = self.shape
        if shape.family not in FAMILIES or shape.activation not in ACTIVATIONS.values():
            raise ValueError("family or activation")
        for name, most in (("layers", 1024), ("d", 1 << 16), ("heads", 1024), ("head", 1024), ("inner", 1 << 18)):
            _check_whole(getattr(shape, name), 1, most)
        _check_whole(shape.groups, 1, shape.heads)
        _check_whole(shape.positions, 1, 1 << 24)
        if shape.heads % shape.groups or shape.head % 2 or len(self.sizes) != shape.layers:
            raise ValueError("heads, groups or layers do not fit")
        _check_real(shape.eps, 1e-12, 1e-2)
        _check_real(shape.theta, *((1.0, 1e12) if shape.kind.rotary else (0.0, 0.0)))
        for one in self.sizes:
            _check_whole(one.value, 1, QUERY + 2)
            _check_whole(one.score_bits, _SCORE_BITS, 20)
            _check_whole(one.cut_up, 1, 60)
            _check_real(one.gate_cell, 1e-300, 1e6)
        if self.choice is not None:
            self.choice.check()


def _check_whole(value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError("a whole number is out of its range")


def _check_real(value: object, least: float, most: float) -> None:
    if type(value) is not float or not least <= value <= most:
        raise ValueError("a real number is out of its range")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's public integers.

    Attributes:
        turned: scales of q, k and v, reals ``[heads*head + 2*groups*head]``, which go into the rotary table. out, gate,
            up, down: integers by which outputs are multiplied.
        out_mean, down_mean: by which their mean is taken off; None where it stays.
        heads, head_norms: scales of q and k, and weights of their norms, ``[(heads+groups)*head]``; None where heads
            have no norms of their own.
    """

    norm1: Norm
    norm2: Norm
    turned: F64
    out: U64
    gate: U64
    up: U64
    down: U64
    out_mean: U64 | None
    down_mean: U64 | None
    heads: U64 | None
    head_norms: U64 | None

    @classmethod
    def of(cls, shape: Shape, sizes: Sizes, tensors: Mapping[str, F32], number: int) -> Layer:
        """From the client bundle's tensors."""
        kind, prefix = shape.kind, f"{shape.kind.prefix}{number}."
        norm1, norm2 = (Norm.of(tensors, prefix + name) for name in kind.norms)
        qkv, out, gate_up, down = (scales(tensors, prefix, modules) for modules in kind.modules)
        root, grown = math.sqrt(shape.d), 2.0 ** (RESIDUAL + SUM - INPUT)
        turned, inner = root * norm1.factor * qkv, root * norm2.factor * gate_up
        queries, both = shape.heads * shape.head, (shape.heads + shape.groups) * shape.head
        heads = head_norms = None
        if kind.head_norms:
            of_q, of_k = (Norm.of(tensors, prefix + name) for name in kind.head_norms)
            heads = integers(turned[:both] * 2.0**TURNED)
            head_norms = np.concatenate([np.tile(of_q.weights, shape.heads), np.tile(of_k.weights, shape.groups)])
            turned[:both] = math.sqrt(shape.head) * 2.0 ** (NORMED - HEAD)
            turned[:queries] *= of_q.factor
            turned[queries:both] *= of_k.factor
        turned[:queries] /= math.sqrt(shape.head)
        return cls(
            norm1=norm1,
            norm2=norm2,
            turned=turned,
            out=integers(out * grown),
            gate=integers(inner[: shape.inner] * 2.0 ** (GATE_CELL - NORMED) / sizes.gate_cell),
            up=integers(inner[shape.inner :] * 2.0 ** (sizes.cut_up + UP - NORMED)),
            down=integers(down * grown),
            out_mean=integers(out * grown / shape.d) if kind.centred else None,
            down_mean=integers(down * grown / shape.d) if kind.centred else None,
            heads=heads,
            head_norms=head_norms,
        )


def scales(tensors: Mapping[str, F32], prefix: str, modules: Sequence[str]) -> F64:
    """Of the outputs of a matrix."""
    return np.concatenate([tensors[f"{prefix}{name}.scale"] for name in modules]).astype(np.float64)


def biases(tensors: Mapping[str, F32], prefix: str, modules: Sequence[str]) -> F64:
    """Of the outputs of a matrix; 0 where there are none."""
    none = [np.zeros_like(tensors[f"{prefix}{name}.scale"]) for name in modules]
    parts = [tensors.get(f"{prefix}{name}.bias", zero) for name, zero in zip(modules, none, strict=True)]
    return np.concatenate(parts).astype(np.float64)


def rotary(shape: Shape, positions: NDArray[np.int64]) -> tuple[F64, F64]:
    """Cosines and sines, ``[rows, head]``; 1 and 0 where nothing is turned."""
    if not shape.kind.rotary:
        return np.ones((len(positions), shape.head)), np.zeros((len(positions), shape.head))
    half = np.arange(0, shape.head, 2, dtype=np.float64) / shape.head
    angles = positions[:, None] * shape.theta**-half
    both = np.concatenate([angles, angles], axis=1)
    return np.cos(both), np.sin(both)
