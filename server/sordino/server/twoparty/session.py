"""The server's side of profile ``two-party``: its plan of a model, and one client's session (docs/two-party.md)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from threadpoolctl import threadpool_limits

from sordino.proto.v1 import dealer_pb2 as deal_pb
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.store import MatrixStore
from sordino.server.twoparty.linear import Provisioner, WordMatrix, choose_kernel
from sordino.shared.errors import (
    LimitError,
    ProtocolError,
    RangeError,
    SessionLostError,
    TransportError,
    UnknownGroupError,
    UnsupportedModelError,
)
from sordino.shared.manifest import CLIENT_DIR
from sordino.shared.twoparty.dealt import Dealt
from sordino.shared.twoparty.forward import DOWN, GATE_UP, MATRICES, OUT, QKV, Cache, Model, forward
from sordino.shared.twoparty.lwe import messages, word_shape
from sordino.shared.twoparty.numbers import (
    HOTTEST,
    MOST_CONSTANT,
    MOST_GROWTH,
    NORMED,
    RESIDUAL,
    SUM,
    TEMPERATURE,
    Bounds,
    Choice,
    Norm,
    Plan,
    Shape,
    Sizes,
    biases,
    bounds,
    growth,
    integers,
    scales,
)
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.passes import Counters, check_tokens, sight_of
from sordino.shared.twoparty.source import PassSource
from sordino.shared.twoparty.tape import SERVER, Tape
from sordino.shared.twoparty.tokens import choose

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

# Rows of masked products that a client may have made ahead, of each matrix, and what the server keeps of all of them.
_MOST_ROWS: Final = 4096
_MOST_KEPT_BYTES: Final = 512 << 20
# However large a model: a client that runs out makes 128 more, and has up to 32.
_LEAST_ROWS: Final = 160
OPENED_ROWS: Final = 32  # of a pass, unless the provider says otherwise
# Of a pass: its memory grows with rows times positions. A client's passes have 32.
_MOST_PASS: Final = 128
# Messages of a pass that it has not come to. A client's are never more than four ahead.
_MOST_AHEAD: Final = 8


class TwoPartyModel:
    """What a server has for all sessions: the plan, the public integers and their digest, and its matrices.

    Args:
        opened: rows of a pass of which a client may open something. tokens: that is the next token, chosen on shares,
            and not the hidden state.

    Attributes:
        unproven: layers that could add so much to a row, for all that is known of their matrices, that the check of its
            domain would not see it.

    Raises:
        UnsupportedModelError: the model is of another kind, or only a part of it is here.
        RangeError: a wire would not fit.
    """

    def __init__(self, store: MatrixStore, opened: int = OPENED_ROWS, *, tokens: bool = False) -> None:
        self.opened = opened
        if not store.is_whole:
            raise UnsupportedModelError("profile two-party needs all layers in one server")
        folder = store.bundle / CLIENT_DIR
        shape = Shape.of(json.loads((folder / "config.json").read_bytes()))
        tensors = load_file(folder / "client.safetensors")
        groups = {group.name: i for i, group in enumerate(store.manifest.groups)}
        kernel = choose_kernel(store.device)
        self._matrices: list[list[WordMatrix]] = []
        self._constants: list[list[U64]] = []
        self.unproven: list[int] = []
        sizes = []
        for layer in range(shape.layers):
            prefix = f"{shape.kind.prefix}{layer}."
            try:
                weights = [store.whole[groups[prefix + name]].weights for name in shape.kind.matrices]
            except KeyError as error:
                raise UnsupportedModelError(f"profile two-party needs {error} as a matrix of its own") from None
            self._matrices.append([WordMatrix(one, kernel) for one in weights])

        def bound(layer: int) -> tuple[Bounds, list[U64], float]:
            weights = [one.weights.cpu().numpy() for one in self._matrices[layer]]
            return _layer(shape, tensors, f"{shape.kind.prefix}{layer}.", weights)

        # Threads of BLAS wait for each other by spinning, and where others want the cores a second becomes a minute.
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for layer, (limits, constants, grows) in enumerate(pool.map(bound, range(shape.layers))):
                sizes.append(Sizes.of(f"{shape.kind.prefix}{layer}.", limits))
                self._constants.append(constants)
                if grows > MOST_GROWTH:
                    self.unproven.append(layer)
        self.fingerprint = store.manifest.fingerprint
        self.plan = Plan(shape, tuple(sizes), Choice.of(shape, tensors) if tokens else None)
        self.public = Model.of(self.plan, tensors)
        self.digest = self.public.digest()

    def constant(self, layer: int, number: int) -> U64:
        """What biases add after a matrix, ``[out]``."""
        return self._constants[layer][number]

    def matrix(self, layer: int, number: int) -> WordMatrix:
        """
        Raises:
            UnknownGroupError: there is none.
        """
        if layer >= len(self._matrices) or number >= len(MATRICES):
            raise UnknownGroupError(f"matrix {number} of layer {layer} does not exist")
        return self._matrices[layer][number]

    @property
    def most_ahead(self) -> int:
        """Rows of products that a session may have made ahead."""
        row = 8 * self.plan.shape.layers * sum(self.plan.shape.matrix(number)[1] for number in MATRICES)
        return min(_MOST_ROWS, max(_LEAST_ROWS, _MOST_KEPT_BYTES // row))


def _layer(
    shape: Shape, tensors: dict[str, NDArray[np.float32]], prefix: str, weights: list[NDArray[np.int8]]
) -> tuple[Bounds, list[U64], float]:
    """Bounds; what biases add after each matrix: of the norm before it, times the matrix, and its own; and by how much
    a row of the residual can grow."""
    kind, root = shape.kind, math.sqrt(shape.d)
    norms = [Norm.of(tensors, prefix + name) for name in kind.norms]
    shifts = [tensors.get(f"{prefix}{name}.bias", np.zeros(shape.d)).astype(np.float64) for name in kind.norms]
    by = [scales(tensors, prefix, modules) for modules in kind.modules]
    own = [biases(tensors, prefix, modules) for modules in kind.modules]
    qkv, gate_up = weights[QKV] * by[QKV][:, None], weights[GATE_UP] * by[GATE_UP][:, None]
    added = qkv @ shifts[0] + own[QKV], gate_up @ shifts[1] + own[GATE_UP]
    normed = [
        sums / (by[matrix] * norm.factor * root)
        for sums, matrix, norm in zip(added, (QKV, GATE_UP), norms, strict=True)
    ]
    if max(np.abs(one).max() for one in normed) > MOST_CONSTANT:
        raise RangeError(f"{prefix}: biases do not fit, they are too large for the scales of their outputs")
    constants = [
        integers(normed[0] * 2.0**NORMED),
        integers(_taken_off(own[OUT], centred=kind.centred) * 2.0 ** (RESIDUAL + SUM)),
        integers(normed[1] * 2.0**NORMED),
        integers(_taken_off(own[DOWN], centred=kind.centred) * 2.0 ** (RESIDUAL + SUM)),
    ]
    weights1, weights2 = (norm.real for norm in norms)
    heads = [Norm.of(tensors, prefix + name).real for name in kind.head_norms]
    values = -shape.groups * shape.head
    grows = growth(
        shape,
        qkv[values:] * weights1,
        weights[OUT] * by[OUT][:, None],
        gate_up * weights2,
        weights[DOWN] * by[DOWN][:, None],
        (added[0][values:], added[1]),
        (own[OUT], own[DOWN]),
    )
    return bounds(shape, qkv, weights1, gate_up, weights2, added, heads), constants, max(grows)


def _taken_off(bias: F64, *, centred: bool) -> F64:
    """A bias of the residual, without its mean if that is to go."""
    return bias - bias.mean() if centred else bias


class StreamLink:
    """Messages of a pass, between the loop that has the stream and the thread that computes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None], silence_s: float) -> None:
        self._loop = loop
        self._send = send
        self._silence_s = silence_s
        self._came: SimpleQueue[bytes | None] = SimpleQueue()

    def put(self, message: bytes | None) -> None:
        """From the loop: what the client sent, None for its end.

        Raises:
            LimitError: the client goes on without waiting for what it needs next.
        """
        if message is not None and self._came.qsize() >= _MOST_AHEAD:
            raise LimitError(f"{_MOST_AHEAD} messages of words wait for the pass to come to them: wait for its answers")
        self._came.put(message)

    def send(self, message: bytes) -> None:
        self._loop.call_soon_threadsafe(self._send, message)

    def receive(self) -> bytes:
        try:
            message = self._came.get(timeout=self._silence_s)
        except Empty:
            raise TransportError(f"the client has sent nothing for {self._silence_s:.0f} s, in mid-pass") from None
        if message is None:
            raise SessionLostError("the client is gone in the middle of a pass")
        return message


class PartySession:
    """One client's shares: its cache, and what was made ahead of its rows."""

    def __init__(self, model: TwoPartyModel, dealing: Dealt, public_key: bytes) -> None:
        self._model = model
        self._dealing = dealing
        self._provisioner = Provisioner(public_key, parallel=torch.get_num_threads() > 1)
        shape = model.plan.shape
        self._cache = Cache.empty(shape)
        self._counters = Counters()
        # Of a request of several messages: what it asks for, and those that have come.
        self._asked = (0, 0, 0)
        self._came: list[bytes] = []
        # Of each matrix: the server's masks of rows that no pass has used.
        self._masks: dict[tuple[int, int], list[U64]] = {}
        self._ahead: tuple[deal_pb.Pass, PassSource] | None = None

    def products(self, request: pb.WordProducts) -> Iterator[pb.WordAnswers]:
        """Answers to a request, of which this is one message of several.

        Raises:
            ProtocolError, UnknownGroupError: the request is malformed. LimitError: too much has been made ahead.
        """
        matrix = self._model.matrix(request.layer, request.matrix)
        if not 1 <= request.rows <= _MOST_ROWS:
            raise ProtocolError(f"a request has 1 to {_MOST_ROWS} rows, this one {request.rows}")
        masks = self._masks.setdefault((request.layer, request.matrix), [])
        most = self._model.most_ahead
        if len(masks) + request.rows > most:
            raise LimitError(
                f"{request.rows} more rows of products ahead, and {len(masks)} are not used yet: of this model the "
                f"server keeps {most} a session (--ahead {most} at most)"
            )
        outputs, inputs = matrix.weights.shape
        shape = word_shape(request.rows, inputs, outputs)
        asked = (request.layer, request.matrix, request.rows)
        if self._came and asked != self._asked:
            raise ProtocolError("another request before the last message of the one before")
        self._asked = asked
        self._came.append(request.ciphertexts)
        if not request.last:
            if len(self._came) >= len(messages(shape.input_blocks)):
                raise ProtocolError("a request goes on after its last ciphertext")
            return
        came, self._came = self._came, []
        parts: list[U64] = []
        for message, s in self._provisioner.answers(matrix.weights.numpy(), came, shape):
            parts.append(s)
            done = sum(part.shape[1] for part in parts) == outputs
            if done:
                masks += list(np.concatenate(parts, axis=1)[: request.rows])
            yield pb.WordAnswers(ciphertexts=message, last=done)

    def ask_ahead(self, wanted: deal_pb.Pass) -> None:
        """Asks the dealer for a pass that has not begun.

        Raises:
            ProtocolError: this was done, and no pass has begun since; or it has tokens and the plan has none.
            LimitError: it has too many rows, or chooses too many tokens.
        """
        self._check(wanted, wanted.tokens)
        if self._ahead is not None:
            raise ProtocolError("a pass was asked for ahead: one at a time, until the next begins")
        self._ahead = wanted, self._dealing.ask(wanted)

    def begin(self, request: pb.Forward) -> PassSource:
        """Material for the pass that begins.

        Raises:
            ProtocolError: not enough was made ahead for it, or it opens rows that it has not, or something else of them
                than the plan says. RangeError: its temperature. LimitError: it has too many rows, or opens too many.
        """
        wanted, opened = request.numbers, list(request.opened)
        self._check(wanted, len(opened))
        if self._model.plan.choice is not None and wanted.tokens != len(opened):
            raise ProtocolError("this provider opens the next token of rows alone, and hidden states of none")
        if request.temperature > HOTTEST * 2**TEMPERATURE:
            raise RangeError(f"tokens are drawn at temperatures up to {HOTTEST:g}")
        if opened != sorted(set(opened)) or (opened and opened[-1] >= wanted.rows):
            raise ProtocolError(f"rows to open are rows of the pass, of which there are {wanted.rows}, in their order")
        made = min(
            len(self._masks.get((layer, matrix), ()))
            for layer in range(self._model.plan.shape.layers)
            for matrix in range(len(MATRICES))
        )
        if wanted.rows > made:
            raise ProtocolError(f"a pass of {wanted.rows} rows, and {made} were made ahead: ask for products first")
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] == wanted:
                return ahead[1]
            ahead[1].drop()
        return self._dealing.ask(wanted)

    def _check(self, wanted: deal_pb.Pass, opened: int) -> None:
        check_tokens(wanted, self._model.plan)
        if wanted.rows > _MOST_PASS:
            raise LimitError(f"a pass of {wanted.rows} rows: it has at most {_MOST_PASS}, send them in several")
        if opened > self._model.opened:
            raise LimitError(f"{opened} rows to open: the provider opens at most {self._model.opened} of a pass")

    def forward(self, request: pb.Forward, source: PassSource, link: StreamLink) -> bytes:
        """The pass; returns its last message, the server's share of what is opened: hidden states, or tokens.

        Raises:
            ProtocolError: it does not fit what went before. SessionLostError: the client goes in the middle.
            SordinoError: of the dealer.
        """
        wanted, shape = request.numbers, self._model.plan.shape
        new = self._counters.extend(self._cache, wanted, self._dealing.key, shape)
        sight = sight_of(request, new, shape)
        party = Party(Tape(SERVER, self._dealing.key, wanted.number, source), link)
        x = np.zeros((wanted.rows, shape.d), np.uint64)
        model = self._model.public
        hidden, outside = forward(party, model, self, self._cache, new, sight, x)
        shown = hidden[list(request.opened)]
        if model.plan.choice is not None and model.head is not None and len(shown):
            shown = choose(party, model.plan.choice, model.head, shown, request.temperature)
        source.finish()
        return np.concatenate([outside, shown.reshape(-1)]).astype("<u8", copy=False).tobytes()

    def constant(self, party: Party, layer: int, matrix: int) -> U64:
        """See :class:`sordino.shared.twoparty.forward.Linear`."""
        del party
        return self._model.constant(layer, matrix)

    def product(self, party: Party, layer: int, matrix: int, x: U64) -> U64:
        """See :class:`sordino.shared.twoparty.forward.Linear`."""
        masks = self._masks[layer, matrix]
        used = np.stack(masks[: len(x)])
        del masks[: len(x)]
        u = party.receive(x.size).reshape(x.shape)
        return self._model.matrix(layer, matrix).product(u + x) - used
