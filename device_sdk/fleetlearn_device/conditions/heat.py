"""The machine's temperature, and whether its processor is slowed down for it or for lack of
power."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from fleetlearn_device.conditions.condition import (
    SystemFiles,
    UnreadableError,
    read_number,
    read_text,
)

HEAT_MARGIN = 5.0
"""Degrees below the bound at which a device that was paused goes on."""
NO_SENSORS = ("PMIC-Die", "PMIC")
"""Thermal zones of a Jetson that say 50 or 100 degrees at any time."""
PLAUSIBLE = -40.0, 150.0
"""Degrees. A sensor that is not there or is asleep says something else, such as -256."""
PI_FLAGS = {
    1 << 0: "its supply voltage is too low",
    1 << 1: "its frequency is capped",
    1 << 2: "it is throttled",
    1 << 3: "it is near its limit of temperature",
}
"""Of a Raspberry Pi's firmware: what is so now. The bits from 16 on say what was so since its
start."""


def read_temperature(folder: Path) -> tuple[float, str]:
    """Return the highest temperature of ``/sys/class/thermal`` in degrees Celsius, and the zone's
    type, such as ``cpu-thermal``. Raises UnreadableError."""
    hottest: tuple[float, str] | None = None
    for zone in sorted(folder.glob("thermal_zone*")):
        kind, milli = read_text(zone / "type") or zone.name, read_number(zone / "temp")
        if milli is None or kind in NO_SENSORS:
            continue
        degrees = milli / 1000
        if PLAUSIBLE[0] < degrees < PLAUSIBLE[1] and (hottest is None or degrees > hottest[0]):
            hottest = degrees, kind
    if hottest is None:
        raise UnreadableError(f"{folder} has no zone that says a temperature")
    return hottest


def needs_cool(files: SystemFiles, most: float) -> Callable[[bool], str | None]:
    """Return the condition that no thermal zone is hotter than ``most`` degrees Celsius."""

    def why_not(held: bool) -> str | None:
        degrees, zone = read_temperature(files.sys / "class/thermal")
        allowed = most if held else most - HEAT_MARGIN
        if degrees <= allowed:
            return None
        return f"too hot ({degrees:.0f} °C at {zone}, needs at most {allowed:g} °C)"

    return why_not


def needs_full_speed(
    files: SystemFiles, ask_firmware: Callable[[], str | None] | None = None
) -> Callable[[bool], str | None]:
    """Return the condition that the processor is not slowed down: as a Raspberry Pi's firmware
    says, or as the kernel's cooling devices do (a Jetson's and others').

    ``ask_firmware``: returns what ``vcgencmd get_throttled`` prints; None where there is no such
    program.
    """
    ask = ask_firmware or _vcgencmd

    def why_not(held: bool) -> str | None:
        flags = _pi_flags(files.sys, ask)
        if flags is not None:
            reasons = [text for bit, text in PI_FLAGS.items() if flags & bit]
            return f"the processor is slowed down ({'; '.join(reasons)})" if reasons else None
        slowed, known = [], False
        for device in sorted((files.sys / "class/thermal").glob("cooling_device*")):
            kind, state = read_text(device / "type"), read_number(device / "cur_state")
            if state is not None and ("cpufreq" in kind or kind == "Processor"):
                known = True
                if state > 0:
                    slowed.append(kind)
        if not known:
            raise UnreadableError(
                "neither a Raspberry Pi's get_throttled nor a cooling device of a processor is here"
            )
        if not slowed:
            return None
        return f"the processor is slowed down to cool it ({', '.join(sorted({*slowed}))})"

    return why_not


def _pi_flags(sys: Path, ask: Callable[[], str | None]) -> int | None:
    # soc, and soc@107c000000 on a Pi 5
    for file in sorted(sys.glob("devices/platform/soc*/*firmware/get_throttled")):
        text = read_text(file)
        if text:
            return int(text, 16)
    said = ask()
    return None if said is None else int(said.partition("=")[2], 16)


def _vcgencmd() -> str | None:
    """Return what the Raspberry Pi's own program says, such as ``throttled=0x0``. None: it is not
    installed, or may not be used by this user."""
    try:
        done = subprocess.run(
            ["vcgencmd", "get_throttled"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=5.0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.decode("ascii", "replace").strip()
    return said if said.startswith("throttled=0x") else None
