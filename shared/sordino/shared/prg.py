"""Keystreams from a 32-byte key: AES-256 in counter mode under keys that HKDF-SHA256 derives.

The stream is AES-256-CTR (NIST SP 800-38A, section 6.5) over zeros, under a key that HKDF-SHA256 (RFC 5869) derives
from the caller's key and a label, so two labels never share a keystream.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

KEY_BYTES: Final = 32
_SALT: Final = b"sordino/v1"  # fixed: RFC 5869 section 3.1 asks no secrecy of it, and the keys here are uniform already
# OpenSSL counts the bytes of a call in a C int; pieces of this size also stay near a cache.
_CALL_BYTES: Final = 1 << 24


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


class Keystream:
    """The bytes of one key and label, in order; from block ``start`` of 16 bytes on."""

    def __init__(self, key: bytes, label: bytes, start: int = 0) -> None:
        self._stream = Cipher(AES256(derive(key, b"prg/" + label)), CTR(start.to_bytes(16, "big"))).encryptor()

    def fill(self, out: NDArray[Any]) -> None:
        """The next bytes, into a contiguous array that holds zeros."""
        raw = out.reshape(-1).view(np.uint8).data if out.size else memoryview(b"")
        for start in range(0, raw.nbytes, _CALL_BYTES):
            piece = raw[start : start + _CALL_BYTES]
            self._stream.update_into(piece, piece)  # in place: CTR adds the keystream to the zeros that are there
