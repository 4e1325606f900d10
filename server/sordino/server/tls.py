"""Certificates: one's own, read and checked, or self-made with an authority of their own (ECDSA P-256, X.509 v3)."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sordino.shared.errors import SordinoError

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
        key, certificate = _read(self.key), _read(self.certificate)
        try:
            certified = x509.load_pem_x509_certificates(certificate)[0].public_key()
        except (ValueError, UnsupportedAlgorithm):
            raise SordinoError(f"{self.certificate} holds no certificate in PEM") from None
        try:
            public = serialization.load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise SordinoError(f"{self.key} holds no private key in PEM, or one under a passphrase") from None
        if public != certified:
            raise SordinoError(f"the key in {self.key} is not that of the certificate in {self.certificate}")
        return key, certificate


def make_certificates(folder: Path, hosts: list[str], *, days: int = 365) -> TlsFiles:
    """Makes a CA and a server certificate for ``hosts`` (names or addresses) in ``folder``, unless they exist.

    The CA's key is used once and not kept: a new certificate means a new CA, to be handed to the clients.

    Raises:
        SordinoError: no hosts, or one that is no name; nothing is made.
    """
    if not hosts:
        raise SordinoError("a certificate needs a host name: pass --hostnames, as in localhost,127.0.0.1")
    names = [_general_name(host) for host in hosts]
    files = TlsFiles.self_made(folder)
    if files.ca.exists() and files.certificate.exists() and files.key.exists():
        return files
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Sordino self-made CA")])
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(name, ca_name, key.public_key(), now, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    _write(files.key, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()), 0o600)
    _write(files.certificate, certificate.public_bytes(pem), 0o644)
    _write(files.ca, ca.public_bytes(pem), 0o644)
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SordinoError(f"{path} cannot be read: {error.strerror}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # a file that was there keeps its own otherwise
        file.write(data)
