"""What both ends of the wire must agree on: channel options, limits, and the table of errors to gRPC codes."""

from __future__ import annotations

from typing import Any, Final

import grpc

from sordino.shared import errors
from sordino.shared.errors import SordinoError

DEFAULT_MAX_MESSAGE_BYTES: Final = 8 << 20
MIN_MESSAGE_BYTES: Final = 64 << 10  # below it a product takes hundreds of thousands of messages
# Room for the fields around a payload of the largest size.
ENVELOPE_BYTES: Final = 4096
ERROR_KEY: Final = "sordino-error"
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


def error_of(call: grpc.RpcError) -> SordinoError:
    """The Sordino error that a failed call stands for (the reverse of :func:`status_of`)."""
    # The peer chooses the text, and it goes into logs.
    code, details = call.code(), errors.printable((call.details() or "")[:_MOST_CHARACTERS])
    metadata: Any = call.trailing_metadata() or ()
    named = _BY_NAME.get(str(dict(metadata).get(ERROR_KEY, "")))
    if named is not None:
        return named(details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return _unreachable(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.AuthError(details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.LimitError(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.HandshakeError(f"the peer does not speak this protocol: is it a Sordino server? ({details})")
    return errors.ProtocolError(f"{code.name}: {details}")


_BAD_CERTIFICATE: Final = (
    "the server's certificate is not signed by the CA given, or by one that everybody knows: pass the provider's "
    "ca.pem as --ca"
)
_NO_TLS: Final = "TLS was spoken to a port without TLS: use grpc:// for a server started --insecure"
# What gRPC's text contains, what to do about it, and whether the same attempt could succeed later.
_HINTS: Final = (
    ("certificate_verify_failed", _BAD_CERTIFICATE, False),
    ("certificate verify failed", _BAD_CERTIFICATE, False),
    ("dns resolution failed", "the host name cannot be resolved: is it spelt right, is there a network?", True),
    ("hostname lookup", "the host name cannot be resolved: is it spelt right, is there a network?", True),
    ("hostname", "the server's certificate is for another host name", False),
    ("wrong version number", _NO_TLS, False),
    ("wrong_version_number", _NO_TLS, False),
    ("proxy", "a proxy is set in the environment: add the host to no_proxy", True),
    (
        "socket closed",
        "the connection closed: no TLS where the server wants it (use grpcs://), or the server stopped",
        True,
    ),
    ("connection refused", "nothing listens there: is the server running, is the port right?", True),
)


def _unreachable(details: str) -> errors.TransportError:
    """Says what to do about the failures that users meet; gRPC's own words stay behind it."""
    for key, hint, passing in _HINTS:
        if key in details.lower():
            return (errors.TransportError if passing else errors.HandshakeError)(f"{hint} [{details}]")
    return errors.TransportError(f"the server cannot be reached [{details}]")


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
