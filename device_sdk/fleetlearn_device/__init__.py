"""Trains a bundle's model on the device's own data, for a coordinator or for the device itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlearn_device.data.buffer_writer import BufferWriter
    from fleetlearn_device.device import Device
    from fleetlearn_device.predictor import Predictor
    from fleetlearn_device.runtimes.open_runtime import open_runtime
    from fleetlearn_device.training.open_data import open_data
    from fleetlearn_device.training.work import TaskOutcome, TaskWork

# ONNX Runtime reads this when it is imported. Without it, wheels from 1.29 on report to their
# vendor: while a device trains, it looks up the vendor's host again and again, and keeps an
# identifier of the machine below ~/.cache.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "BufferWriter",
    "Device",
    "Predictor",
    "TaskOutcome",
    "TaskWork",
    "open_data",
    "open_runtime",
]


def __getattr__(name: str) -> Any:
    # Imported late, so that a program that only opens a runtime imports no websockets.
    if name == "Device":
        from fleetlearn_device.device import Device

        return Device
    if name == "BufferWriter":
        from fleetlearn_device.data.buffer_writer import BufferWriter

        return BufferWriter
    if name == "Predictor":
        from fleetlearn_device.predictor import Predictor

        return Predictor
    if name == "open_data":
        from fleetlearn_device.training.open_data import open_data

        return open_data
    if name == "open_runtime":
        from fleetlearn_device.runtimes.open_runtime import open_runtime

        return open_runtime
    if name in ("TaskOutcome", "TaskWork"):
        from fleetlearn_device.training import work

        return getattr(work, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
