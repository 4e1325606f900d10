"""Products with pages of clients' encrypted KV caches.

The server holds no key, and does not know which page has keys and which values, nor of what layer, head or row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sordino.server.pagepool import Pages
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
    operands: U32,
    residues: U32,
    slots: I64,
    pairs: I64,
    part: int,
    prime: int,
    q: np.uint64,
    q_inv: np.uint64,
    out: U32,
) -> None:
    """Part 0, 1 or 2 of sum_k operand_k * page_k over ``pairs [K, 2]``, times 2^-32, below 2q: ``out [N]``."""
    mask, two_q = np.uint64(0xFFFFFFFF), np.uint32(2 * q)
    out[:] = 0
    acc = np.empty(out.size, np.uint64)
    # Sums of 2 * 15 products below 2^54 stay below q * 2^32, as the reduction needs.
    for first in range(0, pairs.shape[0], 15):
        acc[:] = 0
        for k in range(first, min(first + 15, pairs.shape[0])):
            a, b = operands[pairs[k, 0]], residues[slots[pairs[k, 1], prime]]
            if part == 1:
                a0, a1, b0, b1 = a[0, prime], a[1, prime], b[0], b[1]
                for i in range(out.size):
                    acc[i] += np.uint64(a0[i]) * np.uint64(b1[i]) + np.uint64(a1[i]) * np.uint64(b0[i])
            else:
                x, y = a[part // 2, prime], b[part // 2]
                for i in range(out.size):
                    acc[i] += np.uint64(x[i]) * np.uint64(y[i])
        for i in range(out.size):
            m = ((acc[i] & mask) * q_inv) & mask
            total = np.uint32(out[i] + np.uint32((acc[i] + m * q) >> np.uint64(32)))
            out[i] = min(total, np.uint32(total - two_q))


@compiled
def _evaluate(
    operands: U32,
    residues: U32,
    slots: I64,
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
                _product(operands, residues, slots, pairs[starts[r] : starts[r + 1]], part, prime, q, q_inv, row)
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
    pages: Pages,
    sums: Sequence[Sequence[tuple[int, int]]],
    read: Read,
    level: Level,
    *,
    parallel: bool = False,
) -> tuple[U64, U64, U64]:
    """Sums of products of ciphertexts, switched to 2^bits of their level.

    Args:
        operands: ``[count, 2 halves, primes, N]`` residues in NTT form.
        pages: the same, read where they lie.
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
        _evaluate(operands, *pages, pairs, starts, *tables, where, bits, block, stop, out0, out1, out2)

    in_halves(work, -(-3 * len(sums) // _LANES), parallel)
    return out0, out1, out2
