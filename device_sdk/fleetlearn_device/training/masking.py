"""An update as masked words, for secure aggregation with a helper.

The clipped update becomes whole numbers of a few bits each, rounded up or down at random
(``secure/fixed_point.py`` of the protocol), and a mask is added to each, modulo 2^32 or 2^24. The
mask's seed is sealed for the helper. Whoever knows how the numbers were rounded, or the seed,
learns more than a sum: both come from the system's random bytes, and never from the task's seed,
which the coordinator knows.

Only a task with secure aggregation needs this module: it imports the package cryptography.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_protocol.encodings import SLAB, masked_encoding
from fleetlearn_protocol.formats.masked import words_to_bytes
from fleetlearn_protocol.secure.about import signed_seed
from fleetlearn_protocol.secure.fixed_point import (
    Words,
    excess_of,
    to_words,
    weighted_words,
)
from fleetlearn_protocol.secure.masks import SEED_BYTES, add_mask
from fleetlearn_protocol.secure.sealed import KEY_BYTES, seal
from fleetlearn_protocol.vector import Vector

_ROUNDINGS = 64
"""One or two are enough for nearly every update."""
RandomBytes = Callable[[int], bytes]
"""n -> n bytes that nobody else knows. Tests give others than the system's."""


class MaskedUpload(NamedTuple):
    """What leaves the device of an update."""

    content: memoryview
    """The masked words, as they travel: 4 bytes to an element, or 3, the weight last."""
    sealed: str
    """The mask's seed, sealed for the helper: 80 bytes in hexadecimal digits."""
    signature: str
    """Ed25519, by the device's own key, over ``about.signed_seed``: 64 bytes in hexadecimal
    digits."""


def share_of(examples: int, most_weight: int | None) -> float:
    """Return an update's weight as a share of the largest one: above 0 and at most 1. None: all
    updates weigh the same."""
    return 1.0 if most_weight is None else min(examples, most_weight) / most_weight


def counted_words(
    update: Vector,
    share: float,
    factor: float,
    bound: float,
    bits: int,
    draw: RandomBytes = secrets.token_bytes,
) -> Words:
    """Return an update as it counts, and its weight, as whole numbers below 2^bits: uint32,
    (P + 1,).

    update: float32, (P,), clipped to the L2 norm ``bound``. The vector that the words stand for is
    within ``bound`` too: where rounding took it beyond, the update is made a little shorter and
    rounded once more. share: the update's weight. factor: what staleness leaves of the update,
    above 0 and at most 1. draw: asked for the seed of each rounding: a fraction is a word of that
    seed's mask, divided by 2^32.
    Raises ValueError: a share or factor out of range, an element beyond the bound, words of too few
    bits for this many elements.
    """
    scale = _scale_of(share, factor)
    for _ in range(_ROUNDINGS):
        words = _rounded(update, scale, share, bound, bits, draw(SEED_BYTES))
        excess = excess_of(words[:-1], bits)
        if excess <= 0:
            return words
        # The square of a rounded update's length varies by about 2 ``most`` from draw to draw.
        most = 2**bits - 1
        length = float(np.linalg.norm(update.astype(np.float64))) * float(scale) * most / bound
        kept = 1 - (excess + 4 * most) / length**2 if length else 0.0
        if kept <= 0:
            break
        scale = np.float32(scale * sqrt(kept))
    raise ValueError(
        f"{len(update)} elements of {bits} bits are longer than the bound {bound:g} however they "
        "are rounded; more bits are needed"
    )


def _rounded(
    update: Vector, scale: np.float32, share: float, bound: float, bits: int, seed: bytes
) -> Words:
    """Return the update times ``scale``, and its weight, rounded by the fractions of a seed."""
    words = np.zeros(len(update) + 1, np.uint32)
    add_mask(words, seed)
    # Each fraction makes way for its word, so that beside the words a slab is enough.
    for start in range(0, len(update), SLAB):
        part = update[start : start + SLAB]
        drawn = words[start : start + len(part)]
        words[start : start + len(part)] = to_words(part * scale, bound, bits, _fractions(drawn))
    words[-1:] = weighted_words(update[:0], share, bound, bits, _fractions(words[-1:]))
    return words


def counted_words_with_noise(
    update: Vector,
    share: float,
    factor: float,
    bound: float,
    bits: int,
    noise: float,
    draw: RandomBytes = secrets.token_bytes,
) -> Words:
    """Return an update as it counts, with noise, and a word that counts it: uint32, (P + 1,).

    The same as ``counted_words`` for a task whose devices add the noise of differential privacy
    (``secure/distributed_noise.py`` of the protocol). noise: its standard deviation, in words.
    draw: asked once, for what the noise and the rounding follow from. Raises ValueError: as that
    does, and an update that is longer than ``bound``.
    """
    from fleetlearn_protocol.secure.distributed_noise import noisy_words  # makes tables

    scale = _scale_of(share, factor)
    return noisy_words(update * scale, bound, bits, noise, draw(SEED_BYTES))


def mask_words(
    words: Words,
    about: bytes,
    helper: bytes,
    private: bytes,
    bits: int,
    draw: RandomBytes = secrets.token_bytes,
) -> MaskedUpload:
    """Add a new mask to words, in place, and seal its seed.

    words: uint32, (P + 1,). about: as ``about_update`` returns. helper: its public key. private:
    the device's own key. bits: of an element before the mask. draw: asked for the mask's seed, and
    for the key of one use that it is sealed with. Raises ValueError: the helper's key is of small
    order.
    """
    seed = draw(SEED_BYTES)
    own = X25519PrivateKey.from_private_bytes(draw(KEY_BYTES))
    sealed = seal(seed, helper, about, own)
    add_mask(words, seed)
    signature = Ed25519PrivateKey.from_private_bytes(private).sign(signed_seed(about, sealed))
    content = words_to_bytes(words, masked_encoding(bits).block_bytes)
    return MaskedUpload(content, sealed.hex(), signature.hex())


def _scale_of(share: float, factor: float) -> np.float32:
    """Return what an update is multiplied by. Raises ValueError where it could grow."""
    for what, given in (("share", share), ("factor", factor)):
        if not 0 < given <= 1:
            raise ValueError(f"a {what} of {given} was given; expected above 0 and at most 1")
    return np.float32(share * factor)


def _fractions(drawn: Words) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return uniform numbers in [0, 1) from random words."""
    return np.asarray(drawn * 2.0**-32, np.float64)
