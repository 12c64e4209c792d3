"""For tests: updates that can be recognised wherever they are.

Each device's update follows from its name. It lies exactly on the fixed point's grid, so that the
words that are masked are known too: no rounding is left to chance.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector

BITS = 20
CLIP = 1 - 2.0**-BITS
"""With it, a step of the grid is 2^-19, and each of its places is a float32."""
SPREAD = 2**14
"""Words are at most this far from the middle: 650 of them are no longer than CLIP."""
RUN = 8
"""Elements in a row that are looked for: by chance they are nowhere."""


def marked_words(name: str, size: int) -> Words:
    """Return the words that a device masks: uint32, (size,), without the weight."""
    seed = int.from_bytes(sha256(name.encode()).digest()[:8], "big")
    drawn = np.random.default_rng(seed).integers(-SPREAD, SPREAD, size)
    return (2 ** (BITS - 1) + drawn).astype(np.uint32)


def marked_update(name: str, size: int) -> Vector:
    """Return a device's update: float32, (size,), shorter than CLIP."""
    words = marked_words(name, size).astype(np.int64)
    update = ((2 * words - (2**BITS - 1)) / 2.0**BITS).astype(np.float32)
    assert np.linalg.norm(update.astype(np.float64)) < CLIP
    return update


def traces_of(name: str, model: Vector) -> dict[str, bytes]:
    """Return what a device's update would be in memory or in a file, by what it is called here: a
    few elements in a row from its beginning and its end. ``model``: the one that the update is for,
    float32, (P,)."""
    update, words = marked_update(name, len(model)), marked_words(name, len(model))
    forms = {
        "float32": update,
        "float64": update.astype(np.float64),
        "words": words,
        "the model after it": model + update,
    }
    places = {"begin": 0, "end": len(model) - RUN}
    return {
        f"{name}: {form}, {where}": array[place : place + RUN].tobytes()
        for form, array in forms.items()
        for where, place in places.items()
    }
