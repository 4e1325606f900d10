"""The ``sordino`` command: collects the commands of whichever sides are installed."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from sordino.shared.errors import SordinoError, printable

COMMANDS = "sordino.commands"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sordino {version('sordino')}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Private inference on hosted language models."""


def build() -> typer.Typer:
    """The command line, with one ``add`` function per installed side (entry points of group ``sordino.commands``)."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # a traceback with local variables would show prompts and keys
    )
    app.callback()(_options)
    for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        try:
            add: Callable[[typer.Typer], None] = point.load()
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("sordino.") and error.name != f"sordino.{point.name}":
                raise
            # This side is not installed; its commands are simply not there.
            logging.getLogger(__name__).debug("commands of %s left out: no module %s", point.name, error.name)
            continue
        add(app)
    return app


# Which extra brings what, where it is one alone.
_EXTRAS: Final = {
    "fastapi": "gateway",
    "gguf": "split",
    "grpc_health": "dealer or server",
    "grpc_reflection": "server",
    "platformdirs": "client",
    "prometheus_client": "dealer or server",
    "uvicorn": "gateway",
}


def main() -> None:
    """Entry point of the ``sordino`` command; a Sordino error ends it with one line and exit code 1."""
    # An idle OpenMP team that spins takes the core that the other side needs; read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():  # bars of the libraries would fill a log
        os.environ.setdefault("TQDM_DISABLE", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer that the terminal's encoding lacks is shown all the same
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        build()()
    except SordinoError as error:
        _fail(f"{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        # Commands load their libraries when they run: the wheel holds both sides, an extra the libraries of one.
        if error.name is None or error.name.startswith("sordino."):
            raise
        extra = _EXTRAS.get(error.name.partition(".")[0], "client, server or split")
        _fail(f"no module {error.name}: this command needs an extra that is not installed, {extra} (see the README)")
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or type(error).__name__}{named}")


def _fail(text: str) -> NoReturn:
    # It can be a bundle's text, or a name from anywhere.
    Console(stderr=True).print(f"[bold red]error:[/] {escape(printable(text))}", highlight=False, soft_wrap=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
