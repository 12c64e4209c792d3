"""Whether a device's owner allows what a run computes or trains by."""

from __future__ import annotations

from fleetlearn_protocol.algorithms import OWN
from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import CheckIn


def why_no_function(manifest: Manifest, check_in: CheckIn, local: str | None = None) -> str:
    """Return why the device cannot compute by the bundle's function, or train by the own algorithm
    ``local``, for its owner; empty where it can, or there is none."""
    settings = manifest.computation
    if local is not None:
        name, does = local, "trains"
        known = OWN in check_in.algorithms
    elif isinstance(settings, FunctionSums):
        name, does, known = settings.device, "computes", True
    else:
        return ""
    if name in check_in.functions and known:
        return ""
    option = name if ":" in name else f"{name}=MODULE:FUNCTION"
    allowed = ", ".join(check_in.functions) or "none"
    which = f"; the device's software is {check_in.software or 'not known'}, and "
    lacking = "" if known or not check_in.functions else f"{which}it has no own algorithms"
    return clip(
        f"this run {does} by the function {name}; the device's owner allows {allowed}{lacking}. "
        f"Where the function is installed, --allow-function {option} allows it, on devices with "
        "the Python SDK"
    )
