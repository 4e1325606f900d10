"""One transformer block on shares by CrypTen, between two processes and a dealer: time, rounds, bytes and error.

    python bench/peers/crypten/block.py --bundle .demo/bundle --context 64 --repeats 5 --json FILE

Computed is one new row of a Llama layer whose KV cache lies in shares: the first layer of the bundle on rows of
its embedding, or random weights of the same shape. The server shares the four matrices, the client its row. Norms,
rotary tables and the size of the residual are public. The functions are CrypTen's, as version 0.4.1 sets them.

Tuples are fetched before they are needed, by CrypTen's own cache: the first pass records what it asked for. So a
repetition has two parts, *ahead* and *online*; ``ms_p50``, ``bytes`` and ``rounds`` are of the second alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.multiprocessing
from safetensors import SafetensorError, safe_open

sys.path.insert(0, str(Path(__file__).parents[2]))  # of peers, for a script and the processes it starts

from peers.crypten.channel import Count, Link, Listener, connected
from sordino.shared.errors import SordinoError
from sordino.shared.tls import TlsFiles, make_certificates

CLIENT: Final = 0
SERVER: Final = 1
MATRICES: Final = 4  # the server's, of a party's inputs; the rest is the client's
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


# -- in the clear ------------------------------------------------------------------------------------------------------


def load_layer(bundle: Path, context: int) -> tuple[Layer, Tensor]:
    """The first layer of a bundle, and ``context`` rows of its embedding ``[context, hidden]``, spread over all.

    Raises:
        SordinoError: it is no bundle of a Llama model with 8-bit weights and no biases.
    """
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
            return _layer(config, client, server), _rows(client.get_slice("model.embed_tokens.weight"), context)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise SordinoError(f"{bundle} is no bundle of a Llama model with 8-bit weights: {error}") from error


def _layer(config: dict[str, Any], client: Any, server: Any) -> Layer:
    prefix = "model.layers.0."
    groups = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    groups += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    matrices = []
    for first, *more in groups:
        values = server.get_tensor(prefix + "+".join([first, *(name.rpartition(".")[2] for name in more)]))
        if values.dim() != 2:
            raise ValueError("its first layer has weights of 12 bits")
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


def make_case(layer: Layer, rows: Tensor) -> Case:
    """Computes the layer: the last of ``rows [context, hidden]`` is the new one, the cache is made of the others."""
    shape, context = layer.shape, rows.shape[0]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * weight

    qkv, o, gate_up, down = layer.matrices
    parts = torch.split(normed(rows, layer.norms[0]) @ qkv, shape.parts, -1)
    q, k, v = (part.reshape(context, -1, shape.head_dim).transpose(0, 1) for part in parts)
    cos, sin = rotary(layer, torch.arange(context))
    q, k = (x * cos + turned(x, torch.cat) * sin for x in (q, k))
    row, query = rows[-1:], q[:, -1:].reshape(shape.kv_heads, -1, shape.head_dim)
    weights = (query @ k.mT / math.sqrt(shape.head_dim)).softmax(-1)
    middle = row + (weights @ v).reshape(1, -1) @ o
    gate, up = (normed(middle, layer.norms[1]) @ gate_up).chunk(2, -1)
    expected = middle + (torch.nn.functional.silu(gate) * up) @ down
    shifts = (_shift(row), _shift(middle))
    public = Public(shape, context, layer.norms, layer.eps, cos[-1], sin[-1], shifts)
    return Case(public, layer.matrices, row, k[:, :-1].contiguous(), v[:, :-1].contiguous(), expected)


def _shift(row: Tensor) -> int:
    return -round(math.log2(row.square().mean().sqrt().item()))


# -- on shares ---------------------------------------------------------------------------------------------------------


def block(public: Public, matrices: list[Any], row: Any, keys: Any, values: Any) -> Any:
    """The layer's output for one row ``[1, hidden]``, all of it CrypTen's tensors of shares."""
    from peers.crypten.communicator import crypten

    shape, (qkv, o, gate_up, down) = public.shape, matrices

    def normed(x: Any, which: int) -> Any:
        shift = public.shifts[which]
        x = x * (1 << shift) if shift >= 0 else x.div(1 << -shift)
        mean = x.square().mean(-1, keepdim=True) + public.eps * 4.0**shift
        return x * mean.inv_sqrt() * public.norms[which].float()

    q, k, v = (part.reshape(-1, 1, shape.head_dim) for part in normed(row, 0).matmul(qkv).split(shape.parts, -1))
    cos, sin, scale = public.cos.float(), public.sin.float(), shape.head_dim**-0.5
    q = q * (cos * scale) + turned(q, crypten.cat) * (sin * scale)
    k = k * cos + turned(k, crypten.cat) * sin
    keys, values = crypten.cat([keys, k], 1), crypten.cat([values, v], 1)
    weights = q.reshape(shape.kv_heads, -1, shape.head_dim).matmul(keys.transpose(1, 2)).softmax(-1)
    row = row + weights.matmul(values).reshape(1, -1).matmul(o)
    gate, up = normed(row, 1).matmul(gate_up).split([shape.inner, shape.inner], -1)
    return row + (gate.sigmoid() * gate * up).matmul(down)


# -- processes ---------------------------------------------------------------------------------------------------------


def run_dealer(files: TlsFiles, main: Connection) -> None:
    from peers.crypten.dealer import deal

    with Listener(files) as listener:
        main.send(listener.port)
        deal(listener)


def run_server(files: TlsFiles, dealer: int, party: Party, main: Connection) -> None:
    with Listener(files) as listener, connected(dealer, files.ca) as material:
        main.send(listener.port)
        party.run(listener.accept(), material, main)


def run_client(files: TlsFiles, dealer: int, server: int, party: Party, main: Connection) -> None:
    with connected(server, files.ca) as link, connected(dealer, files.ca) as material:
        party.run(link, material, main)


@dataclass(frozen=True, slots=True)
class Turn:
    """One repetition, as one party saw it; the output is the client's."""

    ms: float
    ahead_ms: float
    online: Count
    ahead: Count
    output: list[float] | None


@dataclass(frozen=True, slots=True)
class Party:
    """What a process is given: of inputs that are the other party's, the size alone."""

    rank: int
    public: Public
    inputs: list[Tensor | torch.Size]
    turns: int

    def run(self, link: Link, material: Link, main: Connection) -> None:
        """Sends ``main`` a :class:`Turn` for each repetition."""
        torch.set_num_threads(1)  # both parties are on one machine
        from peers.crypten import communicator, dealer
        from peers.crypten.communicator import crypten

        communicator.start(link, self.rank)
        dealer.use(material, self.rank)
        with crypten.no_grad():
            *matrices, row, keys, values = (
                crypten.cryptensor(
                    given.float() if isinstance(given, Tensor) else torch.zeros(given),
                    src=SERVER if index < MATRICES else CLIENT,
                )
                for index, given in enumerate(self.inputs)
            )
            crypten.trace(True)
            block(self.public, matrices, row, keys, values)
            crypten.trace(False)
            for _ in range(self.turns):
                counted, start = material.count.copy(), time.perf_counter()
                crypten.fill_cache()
                ahead_ms, ahead = 1e3 * (time.perf_counter() - start), material.count - counted
                crypten.communicator.get().barrier()
                counted, start = link.count.copy(), time.perf_counter()
                output = block(self.public, matrices, row, keys, values)
                ms, online = 1e3 * (time.perf_counter() - start), link.count - counted
                plain = output.get_plain_text(dst=CLIENT)
                main.send(Turn(ms, ahead_ms, online, ahead, None if plain is None else plain.flatten().tolist()))


def measure(case: Case, repeats: int, on_turn: Callable[[int, int], None]) -> dict[str, Any]:
    """Figures of ``repeats`` passes after the warm-up, in three processes that share TLS on loopback alone.

    Args:
        on_turn: told how many of how many passes are done.

    Raises:
        SordinoError: CrypTen is not installed, a process ended early, or the two parties counted differently.
    """
    if importlib.util.find_spec("crypten") is None:
        raise SordinoError("CrypTen is not installed: run pip install -c constraints.txt --no-deps crypten omegaconf")
    processes = torch.multiprocessing.get_context("spawn")
    inputs = [*case.matrices, case.row, case.keys, case.values]
    turns = 1 + repeats  # the first finds caches cold
    parties = [
        Party(
            rank,
            case.public,
            [x if (i < MATRICES) == (rank == SERVER) else x.size() for i, x in enumerate(inputs)],
            turns,
        )
        for rank in (CLIENT, SERVER)
    ]
    started: list[Any] = []

    def begin(work: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = processes.Pipe()
        started.append(processes.Process(target=work, args=(*arguments, theirs), daemon=True))
        started[-1].start()
        theirs.close()
        return ours

    with tempfile.TemporaryDirectory(prefix="sordino-crypten-") as folder:
        files = make_certificates(Path(folder), ["localhost"])
        try:
            dealer = _next(begin(run_dealer, files))
            server = begin(run_server, files, dealer, parties[SERVER])
            client = begin(run_client, files, dealer, _next(server), parties[CLIENT])
            seen: list[tuple[Turn, Turn]] = []
            for turn in range(turns):
                seen.append((_next(client), _next(server)))
                on_turn(turn + 1, turns)
            for process in started:
                process.join(30)
        finally:
            for process in started:
                process.kill()
    return _figures(case, seen[1:])


def _next(process: Connection) -> Any:
    try:
        return process.recv()
    except EOFError:
        raise SordinoError("a process ended early: what it said stands above") from None


def _figures(case: Case, seen: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    own, other = seen[0]
    online = own.online
    mirrored = Count(online.rounds, online.bytes_down, online.bytes_up)
    if any(client.online != online or server.online != mirrored for client, server in seen):
        raise SordinoError("the parties counted differently, or passes differ: the figures would be worth nothing")
    times = [client.ms for client, _ in seen]
    outputs = torch.tensor([client.output for client, _ in seen], dtype=torch.float64)
    errors = (outputs - case.expected).abs().amax(-1)
    return {
        "protocol": "crypten",
        "ms_p50": round(statistics.median(times), 1),
        "ms": [round(ms, 1) for ms in times],
        "rounds": online.rounds,
        "bytes": online.bytes_up + online.bytes_down,
        "bytes_up": online.bytes_up,
        "bytes_down": online.bytes_down,
        "dealer_bytes": own.ahead.bytes_down + other.ahead.bytes_down,
        "dealer_bytes_client": own.ahead.bytes_down,
        "dealer_bytes_server": other.ahead.bytes_down,
        "dealer_rounds": own.ahead.rounds,
        "dealer_ms_p50": round(statistics.median(client.ahead_ms for client, _ in seen), 1),
        "max_error": errors.max().item(),
        "max_errors": errors.tolist(),
        "max_output": case.expected.abs().max().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, help="of SmolLM2 or another Llama; random weights without one")
    parser.add_argument("--context", type=int, default=64, help="rows that the new one sees, itself among them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.context < 2 or options.repeats < 1:
        parser.error("--context is at least 2, --repeats at least 1")
    try:
        if options.bundle:
            layer, rows = load_layer(options.bundle, options.context)
        else:
            layer, rows = draw_layer(SMOLLM2, options.context)
        from sordino.client.bench import machine  # with transformers, which the three processes do without
        from sordino.client.terminal import progress_bar

        print("three processes start, and share the weights", flush=True)
        with progress_bar("passes of one block") as on_turn:
            result = measure(make_case(layer, rows), options.repeats, on_turn)
    except SordinoError as error:
        sys.exit(f"error: {error}")
    report = {
        **result,
        "context": options.context,
        "repeats": options.repeats,
        "shape": asdict(layer.shape),
        "weights": "bundle" if options.bundle else "random",
        "machine": machine() | {"threads": 1},
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
