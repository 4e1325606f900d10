"""Two parties and a dealer in one process: each party in a thread, messages through queues."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
from layer_check import links
from numpy.typing import NDArray

from sordino.dealer.deal import deal
from sordino.dealer.press import Press
from sordino.shared.twoparty.party import Party
from sordino.shared.twoparty.tape import Given, Tape

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_NUMBERS = count()


def share(values: NDArray[Any]) -> tuple[U64, U64]:
    """Random shares of signed or unsigned integers."""
    words = np.asarray(values).astype(np.int64).view(np.uint64) if np.asarray(values).dtype != np.uint64 else values
    first = np.frombuffer(os.urandom(8 * words.size), np.uint64).reshape(words.shape)
    return first, words - first


def signed(words: U64) -> I64:
    return words.view(np.int64)


class Run:
    """``program(party, *shares)`` by both, with the material of ``steps``. What they return must be shares, or tuples
    of them: ``result`` is their sum.

    Attributes:
        parties, links: to look at counts and messages.
    """

    def __init__(
        self,
        steps: Sequence[Any],
        program: Callable[..., Any],
        *inputs: NDArray[Any],
        dealt: Callable[[Press], None] | None = None,
    ) -> None:
        keys, number = (os.urandom(32), os.urandom(32)), next(_NUMBERS)
        press = Press(keys, number)
        for step in steps:
            deal(step, press)
        if dealt is not None:
            dealt(press)
        points, corrections = press.take()
        sources = Given(points, b""), Given(points, corrections)
        self.links = links()
        self.parties = [Party(Tape(i, keys[i], number, sources[i]), self.links[i]) for i in (0, 1)]
        shares = [share(values) for values in inputs]
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(program, party, *(two[party.index] for two in shares)) for party in self.parties]
            outs = [job.result(timeout=120) for job in jobs]
        assert [source.rest for source in sources] == [0, 0], "material that no step has read"
        self.result = _sum(*outs)


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, tuple):
        return tuple(_sum(a, b) for a, b in zip(first, second, strict=True))
    return first + second


def uniform(size: int, bits: int) -> I64:
    """Signed integers of at most so many bits, of all magnitudes."""
    words = np.frombuffer(os.urandom(8 * size), np.uint64)
    shift = np.frombuffer(os.urandom(size), np.uint8) % np.uint8(bits) + np.uint8(64 - bits)
    return (words.view(np.int64) >> shift.astype(np.int64)).copy()
