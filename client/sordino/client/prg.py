"""Uniform ring elements from a 32-byte key, by AES-256 in counter mode.

The stream is AES-256-CTR (NIST SP 800-38A, section 6.5) over zeros, under a key that HKDF-SHA256 (RFC 5869) derives
from the caller's key and a label, so two labels never share a keystream. It is read as little-endian uint32 words, and
words >= p are left out: what remains is exactly uniform on [0, p), as far as AES is a pseudo-random permutation. Of the
2^32 words five are left out: about one in 3.4 GB.

The output is part of the pool's format: the masks of a stored batch are computed again from its keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from sordino.shared.ring import P

U32 = NDArray[np.uint32]

KEY_BYTES: Final = 32
_SALT: Final = b"sordino/v1"  # fixed: RFC 5869 section 3.1 asks no secrecy of it, and the keys here are uniform already
_CALL_BYTES: Final = (
    1 << 24
)  # OpenSSL counts the bytes of a call in a C int; pieces of this size also stay near a cache


def random_key() -> bytes:
    """32 bytes from the operating system's generator."""
    return os.urandom(KEY_BYTES)


def derive(key: bytes, purpose: bytes) -> bytes:
    """HKDF-SHA256: a 32-byte key for one purpose. Keys of different purposes tell nothing about each other or ``key``.

    Raises:
        ValueError: the key is not 32 bytes.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this one has {len(key)}")
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=_SALT, info=purpose).derive(key)


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
    stream = Cipher(AES256(derive(key, b"prg/" + label)), CTR(bytes(16))).encryptor()

    def words(n: int) -> U32:
        out = np.zeros(n, dtype="<u4")
        raw = out.data.cast("B") if n else memoryview(b"")
        for start in range(0, 4 * n, _CALL_BYTES):
            piece = raw[start : start + _CALL_BYTES]
            stream.update_into(piece, piece)  # in place: CTR adds the keystream to the zeros that are there
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
