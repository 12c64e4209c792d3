"""PyTorch model -> training bundle: one training step as a graph of standard ONNX operators.

``export_distillation`` writes such a graph for a coordinator that distils.

All of these bring PyTorch and ONNX with them when they are first asked for. Raises ImportError
where they are missing or where two builds of ONNX Runtime are mixed up.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from fleetlearn_protocol.manifest import LocalStep, TrainMany

from fleetlearn_export.errors import ExportError

if TYPE_CHECKING:
    from fleetlearn_export.bundle import export_bundle
    from fleetlearn_export.distillation import distillation_loss, export_distillation
    from fleetlearn_export.split_parts import export_vertical
    from fleetlearn_export.written_bundle import Exported, ExportedParts

# ONNX Runtime reads this when it is imported. Without it, wheels from 1.29 on report to their
# vendor.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "ExportError",
    "Exported",
    "ExportedParts",
    "LocalStep",
    "TrainMany",
    "distillation_loss",
    "export_bundle",
    "export_distillation",
    "export_vertical",
]
HOMES = {
    "Exported": "written_bundle",
    "ExportedParts": "written_bundle",
    "distillation_loss": "distillation",
    "export_bundle": "bundle",
    "export_distillation": "distillation",
    "export_vertical": "split_parts",
}
"""What brings PyTorch with it -> its module."""


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from fleetlearn_export.installation import check_installation

    check_installation()
    return getattr(import_module(f"fleetlearn_export.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
