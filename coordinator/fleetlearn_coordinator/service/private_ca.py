"""A private CA and a server's certificate, for coordinators whose name no public CA certifies.

Devices are given ``ca.pem`` and trust that CA alone. ``ca-key.pem`` makes further certificates and is not needed where
the coordinator runs. Keys are of the curve P-256 (RFC 5480), certificates as RFC 5280 says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fleetlearn_protocol.errors import Code, FleetError

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "certificate.pem", "key.pem"
CA_DAYS = 3650
"""Days that the CA is valid. Devices must be given another one before they are over."""
CLOCKS = timedelta(days=1)
"""How far a device's clock may be behind."""


def make_certificate(folder: Path, names: Sequence[str], days: int) -> bool:
    """Write a certificate for these names and IP addresses, valid for ``days``, with the folder's CA.

    Makes the CA if the folder has none; returns whether it did. A certificate that is there is replaced. Raises
    FleetError (bad-message) on a name that is none, or where the folder's CA cannot be used, OSError.
    """
    wanted = x509.SubjectAlternativeName([_name(name) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    new = not (folder / CA).exists()
    if new:
        _make_ca(folder)
    ca, ca_key = _read_ca(folder)
    if datetime.now(UTC) + timedelta(days=days) > ca.not_valid_after_utc:
        raise FleetError(
            Code.BAD_MESSAGE,
            f"a certificate of {days} days would outlive {folder / CA}, which ends on "
            f"{ca.not_valid_after_utc:%Y-%m-%d}: ask for fewer days, or make a new CA in another folder",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _begun(names[0][:64], ca.subject, key, days)
        .add_extension(wanted, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_key(folder / KEY, key)
    _write(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return new


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    labels = text.split(".")
    if len(text) > 253 or not all(label.isascii() and label.replace("-", "a").isalnum() for label in labels):
        raise FleetError(Code.BAD_MESSAGE, f"{text!r} is neither an IP address nor a host's name")
    return x509.DNSName(text)


def _make_ca(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleetlearn private CA")])
    certificate = (
        _begun("fleetlearn private CA", name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / CA_KEY, key)
    _write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _read_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        ca = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            Code.BAD_MESSAGE, f"{folder / CA} and {folder / CA_KEY} cannot be used: {error}; expected PEM files"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise FleetError(Code.BAD_MESSAGE, f"{folder / CA_KEY} is not the key of {folder / CA}")
    return ca, key


def _begun(common_name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """Of a CA that signs certificates, or of a server."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    _write(path, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o600)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write the file whole, readable by nobody else where ``mode`` says so, from its first byte on."""
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    draft.replace(path)
