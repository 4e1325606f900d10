"""As :mod:`sordino.shared.tls`, for programs that know its former place."""

from sordino.shared.tls import TlsFiles, make_certificates

__all__ = ["TlsFiles", "make_certificates"]
