"""What both ends of the wire must agree on: channel options, limits, and the table of errors to gRPC codes."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc

from sordino.shared import errors
from sordino.shared.errors import AuthError, SordinoError, TransportError

DEFAULT_PORT: Final = 50551
DEFAULT_MAX_MESSAGE_BYTES: Final = 8 << 20
MIN_MESSAGE_BYTES: Final = 64 << 10  # below it a product takes hundreds of thousands of messages
# Room for the fields around a payload of the largest size.
ENVELOPE_BYTES: Final = 4096
ERROR_KEY: Final = "sordino-error"
OPENED_KEY: Final = "sordino-opened"  # before the first answer of a stream of the dealer's
BUNDLE_CHUNK_BYTES: Final = 1 << 20

_CODES: Final[dict[type[SordinoError], grpc.StatusCode]] = {
    errors.UnknownGroupError: grpc.StatusCode.NOT_FOUND,
    errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RangeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.KvEvictedError: grpc.StatusCode.ABORTED,
    errors.AuthError: grpc.StatusCode.UNAUTHENTICATED,
    errors.FingerprintError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BundleError: grpc.StatusCode.DATA_LOSS,
    errors.TransportError: grpc.StatusCode.UNAVAILABLE,
}
_BY_NAME: Final = {cls.__name__: cls for cls in _CODES}


def status_of(error: SordinoError) -> grpc.StatusCode:
    """The gRPC code for an error, by the nearest listed class."""
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


_MOST_CHARACTERS: Final = 500  # of a peer's text


def error_of(call: grpc.RpcError, peer: str = "server", ca: str = "--ca") -> SordinoError:
    """The Sordino error that a failed call stands for (the reverse of :func:`status_of`).

    Args:
        peer, ca: what the other side is called, and the option with its certificate.
    """
    # The peer chooses the text, and it goes into logs.
    code, details = call.code(), errors.printable((call.details() or "")[:_MOST_CHARACTERS])
    metadata: Any = call.trailing_metadata() or ()
    named = _BY_NAME.get(str(dict(metadata).get(ERROR_KEY, "")))
    if named is not None:
        return named(details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return _unreachable(details, peer, ca)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.AuthError(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.LimitError(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.HandshakeError(f"the peer does not speak this protocol: is it a Sordino {peer}? ({details})")
    return errors.ProtocolError(f"{code.name}: {details}")


_BAD_CERTIFICATE: Final = (
    "the {peer}'s certificate is not signed by the CA given, or by one that everybody knows: pass its operator's "
    "ca.pem as {ca}"
)
_NO_TLS: Final = "TLS was spoken to a port without TLS: use grpc:// for a {peer} started --insecure"
# What gRPC's text contains, what to do about it, and whether the same attempt could succeed later.
_HINTS: Final = (
    ("certificate_verify_failed", _BAD_CERTIFICATE, False),
    ("certificate verify failed", _BAD_CERTIFICATE, False),
    ("dns resolution failed", "the host name cannot be resolved: is it spelt right, is there a network?", True),
    ("hostname lookup", "the host name cannot be resolved: is it spelt right, is there a network?", True),
    ("hostname", "the {peer}'s certificate is for another host name", False),
    ("wrong version number", _NO_TLS, False),
    ("wrong_version_number", _NO_TLS, False),
    ("proxy", "a proxy is set in the environment: add the host to no_proxy", True),
    (
        "socket closed",
        "the connection closed: no TLS where the {peer} wants it (use grpcs://), or the {peer} stopped",
        True,
    ),
    ("connection refused", "nothing listens there: is the {peer} running, is the port right?", True),
)


def _unreachable(details: str, peer: str, ca: str) -> errors.TransportError:
    """Says what to do about the failures that users meet; gRPC's own words stay behind it."""
    for key, hint, passing in _HINTS:
        if key in details.lower():
            return (errors.TransportError if passing else errors.HandshakeError)(
                f"{hint.format(peer=peer, ca=ca)} [{details}]"
            )
    return errors.TransportError(f"the {peer} cannot be reached [{details}]")


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options for either end: message limits, keepalive that the other side accepts."""
    limit = max_message_bytes + ENVELOPE_BYTES
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def authorization(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of calls under a token, none under none.

    Raises:
        AuthError: no server could know it.
    """
    if token is None:
        return ()
    if not token:
        raise AuthError("the token is empty: pass the one that the provider gave you")
    if not re.fullmatch("[!-~]+", token):
        raise AuthError(
            "the token has a line break, a space or a character outside ASCII: pass it exactly as the provider gave "
            "it, without the end of its line"
        )
    return (("authorization", f"Bearer {token}"),)


def parse_target(target: str, default_port: int = DEFAULT_PORT) -> tuple[str, str, int]:
    """Scheme, host and port of ``grpcs://host:port``.

    Raises:
        TransportError: it is not of this form.
    """
    try:
        parts = urlsplit(target)
        host = parts.hostname or ""
    except ValueError:  # of brackets that do not match
        parts, host = urlsplit(""), ""
    odd = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None
    # In another alphabet it is gRPC that would fail, with a text of its own; names have an ASCII form (xn--...).
    if parts.scheme not in ("grpc", "grpcs") or odd or not re.fullmatch(r"[!-~]+", host):
        raise TransportError(f"target {target!r} is not of the form grpcs://host:port")
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not port:
        raise TransportError(f"target {target!r}: the port is not a number from 1 to 65535")
    return parts.scheme, host, port


def open_channel(
    target: str, ca: Path | None, max_message_bytes: int, default_port: int = DEFAULT_PORT
) -> grpc.Channel:
    """To one target, as :func:`parse_target` takes it; ca None trusts the authorities that everybody knows.

    Raises:
        TransportError: the target is malformed, or without TLS and not on loopback; or the CA file is no good.
    """
    scheme, host, port = parse_target(target, default_port)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    options: list[tuple[str, int]] = channel_options(max_message_bytes + ENVELOPE_BYTES)
    # gRPC by itself waits up to two minutes between attempts to connect, whatever is asked of the channel meanwhile.
    options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
    loopback = host in ("localhost", "127.0.0.1", "::1")
    if loopback:
        # A proxy of the environment cannot reach this machine's own loopback.
        options.append(("grpc.enable_http_proxy", 0))
    # Two connections of one process never share a socket: closing one must not touch the other.
    options.append(("grpc.use_local_subchannel_pool", 1))
    if scheme == "grpc":
        if not loopback:
            raise TransportError(f"grpc:// (no TLS) is for loopback only; use grpcs:// for {host}")
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(_roots(ca) if ca else None), options=options)


def _roots(ca: Path) -> bytes:
    """The CA file; gRPC would take one without a certificate, and fail at every handshake with another text."""
    try:
        roots = ca.read_bytes()
    except (OSError, ValueError) as error:  # the latter of a name with a NUL
        why = getattr(error, "strerror", None) or error
        raise TransportError(f"the CA file {ca} cannot be read: {why}") from None
    try:
        # Text beside the certificates may be of any encoding.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=roots.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise TransportError("the CA file holds no PEM certificate: pass the ca.pem of the provider") from None
    return roots
