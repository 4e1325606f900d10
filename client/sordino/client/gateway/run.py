"""Runs the gateway: a port of loopback, HTTP by uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from platformdirs import user_data_path
from uvicorn.protocols.http.h11_impl import H11Protocol

from sordino.client.gateway import page
from sordino.client.gateway.app import Settings, create_app
from sordino.client.gateway.guard import Guard, check_host, read_key
from sordino.shared.errors import RangeError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from sordino.client.session import Connected

OPEN_PATHS: Final = frozenset({"/healthz"}) | page.OPEN_PATHS
_HEADERS_S: Final = 10.0  # for the head of a request to come
_CONNECTIONS: Final = 256
_PATIENCE_S: Final = 3.0  # for answers to end after the pass under way
_LAST_S: Final = 2  # for their clients to be told


class _Http(H11Protocol):
    """uvicorn waits for the head of a request for ever; here the connection is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        self.loop.call_later(_HEADERS_S, self._give_up, self.cycle)

    def _give_up(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """HTTP for one link; its end is that of the session, too.

    Args:
        port: that clients will use.
    """

    def __init__(self, link: Connected, settings: Settings, *, key: str, port: int) -> None:
        app, self.gateway = create_app(link, settings)
        app.include_router(page.router(link))
        super().__init__(
            uvicorn.Config(
                Guard(app, key=key, port=port, open_paths=OPEN_PATHS),
                http=_Http,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_CONNECTIONS,
                timeout_graceful_shutdown=int(_PATIENCE_S) + _LAST_S,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self.gateway.close(_PATIENCE_S))
        await super().shutdown(sockets)
        await closing


def default_key_file() -> Path:
    return user_data_path("sordino") / "gateway" / "key"


def bind(host: str, port: int) -> socket.socket:
    """A socket of loopback that does not listen yet: what asks meanwhile is refused rather than left waiting.

    Raises:
        RangeError: the host is not loopback, or the port is taken.
    """
    host = check_host(host)
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise _taken(host, port, error) from None
    return opened


def _taken(host: str, port: int, error: OSError) -> RangeError:
    return RangeError(f"port {port} of {host} cannot be had: {error.strerror}: choose another with --port")


def serve(
    link: Connected, opened: socket.socket, key_file: Path, settings: Settings, console: Console, port_file: Path | None
) -> None:
    """Serves until SIGTERM or Ctrl-C, and closes the session.

    Args:
        opened: of :func:`bind`. port_file: the port is written here when the gateway answers.

    Raises:
        RangeError: another program listens on the port meanwhile.
    """
    key, (host, port) = read_key(key_file), opened.getsockname()[:2]
    server = Server(link, settings, key=key, port=port)
    try:
        opened.listen(_CONNECTIONS)
    except OSError as error:  # two may bind a port as long as neither listens
        raise _taken(host, port, error) from None
    server.gateway.prompts.renderer.start()
    _introduce(console, f"[{host}]" if ":" in host else host, port, key, key_file, settings.model)
    # uvicorn raises the signal again when all is done: that is the end this process wants anyway.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    if port_file:
        port_file.write_text(str(port))
    server.run(sockets=[opened])


def _introduce(console: Console, host: str, port: int, key: str, key_file: Path, model: str) -> None:
    """Where it is, where the key is, and a command that works and shows the key to nobody: arguments are for all users
    of the machine to see, and printf is the shell's own."""
    address, path = f"http://{host}:{port}", shlex.quote(str(key_file))
    said = {"model": model, "messages": [{"role": "user", "content": "Say hello."}]}
    ask = (
        f'printf \'header = "Authorization: Bearer %s"\' "$(cat {path})" | curl -sK - '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(said))} {address}/v1/chat/completions"
    )
    lines = [
        f"gateway: {address}/v1 (model {model})",
        f"key:     {key_file}",
        f"page:    {address}/" + (f"#key={key}" if console.is_terminal else ", which asks for the key"),
        ask,
    ]
    for line in lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
