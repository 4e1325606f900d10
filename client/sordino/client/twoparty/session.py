"""The client's side of profile ``two-party``: a session with a server and a dealer (docs/two-party.md)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sordino.client.interrupts import interrupts
from sordino.client.transport import Call, Connection, Traffic, Watchdog, next_answer
from sordino.client.twoparty.linear import WordKey
from sordino.proto.v1 import dealer_pb2 as deal_pb
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import (
    IntegrityError,
    LimitError,
    ProtocolError,
    RangeError,
    SessionLostError,
    TransportError,
)
from sordino.shared.transport import error_of
from sordino.shared.twoparty import numbers as nb
from sordino.shared.twoparty.amounts import pass_bytes
from sordino.shared.twoparty.dealt import Dealt
from sordino.shared.twoparty.forward import MATRICES, Cache, Model, Sight, forward
from sordino.shared.twoparty.lwe import word_shape
from sordino.shared.twoparty.numbers import Plan
from sordino.shared.twoparty.party import Count, Party
from sordino.shared.twoparty.passes import Counters, counters_of, ranges, tell_sight
from sordino.shared.twoparty.source import AHEAD_BYTES, Dealer, PassSource
from sordino.shared.twoparty.tape import CLIENT, Tape
from sordino.shared.twoparty.tokens import choose

log = logging.getLogger(__name__)
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Progress = Callable[[int, int], None]

MOST_ROWS: Final = 32  # of a pass; a longer prompt goes in several
BLOCK_ROWS: Final = 32  # that are made ahead at a time, when they have run out
MOST_BLOCK: Final = 128  # and later as many as were used before, up to this
NO_TOKEN: Final = -1.0  # of a row of which none was wanted
_LARGEST: Final = 2.0**15  # of an embedding's entries
# Of a row's sum of squares: from here on it wraps, and could come back into its domain.
_LARGEST_SUM: Final = 2.0 ** (64 - 2 * nb.RESIDUAL)
_CLOSED: Final = "the session is closed"
_BROKEN: Final = "the session was interrupted, or broke, in something before: connect anew, nothing of it can be used"


def check_rows(rows: F64) -> None:
    """Whether embedded rows ``[R, d]`` are any that a pass can tell right from wrong.

    Raises:
        RangeError: entries that are no numbers, or too large.
    """
    fits = np.isfinite(rows).all() and np.abs(rows).max(initial=0.0) < _LARGEST
    if not (fits and np.square(rows).sum(axis=1).max(initial=0.0) < 0.999 * _LARGEST_SUM):
        raise RangeError("an embedded row has entries that are no numbers, or too large: nothing was sent")


class Spent(Count):
    """What a session has cost: rounds and bytes of passes, and bytes of products made ahead.

    Attributes:
        ahead_sent, ahead_received: bytes of encrypted products. ahead_s: seconds for them. passes, pass_s: of passes.
    """

    __slots__ = ("ahead_received", "ahead_s", "ahead_sent", "pass_s", "passes")

    def __init__(self) -> None:
        super().__init__()
        self.ahead_sent = self.ahead_received = self.passes = 0
        self.ahead_s = self.pass_s = 0.0


class PartySession:
    """One session: its stream to the server, its place at the dealer, and this side's shares. A context manager.

    Threads take turns. What ends in the middle, by an error or by Ctrl-C, ends the session, on both sides: what the two
    have of a cache or of products ahead need not fit together any more.

    Attributes:
        opens_tokens: the provider opens the next token of a row, and not its hidden state.

    Args:
        connection, dealer: from here on the session's, which closes them.
        tensors: of the client bundle.
        on_plan: told what products ahead will cost, before they are made; the log, without. on_provision: progress of
            it.

    Raises:
        SordinoError: the server or the dealer refuses it.
    """

    def __init__(
        self,
        connection: Connection,
        tensors: dict[str, NDArray[np.float32]],
        dealer: Dealer,
        *,
        on_plan: Callable[[str], object] | None = None,
        on_provision: Progress | None = None,
    ) -> None:
        self._on_plan, self._on_provision = on_plan or log.warning, on_provision
        self._connection = connection
        self._outgoing: SimpleQueue[pb.ComputeRequest | None] = SimpleQueue()
        self._watchdog = Watchdog(connection.timeout_s)
        self._turn = threading.RLock()
        self._over = ""
        self._closed = False
        self._phase = "online"  # that traffic is counted as
        self._held = ExitStack()
        self._held.callback(connection.close)
        self._held.callback(dealer.close)
        self.spent = Spent()
        self.sends_padding = False  # as rows: so it hides no length
        with interrupts:  # in one of gRPC's locks a KeyboardInterrupt would hang its channel, here and in what follows
            self._call: Call[pb.ComputeResponse] = connection.open_compute(iter(self._outgoing.get, None))
        try:
            with interrupts:
                self._open(dealer, tensors)
        except BaseException:
            self.close()
            raise
        self._cache = Cache.empty(self.plan.shape)
        self._counters = Counters()
        self._next_pass = self._next_row = self._last_rows = 0
        self._temperature = 0
        self._ahead: tuple[deal_pb.Pass, PassSource] | None = None
        # Of each matrix: rows r that nothing has been masked with, and c = W r + s of them.
        self._rows: dict[tuple[int, int], deque[tuple[U64, U64]]] = {
            (layer, matrix): deque() for layer in range(self.plan.shape.layers) for matrix in MATRICES
        }

    def _open(self, dealer: Dealer, tensors: dict[str, NDArray[np.float32]]) -> None:
        fingerprint = self._connection.manifest.fingerprint
        opening = pb.Open(fingerprint=fingerprint, protocol=pb.PROTOCOL_TWO_PARTY)
        self._put(pb.ComputeRequest(open=opening))
        told = self._next("plan").plan
        self.plan, self.opened = Plan.from_json(told.plan), int(told.opened)
        self.opens_tokens = self.plan.choice is not None
        self._model = Model.of(self.plan, tensors)
        last = tensors.get(f"{self.plan.shape.kind.last}.bias")
        self._last_bias: F64 = np.zeros(1) if last is None else last.astype(np.float64)
        dealer.check = self._check
        self._dealing = Dealt.begun(dealer, fingerprint, self.plan, self._connection.timeout_s)
        self._held.callback(self._dealing.close)
        self._key = WordKey(parallel=(os.cpu_count() or 1) > 1)
        session = pb.PartySession(
            session=self._dealing.session, digest=self._model.digest(), public_key=self._key.public
        )
        self._put(pb.ComputeRequest(session=session))
        self._next("joined")

    # -- made ahead --------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        return self._connection.traffic

    @property
    def masks_left(self) -> int:
        """For how many rows products have been made, and not used."""
        return min(len(rows) for rows in self._rows.values())

    def provision(self, rows: int) -> None:
        """Makes products ahead for so many more rows of every matrix.

        Raises:
            SessionLostError: the session is over, or is now. SordinoError: of the server; it is over now.
        """
        with self._turn_of_one():
            self._provision(rows)

    def _provision(self, rows: int) -> None:
        start, self._phase = time.perf_counter(), "ahead"
        shapes = [word_shape(rows, *self.plan.shape.matrix(matrix)) for matrix in MATRICES]
        sizes = [
            sum(sizes) * self.plan.shape.layers / 1e6
            for sizes in ([one.upload_bytes() for one in shapes], [one.download_bytes() for one in shapes])
        ]
        self._on_plan(
            f"products ahead for {rows} rows: {sizes[0]:,.0f} MB up, {sizes[1]:,.0f} MB down "
            f"({sum(sizes) / rows:,.1f} MB a row; more rows at a time cost less each)"
        )
        for done, (layer, matrix) in enumerate(self._rows):
            inputs, outputs = self.plan.shape.matrix(matrix)
            shape = word_shape(rows, inputs, outputs)
            r = np.frombuffer(os.urandom(8 * rows * inputs), np.uint64).reshape(rows, inputs)
            requests = self._key.requests(r, shape)
            for i, message in enumerate(requests):
                last = i == len(requests) - 1
                wanted = pb.WordProducts(layer=layer, matrix=matrix, rows=rows, ciphertexts=message, last=last)
                self.spent.ahead_sent += wanted.ByteSize()
                self._put(pb.ComputeRequest(products=wanted))
            answers: list[bytes] = []
            while True:
                answer = self._next("answers").answers
                self.spent.ahead_received += answer.ByteSize()
                answers.append(answer.ciphertexts)
                if answer.last:
                    break
            c = self._key.open(answers, shape)[:rows]
            self._rows[layer, matrix].extend(zip(r, c, strict=True))
            if self._on_provision is not None:
                self._on_provision(done + 1, len(self._rows))
        self.spent.ahead_s += time.perf_counter() - start
        self._phase = "online"

    # -- passes ------------------------------------------------------------------------------------------------------

    @property
    def cached(self) -> tuple[int, ...]:
        """Counters of the rows in the cache, in order."""
        return tuple(self._cache.counters)

    @property
    def temperature(self) -> float:
        """At which tokens are drawn where they are opened alone, to 2^-12; 0 takes the likeliest."""
        return float(self._temperature * 2.0**-nb.TEMPERATURE)

    @temperature.setter
    def temperature(self, value: float) -> None:
        """
        Raises:
            RangeError: it is out of its range.
        """
        if not 0 <= value <= nb.HOTTEST:
            raise RangeError(f"tokens are drawn on shares at temperatures from 0 to {nb.HOTTEST:g}, not {value:g}")
        self._temperature = round(value * 2**nb.TEMPERATURE)

    def forward(
        self, rows: F64, kept: Sequence[int], sight: Sight | None = None, opened: Sequence[int] | None = None
    ) -> tuple[F64, list[int]]:
        """Hidden states ``[R, d]`` after the last norm, of embedded rows ``[R, d]`` after the cached rows ``kept``.

        Where ``opens_tokens`` they are next tokens, ``[R, 1]``.

        Args:
            sight: what the rows see of ``kept`` and of those among them that come before; None for one sequence.
            opened: the rows of which these are wanted, ascending; None for all. Hidden states of others are 0, tokens
                ``NO_TOKEN``.

        Returns:
            Also the counters of these rows in the cache.

        Raises:
            RangeError: an activation left the domain of a table; the cache is as before. Or rows are no numbers, or
                more are to be opened than the provider permits: nothing was sent.
            LimitError: too many rows for a cache. ProtocolError: the cache lacks ``kept``.
            SessionLostError: the session is over, or is now. SordinoError: of server or dealer; it is over now.
        """
        check_rows(rows)
        most = min(nb.LONGEST, self.plan.shape.positions)
        if len(kept) + len(rows) > nb.LONGEST:
            raise LimitError(
                f"{len(kept) + len(rows)} tokens: profile two-party takes {nb.LONGEST}, of all prompts of a batch and "
                "their answers: shorten them, or send fewer"
            )
        last = len(kept) + len(rows) - 1 if sight is None else int(sight.positions.max(initial=0))
        if last >= most:
            raise LimitError(f"position {last}: profile two-party has {most} of this model")
        wanted = np.arange(len(rows)) if opened is None else np.array(opened, np.int64)
        spans = [range(start, min(start + MOST_ROWS, len(rows))) for start in range(0, len(rows), MOST_ROWS)]
        if any(np.isin(wanted, span).sum() > self.opened for span in spans):
            raise RangeError(
                f"this provider opens at most {self.opened} of the rows that are sent together: speculation, beams, "
                "batches, and logits of a whole prompt need more"
            )
        if self.plan.shape.kind.centred:
            rows = rows - rows.mean(axis=1, keepdims=True)
        out, counters = np.full((len(rows), 1), NO_TOKEN) if self.opens_tokens else np.zeros_like(rows), list(kept)
        with self._turn:
            if self._cache.counters[: len(kept)] != counters:
                raise ProtocolError("the cache's rows are gone, another prompt came since: begin with an empty one")
            for span in spans:
                some, seen = rows[span.start : span.stop], None
                if sight is not None:
                    seen = Sight(
                        sight.positions[span.start : span.stop],
                        sight.visible[span.start : span.stop, : len(kept) + span.stop],
                    )
                while self.masks_left < len(some):
                    self.provision(min(max(BLOCK_ROWS, self._next_row), MOST_BLOCK))
                opening = wanted[np.isin(wanted, span)]
                with self._turn_of_one():
                    out[opening], outside = self._pass(some, counters, seen, opening - span.start)
                if outside:
                    self._cache.crop(len(counters))
                    raise RangeError("an activation left the domain that this profile can compute: no token came of it")
                counters += self._cache.counters[-len(some) :]
        return out, counters[len(kept) :]

    def _pass(self, rows: F64, kept: Sequence[int], sight: Sight | None, opening: I64) -> tuple[F64, int]:
        """Hidden states of the opened rows, or their tokens; and how many wires left their domain."""
        start = time.perf_counter()
        shape, count = self.plan.shape, len(rows)
        plain = len(kept) == len(self._cache)
        choice, head = self.plan.choice, self._model.head
        tokens = len(opening) if choice is not None else 0
        wanted, source = self._begin(count, kept, tokens)
        new = self._counters.extend(self._cache, wanted, self._dealing.key, shape)
        request = pb.Forward(numbers=wanted, opened=opening.tolist(), temperature=self._temperature)
        if sight is None:
            sight = Sight.causal(new)
        else:
            tell_sight(request, sight)
        self._put(pb.ComputeRequest(forward=request))
        if plain and count in (1, self._last_rows):  # one token after another, and so probably the next
            self._ask_ahead(count, self._cache.counters, tokens)
        self._last_rows = count
        party = Party(Tape(CLIENT, self._dealing.key, wanted.number, source), self)
        x = np.rint(rows * 2.0**nb.RESIDUAL).astype(np.int64).view(np.uint64)
        hidden, outside = forward(party, self._model, self, self._cache, new, sight, x)
        shown = hidden[opening]
        if choice is not None and head is not None:
            shown = choose(party, choice, head, shown, self._temperature)[:, None] if tokens else shown[:, :1]
        theirs = party.receive(1 + shown.size)
        source.finish()
        self._add(party.count, time.perf_counter() - start)
        words, left = shown + theirs[1:].reshape(shown.shape), int((outside + theirs[:1])[0])
        if choice is not None:
            return (words & np.uint64((1 << choice.number_bits) - 1)).astype(np.float64), left
        return self._model.hidden(words) + self._last_bias, left

    def _begin(self, rows: int, kept: Sequence[int], tokens: int) -> tuple[deal_pb.Pass, PassSource]:
        """A pass, and its material: that which was asked for ahead, if it is of such a pass."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wanted, source = ahead
            if (wanted.rows, wanted.tokens, counters_of(wanted.kept)) == (rows, tokens, list(kept)) and not source.lost:
                return ahead
            source.drop()
        wanted = deal_pb.Pass(
            number=self._next_pass, rows=rows, first_counter=self._next_row, kept=ranges(kept), tokens=tokens
        )
        self._next_pass += 1
        self._next_row += rows
        return wanted, self._dealing.ask(wanted)

    def ask_ahead(self, rows: int, kept: Sequence[int]) -> None:
        """Has the dealer make now what the next pass takes, if it is one of so many rows after ``kept``, all of them
        opened, unless another was asked for already; returns when this party has all of it.

        Raises:
            SessionLostError: the session is over, or is now. SordinoError: of server or dealer; it is over now.
        """
        with self._turn_of_one():
            if self._ahead is None:
                self._ask_ahead(rows, kept, rows if self.opens_tokens else 0)
            if self._ahead is not None:
                self._ahead[1].wait()

    def _ask_ahead(self, rows: int, kept: Sequence[int], tokens: int) -> None:
        """If both can read all of it before it is needed, and a cache has room for it."""
        if len(kept) + rows > nb.LONGEST:
            return
        if pass_bytes(self.plan, rows, len(kept) + rows, tokens) < AHEAD_BYTES // 2:  # and this pass
            self._ahead = self._begin(rows, kept, tokens)
            self._put(pb.ComputeRequest(ahead=self._ahead[0]))

    def _add(self, count: Count, seconds: float) -> None:
        spent = self.spent
        spent.rounds += count.rounds
        spent.sent += count.sent
        spent.received += count.received
        spent.passes += 1
        spent.pass_s += seconds

    def product(self, party: Party, layer: int, matrix: int, x: U64) -> U64:
        """See :class:`sordino.shared.twoparty.forward.Linear`. Rows are gone before they mask anything."""
        rows = self._rows[layer, matrix]
        used = list(islice(rows, len(x)))
        for _ in used:
            rows.popleft()
        party.send(x - np.stack([r for r, _ in used]))
        return np.stack([c for _, c in used])

    @contextmanager
    def _turn_of_one(self) -> Iterator[None]:
        """For what both sides must bring to its end."""
        with self._turn:
            if self._over:
                raise SessionLostError(self._over)
            try:
                with interrupts:  # in the locks of gRPC, and in that of the dealer's stream
                    yield
            except BaseException as error:
                closed, self._over = self._closed, self._over or _BROKEN
                self.close()
                if isinstance(error, TransportError):
                    text = _CLOSED if closed else f"the session broke and is over, connect anew: {error}"
                    raise SessionLostError(text) from None
                raise

    def constant(self, party: Party, layer: int, matrix: int) -> U64:
        """See :class:`sordino.shared.twoparty.forward.Linear`: the server adds what biases add."""
        del party, layer, matrix
        return np.zeros(1, np.uint64)

    # -- the stream --------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """See :class:`sordino.shared.twoparty.party.Link`."""
        self._put(pb.ComputeRequest(words=message))

    def receive(self) -> bytes:
        """See :class:`sordino.shared.twoparty.party.Link`."""
        return self._next("words").words

    def _put(self, request: pb.ComputeRequest) -> None:
        if self._closed:
            raise SessionLostError(_CLOSED)
        self.traffic.count(self._phase, up=request.ByteSize())
        self._outgoing.put(request)

    def _next(self, kind: str) -> pb.ComputeResponse:
        interrupts.check()  # of a pass, which defers them as a whole
        with interrupts:
            answer = next_answer(self._call, self._watchdog)
        self.traffic.count(self._phase, down=answer.ByteSize())
        if answer.WhichOneof("kind") != kind:
            raise IntegrityError(f"the server sent another kind of message where {kind!r} belongs")
        return answer

    def _check(self) -> None:
        """While the dealer is waited for.

        Raises:
            KeyboardInterrupt: Ctrl-C. SordinoError: the server has ended the session.
        """
        interrupts.check()
        call: Any = self._call
        if not call.is_active():
            raise TransportError(f"while the dealer was waited for, the server ended the stream: {error_of(call)}")

    def close(self) -> None:
        """Ends the session, at the server and at the dealer, and what another thread does in it."""
        if self._closed or not self._connection.owner.here():
            return
        with interrupts:
            self._closed, self._over = True, self._over or _CLOSED
            self._outgoing.put(None)
            self._call.cancel()
            self._watchdog.close()
            self._held.close()

    def __enter__(self) -> PartySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
