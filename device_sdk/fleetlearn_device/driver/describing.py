"""What the device states at each check-in: what its user says, and what can be measured."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
from fleetlearn_protocol.messages import Identifier, Tags
from fleetlearn_protocol.user_errors import ANY_FAILURE, in_one_line

from fleetlearn_device.conditions.condition import UnreadableError
from fleetlearn_device.conditions.power import read_power
from fleetlearn_device.session.statement import Network, Statement

POWER_SUPPLIES = Path("/sys/class/power_supply")
"""Where Linux describes batteries and chargers, a folder for each."""
Value = TypeVar("Value")
Charging: TypeAlias = bool | Callable[[], bool | None] | None
NetworkNow: TypeAlias = Network | Callable[[], Network | None] | None

log = logging.getLogger("fleetlearn.device")


class Description:
    """The user's description of the device.

    Args:
        tags, tier: Names that the coordinator's plan may choose devices by.
        charging: Whether the device is charging, or a function that says so at each check-in. None:
            as Linux says.
        network: ``metered`` or ``unmetered``, or a function that says which at each check-in. None:
            not stated.

    A function is called in the event loop, so it should return at once. Raises ValueError on a tag,
    tier or network that is not allowed.
    """

    def __init__(
        self,
        tags: Iterable[str] = (),
        tier: str | None = None,
        charging: Charging = None,
        network: NetworkNow = None,
    ) -> None:
        self.tags, self.tier, self.charging, self.network = tuple(tags), tier, charging, network
        _check("tags", self.tags, Tags)
        _check("tier", tier, Identifier | None)
        if not callable(network):
            _check("network", network, Network | None)

    def state(self) -> Statement:
        """Return what is so now. What cannot be found out is left out."""
        charging = _ask(self.charging) if callable(self.charging) else self.charging
        network: Network | None = _ask(self.network) if callable(self.network) else self.network
        try:
            _check("network", network, Network | None)
        except ValueError as error:
            log.warning("the network is not stated: %s", error)
            network = None
        charging = is_charging() if charging is None else bool(charging)
        return Statement(memory(), self.tags, self.tier, charging, network)


def _check(name: str, value: object, kind: object) -> None:
    """Raise ValueError where the protocol does not take the value."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} is {value!r}: {error}") from None


def _ask(function: Callable[[], Value | None]) -> Value | None:
    try:
        return function()
    except ANY_FAILURE as error:  # the user's code may raise anything, and training must go on
        log.warning(
            "what %s says is not stated: %s",
            getattr(function, "__name__", function),
            in_one_line(error),
        )
        return None


def memory() -> int | None:
    """Return the machine's bytes of RAM, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def is_charging(folder: Path = POWER_SUPPLIES) -> bool | None:
    """Return whether a charger is connected, as Linux says. None: it knows neither a battery nor a
    charger."""
    try:
        return read_power(folder).charging
    except UnreadableError:
        return None
