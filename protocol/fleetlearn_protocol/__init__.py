"""What two parts of fleetlearn must agree on: messages, binary frames, the flat vector, the bundle's manifest."""

from fleetlearn_protocol.bundle import Bundle, open_bundle, pack_bundle, write_bundle, write_inference_model
from fleetlearn_protocol.errors import BundleError, Code, FleetError, ProtocolError
from fleetlearn_protocol.manifest import Manifest, read_manifest, write_manifest

__all__ = [
    "Bundle",
    "BundleError",
    "Code",
    "FleetError",
    "Manifest",
    "ProtocolError",
    "open_bundle",
    "pack_bundle",
    "read_manifest",
    "write_bundle",
    "write_inference_model",
    "write_manifest",
]
