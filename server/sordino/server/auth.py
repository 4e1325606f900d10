"""Token authentication. The server stores SHA-256 digests of tokens, never the tokens.

Tokens are 32 random bytes, so a plain hash is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc

from sordino.shared.errors import AuthError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.ServicerContext
ANONYMOUS: Final = "anonymous"
_OPEN_SERVICES: Final = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """``expires`` is in seconds since the epoch; None never expires."""

    name: str
    sha256: str
    expires: float | None


class TokenFile:
    """A JSON file of token records, mode 0600; re-read when it changes, so tokens are added without a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._records: list[TokenRecord] = []

    def issue(self, name: str, *, days: float | None = None) -> str:
        """Adds a token and returns it; it cannot be shown again."""
        token = "sord_" + secrets.token_urlsafe(32)
        expires = None if days is None else time.time() + days * 86_400
        record = TokenRecord(name=name, sha256=hashlib.sha256(token.encode()).hexdigest(), expires=expires)
        records = [*(self._load() if self._path.exists() else []), record]
        temporary = self._path.with_suffix(".tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump([asdict(r) for r in records], file, indent=1)
        temporary.replace(self._path)
        return token

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
            when = time.strftime("%Y-%m-%d", time.gmtime(found.expires))
            raise AuthError(f"the token expired on {when}: ask the provider for another")
        return found.name

    def _load(self) -> list[TokenRecord]:
        stat = self._path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp != self._stamp:
            try:
                self._records = [TokenRecord(**entry) for entry in json.loads(self._path.read_text())]
            except (ValueError, TypeError) as error:
                raise AuthError("the server's token file is malformed: its operator must mend it") from error
            self._stamp = stamp
        return self._records


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses every call without a valid ``authorization: Bearer`` header, health checks excepted."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICES):
            return handler
        try:
            self._tokens.verify(bearer(handler_call_details.invocation_metadata or ()))
        except AuthError as error:
            return _refusal(str(error))
        except OSError:
            return _refusal("the server's token file cannot be read: its operator must mend it")
        return handler


def bearer(metadata: Any) -> str:
    """The token of a call's metadata.

    Raises:
        AuthError: there is none.
    """
    for key, value in metadata:
        if key == "authorization" and str(value).startswith("Bearer "):
            return str(value)[7:]
    raise AuthError("no token: pass token=... (or --token-file) as the provider gave it to you")


def identity_of(context: Context) -> str:
    """What limits are counted by: a digest of the token, or of nothing on a server without authentication."""
    try:
        return hashlib.sha256(bearer(context.invocation_metadata() or ()).encode()).hexdigest()[:16]
    except AuthError:
        return ANONYMOUS


def _refusal(text: str) -> Handler:
    """Ends a call without reading from it: who may not enter holds no thread by sending nothing."""

    def refuse(_: object, context: Context) -> NoReturn:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    return grpc.stream_stream_rpc_method_handler(refuse)
