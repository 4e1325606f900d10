"""A Llama layer in float64, of a bundle or drawn: what results on shares are compared with, and what is public."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from sordino.shared.errors import SordinoError

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a layer: ``hidden`` is the width, ``inner`` that of gate and up."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @property
    def parts(self) -> list[int]:
        """Columns of q, k and v in their common matrix."""
        return [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]


SMOLLM2: Final = Shape(hidden=576, heads=9, kv_heads=3, head_dim=64, inner=1536)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights, float64: ``[in, out]`` of q|k|v, o, gate|up and down, and norms ``[hidden]``."""

    shape: Shape
    matrices: list[Tensor]
    norms: tuple[Tensor, Tensor]
    eps: float
    theta: float


@dataclass(frozen=True, slots=True)
class Public:
    """What both parties know, float64: norms, and cos and sin of the new row's position, ``[head_dim]``.

    ``shifts``: powers of two that bring each norm's input near a root mean square of 1, where CrypTen's inverse square
    root converges. Found from the row itself; a deployment would have them from a calibration, layer by layer.
    """

    shape: Shape
    context: int
    norms: tuple[Tensor, Tensor]
    eps: float
    cos: Tensor
    sin: Tensor
    shifts: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs, and the output as float64 has it: the row ``[1, hidden]``, the cache ``[kv_heads, context - 1, dim]``."""

    public: Public
    matrices: list[Tensor]
    row: Tensor
    keys: Tensor
    values: Tensor
    expected: Tensor


def load_layer(bundle: Path, context: int) -> tuple[Layer, Tensor]:
    """The first layer of a bundle, and ``context`` rows of its embedding ``[context, hidden]``, spread over all.

    Raises:
        SordinoError: it is no bundle of a Llama model with 8-bit weights and no biases.
    """
    with opened(bundle) as (config, client, server):
        return read_layer(config, client, server, 0), _rows(client.get_slice("model.embed_tokens.weight"), context)


@contextmanager
def opened(bundle: Path) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """A bundle's config, and its files of tensors, the client's and the server's. Raises as :func:`load_layer`."""
    try:
        config = json.loads((bundle / "client" / "config.json").read_text())
        if config["model_type"] != "llama" or config["attention_bias"] or config["mlp_bias"]:
            raise ValueError("another family, or biases")
        if config["rope_parameters"]["rope_type"] != "default":
            raise ValueError("its rotary angles are scaled")
        with (
            safe_open(bundle / "client" / "client.safetensors", "pt") as client,
            safe_open(bundle / "server" / "weights.safetensors", "pt") as server,
        ):
            yield config, client, server
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise SordinoError(f"{bundle} is no bundle of a Llama model with 8-bit weights: {error}") from error


def read_layer(config: dict[str, Any], client: Any, server: Any, number: int) -> Layer:
    """
    Raises:
        KeyError, SafetensorError: there is no such layer.
        ValueError: its weights have 12 bits.
    """
    prefix = f"model.layers.{number}."
    groups = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    groups += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    matrices = []
    for first, *more in groups:
        values = server.get_tensor(prefix + "+".join([first, *(name.rpartition(".")[2] for name in more)]))
        if values.dim() != 2:
            raise ValueError(f"its layer {number} has weights of 12 bits")
        scales = torch.cat([client.get_tensor(f"{prefix}{name}.scale") for name in [first, *more]])
        matrices.append((values.double() * scales.double()[:, None]).T)
    norms = [client.get_tensor(f"{prefix}{name}_layernorm.weight").double() for name in ("input", "post_attention")]
    shape = Shape(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        inner=config["intermediate_size"],
    )
    theta = config["rope_parameters"]["rope_theta"]
    return Layer(shape, matrices, (norms[0], norms[1]), config["rms_norm_eps"], theta)


def _rows(embedding: Any, count: int) -> Tensor:
    vocabulary = embedding.get_shape()[0]
    return torch.cat([embedding[7919 * i % vocabulary][None].double() for i in range(1, count + 1)])


def draw_layer(shape: Shape, context: int) -> tuple[Layer, Tensor]:
    """Random weights of a usual size, always the same, and rows like an embedding's."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int, deviation: float) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64) * deviation

    d, inner, wide = shape.hidden, shape.inner, shape.heads * shape.head_dim
    sizes = [(d, sum(shape.parts)), (wide, d), (d, 2 * inner), (inner, d)]
    matrices = [drawn(*size, deviation=size[0] ** -0.5) for size in sizes]
    norms = (1 + drawn(d, deviation=0.1), 1 + drawn(d, deviation=0.1))
    return Layer(shape, matrices, norms, 1e-5, 1e5), drawn(context, d, deviation=0.1)


def rotary(layer: Layer, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[positions, head_dim]``, for halves that turn against each other."""
    half = torch.arange(0, layer.shape.head_dim, 2, dtype=torch.float64) / layer.shape.head_dim
    angles = positions.double()[:, None] * layer.theta**-half
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def turned(x: Any, cat: Callable[..., Any]) -> Any:
    """``x`` with its halves a quarter turn on, which sin multiplies."""
    half = x.size(-1) // 2
    return cat([-x[..., half:], x[..., :half]], -1)


@dataclass(frozen=True, slots=True)
class Passed:
    """In float64: a layer's cache ``[kv_heads, rows, dim]``; rows ``[rows, hidden]`` at its second norm, and after."""

    keys: Tensor
    values: Tensor
    middle: Tensor
    output: Tensor


def passed(layer: Layer, rows: Tensor) -> Passed:
    """Computes the layer for ``rows [rows, hidden]``, each of which sees itself and those before it."""
    shape, count = layer.shape, rows.shape[0]
    qkv, o, gate_up, down = layer.matrices
    parts = torch.split(rms_normed(rows, layer.norms[0], layer.eps) @ qkv, shape.parts, -1)
    q, k, v = (part.reshape(count, -1, shape.head_dim).transpose(0, 1) for part in parts)
    cos, sin = rotary(layer, torch.arange(count))
    q, k = (x * cos + turned(x, torch.cat) * sin for x in (q, k))
    shared = shape.heads // shape.kv_heads
    scores = q @ k.repeat_interleave(shared, 0).mT / math.sqrt(shape.head_dim)
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    seen = scores.masked_fill(later, -math.inf).softmax(-1) @ v.repeat_interleave(shared, 0)
    middle = rows + seen.transpose(0, 1).reshape(count, -1) @ o
    gate, up = (rms_normed(middle, layer.norms[1], layer.eps) @ gate_up).chunk(2, -1)
    return Passed(k, v, middle, middle + (torch.nn.functional.silu(gate) * up) @ down)


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def make_case(layer: Layer, rows: Tensor) -> Case:
    """Computes the layer: the last of ``rows [context, hidden]`` is the new one, the cache is made of the others."""
    context, after = rows.shape[0], passed(layer, rows)
    shifts = (shift_of(rows[-1:]), shift_of(after.middle[-1:]))
    public = make_public(layer, context, shifts)
    keys, values = (x[:, :-1].contiguous() for x in (after.keys, after.values))
    return Case(public, layer.matrices, rows[-1:], keys, values, after.output[-1:])


def make_public(layer: Layer, context: int, shifts: tuple[int, int]) -> Public:
    """For the row at position ``context - 1``."""
    cos, sin = rotary(layer, torch.tensor([context - 1]))
    return Public(layer.shape, context, layer.norms, layer.eps, cos[0], sin[0], shifts)


def shift_of(rows: Tensor) -> int:
    """The power of two that brings the root mean square of ``rows [rows, hidden]``, in the middle of them, near 1."""
    return -round(rows.square().mean(-1).sqrt().log2().median().item())
