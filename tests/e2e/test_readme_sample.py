"""The README's Python samples, as a reader would run them: fresh environments, both ends of transformers (slow)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from stack import ServerProcess, connect_to
from twoparty import DealerProcess, serve_with

ROOT = Path(__file__).parents[2]
PROMPT, TOKENS = "The capital of France is", 16


def samples() -> list[str]:
    """The blocks of Python in README.md: for the profile in which the client sees activations, and for the other."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 2, "README.md has other Python samples than those that are tested"
    return found


def ends_of_the_range() -> list[str]:
    """The lowest transformers that pyproject allows, and whatever is the newest of them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["client"]
    [wanted] = [text for text in extras if text.startswith("transformers")]
    lowest = re.search(r">=([0-9.]+)", wanted)
    assert lowest, wanted
    return [f"transformers=={lowest[1]}", wanted]


def test_the_sample_needs_nothing_but_the_environment() -> None:
    """It compiles, connects, and reads its three variables."""
    code = samples()[0]
    compile(code, "README.md", "exec")
    for name in ("SORDINO_SERVER", "SORDINO_CA", "SORDINO_TOKEN", "connect", "generate"):
        assert name in code


def test_the_sample_runs_here(server: ServerProcess, tmp_path: Path) -> None:
    assert run_sample(Path(sys.executable), server, tmp_path) == expected(server, tmp_path)


def shared_commands() -> list[list[str]]:
    """Of the README's part on profile two-party, word by word: the dealer's, the server's and the client's."""
    _, part = (ROOT / "README.md").read_text().split("## Neither side sees an activation")
    found = re.search(r"^```\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert found, "README.md does not say how to ask on shares"
    lines = found[1].replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))[0] == "sordino"]


def test_commands_and_sample_of_profile_two_party_run_here(bundles: Callable[..., Path], tmp_path: Path) -> None:
    """In the folder where server and dealer were started, but for the ports."""
    deal, serve, generate = shared_commands()
    assert (deal[1:], serve[1:3], generate[1]) == (["deal"], ["serve", ".demo/bundle"], "generate")
    with (
        DealerProcess(tmp_path / "dealing") as dealer,
        serve_with(dealer, bundles("llama"), tmp_path / "serving", allow_clear=True) as server,
    ):
        code = samples()[1]
        for port, given in ((50551, server.port), (50552, dealer.port)):
            assert code.count(str(port)) == 1
            code = code.replace(str(port), str(given))
            generate = [word.replace(f":{port}", f":{given}") for word in generate]
        for name, state in ((".sordino-server", server.state), (".sordino-dealer", dealer.state)):
            (tmp_path / name).symlink_to(state)
        for word in serve[3:] + generate:
            assert not word.startswith(".") or (tmp_path / word).is_file()
        command = [str(Path(sys.executable).with_name("sordino")), *generate[1:], "--max-new-tokens", "4"]
        homes = {"XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=clean() | homes, capture_output=True, text=True, timeout=120, check=True
        )
        assert re.search(r" · \d+ rows ahead\n$", done.stderr), done.stderr
        assert run_sample(Path(sys.executable), server, tmp_path, code) == expected(server, tmp_path)


@pytest.fixture(scope="module", params=[0, 1], ids=["lowest", "newest"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the client's extra and one end of the range of transformers."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.EnvBuilder(with_pip=True).create(folder / "venv")
    executable = folder / "venv" / "bin" / "python"
    # What goes with one release of transformers alone is left to the installer.
    tied = ("transformers", "huggingface-hub", "tokenizers")
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(line for line in lines if not line.startswith(tied)))
    pip = [str(executable), "-m", "pip", "install", "-q", "-c", str(constraints)]
    wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(wheel, check=True, capture_output=True)
    [built] = (folder / "dist").glob("*.whl")
    done = subprocess.run(
        [*pip, f"{built}[client]", ends_of_the_range()[request.param]], env=clean(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return executable


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_sample_runs_with_both_ends_of_the_range(
    python: Path, bundles: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Case 1.3: GPT-2 (transposed linear layers) and Gemma (buffers that have to be computed) included."""
    with ServerProcess(bundles(family), tmp_path / "server", allow_clear=True) as server:
        assert run_sample(python, server, tmp_path) == expected(server, tmp_path)


def clean() -> dict[str, str]:
    """Nothing of this project's path reaches another interpreter."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run_sample(python: Path, server: ServerProcess, tmp: Path, code: str = "") -> str:
    homes = {name: str(tmp / name) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    environment = {**clean(), **homes, "OMP_NUM_THREADS": "1"}
    environment |= {"SORDINO_SERVER": server.target, "SORDINO_CA": str(server.ca), "SORDINO_TOKEN": server.token}
    script = tmp / "sample.py"
    script.write_text(code or samples()[0])
    done = subprocess.run(
        [str(python), str(script)], cwd=tmp, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return done.stdout.rstrip("\n")


def expected(server: ServerProcess, tmp: Path) -> str:
    """The same answer from this environment."""
    with (link := connect_to(server, tmp)).session:
        inputs = link.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        out = link.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        return link.tokenizer.decode(out[0], skip_special_tokens=True).rstrip("\n")
