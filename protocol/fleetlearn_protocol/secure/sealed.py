"""Bytes that only the holder of a private key can open, such as a mask's seed for the helper.

X25519 (RFC 7748) with a key of one use, HKDF-SHA-256 (RFC 5869), and ChaCha20-Poly1305 (RFC 8439),
as in HPKE's base mode (RFC 9180) in construction, not in encoding. What is bound in (``about``) is
not sent: whoever opens must name the same.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleetlearn_protocol.secure.about import length_prefixed

KEY_BYTES = 32
OVERHEAD = KEY_BYTES + 16
"""Bytes that a sealed text is longer: the key of one use, and the tag."""
_LABEL = b"fleetlearn.v1 sealed"
_NONCE = bytes(12)
"""Each key is used once."""


def agreed_key(private: X25519PrivateKey, public: bytes, about: bytes, *keys: bytes) -> bytes:
    """Return the 32 bytes that two parties agree on. Raises ValueError on a public key of small
    order. ``keys``: the public keys of both, in an order that both know."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    info = length_prefixed((_LABEL, about, *keys))
    return HKDF(SHA256(), 32, None, info).derive(shared)


def can_seal_for(public: bytes) -> bool:
    """Return whether a public X25519 key, 32 bytes, hides anything: what is sealed for one of small
    order, or masked with it, can be read by anybody."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def seal(content: bytes, public: bytes, about: bytes, own: X25519PrivateKey | None = None) -> bytes:
    """Return ``content`` sealed for the holder of ``public``'s private key. ``own``: the key of one
    use, for test vectors alone; by default a new one is drawn."""
    own = X25519PrivateKey.generate() if own is None else own
    key = own.public_key().public_bytes_raw()
    secret = agreed_key(own, public, about, key, public)
    return key + ChaCha20Poly1305(secret).encrypt(_NONCE, content, about)


def unseal(sealed: bytes, private: X25519PrivateKey, about: bytes) -> bytes:
    """Return what was sealed. Raises ValueError where it was not sealed for this key and about
    this."""
    if len(sealed) < OVERHEAD:
        raise ValueError(f"{len(sealed)} sealed bytes were given; there are at least {OVERHEAD}")
    key, public = sealed[:KEY_BYTES], private.public_key().public_bytes_raw()
    secret = agreed_key(private, key, about, key, public)
    try:
        return ChaCha20Poly1305(secret).decrypt(_NONCE, sealed[KEY_BYTES:], about)
    except InvalidTag:
        raise ValueError(
            "sealed bytes that were sealed for another key, about something else, or changed"
        ) from None
