"""The ledger: which masks this host has used, kept apart from the pools so that a pool file put back cannot undo it.

One directory per user and host (``platformdirs.user_state_path("sordino") / "ledger"`` by default) holds

- ``lock``: every change of any pool, by any process, happens under a ``flock`` on it;
- ``host``: a random secret, which makes the ledger this host's own;
- ``<pool id>.json``: per batch, how many of its chunks have been reserved: the authoritative mark;
- ``<pool id>.gone``: the pool was destroyed.

All copies of a pool on one host share its ledger entry, so a copy, or an older state that was put back, goes on where
the furthest of them stopped. A batch that the entry does not list counts as used up, so that entries may be pruned.

Refused (:class:`PoolForeignError`): a pool without an entry here; an entry or a pool made on another machine (machine
id, host secret); an entry that is not the very file this host wrote: it holds its own inode, birth and generation, so
a ledger that was copied, or restored from a backup, is noticed.

What no file can stop, since nothing in the files differs: a virtual machine or a file system rolled back to a snapshot
as a whole, and a clone of the whole machine that keeps the machine id. After either, delete the pools. Where the file
system tells neither birth nor generation, a restored ledger can also get its old inode number and pass; the log says so
when a pool is opened.

Files are for POSIX systems; ``flock`` on a network file system is only as good as that file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import json
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from platformdirs import user_state_path

from sordino.shared.errors import PoolError, PoolForeignError
from sordino.shared.locks import flocked

FILE_MODE: Final = 0o600
DIR_MODE: Final = 0o700
LOCK_TIMEOUT_S: Final = 60.0
_FORMAT: Final = 1
_HANDLE_BYTES: Final = 128  # MAX_HANDLE_SZ
_AT_FDCWD: Final = -100
_STATX_BTIME: Final = 0x800
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ID: Final = re.compile(r"^[0-9a-f]{32}$")


def crash_point(step: str) -> None:
    """Does nothing. Tests put in its place what stops the process between two steps of a change on disk."""


def default_state_dir() -> Path:
    return user_state_path("sordino") / "ledger"


def machine_id() -> str:
    """What the operating system names this machine by, where it does; else the host's name."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        with contextlib.suppress(OSError):
            if text := path.read_text().strip():
                return text
    return platform.node()


# -- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk_errors(what: str, where: Path, needed: int = 0) -> Iterator[None]:
    """Turns OSError into PoolError, with needed and free bytes when the disk (or a quota, or a limit) is full."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise PoolError(full_text(what, where, needed)) from error
        raise PoolError(f"{what}: {os.strerror(error.errno) if error.errno else type(error).__name__}") from error


def full_text(what: str, where: Path, needed: int) -> str:
    size = f"{needed:,} bytes are needed, " if needed else ""
    return (
        f"{what}: the disk is full, or a quota or file size limit is reached ({size}{free_bytes(where):,} bytes are "
        "free). Free some space or make a smaller batch; what was in the pool before is untouched"
    )


def free_bytes(where: Path) -> int:
    return shutil.disk_usage(where).free


def sync(fd: int) -> None:
    """Waits until a file is on the medium; macOS needs F_FULLFSYNC for that."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)


def sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_private(path: Path, flags: int) -> int:
    """A descriptor that children do not inherit over exec and that follows no symbolic link; new files are 0600."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    if flags & os.O_CREAT:
        os.fchmod(fd, FILE_MODE)
    return fd


def make_private_dir(path: Path) -> None:
    """The directory exists and is open to its owner alone."""
    path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o777 != DIR_MODE:
        path.chmod(DIR_MODE)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def read_private(path: Path) -> bytes:
    fd = open_private(path, os.O_RDONLY)
    with open(fd, "rb") as file:
        return file.read()


def scrub(fd: int) -> None:
    """Best effort: overwrites a file in place. Journals, snapshots, flash translation and copy-on-write keep copies."""
    write_all(fd, bytes(os.fstat(fd).st_size), 0)
    sync(fd)


def remove(path: Path, *, overwrite: bool = False) -> None:
    with contextlib.suppress(FileNotFoundError):
        if overwrite:
            fd = open_private(path, os.O_WRONLY)
            try:
                scrub(fd)
            finally:
                os.close(fd)
        path.unlink()


def file_identity(path: Path) -> str:
    """Inode and, where system and file system tell them, what tells apart two files that had the inode.

    That is the time of birth, which no restored file gets back (statx(2); macOS has it in stat(2)), and on Linux the
    generation: part of the file handle of name_to_handle_at(2), which lasts over reboots (NFS servers need that).
    Overlay file systems, the roots of containers, tell the birth alone.
    """
    return "-".join((str(path.stat().st_ino), *_birth(path), *_generation(path)))


def _birth(path: Path) -> list[str]:
    if sys.platform == "darwin":
        return [f"b{path.stat().st_birthtime}"]
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if sys.platform != "linux" or statx is None:
        return []
    found = _Statx()
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, ctypes.byref(found)) or not found.mask & _STATX_BTIME:
        return []
    return [f"b{found.birth_s}.{found.birth_ns:09d}"]


def _generation(path: Path) -> list[str]:
    known = getattr(ctypes.CDLL(None), "name_to_handle_at", None)
    if sys.platform != "linux" or known is None:
        return []
    handle, mount = _FileHandle(_HANDLE_BYTES, 0), ctypes.c_int()
    if known(_AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0):
        return []
    return [str(handle.kind), bytes(handle.handle[: handle.size]).hex()]


class _FileHandle(ctypes.Structure):
    """struct file_handle of <fcntl.h>."""

    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("handle", ctypes.c_ubyte * _HANDLE_BYTES))


class _Statx(ctypes.Structure):
    """struct statx of <linux/stat.h>: 256 bytes, the same on every architecture."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("_before", ctypes.c_ubyte * 76),
        ("birth_s", ctypes.c_int64),
        ("birth_ns", ctypes.c_uint32),
        ("_after", ctypes.c_ubyte * 164),
    )


@dataclass(frozen=True, slots=True)
class Staged:
    """A new version of a file, durable under another name; nothing has changed until :meth:`publish`."""

    temp: Path
    target: Path

    def publish(self, *, overwrite_old: bool = False) -> None:
        """Replaces the target, durably; then overwrites the old version's bytes if asked (see :func:`scrub`)."""
        old = -1
        if overwrite_old:
            with contextlib.suppress(FileNotFoundError):
                old = open_private(self.target, os.O_WRONLY)
        try:
            self.temp.replace(self.target)
            sync_dir(self.target.parent)
            if old >= 0:
                scrub(old)
        finally:
            if old >= 0:
                os.close(old)

    def discard(self) -> None:
        self.temp.unlink(missing_ok=True)


def stage(target: Path, content: bytes | Callable[[str], bytes]) -> Staged:
    """Writes a file beside ``target`` and syncs it. ``content`` may be a function of the new :func:`file_identity`."""
    temp = target.with_name(f"{target.name}.{secrets.token_hex(6)}.tmp")
    fd = open_private(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(fd, content if isinstance(content, bytes) else content(file_identity(temp)), 0)
        sync(fd)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return Staged(temp, target)


# -- the ledger ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """``used`` of a batch's ``chunks`` have been reserved, by whichever process or copy."""

    used: int
    chunks: int


class LedgerBusyError(PoolError):
    """Another process holds the ledger's lock."""


class Ledger:
    """The marks of one host. Every method but :meth:`locked` is called under :meth:`locked`.

    Raises:
        PoolError: the directory cannot be used.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir
        with disk_errors("the ledger of used masks cannot be opened", Path(self.path.anchor or ".")):
            make_private_dir(self.path)

    @contextlib.contextmanager
    def locked(self, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Holds the host-wide lock; threads and processes alike wait for each other.

        Raises:
            LedgerBusyError: another process held it all the time.
        """
        with disk_errors("the ledger's lock cannot be opened", self.path):
            # A descriptor of its own each time: flock belongs to the open file, so threads exclude each other too.
            fd = open_private(self.path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            with flocked(fd, wait_s=timeout_s, poll_s=0.002) as held:
                if not held:
                    raise LedgerBusyError("another process holds the ledger of used masks; is it stopped?")
                yield
        finally:
            os.close(fd)

    def register(self, pool_id: str) -> str:
        """Begins the entry of a new pool. Returns the tag that binds the pool to this host."""
        host = self.path / "host"
        if not host.exists():
            stage(host, secrets.token_bytes(32)).publish()
        self.stage_marks(pool_id, {}).publish()
        return self._tag(pool_id)

    def marks(self, pool_id: str, tag: str) -> dict[str, Mark]:
        """The marks of a pool whose own file holds ``tag``.

        Raises:
            PoolForeignError: the pool, or this ledger, is not this host's, as the module's text says.
        """
        if self._gone(pool_id).exists():
            raise _foreign("it was destroyed, after a failed check")
        try:
            raw = read_private(self._entry(pool_id))
            identity = file_identity(self._entry(pool_id))
            expected = self._tag(pool_id)
        except FileNotFoundError:
            raise _foreign("this host has no record of which of its masks were used") from None
        if not hmac.compare_digest(expected, tag):
            raise _foreign("it was made on another machine or by another user")
        body, _, mac = raw.rpartition(b"\n")
        if not hmac.compare_digest(self._mac(body), mac):
            raise _foreign("the record of its used masks is damaged or from another machine")
        entry = json.loads(body)
        if entry["format"] != _FORMAT or entry["pool"] != pool_id:
            raise _foreign("the record of its used masks belongs to another pool or release")
        if entry["file"] != identity:
            raise _foreign("the record of its used masks was copied or restored, and may be out of date")
        return {name: Mark(used, chunks) for name, (used, chunks) in entry["marks"].items()}

    def stage_marks(self, pool_id: str, marks: dict[str, Mark]) -> Staged:
        """A new version of a pool's entry, not in force before it is published."""

        def content(identity: str) -> bytes:
            listed = {name: (mark.used, mark.chunks) for name, mark in marks.items()}
            entry = {"format": _FORMAT, "pool": pool_id, "file": identity, "marks": listed}
            body = json.dumps(entry, sort_keys=True).encode()
            return body + b"\n" + self._mac(body)

        return stage(self._entry(pool_id), content)

    def notices_restoring(self, pool_id: str) -> bool:
        """Whether a restored entry could not get the identity of the one it replaces."""
        return "-" in file_identity(self._entry(pool_id))

    def tidy(self) -> None:
        """Removes what processes that died left."""
        for temp in self.path.glob("*.tmp"):
            temp.unlink(missing_ok=True)

    def forget(self, pool_id: str) -> None:
        """No copy of the pool can be used on this host any more, whatever a process that was stopped still writes."""
        os.close(open_private(self._gone(pool_id), os.O_WRONLY | os.O_CREAT))
        self._entry(pool_id).unlink(missing_ok=True)
        sync_dir(self.path)

    def _gone(self, pool_id: str) -> Path:
        return self._entry(pool_id).with_suffix(".gone")

    def _entry(self, pool_id: str) -> Path:
        if not _ID.match(pool_id):
            raise PoolError("the pool's id is malformed")
        return self.path / f"{pool_id}.json"

    def _key(self) -> bytes:
        secret = read_private(self.path / "host")
        return hashlib.sha256(b"sordino ledger\0" + secret + machine_id().encode()).digest()

    def _tag(self, pool_id: str) -> str:
        return hmac.new(self._key(), b"pool\0" + pool_id.encode(), hashlib.sha256).hexdigest()

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._key(), b"entry\0" + body, hashlib.sha256).hexdigest().encode()


def _foreign(why: str) -> PoolForeignError:
    return PoolForeignError(
        f"the mask pool cannot be used here: {why}. A mask must never be used twice, so make a new pool: delete the "
        "pool's folder, or name another one, and provision again"
    )
