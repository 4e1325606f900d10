"""Pages of clients' encrypted KV caches: products with them, and who may keep how many bytes for how long.

The server holds no key, and does not know which page has keys and which values, nor of what layer, head or row.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sordino.shared.errors import KvEvictedError, LimitError, ProtocolError
from sordino.shared.jit import compiled
from sordino.shared.pages import COARSE_BITS, Level, N, Read, montgomery
from sordino.shared.rlwe import U32, U64, RlweParams, in_halves, inverse_stages, twiddles

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_LANES: Final = 16  # polynomials in one transform


@cache
def _tables(params: RlweParams) -> tuple[U32, U32, U64, U64, F64]:
    """For each prime: inverse twiddles and their quotients, (q, -q^-1), the last factor with its quotient, and 1/q."""
    q = params.q
    powers = [twiddles(params, i)[2:] for i in range(len(params.primes))]
    moduli, last = [], []
    for prime in params.primes:
        # 1/N of the transform, 2^32 of Montgomery's reduction, and (q/prime)^-1 of the Chinese remainder theorem.
        factor = pow(N, -1, prime) * (1 << 32) * pow(q // prime, -1, prime) % prime
        moduli.append((prime, montgomery(prime)[0]))
        last.append((factor, (factor << 32) // prime))
    return (
        np.stack([w for w, _ in powers]),
        np.stack([ws for _, ws in powers]),
        np.array(moduli, np.uint64),
        np.array(last, np.uint64),
        1 / np.array(params.primes, np.float64),
    )


@compiled
def _product(
    operands: U32, pages: U32, pairs: I64, part: int, prime: int, q: np.uint64, q_inv: np.uint64, out: U32
) -> None:
    """Part 0, 1 or 2 of sum_k operand_k * page_k over ``pairs [K, 2]``, times 2^-32, below 2q: ``out [N]``."""
    mask, two_q = np.uint64(0xFFFFFFFF), np.uint32(2 * q)
    out[:] = 0
    acc = np.empty(out.size, np.uint64)
    # Sums of 2 * 15 products below 2^54 stay below q * 2^32, as the reduction needs.
    for first in range(0, pairs.shape[0], 15):
        acc[:] = 0
        for k in range(first, min(first + 15, pairs.shape[0])):
            a, b = operands[pairs[k, 0]], pages[pairs[k, 1]]
            if part == 1:
                a0, a1, b0, b1 = a[0, prime], a[1, prime], b[0, prime], b[1, prime]
                for i in range(out.size):
                    acc[i] += np.uint64(a0[i]) * np.uint64(b1[i]) + np.uint64(a1[i]) * np.uint64(b0[i])
            else:
                x, y = a[part // 2, prime], b[part // 2, prime]
                for i in range(out.size):
                    acc[i] += np.uint64(x[i]) * np.uint64(y[i])
        for i in range(out.size):
            m = ((acc[i] & mask) * q_inv) & mask
            total = np.uint32(out[i] + np.uint32((acc[i] + m * q) >> np.uint64(32)))
            out[i] = min(total, np.uint32(total - two_q))


@compiled
def _evaluate(
    operands: U32,
    pages: U32,
    pairs: I64,
    starts: I64,
    w: U32,
    ws: U32,
    moduli: U64,
    last: U64,
    inverse: F64,
    read: tuple[int, int, int],
    bits: tuple[int, int],
    block: int,
    stop: int,
    out0: U64,
    out1: U64,
    out2: U64,
) -> None:
    """Blocks of 16 of the 3*R polynomials of R sums: products, inverse transforms, switched and rounded.

    x 2^bits / q for x = CRT(x_i) is the sum of ((q/q_i)^-1 x_i mod q_i) 2^bits / q_i mod 2^bits: within 2^(bits-50) of
    the truth in float64.
    """
    sums, n = starts.size - 1, operands.shape[3]
    first, step, count = read
    fine, coarse = bits
    mask = np.uint64(0xFFFFFFFF)
    buf = np.empty((n, 16), np.uint32)
    row = np.empty(n, np.uint32)
    acc = np.empty((n, 16), np.float64)
    scale = np.empty(16, np.float64)
    for group in range(block, stop):
        width = min(16, 3 * sums - 16 * group)
        acc[:] = 0
        for c in range(16):
            scale[c] = np.float64(1 << (coarse if (16 * group + c) // sums == 1 else fine))
        for prime in range(moduli.shape[0]):
            q, q_inv = moduli[prime, 0], moduli[prime, 1]
            q32 = np.uint32(q)
            buf[:, width:] = 0
            for c in range(width):
                part, r = (16 * group + c) // sums, (16 * group + c) % sums
                _product(operands, pages, pairs[starts[r] : starts[r + 1]], part, prime, q, q_inv, row)
                for i in range(n):
                    buf[i, c] = row[i]
            inverse_stages(buf, w[prime], ws[prime], np.int64(q))
            factor, shoup = last[prime, 0], last[prime, 1]
            each = scale * inverse[prime]
            for i in range(n):
                for c in range(16):
                    y = np.uint64(buf[i, c])
                    r32 = np.uint32((factor * y - ((shoup * y) >> np.uint64(32)) * q) & mask)
                    acc[i, c] += np.float64(min(r32, np.uint32(r32 - q32))) * each[c]
        acc += 6755399441055744.0  # 1.5 * 2^52 leaves the rounded integer in the low bits
        whole = acc.view(np.uint64)
        for c in range(width):
            part, r = (16 * group + c) // sums, (16 * group + c) % sums
            low = np.uint64((1 << (coarse if part == 1 else fine)) - 1)
            if part == 0:
                for k in range(count):
                    out0[r, k] = whole[first + step * k, c] & low
            elif part == 1:
                for i in range(n):
                    out1[r, i] = whole[i, c] & low
            else:
                for i in range(n):
                    out2[r, i] = whole[i, c] & low


def evaluate(
    operands: U32,
    pages: U32,
    sums: Sequence[Sequence[tuple[int, int]]],
    read: Read,
    level: Level,
    *,
    parallel: bool = False,
) -> tuple[U64, U64, U64]:
    """Sums of products of ciphertexts, switched to 2^bits of their level.

    Args:
        operands, pages: ``[count, 2 halves, primes, N]`` residues in NTT form.
        sums: for each answer which operand times which page, added up.
        parallel: use two threads.

    Returns:
        ``[R, read.count]`` of c0, ``[R, N]`` of c1 (COARSE_BITS less), ``[R, N]`` of c2.
    """
    pairs = np.array([pair for terms in sums for pair in terms], np.int64).reshape(-1, 2)
    starts = np.cumsum([0, *(len(terms) for terms in sums)], dtype=np.int64)
    out0 = np.empty((len(sums), read.count), np.uint64)
    out1, out2 = (np.empty((len(sums), N), np.uint64) for _ in range(2))
    bits, where = (level.bits, level.bits - COARSE_BITS), (read.first, read.step, read.count)
    tables = _tables(level.params)

    def work(block: int, stop: int) -> None:
        _evaluate(operands, pages, pairs, starts, *tables, where, bits, block, stop, out0, out1, out2)

    in_halves(work, -(-3 * len(sums) // _LANES), parallel)
    return out0, out1, out2


@dataclass(slots=True, eq=False)
class PageSession:
    """The pages of one stream, by the numbers that its client gave them, in order. ``holder`` is whose it is."""

    holder: str = ""
    pages: dict[int, U32] = field(default_factory=dict)
    appended: int = 0
    used: float = field(default_factory=time.monotonic)
    busy: bool = False
    evicted: bool = False

    @property
    def size(self) -> int:
        return sum(page.nbytes for page in self.pages.values())

    def find(self, numbers: Sequence[int], level: Level) -> U32:
        """``[len(numbers), 2, primes, N]``.

        Raises:
            ProtocolError: a page is not there, or at another level.
        """
        for number in numbers:
            if number not in self.pages:
                raise ProtocolError(f"page {number} was never appended, or was dropped")
            if self.pages[number].shape[1] != level.primes:
                raise ProtocolError(f"page {number} is at another level than the operands of {level.primes} primes")
        return np.stack([self.pages[number] for number in numbers])


class PageStore:
    """All sessions' pages, accounted in bytes.

    Args:
        total, per_session: limits in bytes.
        evict_after_s: a session that was not used for so long may lose its pages to others, the least recently used
            first; its next call says so. A holder of more than the holders' equal share may lose pages to one who
            has less, rested or not.
    """

    def __init__(self, total: int, per_session: int, evict_after_s: float) -> None:
        self._total = total
        self._per_session = per_session
        self._evict_after_s = evict_after_s
        self._lock = threading.Lock()
        self._sessions: list[PageSession] = []

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(session.size for session in self._sessions)

    @contextmanager
    def session(self, holder: str = "") -> Iterator[PageSession]:
        """Pages of a holder (a token, say) that are gone at the end."""
        session = PageSession(holder)
        with self._lock:
            self._sessions.append(session)
        try:
            yield session
        finally:
            with self._lock:
                self._sessions.remove(session)

    @contextmanager
    def using(self, session: PageSession) -> Iterator[None]:
        """While a request of the session is answered: its pages stay.

        Raises:
            KvEvictedError: they went before.
        """
        with self._lock:
            if session.evicted:
                raise KvEvictedError("the pages of this session made room for others while it rested: start anew")
            session.busy = True
        try:
            yield
        finally:
            with self._lock:
                session.busy, session.used = False, time.monotonic()

    def append(self, session: PageSession, first: int, pages: Sequence[U32]) -> None:
        """Adds pages ``[2, primes, N]`` under the numbers from ``first`` on.

        Raises:
            ProtocolError: these numbers are not the next ones.
            LimitError: there is no room.
        """
        if first != session.appended:
            raise ProtocolError(f"page {first} is appended twice or out of order: the next is {session.appended}")
        size = sum(page.nbytes for page in pages)
        with self._lock:
            if session.size + size > self._per_session:
                raise LimitError(
                    f"a session may keep {self._per_session >> 20} MiB of pages here: use shorter prompts or answers"
                )
            self._make_room(session.holder, size)
            session.pages.update(enumerate(pages, first))
            session.appended += len(pages)

    def drop(self, session: PageSession, numbers: Sequence[int]) -> None:
        """Forgets pages; each must be there.

        Raises:
            ProtocolError: one is not.
        """
        with self._lock:
            for number in numbers:
                if session.pages.pop(number, None) is None:
                    raise ProtocolError(f"page {number} was never appended, or was dropped")

    def _make_room(self, holder: str, size: int) -> None:
        held = Counter({holder: 0})
        for session in self._sessions:
            held[session.holder] += session.size
        over = held.total() + size - self._total
        share = self._total // len(held)
        before = time.monotonic() - self._evict_after_s
        going: list[PageSession] = []
        for other in sorted(self._sessions, key=lambda other: other.used):
            if over <= 0:
                break
            too_much = held[other.holder] > share and held[holder] + size <= share
            if other.pages and not other.busy and (other.used <= before or too_much):
                going.append(other)
                held[other.holder] -= other.size
                over -= other.size
        if over > 0:
            raise LimitError("the server's memory for pages is in use: try again later")
        for other in going:
            other.pages.clear()
            other.evicted = True
