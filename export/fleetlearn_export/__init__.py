"""PyTorch model -> training bundle: one training step as a graph of standard ONNX operators.

``export_bundle`` brings PyTorch and ONNX with it when it is first asked for. Raises ImportError
where they are missing or where two builds of ONNX Runtime are mixed up.
"""

import os
from typing import TYPE_CHECKING

from fleetlearn_protocol.manifest import LocalStep, TrainMany

from fleetlearn_export.errors import ExportError

if TYPE_CHECKING:
    from fleetlearn_export.bundle import Exported, export_bundle

# ONNX Runtime reads this when it is imported. Without it, wheels from 1.29 on report to their
# vendor.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["ExportError", "Exported", "LocalStep", "TrainMany", "export_bundle"]


def __getattr__(name: str) -> object:
    if name not in ("Exported", "export_bundle"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from fleetlearn_export.installation import check_installation

    check_installation()
    from fleetlearn_export import bundle

    return getattr(bundle, name)


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
