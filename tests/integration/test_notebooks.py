"""Every notebook runs from top to bottom, as a copy, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 240

# In a process of its own: the kernel machinery's warnings are not this project's, and its event loop ends with it.
_EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
path, seconds = sys.argv[1], int(sys.argv[2])
notebook = nbformat.read(path, as_version=4)
try:
    NotebookClient(notebook, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
except CellExecutionError as error:
    sys.exit(str(error))
finally:
    nbformat.write(notebook, path)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run" / notebook.name
    shutil.copytree(notebook.parent, copy.parent, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    roots = [str(ROOT / side) for side in ("client", "server", "shared", "proto")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(roots),
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "SORDINO_MODEL": str(ROOT / ".demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _EXECUTE, copy.name, str(CELL_SECONDS)],
        cwd=copy.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_output(notebook: Path) -> None:
    """Output would show the machine that it ran on, and change at every run."""
    import nbformat

    for cell in nbformat.read(notebook, as_version=4).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)
