"""Files of the server's state folder: replaced as a whole, by one process at a time, for the user who reads them."""

from __future__ import annotations

import errno
import os
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sordino.shared.errors import SordinoError
from sordino.shared.locks import flocked

_WAIT_S: Final = 10.0
_NEW: Final = ".new-"  # in the names of files that are being written


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time, and in it one thread; not to be nested. Removes what a process that died was writing.

    Who may not write in the folder locks nothing: it changes nothing either, and each file there is whole.

    Raises:
        SordinoError: another process holds the folder and does not let go of it, or it is none.
    """
    path = folder / ".lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise SordinoError(unreadable(path, error)) from error
        yield
        return
    try:
        if os.geteuid() == 0:
            owner = folder.stat()
            os.fchown(handle, owner.st_uid, owner.st_gid)
        with flocked(handle, wait_s=_WAIT_S, poll_s=0.02) as held:
            if not held:
                raise SordinoError(f"another process holds {path}: is it stopped?")
            for left in folder.glob(f".*{_NEW}*"):
                left.unlink(missing_ok=True)
            yield
    finally:
        os.close(handle)


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Puts a whole new file in the place of ``path``, durably; a crash leaves the old one or the new one.

    A file that root writes belongs to who had the old one, or has the folder: a server that is not root reads it.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{_NEW}")  # mode 0600
    try:
        with open(fd, "wb") as file:
            if os.geteuid() == 0:
                owner = (path if path.exists() else path.parent).stat()
                os.fchown(fd, owner.st_uid, owner.st_gid)
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unreadable(path: Path, error: OSError) -> str:
    """Says which file cannot be read, and where it is for want of a permission, whose it is and who asks."""
    text = f"{path} cannot be read: {error.strerror}"
    if not isinstance(error, PermissionError):
        return text
    try:
        owner = _name(path.stat().st_uid)
    except OSError:
        return f"{text} (its folder is closed to {_name(os.geteuid())}, who runs the server)"
    return f"{text} (it belongs to {owner}, the server is run by {_name(os.geteuid())}: chown it)"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
