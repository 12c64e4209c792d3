"""PyTorch model -> training bundle: one training step as a graph of standard ONNX operators.

``export_bundle`` and ``export_vertical`` bring PyTorch and ONNX with them when they are first asked
for. Raises ImportError
where they are missing or where two builds of ONNX Runtime are mixed up.
"""

import os
from typing import TYPE_CHECKING

from fleetlearn_protocol.manifest import LocalStep, TrainMany

from fleetlearn_export.errors import ExportError

if TYPE_CHECKING:
    from fleetlearn_export.bundle import export_bundle
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
    "export_bundle",
    "export_vertical",
]


def __getattr__(name: str) -> object:
    if name not in ("Exported", "ExportedParts", "export_bundle", "export_vertical"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from fleetlearn_export.installation import check_installation

    check_installation()
    from fleetlearn_export import bundle, split_parts, written_bundle

    homes = {"export_bundle": bundle, "export_vertical": split_parts}
    return getattr(homes.get(name, written_bundle), name)


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
