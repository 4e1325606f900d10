"""Commands of the client. (Filled in below.)"""
from __future__ import annotations
import typer
def add(app: typer.Typer) -> None:
    """Adds the client's commands to the ``sordino`` command."""
