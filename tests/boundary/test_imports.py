"""The trust boundary is a path: each side imports without the other, and nothing heavy or foreign comes in with it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIDES = ("client", "dealer", "server", "shared", "proto")

# Runs with -S: no .pth file is read, so the development install puts none of the four roots on the path.
_IMPORT_ALL = """
import importlib, importlib.util, json, pkgutil, sys
roots, site, package, absent, blocked, skipped = json.loads(sys.argv[1])
sys.path[:0] = roots
sys.path.extend(site)
for name in blocked:
    sys.modules[name] = None
for name in absent:
    assert importlib.util.find_spec(name) is None, f"{name} can be found"
root = importlib.import_module(package)
names = [package] + [m.name for m in pkgutil.walk_packages(root.__path__, package + ".")]
for name in names:
    if not any(name == s or name.startswith(s + ".") for s in skipped):
        importlib.import_module(name)
leaked = [n for n in sys.modules for a in absent if n == a or n.startswith(a + ".")]
assert not leaked, leaked
print(json.dumps([n for n in sys.modules if n.startswith("sordino.")]))
"""


def import_all(
    package: str, roots: list[str], absent: list[str], *, blocked: tuple[str, ...] = (), skipped: tuple[str, ...] = ()
) -> list[str]:
    """Imports every module of ``package`` in a fresh interpreter that sees only ``roots``; returns what it loaded."""
    site = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    arguments = json.dumps([[str(ROOT / root) for root in roots], site, package, absent, blocked, skipped])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _IMPORT_ALL, arguments], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_the_namespace_has_no_init_file() -> None:
    for side in SIDES:
        assert not (ROOT / side / "__init__.py").exists()
        assert not (ROOT / side / "sordino" / "__init__.py").exists()
        assert [p.name for p in (ROOT / side / "sordino").iterdir() if p.name != "__pycache__"] == [side]
        assert (ROOT / side / "sordino" / side / "py.typed").is_file()


def test_client_imports_without_the_server() -> None:
    assert "sordino.client" in import_all(
        "sordino.client", ["client", "shared", "proto"], ["sordino.dealer", "sordino.server"]
    )


def test_server_imports_without_the_client() -> None:
    assert "sordino.server" in import_all("sordino.server", ["server", "shared", "proto"], ["sordino.client"])


def test_dealer_imports_without_the_parties() -> None:
    assert "sordino.dealer" in import_all(
        "sordino.dealer", ["dealer", "shared", "proto"], ["sordino.client", "sordino.server"]
    )


def test_shared_imports_alone() -> None:
    import_all("sordino.shared", ["shared", "proto"], ["sordino.client", "sordino.dealer", "sordino.server"])


def test_running_server_needs_no_model_library() -> None:
    """Only the split reads models; a serving machine needs no tokenizer, and must not be able to use one."""
    loaded = import_all(
        "sordino.server",
        ["server", "shared", "proto"],
        ["sordino.client"],
        blocked=("transformers", "tokenizers", "accelerate", "gguf", "sentencepiece"),
        skipped=("sordino.server.split", "sordino.server.cli"),
    )
    assert not [name for name in loaded if name.startswith("sordino.server.split")]


@pytest.mark.parametrize("side", ["client", "server"])
def test_importing_a_side_is_quiet(side: str) -> None:
    """No module prints, starts a thread or opens a socket when it is imported."""
    other = "server" if side == "client" else "client"
    code = _IMPORT_ALL + "\nimport threading\nassert threading.active_count() == 1, threading.enumerate()\n"
    site = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    roots = [str(ROOT / root) for root in (side, "shared", "proto")]
    skipped = ["sordino.server.split"]
    arguments = json.dumps([roots, site, f"sordino.{side}", [f"sordino.{other}"], [], skipped])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, arguments], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout


def test_stubs_are_made_for_the_lowest_supported_versions() -> None:
    """Case 1.24: a stub asks for the protobuf and grpcio it was generated for; pyproject must ask for no less."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = dict(text.split(",")[0].split(">=") for text in project["dependencies"])
    stubs = sorted((ROOT / "proto/sordino/proto/v1").glob("*_pb2*.py"))
    for stub in stubs:
        text = stub.read_text()
        if stub.name.endswith("_pb2.py"):
            assert f"# Protobuf Python Version: {wanted['protobuf']}\n" in text
        else:
            major_minor = ".".join(wanted["grpcio"].split(".")[:2])
            assert f"GRPC_GENERATED_VERSION = '{major_minor}.0'" in text
    tools = dict(
        line.split("==") for line in (ROOT / "proto/requirements.txt").read_text().splitlines() if "==" in line
    )
    assert tools["protobuf"] == wanted["protobuf"]
    assert tools["grpcio-tools"].startswith(wanted["grpcio"])
