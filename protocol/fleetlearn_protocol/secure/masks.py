"""Masks: numbers that look random to everybody who does not know their seed.

A mask is the stream of ChaCha20 (RFC 8439) under the seed as its key, read as little-endian numbers
of 32 bits. Masks are added modulo 2^32.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from fleetlearn_protocol.secure.fixed_point import Words

SEED_BYTES = 32
_NONCE = bytes(16)
"""A seed makes one mask, so its nonce and counter are always zero."""


def mask_of(seed: bytes, size: int) -> Words:
    """Return the mask of a seed of 32 bytes: uint32, shape (size,)."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed of {len(seed)} bytes was given; it has {SEED_BYTES}")
    stream = Cipher(ChaCha20(seed, _NONCE), None).encryptor().update(bytes(4 * size))
    mask: NDArray[np.uint32] = np.frombuffer(stream, "<u4").astype(np.uint32)
    return mask


def add_mask(words: Words, seed: bytes, sign: int = 1) -> None:
    """Add a seed's mask to words, in place, modulo 2^32; subtract it where ``sign`` is -1."""
    mask = mask_of(seed, len(words))
    (np.add if sign == 1 else np.subtract)(words, mask, out=words)
