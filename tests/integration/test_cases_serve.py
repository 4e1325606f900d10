"""``sordino serve`` and ``sordino token`` with options that cannot work: one line that says which, nothing written."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sordino.server import app
from sordino.server.tls import make_certificates
from sordino.shared.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``run(command, *arguments)``: the command as a shell would run it; a server that would start is an error."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(app, "serve", lambda *_, **__: print("served"))

    def command(*arguments: object) -> Outcome:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["sordino", *map(str, arguments), "--state", str(tmp_path / "state")])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return command


def refused(outcome: Outcome, text: str, state: Path) -> None:
    assert (outcome.code, outcome.out) == (1, "")
    [line] = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert text in line
    assert not state.exists() or not list(state.iterdir()), "something was written for a server that cannot run"


def test_what_can_run_is_run(bundles: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    outcome = run("serve", bundles("llama"), "--hostnames", "localhost,::1,*.a-b.example,xn--bcher-kva.example")
    assert (outcome.code, outcome.out) == (0, "served\n")
    assert {path.name for path in (tmp_path / "state").iterdir()} == {
        "ca.pem",
        "server.pem",
        "server.key",
        "tokens.json",
        "token",
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--device", "nosuch"), "device 'nosuch' is not known"),
        (("--device", ""), "device '' is not known"),
        (("--device", "meta"), "device 'meta' is not known"),
        (("--device", "cuda:-1"), "device 'cuda:-1' is not known"),
        (("--device", "cuda:99"), "device 'cuda:99' is not there"),
        (("--hostnames", ""), "needs a host name"),
        (("--hostnames", " , "), "needs a host name"),
        (("--hostnames", "a b"), "'a b' is no host name"),
        (("--hostnames", "localhost,bücher.example"), "'bücher.example' is no host name"),
        (("--hostnames", "-a.example"), "'-a.example' is no host name"),
        (("--hostnames", "a..example"), "'a..example' is no host name"),
        (("--hostnames", "https://a.example"), "'https://a.example' is no host name"),
        (("--hostnames", "a" * 64), "is no host name"),
        (("--grace", "nan"), "the grace is"),
        (("--grace", "inf"), "the grace is"),
        (("--grace", "-1"), "the grace is"),
        (("--max-message-mib", "0"), "the message limit must be"),
        (("--max-message-mib", "-8"), "the message limit must be"),
        (("--max-message-mib", "1025"), "the message limit must be"),
        (("--host", "0.0.0.0", "--no-auth"), "loopback alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_that_cannot_work(
    bundles: Callable[..., Path], run: Run, tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    refused(run("serve", bundles("llama"), *options), text, tmp_path / "state")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_cuda_where_there_is_none(bundles: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    refused(run("serve", bundles("llama"), "--device", "cuda"), "torch finds 0", tmp_path / "state")


@pytest.mark.parametrize("change", ["missing", "empty", "damaged"])
def test_a_folder_that_is_no_bundle(bundles: Callable[..., Path], run: Run, tmp_path: Path, change: str) -> None:
    bundle = tmp_path / "bundle"
    if change == "empty":
        bundle.mkdir()
    elif change == "damaged":
        shutil.copytree(bundles("llama"), bundle)
        (bundle / "manifest.json").write_text("{}")
    refused(run("serve", bundle), "BundleError", tmp_path / "state")


def test_certificates_of_ones_own(bundles: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    own = make_certificates(tmp_path / "own", ["localhost"])
    other = make_certificates(tmp_path / "other", ["localhost"])
    (junk := tmp_path / "junk.pem").write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    missing = tmp_path / "missing.pem"
    for certificate, key, text in (
        (missing, own.key, f"{missing} cannot be read: No such file"),
        (own.certificate, missing, f"{missing} cannot be read: No such file"),
        (tmp_path, own.key, f"{tmp_path} cannot be read"),
        (junk, own.key, f"{junk} holds no certificate"),
        (own.key, own.key, f"{own.key} holds no certificate"),
        (own.certificate, junk, f"{junk} holds no private key"),
        (own.certificate, own.certificate, f"{own.certificate} holds no private key"),
        (own.certificate, other.key, "is not that of the certificate"),
    ):
        outcome = run("serve", bundles("llama"), "--tls-cert", certificate, "--tls-key", key)
        refused(outcome, text, tmp_path / "state")
    outcome = run("serve", bundles("llama"), "--tls-cert", own.certificate, "--tls-key", own.key)
    assert outcome.out == "served\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("",), "needs a name"),
        (("  ",), "needs a name"),
        (("somebody", "--days", "nan"), "days, not nan"),
        (("somebody", "--days", "inf"), "days, not inf"),
        (("somebody", "--days", "0"), "days, not 0"),
        (("somebody", "--days", "-1"), "days, not -1"),
    ],
)
def test_tokens_that_mean_nothing(run: Run, tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    refused(run("token", *arguments), text, tmp_path / "state")


def test_a_malformed_token_file(run: Run, tmp_path: Path) -> None:
    assert run("token", "somebody").out.startswith("sord_")
    (tmp_path / "state/tokens.json").write_text("[{")
    outcome = run("token", "somebody")
    assert (outcome.code, outcome.out, "malformed" in outcome.err) == (1, "", True)
    assert "Traceback" not in outcome.err


def test_files_that_were_there_become_private(run: Run, bundles: Callable[..., Path], tmp_path: Path) -> None:
    """A key is never written into a file that others may read."""
    state = tmp_path / "state"
    state.mkdir()
    for name in ("server.key", "token"):
        (state / name).touch(0o644)
        (state / name).chmod(0o644)
    (state / "server.key").unlink()
    assert run("serve", bundles("llama")).out == "served\n"
    assert [(state / name).stat().st_mode & 0o777 for name in ("server.key", "token")] == [0o600, 0o600]
