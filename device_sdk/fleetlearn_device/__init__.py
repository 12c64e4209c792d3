"""What runs on a device: a bundle's model trained on its own data, for a coordinator or for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlearn_device.driver import Device
    from fleetlearn_device.runtime import open_runtime

__all__ = ["Device", "open_runtime"]


def __getattr__(name: str) -> Any:
    # Late, so that each takes no more time and memory than it needs: a runtime alone needs no websockets.
    if name == "Device":
        from fleetlearn_device.driver import Device

        return Device
    if name == "open_runtime":
        from fleetlearn_device.runtime import open_runtime

        return open_runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
