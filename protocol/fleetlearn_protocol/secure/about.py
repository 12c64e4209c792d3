"""What a masked update is about, in bytes: a device seals its seed about them, and signs them.

Whoever opens or checks says the same things again, so that a seed of one run, model, task or device
is of no use for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

_ABOUT = b"fleetlearn.v1 masked update"
_SIGNED = b"fleetlearn.v1 signed seed"
_SET = b"fleetlearn.v1 set of masked updates"


class MaskTerms(NamedTuple):
    """What the masked updates of one sum have in common. Each device signs it."""

    helper: bytes
    """The helper's public X25519 key, 32 bytes: the one that the device was given to trust."""
    run: str
    """The run's name."""
    bundle: str
    """SHA-256 of the bundle's manifest.json, in hexadecimal digits."""
    size: int
    """Elements of an update as it is masked, the weight included."""
    minimum: int
    """The fewest different devices whose updates may be added up."""
    training: str
    """SHA-256 of what is trained, and how: ``task_terms.training_digest``."""
    one_model: bool
    """Whether all of these updates are of one round, and began from one model."""


class MaskedUpdate(NamedTuple):
    """Which update of which device it is."""

    device: str
    task: str
    round: int
    """The round of the task."""
    model: str
    """SHA-256 of the model that the training began from, in hexadecimal digits."""


def length_prefixed(parts: Iterable[bytes]) -> bytes:
    """Return the parts one after the other, each with its length before it (4 bytes, big-endian):
    no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def about_update(terms: MaskTerms, update: MaskedUpdate) -> bytes:
    """Return what a device's seed is sealed about. Numbers are decimal digits, text is UTF-8,
    ``one_model`` is 1 or 0."""
    words = (terms.run, terms.bundle, str(terms.size), str(terms.minimum), terms.training)
    named = (update.device, update.task, str(update.round), update.model)
    texts = [text.encode() for text in (*words, str(int(terms.one_model)), *named)]
    return length_prefixed((_ABOUT, terms.helper, *texts))


def signed_seed(about: bytes, sealed: bytes) -> bytes:
    """Return the bytes that a device signs (Ed25519, RFC 8032). They begin with words of their own,
    so that nothing else that the key signs is such a signature.

    about: as ``about_update`` returns. sealed: the seed, as ``sealed.seal`` returns.
    """
    return length_prefixed((_SIGNED, about, hashlib.sha256(sealed).digest()))


def digest_of_set(signed: Iterable[bytes]) -> bytes:
    """Return the name of a set of masked updates: 32 bytes, whatever their order. ``signed``: what
    each device signed."""
    members = sorted(hashlib.sha256(content).digest() for content in signed)
    return hashlib.sha256(length_prefixed((_SET, *members))).digest()
