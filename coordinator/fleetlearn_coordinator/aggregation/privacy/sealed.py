"""Buffers of correlated noise as a file may have them: nobody reads them without the secret.

With the buffers before and after a release anybody could take the noise away from the release. A
model's file is copied, kept and given away, so it has them only in this form. What hides them is
as random for everybody else as the noise is, is never the same for two contents (its key is a
digest of the content), and always the same for one: the same state makes the same file. This is
how Rogaway and Shrimpton's synthetic initialization vector works ("Deterministic
Authenticated-Encryption", 2006), with SHAKE-256 for both functions.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
from numpy.typing import NDArray

KEY_WORDS = 4
"""Elements in front of the sealed ones: the key, 32 bytes."""


def seal(buffer: NDArray[np.int64], secret: bytes, name: str) -> NDArray[np.int64]:
    """Return the buffer, (P,), in a form that tells nothing without the secret: int64, (P + 4,).
    ``name``: of the buffer, one of several with this secret."""
    key = _key(buffer, secret, name)
    return np.concatenate([np.frombuffer(key, "<i8"), buffer ^ _stream(key, secret, buffer.size)])


def unseal(sealed: NDArray[np.int64], secret: bytes, name: str) -> NDArray[np.int64]:
    """Return what ``seal`` was given. Raises ValueError where it was sealed with another secret or
    name, or changed since."""
    key = sealed[:KEY_WORDS].astype("<i8").tobytes()
    buffer: NDArray[np.int64] = sealed[KEY_WORDS:] ^ _stream(
        key, secret, max(0, sealed.size - KEY_WORDS)
    )
    if not hmac.compare_digest(_key(buffer, secret, name), key):
        raise ValueError(f"the noise's buffer {name} is damaged, or another run's")
    return buffer


def _key(buffer: NDArray[np.int64], secret: bytes, name: str) -> bytes:
    content = hashlib.sha256(np.ascontiguousarray(buffer, "<i8").data).digest()
    return hashlib.shake_256(b"fleetlearn buffer" + secret + content + name.encode()).digest(32)


def _stream(key: bytes, secret: bytes, size: int) -> NDArray[np.int64]:
    content = hashlib.shake_256(b"fleetlearn sealed" + secret + key).digest(8 * size)
    return np.frombuffer(content, "<i8")
