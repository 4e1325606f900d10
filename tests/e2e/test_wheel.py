"""The wheel: what is in it, that the client works without the server's part, and (slow) that it installs and runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
SERVICES_ONLY = ("grpcio-health-checking", "grpcio-reflection")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked and the new files, in a copy, so that nothing is left in the working tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("client", "dealer", "server", "shared", "proto"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("sordino-*.whl")
    return path


def files_of(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def test_every_source_file_is_inside_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in files_of(wheel) if not name.split("/")[0].endswith(".dist-info")}
    expected = {
        str(path.relative_to(ROOT / side))
        for side in ("client", "dealer", "server", "shared", "proto")
        for path in (ROOT / side / "sordino").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == expected
    for side in ("client", "dealer", "server", "shared", "proto"):
        assert f"sordino/{side}/__init__.py" in inside
        assert f"sordino/{side}/py.typed" in inside
    assert "sordino/__init__.py" not in inside
    assert any(name.startswith("sordino/proto/v1/") and name.endswith("_pb2_grpc.py") for name in inside)


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
        entry = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    assert metadata["License-Expression"] == "Apache-2.0"
    for line in (
        "sordino = sordino.shared.cli:main",
        "client = sordino.client.cli:add",
        "dealer = sordino.dealer.cli:add",
        "server = sordino.server.cli:add",
    ):
        assert line in entry
    requirements = metadata.get_all("Requires-Dist") or []
    for package in SERVICES_ONLY:
        texts = [text for text in requirements if text.startswith(package)]
        assert all("extra == 'server'" in text or "extra == 'dealer'" in text for text in texts)
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "client",
        "crypten",
        "dealer",
        "gateway",
        "guides",
        "peers",
        "ray",
        "server",
        "split",
    }


@pytest.mark.parametrize(("side", "other"), [("client", "server"), ("server", "client"), ("dealer", "server")])
def test_one_side_works_without_the_other(wheel: Path, tmp_path: Path, side: str, other: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [n for n in archive.namelist() if not n.startswith(f"sordino/{other}/")])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.path.extend(sys.argv[2:])\n"
        f"import sordino.{side}, sordino.shared, sordino.proto\n"
        f"assert sordino.{side}.__file__.startswith(sys.argv[1])\n"
        f"try:\n    import sordino.{other}\nexcept ModuleNotFoundError:\n    print('absent')\n"
    )
    # -S: the development install of this machine must not lend the missing part.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path), *SITE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "absent"


def make_venv(folder: Path) -> Path:
    venv.EnvBuilder(with_pip=True).create(folder)
    return folder / "bin" / "python"


def clean_environment() -> dict[str, str]:
    """Nothing of this project's path reaches the fresh environment."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run(*command: str | Path, cwd: Path, timeout: int = 900) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fresh_install_serves_and_generates(wheel: Path, tmp_path: Path) -> None:
    """Two fresh environments, the provider's and the user's; the user's has no server extra."""
    import models

    model = tmp_path / "model"
    models.make_tiny("llama", model)
    provider, user = make_venv(tmp_path / "provider"), make_venv(tmp_path / "user")
    constraints = ROOT / "constraints.txt"
    run(provider, "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[server,split]", cwd=tmp_path)
    run(user, "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[client]", cwd=tmp_path)
    installed = run(user, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not [line for line in installed.splitlines() if line.split("==")[0] in SERVICES_ONLY]

    run(provider.with_name("sordino"), "split", model, "bundle", cwd=tmp_path)
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [provider.with_name("sordino"), "serve", "bundle", "--port", "0", "--port-file", "port",
             "--state", "state"],
            cwd=tmp_path, env=clean_environment(), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        port = wait_for(tmp_path / "port", server)
        answer = run(
            user.with_name("sordino"), "generate", "hello", "--server", f"grpcs://localhost:{port}",
            "--ca", "state/ca.pem", "--token-file", "state/token", "--pool", "pool", "--batch", "64",
            "--max-new-tokens", "4", "--temperature", "0", cwd=tmp_path,
        )  # fmt: skip
        assert answer.strip()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()


def wait_for(path: Path, server: subprocess.Popen[bytes], seconds: int = 120) -> str:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and (text := path.read_text().strip()):
            return text
        assert server.poll() is None, path.with_name("server.log").read_text()[-4000:]
        time.sleep(0.2)
    raise AssertionError(path.with_name("server.log").read_text()[-4000:])


def bounds() -> list[list[str]]:
    """The lowest versions of pyproject, and the highest below its limits, of what the stubs depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        text
        for text in [*project["dependencies"], *project["optional-dependencies"]["server"]]
        if text.startswith(("grpcio", "protobuf"))
    ]
    return [[text.split(",")[0].replace(">=", "==") for text in wanted], wanted]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [0, 1], ids=["lowest", "highest"])
def test_stubs_import_with_the_lowest_and_highest_versions(which: int, tmp_path: Path) -> None:
    """Case 1.24: stubs newer than the installed runtime fail at import; no allowed version may be such a one."""
    python = make_venv(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", "--upgrade", *bounds()[which], cwd=tmp_path)
    code = (
        "import importlib, pkgutil, sys, warnings; warnings.simplefilter('error'); sys.path.insert(0, sys.argv[1])\n"
        "import sordino.proto.v1 as v1\n"
        "names = [m.name for m in pkgutil.iter_modules(v1.__path__)]\n"
        "[importlib.import_module('sordino.proto.v1.' + n) for n in names]\n"
        "import grpc, google.protobuf, grpc_health.v1.health_pb2_grpc, grpc_reflection.v1alpha.reflection\n"
        "print(len(names), grpc.__version__, google.protobuf.__version__)\n"
    )
    assert int(run(python, "-c", code, ROOT / "proto", cwd=tmp_path).split()[0]) >= 2
