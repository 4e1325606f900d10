"""A server process of one's own on this machine: for the benchmark, the audit, the demo and the notebooks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from sordino.shared.errors import SordinoError


@contextmanager
def server_process(
    bundle: Path, state: Path, *, allow_clear: bool, arguments: Sequence[str] = ()
) -> Iterator[tuple[str, Path, Path, psutil.Process]]:
    """A ``sordino serve`` of its own with TLS and a token: (target, CA, token file, process).

    Args:
        arguments: further options of the command.
    """
    state.mkdir(parents=True, exist_ok=True)
    port_file, log = state / "port", state / "server.log"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sordino.shared.cli", "serve", str(bundle), "--port", "0", "--state", str(state)]
    command += ["--port-file", str(port_file), *(["--allow-clear"] if allow_clear else []), *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SordinoError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        port = int(port_file.read_text())
        yield f"grpcs://127.0.0.1:{port}", state / "ca.pem", state / "token", psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
