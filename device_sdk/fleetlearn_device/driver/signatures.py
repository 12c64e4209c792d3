"""Signatures (Ed25519), with the package cryptography: only devices need it that were given keys to
trust, or that take part in secure aggregation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_device.session.abilities import SECURE_NEEDS
from fleetlearn_device.session.trust import Verify


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


def has_cryptography() -> bool:
    """Return whether the package cryptography is installed. It is not imported."""
    return find_spec("cryptography") is not None


def need_cryptography() -> None:
    """Raise FleetError where the package cryptography is not installed, or cannot be loaded."""
    try:
        import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError as error:
        raise FleetError(Code.BAD_VERSION, f"{SECURE_NEEDS} ({error})") from None


def public_key_of(private: bytes) -> bytes:
    """Return the public Ed25519 key, 32 bytes, of a private one of 32 bytes. Raises FleetError
    where cryptography is not installed."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
