"""``sordino serve`` and ``sordino token`` with options that cannot work: one line that says which, nothing written."""

from __future__ import annotations

import datetime
import errno
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import torch
from stack import ServerProcess

from sordino.server import app
from sordino.shared import tls
from sordino.shared.auth import TokenFile
from sordino.shared.cli import main
from sordino.shared.tls import make_certificates


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

    def command(*arguments: object, state: object = tmp_path / "state") -> Outcome:
        capfd.readouterr()
        free = () if "--port" in arguments or arguments[0] != "serve" else ("--port", "0")
        monkeypatch.setattr(sys, "argv", ["sordino", *map(str, arguments), *free, "--state", str(state)])
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
        "ca.key",
        "tokens.json",
        "token",
        ".lock",
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
        (("--host", "a b"), "--host 'a b' is no address and cannot be resolved"),
        (("--host", "256.1.1.1"), "--host '256.1.1.1' is no address and cannot be resolved"),
        (("--host", "a" * 64), "is no address and cannot be resolved: no name has this form"),
        (("--host", ""), "--host '' is no address and cannot be resolved: it is empty"),
        (("--host", "192.0.2.1"), "--host '192.0.2.1' is not an address of this machine"),
        (("--host", "2001:db8::1"), "--host '2001:db8::1' is not an address of this machine"),
        (("--threads", "-1"), "--threads is 0 to"),
        (("--threads", "1000000"), "4 for each core of this machine, not 1000000"),
        (("--threads", "1" + "0" * 20), "--threads is 0 to"),
        (("--port-file", "."), "--port-file . is a folder"),
        (("--port-file", "/"), "--port-file / is a folder"),
        (("--port-file", "nowhere/port"), "there is no folder nowhere"),
        (("--port-file", "/dev/null/port"), "there is no folder /dev/null"),
        (("--opens", "token"), "--opens token belongs to --dealer"),
        (("--dealer-ca", "x"), "--dealer-ca and --dealer-token-file belong to --dealer"),
        (("--dealer", "grpcs://localhost:9"), "--dealer needs --dealer-token-file"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_that_cannot_work(
    bundles: Callable[..., Path], run: Run, tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    refused(run("serve", bundles("llama"), *options), text, tmp_path / "state")


@pytest.mark.parametrize(
    ("options", "token", "text"),
    [
        (
            ("--dealer", "grpcs://localhost:9", "--dealer-ca", "nowhere.pem"),
            "x",
            "the CA file nowhere.pem cannot be read",
        ),
        (("--dealer", "localhost:9"), "x", "of the dealer: target 'localhost:9' is not of the form"),
        (("--dealer", "grpc://example.org:9"), "x", "of the dealer: grpc:// (no TLS) is for loopback only"),
        (("--dealer", "grpcs://localhost:9"), "", "of the dealer: the token is empty"),
        (
            ("--dealer", "grpcs://localhost:9", "--tensor-parallel", "2", "--dealer-ca", "nowhere.pem"),
            "x",
            "nowhere.pem",
        ),
    ],
)
def test_a_dealer_that_cannot_be_is_refused_at_once(
    run: Run, tmp_path: Path, options: tuple[str, ...], token: str, text: str
) -> None:
    """Before the bundle, which is not there, is looked at."""
    file = tmp_path / "dealer-token"
    file.write_text(token)
    refused(run("serve", tmp_path / "nothing", *options, "--dealer-token-file", file), text, tmp_path / "state")


def test_files_of_a_dealer_are_where_every_node_finds_them(
    bundles: Callable[..., Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("x")
    outcome = run(
        "serve", bundles("llama"), "--engine", "ray", "--dealer", "grpcs://localhost:9", "--dealer-token-file", "token"
    )
    refused(outcome, "token is a path of this folder alone", tmp_path / "state")


def test_who_offers_two_party_says_how_to_ask(
    bundles: Callable[..., Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dealer's files are the user's own, so they are not named."""
    file, ca = tmp_path / "dealer-token", tmp_path / "dealer"
    file.write_text("x")
    ca.mkdir()
    make_certificates(ca, None)
    monkeypatch.setattr(app, "serve", lambda config, *, ready: ready(4242))
    plain = run("serve", bundles("llama"))
    assert "two-party" not in plain.err
    dealer = ("--dealer", "grpcs://localhost:9", "--dealer-token-file", file, "--opened-rows", "7")
    own = run("serve", bundles("llama"), *dealer, "--dealer-ca", ca / "ca.pem")
    told = "profile two-party, with the dealer grpcs://localhost:9: of the rows that are sent together, "
    assert f"{told}hidden states of at most 7 are opened\n" in own.err
    chosen = run("serve", bundles("llama"), *dealer, "--opens", "token")
    assert f"{told}next tokens of at most 7 are opened\n" in chosen.err
    asked = f"--server grpcs://localhost:4242 --ca {tmp_path}/state/ca.pem --token-file {tmp_path}/state/token"
    for outcome, of_ca in ((own, " --dealer-ca FILE"), (run("serve", bundles("llama"), *dealer), "")):
        assert f'try: sordino generate "Hello" {asked}\n' in outcome.err
        assert (
            f'sordino generate "Hello" {asked} --profile two-party --dealer grpcs://localhost:9{of_ca} '
            "--dealer-token-file FILE\n"
        ) in outcome.err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken(bundles: Callable[..., Path], run: Run, tmp_path: Path, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = run("serve", bundles("llama"), "--host", host, "--port", port)
        refused(outcome, f"cannot listen on {host}:{port}: the port is taken, is another server", tmp_path / "state")


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as trial:
        return trial.connect_ex(("::1", 9)) in (0, errno.ECONNREFUSED)


@pytest.mark.skipif(not socket.has_ipv6 or not _has_ipv6(), reason="no IPv6 on loopback")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_hosts_with_an_ipv6_address(bundles: Callable[..., Path], tmp_path: Path, host: str) -> None:
    with ServerProcess(bundles("llama"), tmp_path, arguments=("--host", host)) as server:
        ca = grpc.ssl_channel_credentials(server.ca.read_bytes())
        with grpc.secure_channel(f"[::1]:{server.port}", ca, options=[("grpc.enable_http_proxy", 0)]) as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", wait_for_ready=True, timeout=20)
        assert f"serving on grpcs://[::1]:{server.port}" in server.log()


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


def test_certificates_of_ones_own(
    bundles: Callable[..., Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for days, text in ((-400, "server.pem expired on"), (400, "server.pem is not valid before")):
        shifted = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        with monkeypatch.context() as patch:
            patch.setattr(tls, "_now", lambda shifted=shifted: shifted)
            past = make_certificates(tmp_path / str(days), ["localhost"])
        outcome = run("serve", bundles("llama"), "--tls-cert", past.certificate, "--tls-key", past.key)
        refused(outcome, text, tmp_path / "state")
    pair = ("--tls-cert", own.certificate, "--tls-key", own.key)
    outcome = run("serve", bundles("llama"), *pair, "--hostnames", "localhost,a.example")
    refused(outcome, "is not for a.example, it is for localhost: pass another", tmp_path / "state")
    assert run("serve", bundles("llama"), *pair, "--hostnames", "localhost").out == "served\n"
    assert run("serve", bundles("llama"), *pair).out == "served\n"


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


def test_a_state_folder_that_lost_something(
    run: Run, bundles: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, serve = tmp_path / "state", ("serve", bundles("llama"))
    assert "first client token" in run(*serve).err
    kept = {path.name: path.read_bytes() for path in state.iterdir()}
    assert run(*serve).err == ""
    assert {path.name: path.read_bytes() for path in state.iterdir()} == kept
    (state / "tokens.json").unlink()
    assert "tokens.json is gone: all tokens that were given out are void" in run(*serve).err
    assert TokenFile(state / "tokens.json").verify((state / "token").read_text().strip()) == "first"
    (state / "tokens.json").write_text("[]")
    assert run(*serve).out == "served\n"
    assert "holds no token, so nobody can enter" in caplog.text
    for text in ("", "[{}]"):
        (state / "tokens.json").write_text(text)
        outcome = run(*serve)
        assert (outcome.code, outcome.out) == (1, "")
        assert f"{state / 'tokens.json'} is malformed: mend it, or delete it" in outcome.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("name", ["tokens.json", "server.key"])
def test_files_of_root_and_a_server_that_is_not(
    run: Run, bundles: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bundle = bundles("llama")
    assert run("serve", bundle).out == "served\n"
    state = tmp_path / "state"
    for path in (tmp_path, state, *state.iterdir()):
        path.chmod(0o755)
    (state / name).chmod(0o600)
    # What lies above may be closed to others: the paths are relative, the bundle's too.
    shutil.copytree(bundle, tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    os.seteuid(65534)
    try:
        outcome = run("serve", "bundle", state="state")
    finally:
        os.seteuid(0)
    assert (outcome.code, outcome.out) == (1, "")
    [line] = outcome.err.splitlines()
    assert f"state/{name} cannot be read: Permission denied (it belongs to root, the server is run by nobody" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_root_issues_the_server_can_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 65534, 65534)
    for _ in range(2):
        assert run("token", "somebody").out.startswith("sord_")
        assert (tmp_path / "state/tokens.json").stat().st_uid == 65534


def test_tokens_are_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "state/tokens.json"
    refused(run("token", "--list"), f"there is no {file}", tmp_path / "state")
    kept, *_ = (run("token", name, *days).out.strip() for name, *days in (("one",), ("two", "--days", 1), ("two",)))
    listed = run("token", "--list").out
    assert [line.split()[0] for line in listed.splitlines()] == ["one", "two", "two"]
    assert listed.count("for ever") == 2
    assert kept not in listed
    assert run("token", "two", "--revoke").err == "2 of two taken away\n"
    assert [record.name for record in TokenFile(file).records()] == ["one"]
    assert TokenFile(file).verify(kept) == "one"
    before = file.read_bytes()
    for arguments in (("two", "--revoke"), ("--revoke",), ("one", "--list"), ("one", "--list", "--revoke"), ()):
        outcome = run("token", *arguments)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert file.read_bytes() == before


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
