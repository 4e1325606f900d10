"""Who may ask: whoever has the key, from a program or a page of this machine, and nobody else.

The gateway listens on loopback, where three others can speak to it: other users of the machine, who lack the key; pages
of other sites in the user's own browser, whose requests carry another Origin; and such pages under a name that was
pointed at 127.0.0.1 meanwhile (DNS rebinding), whose requests carry another Host. Browsers ask before they send JSON
across sites, and never get leave: there are no CORS headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
import stat
import traceback
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sordino.client.gateway.faults import ApiError
from sordino.client.ledger import make_private_dir, open_private, stage
from sordino.shared.errors import AuthError, RangeError

log = logging.getLogger(__name__)
HOSTS: Final = ("127.0.0.1", "::1")
_KEY: Final = re.compile(r"sk-sordino-[A-Za-z0-9_-]{43}")
_KEY_BYTES: Final = 32
_HEADERS: Final = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def check_host(host: str) -> str:
    """Refuses an address that others could reach.

    Raises:
        RangeError: it is not loopback.
    """
    if host == "localhost":
        return HOSTS[0]
    if host not in HOSTS:
        raise RangeError(f"the gateway listens on {' or '.join(HOSTS)} alone, not on {host[:80]!r}: it reads prompts")
    return host


def read_key(path: Path) -> str:
    """The key of the file, which is made where there is none: 256 random bits, mode 0600.

    Raises:
        AuthError: the file is open to others, another user's, or holds no key.
    """
    try:
        if not path.exists():
            if not path.parent.exists():
                make_private_dir(path.parent)
            staged = stage(path, f"sk-sordino-{secrets.token_urlsafe(_KEY_BYTES)}\n".encode())
            try:
                # Never over a key that another start made meanwhile.
                with contextlib.suppress(FileExistsError):
                    os.link(staged.temp, path)
            finally:
                staged.discard()
        # Of a pipe, the opening would wait for a writer, and the reading for what it writes.
        with open(open_private(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            text = file.read(1000).decode("ascii", "replace").strip() if stat.S_ISREG(state.st_mode) else ""
    except (OSError, ValueError) as error:  # the latter of a name with a NUL
        why = getattr(error, "strerror", None) or error
        raise AuthError(f"the key file {path} cannot be used: {why}") from None
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise AuthError(
            f"the key file {path} must be yours alone: chmod 600 it, or delete it and every copy of the key"
        )
    if not _KEY.fullmatch(text):
        raise AuthError(f"the key file {path} holds no key: delete it, and the next start makes one")
    return text


class Guard:
    """The outermost layer: every request passes it, whatever its route.

    Args:
        port: that the gateway listens on. open_paths: which need no key.
    """

    def __init__(self, app: ASGIApp, *, key: str, port: int, open_paths: frozenset[str]) -> None:
        self._app, self._key, self._open_paths = app, key.encode(), open_paths
        names = ("localhost", "127.0.0.1", "[::1]")
        self._hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        begun = False

        async def guarded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                have = {name.lower() for name, _ in message.get("headers", ())}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *(item for item in more if item[0] not in have)]
            await send(message)

        try:
            self.check(Request(scope))
            await self._app(scope, receive, guarded)
        except ApiError as fault:
            await JSONResponse(fault.body, fault.status, fault.headers)(scope, receive, guarded)
        except asyncio.CancelledError:  # the gateway ends, and would not wait longer: for a body, say
            if begun:
                raise
            closing = ApiError(503, "the gateway is closing", code="closing")
            await JSONResponse(closing.body, closing.status, closing.headers)(scope, receive, guarded)
        except Exception as error:
            # Whatever logs it otherwise would log its text, too, which may hold part of a prompt.
            log.error(
                "a request failed: %s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__))
            )
            if not begun:
                failed = ApiError(500, "the gateway failed; its log says where", code="internal_error")
                await JSONResponse(failed.body, failed.status, failed.headers)(scope, receive, guarded)

    def check(self, request: Request) -> None:
        """Host, Origin, key, type of the body, in this order.

        Raises:
            ApiError: the request is not the user's own.
        """
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            raise ApiError(403, "this host name is not the gateway's: use localhost or 127.0.0.1", code="wrong_host")
        if origins and [origin.lower() for origin in origins] != [f"http://{hosts[0].lower()}"]:
            raise ApiError(403, "pages of other sites may not use the gateway", code="wrong_origin")
        if request.scope["path"] not in self._open_paths:
            self._check_key(request)
        if request.method in ("POST", "PUT", "PATCH"):
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "the body is JSON: send content-type application/json", code="wrong_content_type")

    def _check_key(self, request: Request) -> None:
        given = request.headers.getlist("authorization")
        if not given:
            raise ApiError(401, "the key is missing: send Authorization: Bearer KEY", code="invalid_api_key")
        scheme, _, key = given[0].partition(" ")
        known = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        if len(given) != 1 or scheme.lower() != "bearer" or not known:
            raise ApiError(
                401, "this is not the gateway's key: it is in the file named at its start", code="invalid_api_key"
            )
