"""How the small secret files of a pool are kept: sealed under a passphrase, or plain with a checksum.

Sealed is AES-256-GCM (NIST SP 800-38D) with a fresh random nonce at every write, under a key that scrypt (RFC 7914)
derives from the passphrase. ``pool.json`` (:class:`Head`) is public: it says whose pool this is.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from sordino.client.ledger import read_private, stage
from sordino.shared.errors import PoolError, PoolSealedError
from sordino.shared.prg import KEY_BYTES

HEAD_NAME: Final = "pool.json"
_FORMAT: Final = 1
_NONCE_BYTES: Final = 12
_SALT_BYTES: Final = 16
_PLAIN: Final = b"sordino plain 1\n"
_SEALED: Final = b"sordino sealed 1\n"
# 32 MiB and some 0.2 s a guess; OWASP's password storage cheat sheet counts this among its sets of equal strength.
_SCRYPT: Final = {"n": 1 << 15, "r": 8, "p": 3}


# Set up before anybody can fork, as in sordino.client.prg.
AESGCM(bytes(KEY_BYTES)).encrypt(bytes(_NONCE_BYTES), b"", None)
Scrypt(salt=bytes(_SALT_BYTES), length=KEY_BYTES, n=2, r=1, p=1).derive(b"first use")


class Vault:
    """Seals small files, or stores them plain with a checksum. Its text form shows no key."""

    __slots__ = ("_aead", "_pool_id")

    def __init__(self, pool_id: str, key: bytes | None) -> None:
        self._pool_id = pool_id
        self._aead = AESGCM(key) if key is not None else None

    @classmethod
    def from_passphrase(cls, pool_id: str, passphrase: str | None, salt: bytes) -> Vault:
        """
        Raises:
            PoolSealedError: an empty passphrase.
        """
        if passphrase is None:
            return cls(pool_id, None)
        if not passphrase:
            raise PoolSealedError("the passphrase is empty: leave it out for a pool that is not sealed")
        # The same passphrase typed on two systems may arrive composed or decomposed.
        secret = unicodedata.normalize("NFKC", passphrase).encode()
        return cls(pool_id, Scrypt(salt=salt, length=KEY_BYTES, **_SCRYPT).derive(secret))

    @property
    def sealed(self) -> bool:
        return self._aead is not None

    def wrap(self, role: str, content: bytes) -> bytes:
        """``role`` names the file, so that one cannot be put in another's place."""
        if self._aead is None:
            return _PLAIN + self._checksum(role, content) + content
        nonce = os.urandom(_NONCE_BYTES)
        return _SEALED + nonce + self._aead.encrypt(nonce, content, self._context(role))

    def unwrap(self, role: str, blob: bytes) -> bytes:
        """
        Raises:
            PoolError: damaged, changed by somebody, or wrapped under another passphrase.
        """
        if self._aead is None:
            body = blob[len(_PLAIN) + 32 :]
            if not blob.startswith(_PLAIN + self._checksum(role, body)):
                raise PoolError(f"the pool's file {role!r} is damaged")
            return body
        start = len(_SEALED) + _NONCE_BYTES
        try:
            if blob.startswith(_SEALED):
                return self._aead.decrypt(blob[len(_SEALED) : start], blob[start:], self._context(role))
        except (InvalidTag, ValueError) as error:
            raise PoolError(f"the pool's file {role!r} is damaged") from error
        raise PoolError(f"the pool's file {role!r} is not sealed as the pool is: it was changed")

    def _checksum(self, role: str, content: bytes) -> bytes:
        return hashlib.sha256(self._context(role) + b"\0" + content).digest()

    def _context(self, role: str) -> bytes:
        return f"sordino pool {self._pool_id} {role}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """``pool.json``. ``host`` is the tag that binds the pool to a ledger; ``proof`` is what a passphrase must open."""

    pool_id: str
    fingerprint: str
    host: str
    sealed: bool
    salt: bytes
    proof: bytes

    @staticmethod
    def make(folder: Path, pool_id: str, fingerprint: str, host: str, passphrase: str | None) -> None:
        """Writes the head of a new pool; from then on there is one.

        Raises:
            PoolSealedError: an empty passphrase.
        """
        salt = secrets.token_bytes(_SALT_BYTES)
        vault = Vault.from_passphrase(pool_id, passphrase, salt)
        head = {
            "format": _FORMAT,
            "pool": pool_id,
            "fingerprint": fingerprint,
            "host": host,
            "sealed": vault.sealed,
            "salt": salt.hex(),
            "proof": vault.wrap(HEAD_NAME, b"").hex(),
        }
        stage(folder / HEAD_NAME, json.dumps(head, indent=1).encode()).publish()

    @classmethod
    def load(cls, folder: Path) -> Head:
        """
        Raises:
            PoolError: there is none, or it is malformed or of another release.
        """
        if not (folder / HEAD_NAME).is_file():
            raise PoolError(f"there is no mask pool in {folder.name!r}")
        try:
            raw = json.loads(read_private(folder / HEAD_NAME))
            if raw["format"] != _FORMAT:
                raise PoolError("the mask pool was made by another release: delete its folder")
            return cls(
                pool_id=str(raw["pool"]),
                fingerprint=str(raw["fingerprint"]),
                host=str(raw["host"]),
                sealed=bool(raw["sealed"]),
                salt=bytes.fromhex(raw["salt"]),
                proof=bytes.fromhex(raw["proof"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PoolError(f"{HEAD_NAME} of the mask pool is damaged: delete the pool's folder") from error

    def vault(self, passphrase: str | None) -> Vault:
        """
        Raises:
            PoolSealedError: the passphrase is missing, wrong, or given for a pool that is not sealed.
        """
        if self.sealed != (passphrase is not None):
            raise PoolSealedError(
                "the mask pool is sealed: give its passphrase"
                if self.sealed
                else "the mask pool is not sealed, but a passphrase was given: leave it out, or make a new pool"
            )
        vault = Vault.from_passphrase(self.pool_id, passphrase, self.salt)
        try:
            vault.unwrap(HEAD_NAME, self.proof)
        except PoolError as error:
            raise PoolSealedError("wrong passphrase for the mask pool") from error
        return vault
