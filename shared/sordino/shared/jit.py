"""Compiled kernels, cached beside their source or in the user's cache folder, and where neither can be written not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from numba import njit

R = TypeVar("R")

log = logging.getLogger(__name__)


def compiled(function: Callable[..., R]) -> Callable[..., R]:
    """Numba's ``njit`` without the GIL, and with its cache if there is a place for one."""
    try:
        fast: Callable[..., R] = njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _say_uncached()
        fast = njit(nogil=True)(function)
    return fast


@cache
def _say_uncached() -> None:
    log.warning("no folder for compiled kernels can be written: every start compiles anew (set NUMBA_CACHE_DIR)")
