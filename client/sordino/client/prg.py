"""Uniform elements of Z_p from a 32-byte key.

A keystream (:mod:`sordino.shared.prg`) is read as little-endian uint32 words, and words >= p are left out: what remains
is exactly uniform on [0, p), as far as AES is a pseudo-random permutation. Of the 2^32 words five are left out: about
one in 3.4 GB.

The output is part of the pool's format: the masks of a stored batch are computed again from its keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sordino.shared.prg import KEY_BYTES, Keystream
from sordino.shared.ring import P

U32 = NDArray[np.uint32]


def uniform_mod_p(key: bytes, label: bytes, count: int) -> U32:
    """``count`` independent uniform elements of Z_p: ``[count]`` uint32 in [0, p).

    Deterministic, and a prefix: a larger ``count`` begins with the same elements.

    Args:
        key: 32 secret bytes. label: what the numbers are for; each label is a stream of its own.

    Raises:
        ValueError: the key is not 32 bytes, or ``count`` is negative.
    """
    if count < 0:
        raise ValueError("count is negative")
    stream = Keystream(key, label)

    def words(n: int) -> U32:
        out = np.zeros(n, dtype="<u4")
        stream.fill(out)
        return out.astype(np.uint32, copy=False)  # no copy on a little-endian machine

    return accept(words, count)


def accept(words: Callable[[int], U32], count: int) -> U32:
    """The first ``count`` words below p of a stream that ``words(n)`` reads n words further.

    How often words are rejected is visible in the time taken; it tells about words that are not used.
    """
    out = words(count)
    # One pass that only reads, since nearly always nothing is rejected.
    if not count or int(out.max()) < P:
        return out
    kept = out[out < P]
    while kept.size < count:
        more = words(count - kept.size)
        kept = np.concatenate([kept, more[more < P]])
    return kept


# What cryptography sets up at its first use must not be under way in another thread at a fork: the child would wait for
# that thread for ever, and hold the ledger meanwhile.
uniform_mod_p(bytes(KEY_BYTES), b"first use", 1)
