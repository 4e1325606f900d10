"""A whole Llama model on shares by CrypTen: greedy tokens one after the other, and what each costs.

A pass is of one row, of the prompt's too: :func:`~peers.crypten.block.block` for each layer with that layer's matrices,
the last norm, and the opening of its result to the client, who has embedding and head, which are one. The cache lies in
shares, is empty at first, and grows by the pass's row.

Tuples of a pass are there before it. What it asks for is recorded from one layer and the last norm, for all layers are
of one size; that recording is in no figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from peers.crypten.block import Turn, block, normed, shared
from peers.crypten.channel import Link
from peers.crypten.layer import Layer, Passed, Tensor, make_public, opened, passed, read_layer, rms_normed, shift_of
from peers.crypten.parties import CLIENT, SERVER, heard, started
from sordino.shared.errors import RangeError, SordinoError


@dataclass(frozen=True, slots=True)
class Model:
    """Embedding and head ``[vocabulary, hidden]``, float32; the weight of the last norm ``[hidden]``, float64."""

    layers: list[Layer]
    embedding: Tensor
    norm: Tensor

    def passed(self, ids: Sequence[int]) -> list[Passed]:
        """Each layer's results, in float64."""
        rows, found = self.embedding[list(ids)].double(), []
        for layer in self.layers:
            found.append(passed(layer, rows))
            rows = found[-1].output
        return found

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """What the head is given, in float64: ``[ids, hidden]``."""
        return rms_normed(self.passed(ids)[-1].output, self.norm, self.layers[0].eps)


def load_model(bundle: Path) -> Model:
    """
    Raises:
        SordinoError: it is no bundle of a Llama model with 8-bit weights, no biases and a tied head.
    """
    with opened(bundle) as (config, client, server):
        if not config["tie_word_embeddings"]:
            raise ValueError("its head is not its embedding")
        layers = [read_layer(config, client, server, number) for number in range(config["num_hidden_layers"])]
        embedding = client.get_tensor("model.embed_tokens.weight").float()
        return Model(layers, embedding, client.get_tensor("model.norm.weight").double())


@dataclass(frozen=True, slots=True)
class Shifts:
    """As ``shifts`` of :class:`~peers.crypten.layer.Public`, for all layers, and for the last norm."""

    layers: list[tuple[int, int]]
    last: int


def calibrated(model: Model, ids: Sequence[int]) -> tuple[Shifts, Shifts]:
    """Of a sequence's first row, whose size is unlike others', and of the others: from a text that nobody keeps secret.

    CrypTen's inverse square root is right to 3 % where a row's root mean square comes out between 1/4 and 12.
    """
    found, passes = [], model.passed(ids)
    for some in (slice(0, 1), slice(1, None)):
        rows, shifts = model.embedding[list(ids)].double(), []
        for after in passes:
            shifts.append((shift_of(rows[some]), shift_of(after.middle[some])))
            rows = after.output
        found.append(Shifts(shifts, shift_of(rows[some])))
    return found[0], found[1]


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelParty:
    """What a process is given: of what is the other party's, sizes alone.

    Attributes:
        layers: without matrices, which are ``matrices``, layer by layer. shifts: as :func:`calibrated` finds them.
        passes: of one row each, the first of them the rows of ``prompt``.
        prompt, embedding: the client's; the server has neither.
    """

    rank: int
    layers: list[Layer]
    norm: Tensor
    shifts: tuple[Shifts, Shifts]
    matrices: list[list[Tensor | torch.Size]]
    passes: int
    prompt: list[int]
    embedding: Tensor | None

    def run(self, link: Link, material: Link, main: Connection) -> None:
        """Sends ``main`` a :class:`Turn` for each pass, and the token that the client takes after it."""
        torch.set_num_threads(1)  # both parties are on one machine
        from peers.crypten import communicator, dealer
        from peers.crypten.communicator import crypten

        communicator.start(link, self.rank)
        dealer.use(material, self.rank)
        with crypten.no_grad():
            matrices = [[shared(given, SERVER) for given in layer] for layer in self.matrices]
            empty = torch.Size([self.layers[0].shape.kv_heads, 0, self.layers[0].shape.head_dim])
            cache = [[shared(empty, CLIENT), shared(empty, CLIENT)] for _ in self.layers]
            tokens = list(self.prompt)
            for number in range(self.passes):
                given = torch.Size([1, len(self.norm)]) if self.embedding is None else self.embedding[[tokens[number]]]
                row = shared(given, CLIENT)
                self._record(row, matrices[0], cache[0])
                counted, start = material.count.copy(), time.perf_counter()
                crypten.fill_cache()
                ahead_ms, ahead = 1e3 * (time.perf_counter() - start), material.count - counted
                crypten.communicator.get().barrier()
                counted, start = link.count.copy(), time.perf_counter()
                for index, layer_matrices in enumerate(matrices):
                    row, *cache[index] = self._layer(index, layer_matrices, row, cache[index])
                plain = self._last_norm(row, number).get_plain_text(dst=CLIENT)
                token = None if self.embedding is None else int((self.embedding @ plain[0]).argmax())
                ms, online = 1e3 * (time.perf_counter() - start), link.count - counted
                if token is not None and number + 1 >= len(self.prompt):
                    tokens.append(token)
                main.send((Turn(ms, ahead_ms, online, ahead, None if plain is None else plain[0].tolist()), token))

    def _layer(self, index: int, matrices: list[Any], row: Any, cache: Sequence[Any]) -> tuple[Any, Any, Any]:
        keys, values = cache
        shifts = self.shifts[keys.size(1) > 0].layers[index]
        public = make_public(self.layers[index], keys.size(1) + 1, shifts)
        return block(public, matrices, row, keys, values)

    def _last_norm(self, row: Any, position: int) -> Any:
        return normed(row, self.norm, self.layers[0].eps, self.shifts[position > 0].last)

    def _record(self, row: Any, matrices: list[Any], cache: Sequence[Any]) -> None:
        """Has CrypTen's cache ask for what a pass with so long a cache asks for."""
        from peers.crypten.communicator import crypten

        provider = crypten.mpc.get_default_provider()
        provider.request_cache, provider.tuple_cache = [], {}
        crypten.trace(True)
        after, *_ = self._layer(0, matrices, row, cache)
        of_layer = list(provider.request_cache)
        self._last_norm(after, 0)
        crypten.trace(False)
        provider.request_cache = of_layer * (len(self.layers) - 1) + provider.request_cache


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, the logits that each was the largest of ``[tokens, vocabulary]``, figures of those after the first."""

    tokens: list[int]
    logits: Tensor
    figures: dict[str, Any]


def answer(
    model: Model,
    prompt: Sequence[int],
    tokens: int,
    *,
    shifts: tuple[Shifts, Shifts],
    on_turn: Callable[[int, int], None],
) -> Answer:
    """Greedy tokens, in three processes that share TLS on loopback alone.

    Args:
        on_turn: told how many of how many passes are done.

    Raises:
        RangeError: fewer than 2 tokens, or an empty prompt.
        SordinoError: CrypTen is not installed, a process ended early, or the two parties counted differently.
    """
    if tokens < 2 or not prompt:
        raise RangeError(
            f"it takes a prompt and 2 tokens at least, not {len(prompt)} and {tokens}: the first is its own"
        )
    weights = [[matrix.float() for matrix in layer.matrices] for layer in model.layers]
    passes = len(prompt) + tokens - 1
    parties = []
    for rank in (CLIENT, SERVER):
        client = rank == CLIENT
        parties.append(
            ModelParty(
                rank,
                layers=[replace(layer, matrices=[]) for layer in model.layers],
                norm=model.norm,
                shifts=shifts,
                matrices=[[x.size() if client else x for x in layer] for layer in weights],
                passes=passes,
                prompt=list(prompt) if client else [],
                embedding=model.embedding if client else None,
            )
        )
    seen: list[tuple[Turn, Turn]] = []
    chosen: list[int] = []
    with started(*parties) as (client_says, server_says):
        for number in range(passes):
            (own, token), (other, _) = heard(client_says), heard(server_says)
            seen.append((own, other))
            chosen.append(token)
            on_turn(number + 1, passes)
    rows = torch.tensor([own.output for own, _ in seen[-tokens:]])
    return Answer(chosen[-tokens:], rows @ model.embedding.T, _figures(seen, len(prompt)))


def _figures(passes: list[tuple[Turn, Turn]], prompt: int) -> dict[str, Any]:
    """Of a token after the first; amounts are means, for what attention asks for grows with the cache."""
    if any(server.online != client.online.mirrored() for client, server in passes):
        raise SordinoError("the parties counted differently: the figures would be worth nothing")
    seen = passes[prompt:]
    seconds = [client.ms / 1e3 for client, _ in seen]

    def mean(values: Iterable[int]) -> int:
        return round(statistics.mean(values))

    return {
        "prompt_s": round(sum(client.ms for client, _ in passes[:prompt]) / 1e3, 3),
        "token_s_p50": round(statistics.median(seconds), 3),
        "token_s_min": round(min(seconds), 3),
        "token_s": [round(one, 3) for one in seconds],
        "rounds": mean(client.online.rounds for client, _ in seen),
        "bytes_up": mean(client.online.bytes_up for client, _ in seen),
        "bytes_down": mean(client.online.bytes_down for client, _ in seen),
        "ahead_s_p50": round(statistics.median(client.ahead_ms for client, _ in seen) / 1e3, 3),
        "dealer_rounds": mean(client.ahead.rounds for client, _ in seen),
        "token_to_client": mean(client.ahead.bytes_down for client, _ in seen),
        "token_to_server": mean(server.ahead.bytes_down for _, server in seen),
    }
