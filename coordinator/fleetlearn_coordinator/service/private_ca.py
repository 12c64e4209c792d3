"""A private CA, a server's certificate for coordinators whose name no public CA certifies, and
devices' certificates.

Devices are given ``ca.pem`` and trust that CA alone. A server's certificate is of no use to a
device, and a device's of none to a server (RFC 5280, 4.2.1.12). ``ca-key.pem`` makes further
certificates and is not needed where the coordinator runs. Keys are of the curve P-256 (RFC 5480),
certificates as RFC 5280 says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fleetlearn_protocol.errors import Code, FleetError, in_words

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "certificate.pem", "key.pem"
DEVICES = "devices"
"""The folder of devices' certificates and keys."""
CA_DAYS = 3650
"""Days that the CA is valid. Devices must be given another one before they are over."""
CLOCKS = timedelta(days=1)
"""How far a device's clock may be behind. A device's own certificate is valid from when it was
made: the coordinator checks it, and tells by that time whether it was made after the device was
revoked."""
DEVICE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""A device's name."""


def make_certificate(folder: Path, names: Sequence[str], days: int) -> bool:
    """Write a certificate for these names and IP addresses, valid for ``days``, with the folder's
    CA.

    Makes the CA if the folder has none; returns whether it did. A certificate that is there is
    replaced. Raises FleetError (bad-message) on a name that is none, or where the folder's CA
    cannot be used, OSError.
    """
    wanted = x509.SubjectAlternativeName([_name(name) for name in names])
    new = _open_ca(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certified(
        folder, names[0][:64], key, days, ExtendedKeyUsageOID.SERVER_AUTH, wanted
    )
    _write_key(folder / KEY, key)
    _write(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return new


def make_device_certificate(folder: Path, device: str, days: int) -> bool:
    """Write a device's certificate ``devices/NAME.pem`` and key ``devices/NAME.key``. Its common
    name is the device's.

    Makes the CA if the folder has none; returns whether it did. A certificate that is there is
    replaced. Raises FleetError (bad-message) on a name that no device can have, or where the
    folder's CA cannot be used, OSError.
    """
    if not re.fullmatch(DEVICE, device):
        text = (
            "a device's name has 1 to 64 letters, digits and . _ -, and begins with a letter or "
            "digit"
        )
        raise FleetError(Code.BAD_MESSAGE, f"the name {device!r} was given; {text}")
    new = _open_ca(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certified(folder, device, key, days, ExtendedKeyUsageOID.CLIENT_AUTH)
    (folder / DEVICES).mkdir(exist_ok=True)
    _write_key(folder / DEVICES / f"{device}.key", key)
    _write(
        folder / DEVICES / f"{device}.pem",
        certificate.public_bytes(serialization.Encoding.PEM),
        0o644,
    )
    return new


def _open_ca(folder: Path) -> bool:
    """Make the CA if the folder has none. Returns whether it did."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CA).exists():
        return False
    _make_ca(folder)
    return True


def _certified(
    folder: Path,
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    usage: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None = None,
) -> x509.Certificate:
    """Return a certificate by the folder's CA. Raises FleetError (bad-message)."""
    ca, ca_key = _read_ca(folder)
    if datetime.now(UTC) + timedelta(days=days) > ca.not_valid_after_utc:
        raise FleetError(
            Code.BAD_MESSAGE,
            f"a certificate of {days} days would outlive {folder / CA}, which ends on "
            f"{ca.not_valid_after_utc:%Y-%m-%d}: ask for fewer days, or make a new CA in another "
            "folder",
        )
    begin = (
        datetime.now(UTC)
        if usage == ExtendedKeyUsageOID.CLIENT_AUTH
        else datetime.now(UTC) - CLOCKS
    )
    builder = (
        _begun(common_name, ca.subject, key, days, begin)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    labels = text.split(".")
    if len(text) > 253 or not all(
        label.isascii() and label.replace("-", "a").isalnum() for label in labels
    ):
        raise FleetError(Code.BAD_MESSAGE, f"{text!r} is neither an IP address nor a host's name")
    return x509.DNSName(text)


def _make_ca(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleetlearn private CA")])
    certificate = (
        _begun("fleetlearn private CA", name, key, CA_DAYS, datetime.now(UTC) - CLOCKS)
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
            Code.BAD_MESSAGE,
            f"{folder / CA} and {folder / CA_KEY} cannot be used: {in_words(error)}; expected PEM "
            "files",
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise FleetError(Code.BAD_MESSAGE, f"{folder / CA_KEY} is not the key of {folder / CA}")
    return ca, key


def _begun(
    common_name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, begin: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """Return the key usage of a CA (``signs``), or of a server or device."""
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
    """Write the file whole, readable by nobody else where ``mode`` says so, from its first byte
    on."""
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    draft.replace(path)
