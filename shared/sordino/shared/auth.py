"""Token authentication. The server stores SHA-256 digests of tokens, never the tokens.

Tokens are 32 random bytes, so a plain hash is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sordino.shared.errors import AuthError, SordinoError
from sordino.shared.files import locked, replace, unreadable

log = logging.getLogger(__name__)
ANONYMOUS: Final = "anonymous"
_OPEN_SERVICES: Final = ("/grpc.health.v1.Health/",)
_MAX_DAYS: Final = 36_500
_LONGEST_NAME: Final = 200
_LAST_S: Final = 253_402_300_799  # of the year 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """``expires`` is in seconds since the epoch; None never expires."""

    name: str
    sha256: str
    expires: float | None

    def __post_init__(self) -> None:
        # The fields come from a file that people edit.
        named = isinstance(self.name, str) and self.name.strip()
        hashed = isinstance(self.sha256, str) and re.fullmatch("[0-9a-f]{64}", self.sha256)
        dated = self.expires is None or (type(self.expires) in (int, float) and abs(self.expires) < math.inf)
        if not (named and hashed and dated):
            raise ValueError("not the record of a token")


class TokenFile:
    """A JSON file of token records, mode 0600; re-read when it changes, so tokens are added without a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._records: list[TokenRecord] = []

    def issue(self, name: str, *, days: float | None = None) -> str:
        """Adds a token and returns it; it cannot be shown again. Several processes may issue at once.

        Raises:
            SordinoError: no name, one that would upset a terminal, or no number of days.
            AuthError: the file is malformed; it stays as it is.
        """
        if not name.strip():
            raise SordinoError("a token needs a name: say whose it is")
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise SordinoError(f"the name of a token is one line of up to {_LONGEST_NAME} printable characters")
        if days is not None and not 0 < days <= _MAX_DAYS:
            raise SordinoError(f"a token is valid for more than 0 and at most {_MAX_DAYS} days, not {days}")
        token, record = _fresh(name, days)
        with locked(self._path.parent):
            self._write([*(self._load() if self._path.exists() else []), record])
        return token

    def issue_first(self, copy: Path) -> bool:
        """Makes the file, with one token for ever that is written to ``copy`` too, unless the file exists."""
        with locked(self._path.parent):
            if self._path.exists():
                return False
            token, record = _fresh("first", None)
            replace(copy, f"{token}\n".encode())  # first: a token that nobody has seen would be of no use
            self._write([record])
        return True

    def revoke(self, name: str) -> int:
        """Takes all tokens of this name away, and returns how many. A running server ends their calls.

        Raises:
            SordinoError: there is none.
            AuthError, OSError: the file is malformed, or cannot be read.
        """
        with locked(self._path.parent):
            records = self._load()
            left = [record for record in records if record.name != name]
            if len(left) == len(records):
                raise SordinoError(f"no token of the name {name!r} is in {self._path}")
            self._write(left)
        return len(records) - len(left)

    def records(self) -> list[TokenRecord]:
        """All records, also those that have expired.

        Raises:
            AuthError, OSError: the file is malformed, or cannot be read.
        """
        return list(self._load())

    def _write(self, records: list[TokenRecord]) -> None:
        replace(self._path, json.dumps([asdict(record) for record in records], indent=1).encode())

    def verify(self, token: str) -> str:
        """The name of the token's record.

        Raises:
            AuthError: unknown or expired.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()
        found = None
        for record in self._load():
            if hmac.compare_digest(record.sha256, digest):
                found = record
        if found is None:
            raise AuthError("the token is not known to this server")
        if found.expires is not None and found.expires < time.time():
            raise AuthError(f"the token expired on {day(found.expires)}: ask the provider for another")
        return found.name

    def check(self) -> bool:
        """Whether the file is there; what is wrong with it is said to who runs the server.

        Raises:
            SordinoError: it is malformed, or cannot be read.
        """
        try:
            if not self._load():
                log.warning("%s holds no token, so nobody can enter: `sordino token` issues one", self._path)
        except FileNotFoundError:
            return False
        except AuthError:
            raise AuthError(f"{self._path} is malformed: mend it, or delete it to begin anew") from None
        except OSError as error:
            raise SordinoError(unreadable(self._path, error)) from error
        return True

    def valid(self) -> set[str]:
        """The digests of all tokens that are known and have not expired.

        Raises:
            AuthError, OSError: the file is malformed, or cannot be read.
        """
        now = time.time()
        return {record.sha256 for record in self._load() if record.expires is None or record.expires >= now}

    def _load(self) -> list[TokenRecord]:
        stat = self._path.stat()
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if stamp != self._stamp:
            try:
                entries = json.loads(self._path.read_text())
                if not isinstance(entries, list):
                    raise TypeError("not a list")
                self._records = [TokenRecord(**entry) for entry in entries]
            except (ValueError, TypeError) as error:
                raise AuthError("the server's token file is malformed: its operator must mend it") from error
            self._stamp = stamp
        return self._records


def day(seconds: float) -> str:
    """The date of a time since the epoch, no earlier than that."""
    return time.strftime("%Y-%m-%d", time.gmtime(min(max(0, seconds), _LAST_S)))


def _fresh(name: str, days: float | None) -> tuple[str, TokenRecord]:
    token = "sord_" + secrets.token_urlsafe(32)
    expires = None if days is None else time.time() + days * 86_400
    return token, TokenRecord(name=name, sha256=hashlib.sha256(token.encode()).hexdigest(), expires=expires)


def is_open(method: str) -> bool:
    """Whether a method, by its full name, needs no token."""
    return method.startswith(_OPEN_SERVICES)


def bearer(metadata: Any) -> str:
    """The token of a call's metadata.

    Raises:
        AuthError: there is none.
    """
    for key, value in metadata or ():
        if key == "authorization" and str(value).startswith("Bearer "):
            return str(value)[7:]
    raise AuthError("no token: pass token=... (or --token-file) as the provider gave it to you")


def identity_of(metadata: Any) -> str:
    """What limits are counted by: a digest of the token, or of nothing on a server without authentication."""
    try:
        return hashlib.sha256(bearer(metadata).encode()).hexdigest()
    except AuthError:
        return ANONYMOUS
