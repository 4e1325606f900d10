"""Errors as OpenAI's clients expect them: a status, and an object that says what is wrong."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from sordino.client.options import Options
from sordino.shared.errors import (
    AuthError,
    FingerprintError,
    IntegrityError,
    KvEvictedError,
    LimitError,
    PoolError,
    ProtocolError,
    RangeError,
    SordinoError,
    TransportError,
    printable,
)

log = logging.getLogger(__name__)
_OPTIONS: Final = frozenset(item.name for item in fields(Options))
_MOST_CHARACTERS: Final = 500
# The first that fits: status and code.
_UPSTREAM: Final[tuple[tuple[type[SordinoError], int, str], ...]] = (
    (IntegrityError, 502, "integrity_check_failed"),
    (AuthError, 502, "server_refuses_token"),
    (FingerprintError, 502, "another_model"),
    (ProtocolError, 502, "protocol_error"),
    (TransportError, 503, "server_unreachable"),
    (PoolError, 503, "no_masks"),
    (LimitError, 503, "server_limit"),
    (KvEvictedError, 503, "cache_evicted"),
)


class ApiError(SordinoError):
    """An answer of HTTP that is an error.

    Args:
        status: of HTTP. param: the field of the request that is to blame. code: for programs.
        retry: whether the same request may succeed in a moment. OpenAI's clients try again by themselves after 408,
            409, 429 and 5xx unless they are told not to.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(printable(message)[:_MOST_CHARACTERS])
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """``{"error": {...}}``"""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry:
            return {"retry-after": "1"}
        return {"x-should-retry": "false"} if self.status == 429 or self.status >= 500 else {}


def bad_request(error: RangeError) -> ApiError:
    """Of a value that means nothing; texts about an option begin with its name."""
    named = re.match(r"\w+", str(error))
    param = named[0] if named and named[0] in _OPTIONS else None
    return ApiError(400, str(error), param=param, code="invalid_value")


def fault_of(error: BaseException) -> ApiError:
    """What an error of an answer under way is called; of one that was not expected only its kind and place are logged,
    since its text may hold part of a prompt.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _UPSTREAM:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    if isinstance(error, SordinoError):
        return ApiError(500, str(error), code="failed")
    place = "".join(traceback.format_tb(error.__traceback__)[-3:])
    log.error("an answer failed: %s\n%s", type(error).__name__, place)
    return ApiError(500, "the gateway failed; its log says where", code="internal_error")
