"""Pairs of connected models, one per family, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import models
import pytest
from pairs import Pair, open_pair


@pytest.fixture(scope="module", params=models.FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from open_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """``make_pair(family, **split options)``; all are closed at the end of the module."""
    with ExitStack() as stack:
        yield lambda family, **options: stack.enter_context(
            contextmanager(open_pair)(family, tmp_path_factory.mktemp(family), **options)
        )
