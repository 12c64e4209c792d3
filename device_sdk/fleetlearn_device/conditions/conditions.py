"""The conditions that a device's owner sets: a field for each, and a table of what checks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fleetlearn_device.conditions.condition import Condition, SystemFiles, UnreadableError
from fleetlearn_device.conditions.heat import needs_cool, needs_full_speed
from fleetlearn_device.conditions.hours import needs_hours
from fleetlearn_device.conditions.machine import (
    LoadMeter,
    needs_free_disk,
    needs_free_memory,
    needs_low_load,
)
from fleetlearn_device.conditions.network import needs_unmetered
from fleetlearn_device.conditions.own_check import OwnCheck, needs_check
from fleetlearn_device.conditions.power import needs_battery, needs_mains

LONG_LOOK = 60.0
"""Seconds between two looks at what takes a process, while the device works."""


class Conditions(NamedTuple):
    """What must hold while a device serves. While one does not, the device takes no task.

    A condition that cannot be read here is refused at the start; one that cannot be read later
    does not hold, and says so.
    """

    mains: bool = False
    """Mains power. A machine without a battery has it."""
    battery: float | None = None
    """Mains power, or at least this many percent in the battery."""
    unmetered: bool = False
    """A network that is not paid for by the byte."""
    load: float | None = None
    """Other programs use at most this many percent of all processors' time."""
    temperature: float | None = None
    """No thermal zone is hotter than this, in degrees Celsius."""
    full_speed: bool = False
    """The processor is not slowed down by heat or a weak power supply."""
    hours: tuple[str, ...] = ()
    """It is one of these hours of the day, in local time: ``22:00-06:00``,
    ``mon-fri@19:00-07:00``."""
    free_memory: float | None = None
    """Other programs leave at least this many MiB of memory."""
    free_disk: float | None = None
    """The state directory's disk has at least this many MiB free."""
    check: OwnCheck | None = None
    """A command that exits with status 0, or a function that returns True."""
    check_timeout: float = 10.0
    """Seconds after which a command that has not ended is killed, and its condition does not
    hold."""


NO_CONDITIONS = Conditions()
BOUNDS = {
    "battery": (0.0, 100.0, "percent"),
    "load": (0.0, 100.0, "percent of all processors"),
    "temperature": (20.0, 120.0, "degrees Celsius"),
    "free_memory": (0.0, 2.0**40, "MiB"),
    "free_disk": (0.0, 2.0**40, "MiB"),
    "check_timeout": (0.1, 600.0, "seconds"),
}
"""What numbers are allowed: from, to, and their unit."""


def make_conditions(
    wanted: Conditions,
    state_dir: Path,
    network: Callable[[], str | None],
    files: SystemFiles | None = None,
) -> tuple[Condition, ...]:
    """Return what checks the conditions that are wanted. Raises ValueError on a setting that is not
    allowed, or that cannot be read on this machine.

    ``network``: returns ``metered``, ``unmetered`` or None, and may raise UnreadableError.
    """
    files = SystemFiles() if files is None else files
    for name, (least, most, unit) in BOUNDS.items():
        value = getattr(wanted, name)
        if value is not None and not least <= value <= most:
            raise ValueError(
                f"the condition {name} is {value}; expected {least:g} to {most:g} {unit}"
            )
    made: list[Condition] = []

    def add(name: str, make: Callable[[Any], Callable[[bool], str | None]], **more: Any) -> None:
        value = getattr(wanted, name)
        if value is not None and value is not False:
            made.append(Condition(name, make(value), **more))

    add("mains", lambda _: needs_mains(files))
    add("battery", lambda least: needs_battery(files, least))
    add("unmetered", lambda _: needs_unmetered(network), every=LONG_LOOK / 4, sends=False)
    add("load", lambda most: needs_low_load(LoadMeter(files), most))
    add("temperature", lambda most: needs_cool(files, most))
    add("full_speed", lambda _: needs_full_speed(files), every=5.0)
    add("free_memory", lambda least: needs_free_memory(files, least))
    add("free_disk", lambda least: needs_free_disk(state_dir, least))
    for condition in made:
        _refuse_unreadable(condition)
    if wanted.hours:
        why_not, opens_in = needs_hours(wanted.hours)
        made.append(Condition("hours", why_not, opens_in=opens_in))
    add(
        "check",
        lambda check: needs_check(check, wanted.check_timeout),
        every=1.0 if callable(wanted.check) else LONG_LOOK,
    )
    return tuple(made)


def _refuse_unreadable(condition: Condition) -> None:
    try:
        condition.why_not(True)
    except UnreadableError as error:
        raise ValueError(
            f"the condition {condition.name} cannot be read on this machine: {error}. Leave it "
            "out, or say it by a check of your own, a command or a function"
        ) from None
