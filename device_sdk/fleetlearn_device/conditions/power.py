"""Mains power and batteries, as Linux tells of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fleetlearn_device.conditions.condition import (
    SystemFiles,
    UnreadableError,
    read_number,
    read_text,
)

BATTERY_MARGIN = 5.0
"""Percent above the bound at which a device that was paused goes on."""


class Power(NamedTuple):
    """What the machine runs on."""

    charging: bool | None
    """A charger is connected. None: neither a battery nor a charger is known."""
    battery: bool
    """The machine has a battery."""
    level: float | None
    """Percent of the batteries' charge, in the mean. None: not known."""


def read_power(folder: Path) -> Power:
    """Return what ``/sys/class/power_supply`` says, a folder for each battery and charger. Raises
    UnreadableError where there is no such folder."""
    try:
        supplies = sorted(folder.iterdir())
    except OSError as error:
        raise UnreadableError(f"{folder} cannot be read ({error.strerror})") from None
    charging = battery = charger = False
    levels = []
    for supply in supplies:
        kind, scope = read_text(supply / "type"), read_text(supply / "scope")
        if kind in ("Battery", "UPS") and scope != "Device":  # else it is a mouse's
            battery = True
            charging = charging or read_text(supply / "status") in ("Charging", "Full")
            level = read_number(supply / "capacity")
            if level is not None:
                levels.append(level)
        elif kind in ("Mains", "USB", "Wireless"):
            charger = True
            charging = charging or read_text(supply / "online") not in ("", "0")
    return Power(
        charging if battery or charger else None,
        battery,
        sum(levels) / len(levels) if levels else None,
    )


def needs_mains(files: SystemFiles) -> Callable[[bool], str | None]:
    """Return the condition that the machine has mains power. A machine without a battery has."""

    def why_not(held: bool) -> str | None:
        power = read_power(files.sys / "class/power_supply")
        if power.charging or not power.battery:
            return None
        level = "" if power.level is None else f"{power.level:.0f} %, "
        return f"on battery ({level}needs mains power)"

    return why_not


def needs_battery(files: SystemFiles, least: float) -> Callable[[bool], str | None]:
    """Return the condition that the machine has mains power or at least this much in its
    batteries, in percent."""

    def why_not(held: bool) -> str | None:
        power = read_power(files.sys / "class/power_supply")
        if power.charging or not power.battery:
            return None
        if power.level is None:
            raise UnreadableError("no battery says its level (capacity)")
        needed = least if held else min(least + BATTERY_MARGIN, 100.0)
        if power.level >= needed:
            return None
        return f"on battery ({power.level:.0f} %, needs {needed:g} %)"

    return why_not
