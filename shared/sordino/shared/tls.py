"""Certificates: one's own, read and checked, or self-made with an authority of their own (ECDSA P-256, X.509 v3)."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sordino.shared.errors import SordinoError
from sordino.shared.files import locked, replace, unreadable

log = logging.getLogger(__name__)
_PEM: Final = serialization.Encoding.PEM
_CA_DAYS: Final = 3650
_SOON: Final = datetime.timedelta(days=30)
_OWN_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_LABEL: Final = "(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_DNS_NAME: Final = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. ``ca`` is what clients need; ``key`` has mode 0600."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def self_made(cls, folder: Path) -> TlsFiles:
        """Where :func:`make_certificates` puts them."""
        return cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")

    def read(self) -> tuple[bytes, bytes]:
        """Key and certificate, as gRPC takes them; it would not say what is wrong with them.

        Raises:
            SordinoError: a file cannot be read or is no PEM, or the key is not the certificate's.
        """
        key, certificate, _ = self._pair()
        return key, certificate

    def _pair(self) -> tuple[bytes, bytes, x509.Certificate]:
        key, certificate = _read(self.key), _read(self.certificate)
        if (certified := _certificate(certificate)) is None:
            raise SordinoError(f"{self.certificate} holds no certificate in PEM")
        if (private := _private_key(key)) is None:
            raise SordinoError(f"{self.key} holds no private key in PEM, or one under a passphrase")
        if private.public_key() != certified.public_key():
            raise SordinoError(f"the key in {self.key} is not that of the certificate in {self.certificate}")
        return key, certificate, certified

    def check(self, hosts: list[str] | None) -> None:
        """Refuses a certificate that no client would accept, and warns of one that soon will be none.

        Args:
            hosts: names or addresses that it must have, if any.

        Raises:
            SordinoError: see :meth:`read`; or its time is not now, or it lacks a host.
        """
        *_, certificate = self._pair()
        if reason := _out_of_time(certificate):
            raise SordinoError(f"{self.certificate} {reason}: clients would refuse it, pass another as --tls-cert")
        if missing := [host for host in hosts or () if not _covers(certificate, host)]:
            raise SordinoError(
                f"{self.certificate} is not for {missing[0]}, it is for {', '.join(_hosts(certificate)) or 'no host'}: "
                "pass another as --tls-cert, or its names as --hostnames"
            )
        if _ends_soon(certificate):
            log.warning("%s expires on %s", self.certificate, _day(certificate.not_valid_after_utc))


def make_certificates(folder: Path, hosts: list[str] | None = None, *, days: int = 365) -> TlsFiles:
    """Makes a CA and a server certificate in ``folder``, as far as what is there will not do.

    A certificate that is damaged, not for these hosts, or expires within a month is made anew under the CA that is
    there, so that clients go on with the ``ca.pem`` they have. Only where that has expired, or its key is gone, there
    is a new CA, and a warning that clients need the new file. Several processes may do this at once.

    Args:
        hosts: names or addresses; None are those of the certificate that is there, or this machine's own.

    Raises:
        SordinoError: no hosts, or one that is no name, and nothing is made; a file cannot be read; the clock is wrong.
    """
    if hosts is not None and not hosts:
        raise SordinoError("a certificate needs a host name: pass --hostnames, as in localhost,127.0.0.1")
    for host in hosts or ():
        _general_name(host)
    files = TlsFiles.self_made(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder):
        ca, old = _certificate(_found(files.ca)), _certificate(_found(files.certificate))
        if ca and ca.not_valid_before_utc > _now():
            raise SordinoError(f"{files.ca} {_out_of_time(ca)}: is the clock of this machine right?")
        ca_key = _key_of(ca, folder / "ca.key")
        lost = old is None and any(path.exists() for path in (files.ca, files.certificate, files.key))
        reason = _unfit(files, old, ca, hosts)
        if ca and old and not reason:
            last = ca_key is None or ca.not_valid_after_utc <= old.not_valid_after_utc
            if last or not _ends_soon(old):
                _warn_of_end(files.ca, ca)
                _warn_of_end(files.certificate, old)
                return files
            reason = "expires soon"
        # Each file is replaced as a whole, the CA's before what it signs and keys before certificates: wherever a crash
        # comes between two, they do not match, and the next start finds that.
        if ca is None or ca_key is None or _out_of_time(ca):
            ca, ca_key = _new_authority(files, ca, ca_key, folder / "ca.key")
        elif files.certificate.exists():
            log.info("%s %s: a new one is made, clients go on with the ca.pem they have", files.certificate, reason)
        key = ec.generate_private_key(ec.SECP256R1())
        names = hosts or (_hosts(old) if old else [])
        if not names:
            names = list(_OWN_HOSTS)
            if lost:
                log.warning("%s is made for %s: pass --hostnames for others", files.certificate, ", ".join(names))
        replace(files.key, _pem_of_key(key))
        replace(files.certificate, _signed(ca, ca_key, key, names, days).public_bytes(_PEM), 0o644)
    return files


def _new_authority(
    files: TlsFiles, old: x509.Certificate | None, key: ec.EllipticCurvePrivateKey | None, key_path: Path
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if old is None and key is not None:
        log.warning("%s was damaged or gone: made anew with its old key, copies of it go on working", files.ca)
    else:
        if files.ca.exists() or files.certificate.exists():
            why = _out_of_time(old) if old else None
            why = f"the old one {why}" if why else "there is no key to renew the old one"
            log.warning("%s is NEW (%s): every client needs a copy of it", files.ca, why)
        key = ec.generate_private_key(ec.SECP256R1())
        replace(key_path, _pem_of_key(key))
    ca = _authority(key)
    replace(files.ca, ca.public_bytes(_PEM), 0o644)
    return ca, key


def _key_of(ca: x509.Certificate | None, path: Path) -> ec.EllipticCurvePrivateKey | None:
    """The CA's key, or one that a CA can be made with; None if it is gone, damaged, or another's."""
    key = _private_key(_found(path))
    if not isinstance(key, ec.EllipticCurvePrivateKey) or (ca and ca.public_key() != key.public_key()):
        return None
    return key


def _unfit(
    files: TlsFiles, certificate: x509.Certificate | None, ca: x509.Certificate | None, hosts: list[str] | None
) -> str | None:
    """Why a self-made certificate will not do; None if it will."""
    if certificate is None:
        return "holds no certificate"
    key = _private_key(_found(files.key))
    if key is None or key.public_key() != certificate.public_key():
        return "and its key are no pair"
    try:
        if ca is None or _out_of_time(ca):
            return "has lost its CA"
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return "is not by the CA in ca.pem"
    if missing := [host for host in hosts or () if not _covers(certificate, host)]:
        return f"is not for {missing[0]}"
    return _out_of_time(certificate)


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Sordino self-made CA")])
    return (
        _builder(name, name, key.public_key(), _now() + datetime.timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _signed(
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
    hosts: list[str],
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    end = min(_now() + datetime.timedelta(days=days), ca.not_valid_after_utc)
    return (
        _builder(name, ca.subject, key.public_key(), end)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - datetime.timedelta(minutes=5))
        .not_valid_after(end)
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise SordinoError(f"{host!r} is no host name or address (names outside ASCII as xn--...)") from None
        return x509.DNSName(host)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _day(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d}"


def _out_of_time(certificate: x509.Certificate) -> str | None:
    if certificate.not_valid_after_utc < _now():
        return f"expired on {_day(certificate.not_valid_after_utc)}"
    if certificate.not_valid_before_utc > _now():
        return f"is not valid before {_day(certificate.not_valid_before_utc)}"
    return None


def _ends_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc < _now() + _SOON


def _warn_of_end(path: Path, certificate: x509.Certificate) -> None:
    if _ends_soon(certificate):
        log.warning(
            "%s expires on %s: delete it and start again for a new CA, whose ca.pem every client then needs",
            path,
            _day(certificate.not_valid_after_utc),
        )


def _hosts(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _covers(certificate: x509.Certificate, host: str) -> bool:
    name = _general_name(host)
    if isinstance(name, x509.IPAddress):
        return str(name.value) in _hosts(certificate)
    host = host.lower()
    return bool({host, "*." + host.partition(".")[2]} & {known.lower() for known in _hosts(certificate)})


def _certificate(data: bytes) -> x509.Certificate | None:
    """The first of a PEM file."""
    try:
        return x509.load_pem_x509_certificates(data)[0]
    except (ValueError, UnsupportedAlgorithm):
        return None


def _private_key(data: bytes) -> PrivateKeyTypes | None:
    try:
        return serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SordinoError(unreadable(path, error)) from error


def _found(path: Path) -> bytes:
    """Nothing for a file that is not there; one that is there and closed to us is no reason to make another."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise SordinoError(unreadable(path, error)) from error
