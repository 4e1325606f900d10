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
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # of peers, for a script and the processes it starts

from peers.crypten.channel import Count, Link
from peers.crypten.layer import SMOLLM2, Case, Public, Tensor, draw_layer, load_layer, make_case, turned
from peers.crypten.parties import CLIENT, SERVER, heard, started
from sordino.shared.errors import SordinoError

MATRICES: Final = 4  # the server's, of a party's inputs; the rest is the client's


# -- on shares ---------------------------------------------------------------------------------------------------------


def block(public: Public, matrices: list[Any], row: Any, keys: Any, values: Any) -> tuple[Any, Any, Any]:
    """The layer's output for one row ``[1, hidden]``, and the cache with it; all of it CrypTen's tensors of shares."""
    from peers.crypten.communicator import crypten

    shape, (qkv, o, gate_up, down) = public.shape, matrices
    x = normed(row, public.norms[0], public.eps, public.shifts[0])
    q, k, v = (part.reshape(-1, 1, shape.head_dim) for part in x.matmul(qkv).split(shape.parts, -1))
    cos, sin, scale = public.cos.float(), public.sin.float(), shape.head_dim**-0.5
    q = q * (cos * scale) + turned(q, crypten.cat) * (sin * scale)
    k = k * cos + turned(k, crypten.cat) * sin
    keys, values = crypten.cat([keys, k], 1), crypten.cat([values, v], 1)
    weights = q.reshape(shape.kv_heads, -1, shape.head_dim).matmul(keys.transpose(1, 2)).softmax(-1)
    row = row + weights.matmul(values).reshape(1, -1).matmul(o)
    x = normed(row, public.norms[1], public.eps, public.shifts[1])
    gate, up = x.matmul(gate_up).split([shape.inner, shape.inner], -1)
    return row + (gate.sigmoid() * gate * up).matmul(down), keys, values


def normed(x: Any, weight: Tensor, eps: float, shift: int) -> Any:
    """RMSNorm of shares ``[1, hidden]``, taken of x times ``2**shift``."""
    x = x * (1 << shift) if shift >= 0 else x.div(1 << -shift)
    mean = x.square().mean(-1, keepdim=True) + eps * 4.0**shift
    return x * mean.inv_sqrt() * weight.float()


def shared(given: Tensor | torch.Size, owner: int) -> Any:
    """CrypTen's shares of what ``owner`` has, of which the other party has the size."""
    from peers.crypten.communicator import crypten

    return crypten.cryptensor(given.float() if isinstance(given, Tensor) else torch.zeros(given), src=owner)


# -- processes ---------------------------------------------------------------------------------------------------------


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
                shared(given, SERVER if index < MATRICES else CLIENT) for index, given in enumerate(self.inputs)
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
                output, *_ = block(self.public, matrices, row, keys, values)
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
    seen: list[tuple[Turn, Turn]] = []
    with started(parties[CLIENT], parties[SERVER]) as (client, server):
        for turn in range(turns):
            seen.append((heard(client), heard(server)))
            on_turn(turn + 1, turns)
    return _figures(case, seen[1:])


def _figures(case: Case, seen: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    own, other = seen[0]
    online = own.online
    if any(client.online != online or server.online != online.mirrored() for client, server in seen):
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
