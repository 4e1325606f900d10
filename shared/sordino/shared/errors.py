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
