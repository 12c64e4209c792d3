"""The limits that a device's owner sets."""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple, get_args

IoClass = Literal["low", "idle"]
"""How the training's disk traffic is served: after that of others (``low``: best effort, level 7),
or only while the disk has nothing else to do (``idle``)."""


class DeviceLimits(NamedTuple):
    """How much of the machine the device may use. None: no limit."""

    nice: int | None = None
    """Priority of the training's threads, from 0 to 19, the lowest. The thread that talks to the
    coordinator keeps its own."""
    io: IoClass | None = None
    """Priority of the training's disk traffic. Linux only."""
    cpu: float | None = None
    """Percent of one processor that the device may use while it trains: 50 is half of one, 200 two.
    """
    memory: float | None = None
    """MiB that the process may use. A task that needs more is given back."""
    upload: float | None = None
    """KiB a second that updates are sent with."""
    download: float | None = None
    """KiB a second that models and bundles are fetched with."""
    cache: float | None = None
    """MiB of the disk for downloaded bundles: those that were not used for longest go."""


NO_LIMITS = DeviceLimits()
BOUNDS = {
    "nice": (0, 19, ""),
    "cpu": (1, 100_000, " percent of one processor"),
    "memory": (32, 2**30, " MiB"),
    "upload": (16, 2**30, " KiB a second"),
    "download": (16, 2**30, " KiB a second"),
    "cache": (1, 2**30, " MiB"),
}
"""What numbers are allowed: from, to, and their unit. A network slower than 16 KiB a second would
look like a broken one."""


def check_limits(limits: DeviceLimits) -> None:
    """Raise ValueError on a limit that is not allowed, or that this system does not have."""
    for name, (least, most, unit) in BOUNDS.items():
        value = getattr(limits, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"the limit {name} is {value}; expected {least} to {most}{unit}")
    if limits.io is not None and limits.io not in get_args(IoClass):
        raise ValueError(f"the limit io is {limits.io!r}; expected low or idle")
    if (limits.nice is not None or limits.io is not None) and sys.platform != "linux":
        raise ValueError(
            f"the limits nice and io are for threads of Linux, and this is {sys.platform}; start "
            "the device by a command that sets its priority"
        )
