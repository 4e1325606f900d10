"""Compiled kernels, cached beside their source or in the user's cache folder, and where neither can be written not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache

R = TypeVar("R")

log = logging.getLogger(__name__)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's own, but a damaged file or a full disk costs time alone."""

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception as error:  # damaged bytes, unpickled, raise anything
            self._forget(error)
            return None

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)
        except Exception as error:  # the index is read before it is written
            self._forget(error)

    def _forget(self, error: Exception) -> None:
        # Numba writes the index first: it may name a file that still holds an older kernel.
        with suppress(OSError):
            Path(self._cache_file._index_path).unlink()
        _say_damaged(self.cache_path, getattr(error, "strerror", None) or type(error).__name__)


def compiled(function: Callable[..., R]) -> Callable[..., R]:
    """Numba's ``njit`` without the GIL, and with its cache if there is a place for one."""
    fast: Callable[..., R] = njit(nogil=True)(function)
    try:
        fast._cache = _Cache(function)  # type: ignore[attr-defined]  # as cache=True does
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _say_uncached()
    return fast


@cache
def _say_damaged(folder: str, why: str) -> None:
    log.warning("kernels in %s cannot be read or written (%s), and are compiled anew", folder, why)


@cache
def _say_uncached() -> None:
    log.warning("no folder for compiled kernels can be written: every start compiles anew (set NUMBA_CACHE_DIR)")
