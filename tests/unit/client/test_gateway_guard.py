"""The key and its file."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sordino.client.gateway.guard import check_host, read_key
from sordino.shared.errors import AuthError, RangeError


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "data" / "key"
    first = read_key(path)
    assert read_key(path) == first
    assert first != read_key(tmp_path / "other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    read_key(tmp_path / "key")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_several_first_starts_at_once_have_one_key(tmp_path: Path) -> None:
    path, keys, ready = tmp_path / "key", [], threading.Barrier(8)

    def start() -> None:
        ready.wait()
        keys.append(read_key(path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert set(keys) == {read_key(path)}


def _link(path: Path) -> None:
    read_key(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def _open(path: Path) -> None:
    read_key(path)
    path.chmod(0o640)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_open, "chmod 600"),
        (lambda path: path.mkdir(mode=0o700), "cannot be used|must be yours"),
        (_link, "cannot be used"),
        (lambda path: os.mkfifo(path, 0o600), "must be yours"),  # and nobody waits for who writes to it
        (lambda path: path.touch(0o600), "holds no key"),
        (lambda path: (path.touch(0o600), path.write_text("secret")), "holds no key"),
        (lambda path: (path.touch(0o600), path.write_bytes(b"\xff" * 50)), "holds no key"),
    ],
)
def test_a_file_that_will_not_do(tmp_path: Path, make: Callable[[Path], object], text: str) -> None:
    path = tmp_path / "key"
    make(path)
    with pytest.raises(AuthError, match=text) as caught:
        read_key(path)
    assert "secret" not in str(caught.value)


def test_a_name_that_cannot_be() -> None:
    with pytest.raises(AuthError, match="cannot be used"):
        read_key(Path("a\0b"))


def test_loopback_alone() -> None:
    assert [check_host(host) for host in ("127.0.0.1", "::1", "localhost")] == ["127.0.0.1", "::1", "127.0.0.1"]
    for host in ("0.0.0.0", "::", "192.168.0.2", "", "example.org", "127.0.0.2"):
        with pytest.raises(RangeError, match="alone"):
            check_host(host)
