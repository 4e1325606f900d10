"""The server's products of pages, wherever these lie, against exact integers."""

from __future__ import annotations

import numpy as np
import pytest

from sordino.server.pagepool import Pages
from sordino.server.pages import evaluate
from sordino.shared.pages import COARSE_BITS, KEYS, VALUES, Level, N, Read
from sordino.shared.rlwe import intt


def residues(count: int, seed: int, level: Level) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, q, (count, 2, N), dtype=np.uint32) for q in level.params.primes]
    return np.ascontiguousarray(np.stack(parts, axis=2))


def scattered(pages: np.ndarray) -> Pages:
    """In any order among slots of others, which hold residues that would be seen in a sum."""
    count, _, primes, _ = pages.shape
    slots = np.random.default_rng(7).permutation(count * primes + 5)[: count * primes].reshape(count, primes)
    residues = np.full((count * primes + 5, 2, N), 12345, np.uint32)
    residues[slots] = pages.transpose(0, 2, 1, 3)
    return Pages(residues, slots)


@pytest.mark.parametrize("level", [KEYS, VALUES], ids=["keys", "values"])
@pytest.mark.parametrize("terms", [1, 15, 16, 40])
def test_sums_are_those_of_exact_integers(terms: int, level: Level) -> None:
    """Rounded from q to the modulus of answers: off by one at most."""
    operands, stored, read = residues(terms, 1, level), residues(3, 2, level), Read(5, 7, 100)
    sums = [[(k, k % 3) for k in range(terms)], [(0, 2)]]
    got = evaluate(operands, scattered(stored), sums, read, level)
    q = level.params.q
    for r, pairs in enumerate(sums):
        for part in range(3):
            exact = []
            for i, prime in enumerate(level.params.primes):
                total = np.zeros(N, object)
                for a, b in pairs:
                    x, y = operands[a].astype(object), stored[b].astype(object)
                    if part == 1:
                        total += x[0, i] * y[1, i] + x[1, i] * y[0, i]
                    else:
                        total += x[part // 2, i] * y[part // 2, i]
                exact.append((total % prime).astype(np.uint32))
            coefficients = np.stack(exact)[:, :, None].copy()
            intt(coefficients, level.params)
            whole = sum(
                coefficients[i, :, 0].astype(object) * (q // prime) * pow(q // prime, -1, prime)
                for i, prime in enumerate(level.params.primes)
            )
            bits = level.bits - COARSE_BITS if part == 1 else level.bits
            wanted = ((whole % q << bits) + q // 2) // q % (1 << bits)
            if part == 0:
                wanted = wanted[read.first :: read.step][: read.count]
            off = (got[part][r].astype(object) - wanted) % (1 << bits)
            assert all(x in (0, 1, (1 << bits) - 1) for x in off)
