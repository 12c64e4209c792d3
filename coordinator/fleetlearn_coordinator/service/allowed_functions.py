"""Whether a device's owner allows what a run computes by."""

from __future__ import annotations

from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import CheckIn


def why_no_function(manifest: Manifest, check_in: CheckIn) -> str:
    """Return why the device cannot compute by the bundle's function, for its owner; empty where it
    can, or the bundle has none."""
    settings = manifest.computation
    if not isinstance(settings, FunctionSums) or settings.device in check_in.functions:
        return ""
    name = settings.device
    option = name if ":" in name else f"{name}=MODULE:FUNCTION"
    allowed = ", ".join(check_in.functions) or "none"
    return clip(
        f"this run computes by the function {name}; the device's owner allows {allowed}. Where the "
        f"function is installed, --allow-function {option} allows it"
    )
