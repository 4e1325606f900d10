"""Runs notebooks from top to bottom and keeps what they show.

    python notebooks/run.py notebooks/*.ipynb            # in place: how the outputs in the repository are made
    python notebooks/run.py --to FOLDER notebooks/0*.ipynb

Only what a reader looks at is kept: no warnings of libraries and no times of cells. With ``SORDINO_SMALL=1`` everything
is smaller, for tests; ``SORDINO_BUNDLE`` is another bundle than the demo's, and ``SORDINO_MODEL`` what that was split
from.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

_CELL_S: Final = 900
_METADATA: Final = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def digest(notebook: Any) -> str:
    """SHA-256 (hex) of all code: it tells whether outputs are of these cells or of earlier ones."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def run(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, run in ``folder``.

    Raises:
        CellExecutionError: a cell raised; the text has its source and traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=_CELL_S, kernel_name="python3", record_timing=False, resources=resources).execute()
    notebook.metadata = nbformat.from_dict({**_METADATA, "run_of": digest(notebook)})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs notebooks and keeps what they show.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, help="folder for the results; by default they replace what was run")
    options = parser.parse_args()
    for path in options.notebooks:
        try:
            notebook = run(path, path.parent)
        except CellExecutionError as error:
            print(error, file=sys.stderr)
            return 1
        nbformat.write(notebook, (options.to or path.parent) / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
