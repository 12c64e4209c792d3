"""The kept state: what a device keeps from one task to the next of the same bundle, as one flat
float32 vector.

The vector holds the personal parameters, then the rows of the step's state that the manifest marks
as ``kept``, then, where the step reads ``previous``, the travelling parameters with which the last
task ended. It never leaves the device.
"""

from __future__ import annotations

from math import prod

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.checks import check_vector
from fleetlearn_device.runtimes.runtime import Runtime


def kept_state_size(manifest: Manifest) -> int:
    """Return the elements of the kept state; 0 where a device keeps nothing for such a bundle."""
    kept_rows = sum(prod(slot.shape) for slot in manifest.state if slot.kept)
    return manifest.local_size - manifest.size + kept_rows + _previous_size(manifest)


def collect_kept_state(runtime: Runtime) -> Vector:
    """Return the kept state as the runtime has it now: a copy, shape (kept_state_size,)."""
    manifest = runtime.manifest
    parts = [
        runtime.local[manifest.size :],
        *(runtime.state[elements] for elements in _kept_rows(manifest)),
    ]
    return np.concatenate([*parts, runtime.parameters[: _previous_size(manifest)]])


def load_model(
    runtime: Runtime,
    bundle: Bundle,
    model: Vector,
    kept_state: Vector | None,
    correction: Vector | None = None,
) -> None:
    """Load the round's model, float32, shape (P,), and the kept state; None at the device's first
    task of the bundle.

    correction: float32, shape (P,); None: zeros, or none where the step reads none. Nothing of an
    earlier task stays in the runtime. Raises ValueError (a vector of another size, a correction
    that the step does not read), BundleError.
    """
    manifest = runtime.manifest
    check_vector(model, manifest.size, what="the round's model")
    begin = manifest.local_size - manifest.size
    rows = _kept_rows(manifest)
    state = bundle.state() if rows else model[:0]
    previous = None
    if kept_state is None:
        personal = bundle.personal_parameters() if begin else model[:0]
    else:
        check_vector(kept_state, kept_state_size(manifest), what="the kept state")
        personal = kept_state[:begin]
        for row in rows:
            state[row] = kept_state[begin : begin + row.stop - row.start]
            begin += row.stop - row.start
        previous = kept_state[begin:] if _previous_size(manifest) else None
    whole = np.concatenate([model, personal]) if personal.size else model
    # Without kept rows, ``load`` sets the state to the bundle's initial state by itself.
    runtime.load(whole, state=state if rows else None, previous=previous, correction=correction)


def _kept_rows(manifest: Manifest) -> list[slice]:
    return [
        slice(slot.offset, slot.offset + prod(slot.shape)) for slot in manifest.state if slot.kept
    ]


def _previous_size(manifest: Manifest) -> int:
    return manifest.size if "previous" in manifest.references else 0
