"""The client SDK. ``from sordino.client import connect`` is the way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sordino.shared.grpc_settings  # noqa: F401 - before grpc is imported

if TYPE_CHECKING:
    from sordino.client.session import Connected, Session, connect

__all__ = ["Connected", "Session", "connect"]


def __getattr__(name: str) -> Any:
    # Deferred: importing transformers takes seconds, and the pool or a tool may not need it.
    if name in __all__:
        from sordino.client import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
