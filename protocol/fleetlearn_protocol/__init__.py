"""What two parts of fleetlearn must agree on: messages, binary frames, the flat vector, the
bundle's manifest."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlearn_protocol.bundle import (
        Bundle,
        open_bundle,
        pack_bundle,
        write_bundle,
        write_inference_model,
    )
    from fleetlearn_protocol.errors import BundleError, Code, FleetError, ProtocolError
    from fleetlearn_protocol.manifest import Manifest
    from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
    from fleetlearn_protocol.own_encodings import BlockFormat

__all__ = [
    "BlockFormat",
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

_MODULES = {
    "bundle": ("Bundle", "open_bundle", "pack_bundle", "write_bundle", "write_inference_model"),
    "errors": ("BundleError", "Code", "FleetError", "ProtocolError"),
    "manifest": ("Manifest",),
    "manifest_file": ("read_manifest", "write_manifest"),
    "own_encodings": ("BlockFormat",),
}


def __getattr__(name: str) -> Any:
    # Late, so that messages and errors can be used without numpy.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
