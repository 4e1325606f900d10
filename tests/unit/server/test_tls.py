"""Self-made certificates: what will not do is made anew, clients go on with the CA they have while they can."""

from __future__ import annotations

import datetime
import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sordino.shared import tls
from sordino.shared.errors import SordinoError
from sordino.shared.tls import TlsFiles, make_certificates

NAMES = ("ca.pem", "ca.key", "server.pem", "server.key")
Clock = Callable[[int], None]


def accepted(files: TlsFiles, ca: bytes, host: str = "localhost") -> bool:
    """Whether a client with this ``ca.pem`` accepts the server, by a handshake in memory."""
    context = ssl.create_default_context(cadata=ca.decode())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        context.wrap_bio(down, up, server_hostname=host),
        server.wrap_bio(up, down, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return ends[0].version() is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """``clock(days)``: certificates are made and judged so many days from now."""

    def set_to(days: int) -> None:
        shifted = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        monkeypatch.setattr(tls, "_now", lambda: shifted)

    return set_to


def test_starts_at_once_agree(tmp_path: Path) -> None:
    begin = threading.Barrier(8)
    seen: list[tuple[bytes, bytes]] = []

    def start() -> None:
        begin.wait()
        files = make_certificates(tmp_path, ["localhost"])
        seen.append((files.ca.read_bytes(), files.read()[1]))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert accepted(TlsFiles.self_made(tmp_path), seen[0][0])
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, ".lock"}


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("before", ["first", "expired"])
def test_a_start_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, before: str, steps: int
) -> None:
    if before == "expired":
        clock(-4000)
        make_certificates(tmp_path, ["localhost"])
        clock(0)
    real, left = tls.replace, [None] * steps

    def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(path, data, mode)

    monkeypatch.setattr(tls, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        make_certificates(tmp_path, ["localhost"])
    monkeypatch.setattr(tls, "replace", real)
    files = make_certificates(tmp_path, ["localhost"])
    assert accepted(files, files.ca.read_bytes())


@pytest.mark.parametrize(
    "data", [None, b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_made_anew(tmp_path: Path, name: str, data: bytes | None) -> None:
    files = make_certificates(tmp_path, ["localhost", "a.example"])
    ca, certificate = files.ca.read_bytes(), files.certificate.read_bytes()
    (tmp_path / name).unlink() if data is None else (tmp_path / name).write_bytes(data)
    for _ in range(2):
        make_certificates(tmp_path, ["localhost", "a.example"])
        assert all(accepted(files, held, "a.example") for held in (ca, files.ca.read_bytes()))
    if name == "ca.key":
        assert (files.ca.read_bytes(), files.certificate.read_bytes()) == (ca, certificate), "nothing needs it yet"


def test_a_key_and_a_certificate_of_two_folders(tmp_path: Path) -> None:
    files, other = (make_certificates(tmp_path / name, ["localhost"]) for name in ("one", "other"))
    ca = files.ca.read_bytes()
    files.key.write_bytes(other.key.read_bytes())
    make_certificates(tmp_path / "one")
    assert accepted(files, ca)
    files.certificate.write_bytes(other.certificate.read_bytes())
    files.key.write_bytes(other.key.read_bytes())
    make_certificates(tmp_path / "one")
    assert accepted(files, ca)


@pytest.mark.parametrize("days", [-366, -340, 10])
def test_a_certificate_at_another_time(tmp_path: Path, clock: Clock, days: int) -> None:
    """It has expired, soon will, or is not valid yet; the CA is."""
    clock(-1000)
    files = make_certificates(tmp_path, ["localhost"])
    ca = files.ca.read_bytes()
    clock(days)
    files.certificate.unlink()
    make_certificates(tmp_path)
    before = files.certificate.read_bytes()
    clock(0)
    make_certificates(tmp_path)
    assert files.certificate.read_bytes() != before
    assert files.ca.read_bytes() == ca
    assert accepted(files, ca)
    before = files.certificate.read_bytes()
    make_certificates(tmp_path)
    assert files.certificate.read_bytes() == before


def test_a_ca_that_has_expired_is_replaced_loudly(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock(-3640)
    files = make_certificates(tmp_path, ["localhost"])
    clock(0)
    make_certificates(tmp_path)
    kept = files.ca.read_bytes()
    assert accepted(files, kept), "it has ten days left"
    caplog.clear()
    make_certificates(tmp_path)
    assert all("expires on" in record.message for record in caplog.records)
    assert len(caplog.records) == 2
    clock(20)
    caplog.clear()
    make_certificates(tmp_path)
    assert files.ca.read_bytes() != kept
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "is NEW" in record.message
    assert "every client needs" in record.message
    clock(0)


def test_a_ca_of_the_future_is_a_wrong_clock(tmp_path: Path, clock: Clock) -> None:
    files = make_certificates(tmp_path, ["localhost"])
    before = files.ca.read_bytes()
    clock(-20_000)
    with pytest.raises(SordinoError, match="is the clock of this machine right"):
        make_certificates(tmp_path)
    assert files.ca.read_bytes() == before


def test_a_folder_whose_ca_has_no_key(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    clock(-345)
    files = make_certificates(tmp_path, ["localhost"])
    (tmp_path / "ca.key").unlink()
    ca = files.ca.read_bytes()
    clock(0)
    make_certificates(tmp_path)
    assert files.ca.read_bytes() == ca
    assert "expires on" in caplog.text
    clock(30)
    make_certificates(tmp_path)
    assert files.ca.read_bytes() != ca
    assert "is NEW (there is no key to renew the old one)" in caplog.text


def test_other_hosts(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["localhost", "::1", "*.a.example"])
    ca, before = files.ca.read_bytes(), files.certificate.read_bytes()
    for covered in (None, ["LOCALHOST"], ["b.a.example", "0:0:0:0:0:0:0:1"], ["*.a.example"]):
        make_certificates(tmp_path, covered)
        assert files.certificate.read_bytes() == before
    for more in (["a.example"], ["c.b.a.example"], ["127.0.0.1"]):
        make_certificates(tmp_path, more)
        assert accepted(files, ca, more[0])
    assert files.ca.read_bytes() == ca
    make_certificates(tmp_path)
    assert accepted(files, ca, "127.0.0.1"), "without names it keeps those it has"


def test_names_that_were_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = make_certificates(tmp_path, ["a.example"])
    assert not caplog.records
    files.certificate.write_bytes(b"")
    make_certificates(tmp_path)
    assert "made for localhost, 127.0.0.1, ::1: pass --hostnames" in caplog.text
