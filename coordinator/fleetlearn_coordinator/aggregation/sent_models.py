"""The forms in which the newest model travels beside float32, as the plan's ``encoding.down``
says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from fleetlearn_protocol.deltas import encode_delta
from fleetlearn_protocol.encodings import FLOAT16
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import Delta
from fleetlearn_protocol.vector import Vector, digest

logger = logging.getLogger("fleetlearn.coordinator")


class Forms(NamedTuple):
    """The forms of one model."""

    contents: Mapping[str, Buffer] = {}
    """SHA-256 -> bytes, for what devices may fetch."""
    half: str | None = None
    """SHA-256 of the model as float16. None: it does not travel so, or its elements are too
    large."""
    deltas: Mapping[str, Delta] = {}
    """SHA-256 of an earlier model -> the difference from it, where that is smaller than the
    model."""


def half_of(model: Vector) -> memoryview | None:
    """Return the model's bytes as float16; None if that cannot hold it."""
    try:
        return FLOAT16.encode(model)
    except ProtocolError as error:
        logger.warning("the model travels as float32: %s", error.text)
        return None


def make_forms(down: str, model: Vector, earlier: Mapping[str, Vector]) -> Forms:
    """Return the forms of a model for a plan's ``encoding.down``. ``earlier``: earlier models by
    their SHA-256. May be called in any thread."""
    if down == "float16" and (half := half_of(model)) is not None:
        sha256 = digest(half)
        return Forms({sha256: half}, sha256)
    contents, deltas = dict[str, Buffer](), dict[str, Delta]()
    if down == "delta":
        for base, vector in earlier.items():
            delta = encode_delta(vector, model)
            if len(delta) < model.nbytes:
                deltas[base] = Delta(base, digest(delta), len(delta))
                contents[deltas[base].sha256] = delta
    return Forms(contents, None, deltas)
