"""Signatures: Ed25519 (RFC 8032), of the package cryptography."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether the holder of a public key's private key signed this content. False, too,
    where the key or the signature has the wrong length, or the key is no point of the curve."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
