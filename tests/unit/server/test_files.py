"""The server's state folder: one process at a time, nothing half-written, nothing left behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from sordino.shared import files
from sordino.shared.errors import SordinoError
from sordino.shared.files import locked, replace


def test_a_process_that_holds_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WAIT_S", 0.1)
    with locked(tmp_path), pytest.raises(SordinoError, match=r"another process holds .*\.lock"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_forked_child_does_not_hold_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if: the same open file, in a process that lives on."""
    monkeypatch.setattr(files, "_WAIT_S", 0.1)
    opened = os.open
    copies: list[int] = []

    def kept(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = opened(path, flags, mode)
        copies.append(os.dup(fd))
        return fd

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", kept)
        with locked(tmp_path):
            pass
    with locked(tmp_path):
        for fd in copies:
            os.close(fd)


def test_what_a_dead_process_was_writing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(_: int) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", dies)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            replace(tmp_path / "server.key", b"secret")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"secret"]
    with locked(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_lock_is_private(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
        with open(tmp_path / ".lock", "rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
