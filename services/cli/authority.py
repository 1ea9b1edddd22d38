"""Certificate authority that signs certificates which OpenSSL, gRPC and browsers accept."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BEFORE: Final = timedelta(minutes=5)
"""Time by which a certificate is valid before now, because another machine's clock may be slow."""
NAME_CHARS_MAX: Final = 64
"""Most characters of a certificate's subject. Clients check only the alternative names."""


class Pair:
    """A certificate and its private key."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.cert = cert
        self.key = key

    def write(self, path: Path) -> None:
        """Write the certificate to `path`.crt and the key to `path`.key. Raises OSError if one exists.

        Only their owner can read the key.
        """
        _write(path.with_suffix(".crt"), self.cert.public_bytes(serialization.Encoding.PEM), 0o644)
        key = self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _write(path.with_suffix(".key"), key, 0o600)


class Authority(Pair):
    """A new certificate authority with its own key. It and the certificates that it signs are valid for
    `days`."""

    def __init__(self, name: str, days: int) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self._until = datetime.now(UTC) + timedelta(days=days)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uses = _uses(signs_certificates=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = (
            self._builder(self._name, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(identifier, critical=False)
        )
        super().__init__(builder.sign(key, hashes.SHA256()), key)

    def certify(self, names: list[str], *, both_ways: bool) -> Pair:
        """Return a new server certificate for these host names and addresses, with its key.

        `both_ways`: whether the server also uses it as a client. Raises ValueError for a malformed name.
        """
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:NAME_CHARS_MAX])])
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        if both_ways:
            purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            self._builder(subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_uses(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(alternatives, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer, critical=False)
        )
        return Pair(builder.sign(self.key, hashes.SHA256()), key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - BEFORE)
            .not_valid_after(self._until)
        )


def _uses(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name or not name.isascii() or any(c.isspace() or c in "/:,@" for c in name):
        raise ValueError(f"{name!r} is neither a host name nor an address")
    return x509.DNSName(name)


def _write(path: Path, text: bytes, mode: int) -> None:
    """Write a new file. It has the permissions `mode` from the moment it exists, so that a key is never
    readable by others."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:  # noqa: PTH123
        opened.write(text)
