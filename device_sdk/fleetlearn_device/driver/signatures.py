"""Checks signatures, with the package cryptography, which only devices need that were given keys to
trust."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, FleetError

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
