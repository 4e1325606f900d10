"""What the shipped source may not contain, by a walk over syntax trees. Each rule has samples that it must catch."""

from __future__ import annotations

import ast
import fnmatch
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("client", "dealer", "server", "shared")
SOURCES = [path for side in SHIPPED for path in sorted((ROOT / side).rglob("*.py"))]

# Weights travel as safetensors: torch's own format is refused whatever its arguments.
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NUMPY_RANDOM = re.compile(r"^(np|numpy)\.random(\.|$)")
TORCH_RANDOM = re.compile(r"^torch\.(rand\w*|normal|bernoulli|manual_seed|seed|default_generator)$")
IN_PLACE_RANDOM = {
    "random_",
    "uniform_",
    "normal_",
    "bernoulli_",
    "exponential_",
    "cauchy_",
    "geometric_",
    "log_normal_",
}
GRPC_FILES = (
    "shared/sordino/shared/transport*",
    "shared/sordino/shared/twoparty/source.py",  # a stream of the dealer
    "dealer/sordino/dealer/service.py",
    "dealer/sordino/dealer/app.py",
    "server/sordino/server/service*.py",
    "server/sordino/server/app*.py",
    "server/sordino/server/calls.py",  # interceptors
    "server/sordino/server/places.py",  # ends calls
    "client/sordino/client/transport*",
    "client/sordino/client/route.py",  # a channel for each of several servers
    "client/sordino/client/bench_block.py",  # counts what a dealer sends
    "client/sordino/client/proxy.py",  # the recording proxy of `sordino audit wire`
    "client/sordino/client/cli*",
    "server/sordino/server/cli*",
    "shared/sordino/shared/cli*",
)
SECRET_NAMES = re.compile(r"SecretKey|MaskPool|MaskSeed|PoolSeed")
Finding = tuple[int, str]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of attributes on a name, else the empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports(tree: ast.AST) -> Iterator[Finding]:
    """Every imported name, in full: ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def keyword(call: ast.Call, name: str) -> object:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def unsafe_loading(tree: ast.AST) -> Iterator[Finding]:
    """Nothing that runs code found in data: pickle in any guise, eval, exec, remote code of a model repository."""
    for line, name in imports(tree):
        if name.split(".")[0] in PICKLES:
            yield line, f"import of {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if called in UNSAFE_CALLS:
            yield node.lineno, f"{called}()"
        for flag in ("allow_pickle", "trust_remote_code"):
            if any(k.arg == flag for k in node.keywords) and keyword(node, flag) is not False:
                yield node.lineno, f"{flag} other than False"


def weak_randomness(tree: ast.AST) -> Iterator[Finding]:
    """Every random number comes from the system's CSPRNG or a cipher keyed by it; fixed test data comes from a hash."""
    for line, name in imports(tree):
        if name.split(".")[0] == "random" or NUMPY_RANDOM.match(name) or TORCH_RANDOM.match(name):
            yield line, f"import of {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if NUMPY_RANDOM.match(name) or TORCH_RANDOM.match(name):
                yield node.lineno, name
            elif node.attr in IN_PLACE_RANDOM:
                yield node.lineno, f".{node.attr}"


def swallowed_errors(tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in caught)
        silent = all(
            isinstance(step, ast.Pass | ast.Continue)
            or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
            for step in node.body
        )
        if broad and silent:
            yield node.lineno, "a broad except that does nothing"


def grpc_imports(tree: ast.AST) -> Iterator[Finding]:
    for line, name in imports(tree):
        if name.split(".")[0] in {"grpc", "grpc_health", "grpc_reflection"} or re.search(r"_pb2_grpc(\.|$)", name):
            yield line, f"import of {name}"


def secret_types(source: str) -> Iterator[Finding]:
    """Names in code, not words in comments and docstrings: those may say why the type is not there."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and SECRET_NAMES.search(token.string):
            yield token.start[0], token.string


def report(rule: Callable[[ast.AST], Iterator[Finding]], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in paths
        for line, what in rule(ast.parse(path.read_text(), filename=str(path)))
    ]


@pytest.mark.parametrize("rule", [unsafe_loading, weak_randomness, swallowed_errors])
def test_shipped_source(rule: Callable[[ast.AST], Iterator[Finding]]) -> None:
    assert SOURCES
    assert report(rule, SOURCES) == []


def test_grpc_stays_at_the_edge() -> None:
    inner = [path for path in SOURCES if not any(fnmatch.fnmatch(str(path.relative_to(ROOT)), p) for p in GRPC_FILES)]
    assert report(grpc_imports, inner) == []


def test_no_secret_type_can_be_named_by_the_server() -> None:
    """What the server imports (server, shared, proto) neither defines nor names a type that holds a secret."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for side in ("server", "shared")
        for path in sorted((ROOT / side).rglob("*.py"))
        for line, what in secret_types(path.read_text())
    ]
    assert found == []


def test_only_the_split_imports_the_split() -> None:
    running = [
        path
        for path in (ROOT / "server").rglob("*.py")
        if not re.match(r"(split|cli)", str(path.relative_to(ROOT / "server/sordino/server")))
    ]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in running
        for line, name in imports(ast.parse(path.read_text()))
        if name.startswith("sordino.server.split")
    ]
    assert found == []


def test_no_relative_import_leaves_its_side() -> None:
    """The rules above read absolute names: so relative imports are not used at all."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert found == []


@pytest.mark.parametrize(
    ("rule", "sample"),
    [
        (unsafe_loading, "import pickle"),
        (unsafe_loading, "def f():\n    from joblib import load"),
        *((unsafe_loading, f"{module}.load(path)") for module in ("torch", "yaml")),
        (unsafe_loading, "eval(text)"),
        (unsafe_loading, "np.load(path, allow_pickle=True)"),
        (unsafe_loading, "AutoConfig.from_pretrained(path, trust_remote_code=flag)"),
        (weak_randomness, "import random"),
        (weak_randomness, "from random import Random"),
        (weak_randomness, "x = np.random.default_rng(0)"),
        (weak_randomness, "from numpy.random import default_rng"),
        (weak_randomness, "from torch import randn"),
        (weak_randomness, "x = torch.randint(0, 2, (3,))"),
        (weak_randomness, "x.random_(0, 5)"),
        (swallowed_errors, "try:\n    f()\nexcept Exception:\n    pass"),
        (
            swallowed_errors,
            "for x in y:\n    try:\n        f()\n    except (OSError, BaseException):\n        continue",
        ),
        (swallowed_errors, "try:\n    f()\nexcept:\n    ..."),
        (grpc_imports, "def f():\n    import grpc.aio"),
        (grpc_imports, "from sordino.proto.v1 import sordino_pb2_grpc"),
        (grpc_imports, "from sordino.proto.v1.sordino_pb2_grpc import SordinoStub"),
    ],
)
def test_rules_catch(rule: Callable[[ast.AST], Iterator[Finding]], sample: str) -> None:
    assert list(rule(ast.parse(sample)))


@pytest.mark.parametrize(
    ("rule", "sample"),
    [
        (unsafe_loading, "safetensors.torch.load_file(path)\nre.compile('x')\nf(trust_remote_code=False)"),
        (weak_randomness, "import os\nimport secrets\nos.urandom(3)\nself.random.bits\ntorch.arange(3)"),
        (
            swallowed_errors,
            "try:\n    f()\nexcept OSError:\n    pass\ntry:\n    f()\nexcept Exception:\n    log()\n    raise",
        ),
        (grpc_imports, "from sordino.proto.v1 import sordino_pb2"),
    ],
)
def test_rules_let_pass(rule: Callable[[ast.AST], Iterator[Finding]], sample: str) -> None:
    assert not list(rule(ast.parse(sample)))


def test_secret_names_are_found_in_code_alone() -> None:
    assert list(secret_types("def f(key: RlweSecretKey) -> None: ...\n"))
    assert not list(secret_types('"""A SecretKey lives with the client."""  # no MaskPool here\n'))
