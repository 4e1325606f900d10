"""A dealer and a server of profile two-party as processes, and clients of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stack import START_S, ServerProcess

from sordino.client.twoparty.connect import TwoPartyConnected, connect


class DealerProcess:
    """``sordino deal`` in a process of its own, with self-made certificates and one token for each role."""

    def __init__(self, tmp: Path, *, port: int = 0, arguments: tuple[str, ...] = ()) -> None:
        self.state = tmp / "dealer-state"
        self.port = port
        self._tmp = tmp
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        tmp.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        port_file = self._tmp / "dealer-port"
        port_file.unlink(missing_ok=True)
        command = [Path(sys.executable).with_name("sordino"), "deal", "--state", self.state]
        command += ["--port", str(self.port), "--port-file", port_file, *self._arguments]
        with (self._tmp / "dealer.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"the dealer did not start:\n{(self._tmp / 'dealer.log').read_text()[-2000:]}")
            time.sleep(0.02)
        self.port = int(port_file.read_text())

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> DealerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        return f"grpcs://localhost:{self.port}"

    @property
    def ca(self) -> Path:
        return self.state / "ca.pem"

    def token_file(self, role: str) -> Path:
        """Of a ``client`` or a ``server``."""
        return self.state / role / "token"


def serve_with(
    dealer: DealerProcess, bundle: Path, tmp: Path, *, extra: tuple[str, ...] = (), **options: Any
) -> ServerProcess:
    """A server that offers profile two-party with this dealer; to be entered."""
    arguments = ("--dealer", dealer.target, "--dealer-ca", str(dealer.ca))
    arguments += ("--dealer-token-file", str(dealer.token_file("server")), *extra)
    return ServerProcess(bundle, tmp, arguments=arguments, **options)


def share_with(server: ServerProcess, of: DealerProcess, tmp: Path, /, **options: Any) -> TwoPartyConnected:
    """A client of both."""
    return connect(
        server.target,
        **{
            "dealer": of.target,
            "dealer_ca": of.ca,
            "dealer_token": of.token_file("client").read_text().strip(),
            "token": server.token,
            "ca": server.ca,
            "cache": tmp / "cache",
            "ahead": 16,
            "timeout_s": 30,
            **options,
        },
    )
