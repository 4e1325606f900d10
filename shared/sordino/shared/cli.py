"""The ``sordino`` command: collects the commands of whichever sides are installed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

import typer
from rich.console import Console
from rich.markup import escape

from sordino.shared.errors import SordinoError

COMMANDS = "sordino.commands"


def build() -> typer.Typer:
    """The command line, with one ``add`` function per installed side (entry points of group ``sordino.commands``)."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # a traceback with local variables would show prompts and keys
        help="Private inference on hosted language models.",
    )
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


def main() -> None:
    """Entry point of the ``sordino`` command; a Sordino error ends it with one line and exit code 1."""
    # An idle OpenMP team that spins takes the core that the other side needs; read once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        build()()
    except SordinoError as error:
        # It can be a server's text: no control sequences for the terminal.
        text = "".join(c if c.isprintable() else " " for c in str(error))
        Console(stderr=True).print(
            f"[bold red]error:[/] {type(error).__name__}: {escape(text)}", highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except ModuleNotFoundError as error:
        # Commands load their libraries when they run: the wheel holds both sides, an extra the libraries of one.
        if error.name is None or error.name.startswith("sordino."):
            raise
        text = f"no module {error.name}: this command needs an extra (client, server or split), as in pip install "
        text += "'sordino[client]'"
        Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        text = escape(f"{error.strerror or type(error).__name__}{named}")
        Console(stderr=True).print(f"[bold red]error:[/] {text}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
