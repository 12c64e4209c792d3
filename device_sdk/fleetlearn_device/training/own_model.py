"""The device's own model as an ONNX file, for its owner to use: any ONNX Runtime runs it."""

from __future__ import annotations

import logging
from pathlib import Path

from fleetlearn_protocol.bundle import Bundle, write_inference_model
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.storage.files import write_durably

log = logging.getLogger("fleetlearn.device")


def write_own_model(path: Path, bundle: Bundle, vector: Vector) -> None:
    """Replace the file by the bundle's infer.onnx with ``vector``, float32, shape (P,) or
    (local_size,).

    Where that fails it warns: the training must not be lost for it. Raises BundleError (infer.onnx
    is damaged).
    """
    try:
        write_durably(path, write_inference_model(bundle, vector))
    except OSError as error:
        log.warning("the device's own model cannot be written to %s: %s", path, error)
    else:
        log.info("the device's own model is in %s", path)
