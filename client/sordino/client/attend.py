"""Attention over encrypted pages, from the client's side: the stream, the pages on it, and messages that fit."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sordino.client.interrupts import interrupts
from sordino.client.pages import (
    F64,
    PageKey,
    decoded,
    encode_keys,
    encode_probabilities,
    encode_queries,
    encode_values,
)
from sordino.client.route import Target
from sordino.client.transport import Call, Connection, Watchdog, next_answer
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.shared.errors import IntegrityError, KvEvictedError, SessionLostError, TransportError
from sordino.shared.pages import KEYS, VALUES, Level, N, PageShape, Read

F32 = NDArray[np.float32]

# Products of more are cut, so that both sides work at the same time.
_MESSAGE_BYTES: Final = 2 << 20
_SPARE_BYTES: Final = 256  # of a message, for what stands beside the ciphertexts
# Encrypted ahead of the server's answers: all queries of a long turn at once are gigabytes.
_UNDER_WAY: Final = 8


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Page:
    """Sealed tokens of one row of a batch in one layer: on the stream ``epoch`` a page of keys and one of values for
    each KV head, and the scales of all. It is dropped there when nothing here refers to it any more."""

    epoch: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    key_scales: F64
    value_scales: F64


class PageStream:
    """The pages of one session: requests and answers over one stream, which cannot be replaced while pages are on it.

    Safe for several threads, which take turns. Without pages a broken stream is opened again, of several servers to any
    one of them, whatever groups it holds; with pages they are gone, and whoever needs them gets KvEvictedError.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._outgoing: queue.SimpleQueue[pb.AttendRequest | None] = queue.SimpleQueue()
        self._call: Call[pb.AttendResponse] | None = None
        self._target: Target | None = None
        self._watchdog = Watchdog(connection.timeout_s)
        self._closed = False
        self._next_id = 0
        self._appended = 0
        self._kept = 0
        self._forgotten: deque[tuple[int, tuple[int, ...]]] = deque()
        self._gone: list[int] = []
        self.epoch = 0

    def append(self, messages: Iterable[pb.AttendRequest]) -> tuple[int, int]:
        """Sends pages, numbering them: the epoch, and the number of the first."""
        self._connection.owner.check()
        with self._turn():
            self._collect()
            first, messages = 0, list(messages)

            def attempt() -> None:
                nonlocal first
                call = self._stream()
                first = number = self._appended
                for message in messages:
                    message.append.first = number
                    number += message.append.pages.count
                self._exchange(call, messages, _ignore)
                # Here, where the server has them, whatever is raised on the way out.
                self._appended = number
                self._kept += number - first

            if self._kept:
                self._guarded(attempt)
            else:
                try:
                    self._connection.retrying(attempt)
                except KvEvictedError:  # of pages that nobody needs any more: on a new stream
                    self._connection.retrying(attempt)
            return self.epoch, first

    def exchange(
        self, epoch: int, messages: Iterable[pb.AttendRequest], receive: Callable[[int, pb.AttendResponse], None]
    ) -> None:
        """Sends ``messages`` as they are made; gives each answer to ``receive`` with the number of its message.

        Raises:
            KvEvictedError: the pages of ``epoch`` are gone.
            SordinoError: the server refused a request.
        """
        self._connection.owner.check()
        with self._turn():
            self._collect()
            self._check_open()
            call = self._call
            if epoch != self.epoch or call is None:
                raise KvEvictedError("the pages of this KV cache are gone from the server: start the answer anew")
            self._guarded(lambda: self._exchange(call, messages, receive))
            self._connection.traffic.rounds += 1

    def forget(self, epoch: int, numbers: tuple[int, ...]) -> None:
        """Has pages dropped before the next request; called by the garbage collector, so it waits for nothing."""
        self._forgotten.append((epoch, numbers))

    def close(self) -> None:
        if not self._connection.owner.here():
            return
        self._closed = True
        self._watchdog.close()
        with interrupts:
            if self._lock.acquire(blocking=False):  # otherwise the connection's end ends the call
                try:
                    self._hang_up()
                finally:
                    self._lock.release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread's turn; an interrupt is raised at its end, or while another thread has its own."""
        with interrupts:
            while not self._lock.acquire(timeout=0.1):
                interrupts.check()
            try:
                yield
            finally:
                self._lock.release()

    def _guarded(self, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except (TransportError, ValueError) as error:  # the latter is gRPC's, of a call on a channel that was closed
            interrupts.check()
            self._check_open()
            if isinstance(error, ValueError):
                raise
            raise KvEvictedError(f"the stream that held this KV cache broke: start the answer anew ({error})") from None

    def _check_open(self) -> None:
        """The connection may have been closed first, by the session's end or a failed check."""
        if self._closed or self._connection.closed:
            raise SessionLostError("the session is closed") from None

    def _stream(self) -> Call[pb.AttendResponse]:
        self._check_open()
        if self._call is None:
            self._outgoing = queue.SimpleQueue()
            self._target = self._connection.route.holder()
            self._call = self._connection.open_attention(iter(self._outgoing.get, None), self._target)
            opening = pb.Open(fingerprint=self._connection.manifest.fingerprint, protocol=pb.PROTOCOL_RLWE)
            self._exchange(self._call, [pb.AttendRequest(open=opening)], _ignore)
        return self._call

    def _exchange(
        self,
        call: Call[pb.AttendResponse],
        messages: Iterable[pb.AttendRequest],
        receive: Callable[[int, pb.AttendResponse], None],
    ) -> None:
        traffic, timings = self._connection.traffic, self._connection.timings
        sent: deque[tuple[int, int]] = deque()  # id, and number among the messages (-1: of our own)

        def send(message: pb.AttendRequest, number: int) -> None:
            message.id = self._next_id
            self._next_id += 1
            traffic.count("attention", up=message.ByteSize())
            self._outgoing.put(message)
            sent.append((message.id, number))

        def read() -> None:
            start = time.perf_counter()
            answer = next_answer(call, self._watchdog)
            timings.lap("attention wait", start)
            expected, number = sent.popleft()
            if answer.id != expected:
                raise IntegrityError("the server answered out of order")
            traffic.count("attention", down=answer.ByteSize())
            timings["attention server"] = timings.get("attention server", 0.0) + answer.compute_us / 1e6
            if number >= 0:
                receive(number, answer)

        try:
            if self._gone:
                gone, self._gone = self._gone, []
                send(pb.AttendRequest(drop=pb.PageDrop(pages=gone)), -1)
            for number, message in enumerate(messages):
                if len(sent) >= _UNDER_WAY:
                    read()
                send(message, number)
            while sent:
                read()
        except TransportError as error:
            target = self._target
            self._hang_up()
            raise (self._connection.route.failed(target, error) if target else error) from None
        except BaseException:
            self._hang_up()
            raise

    def _collect(self) -> None:
        """Pages that nothing refers to any more do not count; the next messages tell the server."""
        while self._forgotten:
            epoch, numbers = self._forgotten.popleft()
            if epoch == self.epoch:
                self._gone.extend(numbers)
                self._kept -= len(numbers)

    def _hang_up(self) -> None:
        if self._call is not None:
            self._outgoing.put(None)
            self._call.cancel()
            self._call = None
            self.epoch += 1
            self._appended = self._kept = 0
            self._gone = []


class EncryptedAttention:
    """Pages are sealed, scores and outputs computed, all encrypted under one key of this session.

    Only against a semi-honest server: nothing checks these answers (docs/threat-model.md).

    Args:
        page_tokens: tokens of a page; by default as many as fit. Fewer are for tests.
    """

    def __init__(self, connection: Connection, page_tokens: int | None = None) -> None:
        self.stream = PageStream(connection)
        self._key = PageKey()
        self._page_tokens = page_tokens
        self._timings = connection.timings
        self._limit = min(_MESSAGE_BYTES, connection.max_message_bytes - _SPARE_BYTES)

    def close(self) -> None:
        self.stream.close()

    def tokens(self, key_size: int, value_size: int) -> int:
        """Tokens of a page for heads of these sizes.

        Raises:
            ValueError: not one fits.
        """
        most = N // max(key_size, value_size)
        return PageShape(max(key_size, value_size), min(most, self._page_tokens or most)).tokens

    def seal(self, keys: F32, values: F32) -> list[Page]:
        """Sends pages: ``keys [P, KV heads, tokens, d]``, values alike."""
        count, heads, _, _ = keys.shape
        flat_keys, key_scales = encode_keys(_flat(keys))
        flat_values, value_scales = encode_values(_flat(values))

        def messages() -> Iterator[pb.AttendRequest]:
            for polynomials, level in ((flat_keys, KEYS), (flat_values, VALUES)):
                step = max(1, self._limit // level.ciphertext_bytes)
                for start in range(0, len(polynomials), step):
                    part = self._ciphertexts(polynomials[start : start + step], level)
                    yield pb.AttendRequest(append=pb.PageAppend(pages=part))

        pages = []
        with interrupts:  # what the server has is here, too, or is dropped
            epoch, first = self.stream.append(messages())
            for p in range(count):
                of_keys = tuple(range(first + p * heads, first + (p + 1) * heads))
                of_values = tuple(number + count * heads for number in of_keys)
                which = slice(p * heads, (p + 1) * heads)
                page = Page(epoch, of_keys, of_values, key_scales[which], value_scales[which])
                weakref.finalize(page, self.stream.forget, epoch, of_keys + of_values).atexit = False
                pages.append(page)
        return pages

    def scores(self, queries: F32, pages: Sequence[Page], tokens: int) -> F32:
        """``queries [heads, rows, d]`` times the keys of ``pages``: ``[heads, rows, P, tokens]``, unscaled."""
        heads, rows, size = queries.shape
        groups = heads // len(pages[0].keys)
        read = PageShape(size, tokens).scores
        flat = queries.reshape(-1, size)
        out = np.empty((heads * rows, len(pages), tokens), np.float32)
        cuts = list(self._cuts(len(flat), len(pages), read, KEYS, lambda some, which: (some, some * which)))
        scales: list[F64] = [np.empty(0)] * len(cuts)

        def messages() -> Iterator[pb.AttendRequest]:
            for number, (some, which) in enumerate(cuts):
                polynomials, scales[number] = encode_queries(flat[some].astype(np.float64))
                products = self._products(polynomials, read, KEYS)
                for k, index in enumerate(range(some.start, some.stop)):
                    head = index // rows // groups
                    for page in pages[which]:
                        products.sums.add(operands=[k], pages=[page.keys[head]])
                yield pb.AttendRequest(products=products)

        def receive(number: int, answer: pb.AttendResponse) -> None:
            some, which = cuts[number]
            start = time.perf_counter()
            shape = (some.stop - some.start, which.stop - which.start)
            read_off = self._key.decrypt((answer.c0, answer.c1, answer.c2), shape[0] * shape[1], read, KEYS)
            heads_of = np.arange(some.start, some.stop) // rows // groups
            of_pages = np.stack([page.key_scales[heads_of] for page in pages[which]], axis=1)
            scale = of_pages * scales[number][:, None]
            out[some, which] = decoded(read_off.reshape(*shape, tokens), scale[:, :, None], KEYS)
            self._timings.lap("attention decrypt", start)

        self.stream.exchange(pages[0].epoch, messages(), receive)
        return out.reshape(heads, rows, len(pages), tokens)

    def outputs(self, weights: F32, pages: Sequence[Page], size: int) -> F32:
        """``weights [heads, rows, P, tokens]`` times the values of ``pages``, summed: ``[heads, rows, size]``."""
        heads, rows, _, tokens = weights.shape
        groups = heads // len(pages[0].values)
        read = PageShape(size, tokens).outputs
        flat = weights.reshape(-1, len(pages), tokens)
        out = np.zeros((heads * rows, size), np.float32)
        cuts = list(self._cuts(len(flat), len(pages), read, VALUES, lambda some, which: (some * which, some)))
        scales: list[F64] = [np.empty(0)] * len(cuts)

        def messages() -> Iterator[pb.AttendRequest]:
            for number, (some, which) in enumerate(cuts):
                heads_of = np.arange(some.start, some.stop) // rows // groups
                of_pages = np.stack([page.value_scales[heads_of] for page in pages[which]], axis=1)
                polynomials, scales[number] = encode_probabilities(flat[some, which].astype(np.float64), of_pages)
                products = self._products(polynomials.reshape(-1, N), read, VALUES)
                for k, head in enumerate(heads_of.tolist()):
                    operands = range(k * len(pages[which]), (k + 1) * len(pages[which]))
                    products.sums.add(operands=operands, pages=[page.values[head] for page in pages[which]])
                yield pb.AttendRequest(products=products)

        def receive(number: int, answer: pb.AttendResponse) -> None:
            some, _ = cuts[number]
            start = time.perf_counter()
            read_off = self._key.decrypt((answer.c0, answer.c1, answer.c2), some.stop - some.start, read, VALUES)
            out[some] += decoded(read_off, scales[number][:, None], VALUES).astype(np.float32)
            self._timings.lap("attention decrypt", start)

        self.stream.exchange(pages[0].epoch, messages(), receive)
        return out.reshape(heads, rows, size)

    def _products(self, polynomials: F64, read: Read, level: Level) -> pb.PageProducts:
        operands = self._ciphertexts(polynomials, level)
        return pb.PageProducts(operands=operands, first=read.first, step=read.step, count=read.count)

    def _ciphertexts(self, polynomials: F64, level: Level) -> pb.Ciphertexts:
        interrupts.check()  # the work of a long prompt is here
        start = time.perf_counter()
        seed, c0 = self._key.encrypt(polynomials, level, parallel=True)
        self._timings.lap("attention encrypt", start)
        return pb.Ciphertexts(count=len(polynomials), seed=seed, c0=c0, primes=level.primes)

    def _cuts(
        self, rows: int, pages: int, read: Read, level: Level, counts: Callable[[int, int], tuple[int, int]]
    ) -> Iterator[tuple[slice, slice]]:
        """Rows x pages in messages within the limit; ``counts(rows, pages)`` are the ciphertexts up and the answers."""

        def fits(some: int, which: int) -> bool:
            up, down = counts(some, which)
            # A page's number takes up to eight bytes of a sum, its operand's up to four.
            sent, read_off = up * level.ciphertext_bytes + 16 * some * which, down * level.answer_bytes(read)
            return max(sent, read_off) <= self._limit

        which = pages
        while which > 1 and not fits(1, which):
            which = -(-which // 2)
        some = 1
        while some < rows and fits(some + 1, which):
            some += 1
        for start in range(0, rows, some):
            for first in range(0, pages, which):
                yield slice(start, min(start + some, rows)), slice(first, min(first + which, pages))


def _flat(x: F32) -> F64:
    """``[P, heads, tokens, d]`` as ``[P * heads, tokens, d]``."""
    return x.reshape(-1, *x.shape[2:]).astype(np.float64)


def _ignore(_: int, __: pb.AttendResponse) -> None:
    pass
