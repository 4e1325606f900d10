"""One error tree, for both sides, mapped to gRPC status codes at the edge.

::

    SordinoError
    ├── BundleError             a bundle or manifest is malformed, damaged or of another version
    ├── UnsupportedModelError   a model cannot be split, with the reason
    ├── RangeError              a value cannot be represented (NaN, infinity, out of the ring)
    ├── ProtocolError           a message is malformed, of wrong shape, or out of order
    │   └── UnknownGroupError   a request names a group that the bundle does not have
    ├── LimitError              a request is over a stated limit
    ├── AuthError               token missing, wrong or expired
    ├── TransportError          the peer cannot be reached
    │   ├── HandshakeError      it was, but TLS or the protocol do not fit: trying again does not help
    │   └── SessionLostError    the stream broke and retrying did not bring it back
    ├── KvEvictedError          pages of an encrypted KV cache are gone: the answer must start anew
    ├── IntegrityError          the server's answer fails the check of its own matrix (§4.4)
    ├── FingerprintError        the server holds other weights than the pool or the caller expects
    └── PoolError               the mask pool cannot be used
        ├── PoolExhaustedError  no mask is left and refilling is off
        ├── PoolSealedError     the pool is sealed: passphrase missing or wrong
        └── PoolForeignError    the pool file belongs to another host, or was copied

Texts carry names, shapes and counts, never values: an error may be logged.
"""

from __future__ import annotations

import re
from typing import Final

# Controls (C0, DEL, C1), separators of lines and paragraphs, what reverses a line, and halves of characters.
_NOT_PRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, keep: str = "") -> str:
    """A stranger's text for a terminal or a log: one line, unless a line break is among ``keep``, of plain text.

    What is left alone joins letters and emoji in many scripts, or is too new for Python's tables.
    """
    return _NOT_PRINTABLE.sub(lambda found: found[0] if found[0] in keep else " ", text)


class SordinoError(Exception):
    """Base of every error that Sordino raises on purpose."""


class BundleError(SordinoError):
    pass


class UnsupportedModelError(SordinoError):
    pass


class RangeError(SordinoError, ValueError):
    pass


class ProtocolError(SordinoError):
    pass


class UnknownGroupError(ProtocolError):
    pass


class LimitError(SordinoError):
    pass


class AuthError(SordinoError):
    pass


class TransportError(SordinoError):
    pass


class HandshakeError(TransportError):
    pass


class SessionLostError(TransportError):
    pass


class KvEvictedError(SordinoError):
    pass


class IntegrityError(SordinoError):
    pass


class FingerprintError(SordinoError):
    pass


class PoolError(SordinoError):
    pass


class PoolExhaustedError(PoolError):
    pass


class PoolSealedError(PoolError):
    pass


class PoolForeignError(PoolError):
    pass
