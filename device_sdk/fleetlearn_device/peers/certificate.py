"""A peer's certificate: its device key (Ed25519), certified by itself. The address book has it, and
TLS trusts the certificates in the book and nothing else.

It is valid for ever, since boards without a clock believe it is 1970 when they start: who is in
the book decides who is trusted.
"""

from __future__ import annotations

import base64
import os
import ssl
from datetime import datetime, timezone
from pathlib import Path

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_device.storage.errors import os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

FILE = "peer.pem"
"""In the state directory: the private key and the certificate, for its owner's eyes alone."""
BEGIN = datetime(1970, 1, 1, tzinfo=timezone.utc)
END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
"""RFC 5280, 4.1.2.5: no end is known."""
NEEDS = 'making a peer\'s certificate needs: pip install "fleetlearn[device,signatures]"'


def own_certificate(folder: Path, name: str, private: bytes) -> bytes:
    """Return the certificate of a device, DER; make it where there is none. The same key and name
    always make the same certificate.

    folder: the state directory. private: the device key, 32 bytes. Raises FleetError where the
    package cryptography is not installed, StateError.
    """
    try:
        made = _certified(name, private)
    except ImportError as error:
        found = _read(folder / FILE)
        if found is None:
            raise FleetError(Code.BAD_VERSION, f"{NEEDS} ({error})") from None
        return found
    pem = made[1]
    with os_errors_as_state_errors(folder):
        path = folder / FILE
        if not path.exists() or path.read_bytes() != pem:
            draft = folder / f"{FILE}.new"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.close(descriptor)
            write_durably(path, pem, into=draft)
    return made[0]


def _certified(name: str, private: bytes) -> tuple[bytes, bytes]:
    """Return the certificate, DER, and the file with it and the key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = Ed25519PrivateKey.from_private_bytes(private)
    public = key.public_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(int.from_bytes(identifier.digest[:8], "big") | 1)
        .not_valid_before(BEGIN)
        .not_valid_after(END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, None)
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    return certificate.public_bytes(serialization.Encoding.DER), pem


def _read(path: Path) -> bytes | None:
    """Return the certificate in a file, DER."""
    try:
        text = path.read_text("ascii")
    except (OSError, ValueError):
        return None
    begin = text.find("-----BEGIN CERTIFICATE-----")
    return None if begin < 0 else ssl.PEM_cert_to_DER_cert(text[begin:])


def card(name: str, address: str | None, certificate: bytes) -> str:
    """Return a peer's entry in the address book, TOML."""
    lines = ["[[peer]]", f'name = "{name}"']
    if address is not None:
        lines.append(f'address = "{address}"')
    lines.append(f'certificate = "{base64.b64encode(certificate).decode()}"')
    return "\n".join(lines)


def tls_contexts(folder: Path, certificates: list[bytes]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a peer dials with, and what it listens with: TLS 1.3, its own certificate, and
    trust in the neighbours' certificates alone. Raises ValueError where one cannot be read."""
    made = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate says who it is, not where
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        for certificate in certificates:
            try:
                context.load_verify_locations(cadata=certificate)
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(
                    f"a certificate in the address book cannot be read ({error}); copy the whole "
                    "line that `fleetlearn-device peer-card` prints"
                ) from None
        context.load_cert_chain(folder / FILE)
        made.append(context)
    return made[0], made[1]
