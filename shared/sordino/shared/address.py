"""Where a server listens: tried before gRPC is asked, which does not say why it cannot."""

from __future__ import annotations

import errno
import socket

from sordino.shared.errors import SordinoError


def join(host: str, port: int) -> str:
    """``host:port`` as gRPC and URLs have it: an IPv6 address is in brackets, which it may have already."""
    host = _bare(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check(host: str, port: int, options: str = "--") -> None:
    """Whether this process could listen there now.

    Args:
        options: how the names of the options for both begin.

    Raises:
        SordinoError: it could not, and why.
    """
    try:
        if not host:
            raise OSError(errno.EINVAL, "it is empty")
        found = socket.getaddrinfo(_bare(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name has this form"
        raise SordinoError(f"{options}host {host!r} is no address and cannot be resolved: {reason}") from error
    here = False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                trial.bind(address)
            here = True
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT):
                reason = {
                    errno.EADDRINUSE: f"the port is taken, is another server there? Pass another {options}port, or 0",
                    errno.EACCES: f"a port below 1024 needs rights that this user lacks, pass another {options}port",
                }.get(error.errno or 0, error.strerror)
                raise SordinoError(f"cannot listen on {join(host, port)}: {reason}") from error
    if not here:  # of the two of localhost, one will do
        raise SordinoError(
            f"{options}host {host!r} is not an address of this machine; 0.0.0.0 and :: are all that it has"
        )


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    family, kind, protocol, _, (name, *_) = socket.getaddrinfo(_bare(host), 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.bind((name, 0))
        port: int = trial.getsockname()[1]
    return port


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
