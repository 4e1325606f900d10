"""A page for the user's browser: a chat, and live beside it what the server sees of it.

The files of the page hold no data and need no key. What the page shows does: it comes from two routes below
``/sordino``, which :class:`sordino.client.gateway.guard.Guard` keeps for the user as it does those of the API.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from fastapi import APIRouter
from fastapi.responses import FileResponse
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool

from sordino.client.gateway.faults import ApiError
from sordino.client.session import Connected, Session
from sordino.client.watch import Sight, Watch, centred
from sordino.shared.manifest import GroupSpec

_FOLDER: Final = Path(__file__).with_name("page")
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN_PATHS: Final = frozenset(_FILES)
# Nothing inline, nothing from elsewhere, no frame around it: text of the model or the provider cannot become code.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_WAIT_S: Final = 1.0  # for a new row, before the figures alone are sent
_LOOK_S: Final = 5.0  # that a group is looked at, after it was last asked for
_STEP_S: Final = 0.03
_SHOWN_BYTES: Final = 4096  # of a ciphertext


class _Looks:
    """A group is looked at for a few seconds after each request for it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._ends: dict[str, asyncio.TimerHandle] = {}

    def renew(self, group: str) -> None:
        if group in self._ends:
            self._ends[group].cancel()
        self._watch.look(group)
        self._ends[group] = asyncio.get_running_loop().call_later(_LOOK_S, self._end, group)

    def _end(self, group: str) -> None:
        del self._ends[group]
        self._watch.look_away(group)


def router(link: Connected) -> APIRouter:
    """The page and its data; all but :data:`OPEN_PATHS` needs the key."""
    session, looks = link.session, _Looks(link.session.watch)
    names = frozenset(session.manifest.by_name)
    routes = APIRouter(include_in_schema=False)
    for path, (name, kind) in _FILES.items():
        routes.add_api_route(path, _file(name, kind), methods=["GET", "HEAD"])

    @routes.get("/sordino/about")
    def about() -> dict[str, Any]:
        """What does not change: the model, how its rows are hidden, its groups. And the figures so far."""
        return {
            **_figures(session),
            "model": session.manifest.model_name,
            "protocol": session.protocol.name,
            "attention": "rlwe" if session.attention else "local",
            "groups": [_about(group) for group in session.manifest.groups],
        }

    @routes.get("/sordino/seen")
    async def seen(group: str, after: int = 0) -> dict[str, Any]:
        """Figures, and the newest row of ``group`` as soon as it is another than number ``after``."""
        if group not in names:
            raise ApiError(404, f"the model has no group {group[:80]!r}", param="group")
        looks.renew(group)
        clock = asyncio.get_running_loop().time
        until = clock() + _WAIT_S
        while _number(sight := session.watch.newest(group)) == after and clock() < until:
            await asyncio.sleep(_STEP_S)
        figures = await run_in_threadpool(_figures, session)
        return {**figures, "row": _row(sight) if sight else None}

    return routes


def _file(name: str, kind: str) -> Callable[[], FileResponse]:
    return lambda: FileResponse(_FOLDER / name, media_type=kind, headers=_HEADERS)


def _about(group: GroupSpec) -> dict[str, Any]:
    label = " + ".join(member.name.rpartition(".")[2] for member in group.members)
    return {"name": group.name, "layer": group.layer, "label": label, "inputs": group.in_features}


def _number(sight: Sight | None) -> int:
    return sight.number if sight else 0


def _figures(session: Session) -> dict[str, Any]:
    up, down = (sum(way.values()) - way.get("bundle", 0) for way in (session.traffic.up, session.traffic.down))
    return {"up": up, "down": down, "masks_left": session.masks_left}


def _row(sight: Sight) -> dict[str, Any]:
    """A row for a picture: eight bits of each element, too few to compute the mask from."""
    size = None
    if isinstance(sight.sent, bytes):
        size = len(sight.sent)
        shades = (np.frombuffer(sight.sent[:_SHOWN_BYTES], np.uint8) ^ 128).view(np.int8)
    else:
        shades = _shades(centred(sight.sent))
    return {
        "number": sight.number,
        "elements": sight.true.size,
        "true": _base64(_shades(sight.true)),
        "sent": _base64(shades),
        "ciphertext_bytes": size,
        "correlation": sight.correlation(),
    }


def _shades(row: NDArray[np.int32]) -> NDArray[np.int8]:
    """From -127 to 127, by the largest magnitude of the row."""
    top = max(int(np.abs(row.astype(np.int64)).max()), 1)
    shades: NDArray[np.int8] = np.rint(row * (127 / top)).astype(np.int8)
    return shades


def _base64(shades: NDArray[np.int8]) -> str:
    return base64.b64encode(shades.tobytes()).decode("ascii")
