"""A bundle whose initial model is one that a run has made, so that a new run goes on from it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fleetlearn_protocol import Bundle, pack_bundle, write_bundle, write_inference_model
from fleetlearn_protocol.manifest import INFER, PARAMETERS
from fleetlearn_protocol.vector import Vector, views
from safetensors.numpy import save


def write_onward_bundle(bundle: Bundle, model: Vector, target: Path) -> Path:
    """Write ``bundle`` with another initial model, as one file. Returns ``target``, which appears
    whole or not at all.

    model: float32, shape (P,), what travels. Personal parameters, and what devices keep beside the
    model, begin as they do in ``bundle``.

    Raises BundleError, ProtocolError (not-finite), ValueError on another shape or dtype, OSError.
    """
    infer = write_inference_model(bundle, model)  # checks the model
    vector = bundle.parameters()
    vector[: model.size] = model
    parameters = save({**views(vector, bundle.manifest.parameters)})
    contents = {file: bundle.read(file) for file in bundle.manifest.files}
    contents |= {PARAMETERS: parameters, INFER: infer}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        return pack_bundle(write_bundle(Path(folder), bundle.manifest, contents), target)
