"""For tests of models with buffers: what a report's parts say of the model after training."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import BUFFERS, UPDATE
from fleetlearn_protocol.vector import Vector, gather, scatter


def trained_model(parts: Mapping[str, Vector], model: Vector, manifest: Manifest) -> Vector:
    """The device's model: the round's plus the update, with the buffers' values in their places,
    where the update has zeros."""
    assert not gather(parts[UPDATE], manifest.buffers).any()
    trained: Vector = model + parts[UPDATE]
    if manifest.buffers:
        scatter(trained, manifest.buffers, parts[BUFFERS])
    return trained
