"""What a device keeps of its own from task to task of one bundle, as one flat float32 vector.

The personal parameters; then the rows of the state that are kept; then, where the step reads ``previous``, the model
with which the last task ended, of what travels. None of it leaves the device.
"""

from __future__ import annotations

from math import prod

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.checks import check_vector
from fleetlearn_device.runtimes.runtime import Runtime


def kept_size(manifest: Manifest) -> int:
    """Elements of the vector; 0 where a device keeps nothing of such a bundle."""
    state = sum(prod(row.shape) for row in manifest.state if row.kept)
    return manifest.local_size - manifest.size + state + _previous_size(manifest)


def collect(runtime: Runtime) -> Vector:
    """The vector, shape (kept_size,), as the runtime has it now. A copy."""
    manifest = runtime.manifest
    parts = [runtime.local[manifest.size :], *(runtime.state[place] for place in _kept_rows(manifest))]
    return np.concatenate([*parts, runtime.parameters[: _previous_size(manifest)]])


def restore(runtime: Runtime, bundle: Bundle, model: Vector, kept: Vector | None) -> None:
    """Load the round's model, float32, shape (P,), and what was kept; None: this is the device's first task.

    Whatever an earlier task left in the runtime is gone. Raises ValueError (a vector of another size), BundleError.
    """
    manifest = runtime.manifest
    check_vector(model, manifest.size, what="the round's model")
    place = manifest.local_size - manifest.size
    rows = _kept_rows(manifest)
    state = bundle.state() if rows else model[:0]
    previous = None
    if kept is None:
        personal = bundle.parameters()[manifest.size :] if place else model[:0]
    else:
        check_vector(kept, kept_size(manifest), what="what was kept")
        personal = kept[:place]
        for row in rows:
            state[row] = kept[place : place + row.stop - row.start]
            place += row.stop - row.start
        previous = kept[place:] if _previous_size(manifest) else None
    whole = np.concatenate([model, personal]) if personal.size else model
    # Without kept rows the state begins anew by itself.
    runtime.load(whole, state=state if rows else None, previous=previous)


def _kept_rows(manifest: Manifest) -> list[slice]:
    return [slice(row.offset, row.offset + prod(row.shape)) for row in manifest.state if row.kept]


def _previous_size(manifest: Manifest) -> int:
    return manifest.size if "previous" in manifest.references else 0
