"""The token file: what is issued is kept, what is malformed is refused, what means nothing is not issued."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sordino.shared.auth import TokenFile
from sordino.shared.errors import AuthError, SordinoError

RECORD = {"name": "somebody", "sha256": "0" * 64, "expires": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_tokens_issued_at_once_are_all_kept(path: Path) -> None:
    issued: list[str] = []
    begin = threading.Barrier(8)

    def issue() -> None:
        file = TokenFile(path)  # as a process of its own has one: a lock belongs to an open file, not to a process
        begin.wait()
        issued.extend(file.issue("somebody") for _ in range(5))

    threads = [threading.Thread(target=issue) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(issued) == 40
    assert {TokenFile(path).verify(token) for token in issued} == {"somebody"}
    assert len(json.loads(path.read_text())) == 40
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TokenFile(path).issue("first")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        TokenFile(path).issue("second")
    assert TokenFile(path).verify(first) == "first"
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", path.name]


def test_a_running_server_takes_up_every_change(path: Path) -> None:
    running = TokenFile(path)
    for name in ("one", "two", "six"):
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text("[]")
        os.utime(path, ns=(stamp, stamp))
        token = TokenFile(path).issue(name)
        os.utime(path, ns=(stamp, stamp))  # a clock too coarse to tell the two apart: their sizes do not either
        assert running.verify(token) == name


@pytest.mark.parametrize(
    "entries",
    [
        None,
        {},
        {"tokens": []},
        ["somebody"],
        [{}],
        [RECORD | {"more": 1}],
        *([RECORD | {"name": name}] for name in (None, 1, "", " ", ["somebody"])),
        *([RECORD | {"sha256": digest}] for digest in (None, 1, "", "0" * 63, "0" * 65, "ä" * 64, "0" * 64 + "\n")),
        *([RECORD | {"expires": at}] for at in ("2030-01-01", "1", True, [], math.nan, math.inf, -math.inf)),
        [RECORD, RECORD | {"sha256": None}],
    ],
    ids=repr,
)
def test_a_malformed_file_is_refused_and_left_alone(path: Path, entries: Any) -> None:
    path.write_text(json.dumps(entries))
    before = path.read_bytes()
    for use in (lambda: TokenFile(path).verify("sord_any"), lambda: TokenFile(path).issue("somebody")):
        with pytest.raises(AuthError, match="malformed"):
            use()
    assert path.read_bytes() == before


def test_any_date_in_the_past_has_expired(path: Path) -> None:
    token = TokenFile(path).issue("somebody")
    entries = json.loads(path.read_text())
    for at in (0, 1.5, -1e300, -(10**400)):
        path.write_text(json.dumps([entries[0] | {"expires": at}]))
        with pytest.raises(AuthError, match=r"expired on 1970-01-01"):
            TokenFile(path).verify(token)


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_a_token_is_somebodys(path: Path, name: str) -> None:
    with pytest.raises(SordinoError, match="needs a name"):
        TokenFile(path).issue(name)
    assert not path.exists()


@pytest.mark.parametrize("name", ["al\x1b[31mice", "al\nice", "al\u202eice", os.fsdecode(b"al\xffice"), "x" * 201])
def test_a_name_is_one_line_of_plain_text(path: Path, name: str) -> None:
    with pytest.raises(SordinoError, match="printable characters"):
        TokenFile(path).issue(name)
    assert not path.exists()
    assert TokenFile(path).issue("Zoë from the 3rd floor")


@pytest.mark.parametrize("days", [math.nan, math.inf, -math.inf, 0, -1, 1e300])
def test_days_that_mean_nothing(path: Path, days: float) -> None:
    with pytest.raises(SordinoError, match="days, not"):
        TokenFile(path).issue("somebody", days=days)
    assert not path.exists()
