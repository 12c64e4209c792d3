"""Signatures (Ed25519), with the package cryptography: only devices need it that were given keys to
trust, or that take part in secure aggregation."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_device.session.trust import Verify

SECURE_NEEDS = (
    "secure aggregation needs the package cryptography on the device: pip install "
    '"fleetlearn[device,secure]"'
)


def find_verifier() -> Verify:
    """Return what checks an Ed25519 signature (RFC 8032). Raises FleetError where cryptography is
    not installed."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise FleetError(
            Code.BAD_VERSION,
            "this device trusts only signed tasks, and to check signatures it needs: pip install "
            f'"fleetlearn[device,signatures]" ({error})',
        ) from None

    def verify(key: str, signature: str, content: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
                bytes.fromhex(signature), content
            )
        except (InvalidSignature, ValueError):  # ValueError: no point of the curve
            return False
        return True

    return verify


def public_key_of(private: bytes) -> bytes:
    """Return the public Ed25519 key, 32 bytes, of a private one of 32 bytes. Raises FleetError
    where cryptography is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise FleetError(Code.BAD_VERSION, f"{SECURE_NEEDS} ({error})") from None
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
