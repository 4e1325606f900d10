"""Fixtures shared by the tests: bundles of tiny models, and servers that outlive one test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that forks cannot do so where an earlier one had a gRPC server of asyncio in this process: its poller
    stays, and gRPC does not prepare for a fork while another thread is in it."""
    polled = any("_poll_wrapper" in thread.name for thread in threading.enumerate())
    if not polled or pyfuncitem.get_closest_marker("forks") is None:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return True


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where a shell starts the tests in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``bundles(family, **split options)``: the bundle of a tiny model, split once a session. Read-only."""
    from stack import split_tiny

    made: dict[str, Path] = {}

    def bundle(family: str = "llama", **options: Any) -> Path:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            made[key] = split_tiny(family, tmp_path_factory.mktemp(f"bundle-{family}"), **options)
        return made[key]

    return bundle


@pytest.fixture(scope="module")
def server(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server as anybody starts it (tiny Llama, TLS, token, no ``clear``), for all tests of a module."""
    from stack import ServerProcess

    with ServerProcess(bundles("llama"), tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="module")
def clear_server(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same with ``--allow-clear``."""
    from stack import ServerProcess

    with ServerProcess(bundles("llama"), tmp_path_factory.mktemp("clear-server"), allow_clear=True) as process:
        yield process
