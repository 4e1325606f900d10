"""Every notebook runs from top to bottom, and what the repository shows of it is of one whole run.

The default suite runs them with small settings, all but the first on a tiny model: it has no words to chat with.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GGUF = ROOT / ".demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDER = ROOT / ".demo" / "all-MiniLM-L6-v2"
# Folders of whoever ran it, whatever they are called, and addresses other than of the machine itself.
_OF_A_MACHINE = re.compile(r"/(home|root|work|tmp|Users|usr|opt|var)/|[A-Z]:\\|\b(?!127\.)\d+\.\d+\.\d+\.\d+\b")
_PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """``models("tiny" or "real")``: the environment that has notebooks use that one; each is split once, quickly."""
    from models import make_tiny

    from sordino.server.split import split_model

    made: dict[str, dict[str, str]] = {}

    def model(kind: str) -> dict[str, str]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            # Longer than tiny models are else: each letter of a prompt is a token.
            original = GGUF if kind == "real" else make_tiny("llama", folder / "model", max_position_embeddings=1024)
            split_model(original, folder / "bundle", rounding="nearest")
            made[kind] = {"SORDINO_BUNDLE": str(folder / "bundle"), "SORDINO_MODEL": str(original)}
        return made[kind]

    return model


def run(notebook: Path, folder: Path, environment: dict[str, str]) -> Any:
    """What the notebook shows at the end of a run in a process of its own, whose kernel's files lie in ``folder``."""
    roots = [str(ROOT / side) for side in ("client", "dealer", "server", "shared", "proto")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "notebooks" / "run.py"), str(notebook), "--to", str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(roots),
            "HF_HUB_OFFLINE": "1",
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "TMPDIR": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return nbformat.read(folder / notebook.name, as_version=4)


def pictures(notebook: Any) -> list[bytes]:
    found = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    return [base64.b64decode(picture) for picture in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, models: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    fetch = [sys.executable, str(ROOT / "examples" / "fetch_embedder.py"), str(EMBEDDER)]
    if notebook.stem.startswith("05"):
        subprocess.run(fetch, check=True, capture_output=True)
    kind = "real" if notebook.stem.startswith("01") else "tiny"
    shown = run(notebook, tmp_path, {**models(kind), "SORDINO_SMALL": "1"})
    assert pictures(shown)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_as_shown(notebook: Path, models: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    """With the settings and the model that the repository's outputs are of."""
    shown = run(notebook, tmp_path, {**models("real"), "SORDINO_SMALL": ""})
    assert len(pictures(shown)) == len(pictures(nbformat.read(notebook, as_version=4)))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_one_whole_run_and_of_no_machine(notebook: Path) -> None:
    shown = nbformat.read(notebook, as_version=4)
    cells = [cell for cell in shown.cells if cell.cell_type == "code"]
    code = "\0".join(cell.source for cell in cells)
    assert shown.metadata["run_of"] == hashlib.sha256(code.encode()).hexdigest(), "run notebooks/run.py on it"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data", "execute_result")
            assert output.get("name", "stdout") == "stdout"
            text = output.get("text", "") + "".join(str(output.get("data", {}).get("text/plain", "")))
            assert not _OF_A_MACHINE.search(text), text
    drawn = pictures(shown)
    assert drawn
    assert all(picture.startswith(_PNG) for picture in drawn)
    assert notebook.stat().st_size < 1 << 20
