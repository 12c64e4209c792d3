"""PyTorch model -> training bundle: one training step as a graph of standard ONNX operators."""

from fleetlearn_protocol.manifest import LocalStep

from fleetlearn_export.bundle import Exported, export_bundle
from fleetlearn_export.errors import ExportError

__all__ = ["ExportError", "Exported", "LocalStep", "export_bundle"]
