"""The kinds of faults: a table. Each says what it may happen to, and how the fleet begins and ends
it (fleet.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tests.chaos.scenario import Scenario

DAY = 86400.0


class Abilities(NamedTuple):
    """What this machine lets the suite do."""

    machines: bool
    """Network namespaces, with a TUN device in each: faults of links."""
    disks: bool
    """Small file systems in memory: disks that are full."""
    clocks: bool
    """A library that is loaded before libc: clocks that step and drift."""

    @property
    def power(self) -> bool:
        """Losses of power: the library keeps what is synced, of file systems in memory."""
        return self.disks and self.clocks


class Event(NamedTuple):
    """A fault."""

    at: float
    """Seconds after the fleet is up."""
    kind: str
    """A key of KINDS."""
    target: str
    """A process, a machine, a disk, or two machines with a dash between them."""
    seconds: float = 0.0
    """How long it lasts, or a process stays away."""
    value: Mapping[str, float] = {}
    """What belongs to the kind."""

    def __str__(self) -> str:
        value = " ".join(f"{name}={each:g}" for name, each in self.value.items())
        return f"{self.at:7.2f} s  {self.kind} {self.target} for {self.seconds:.2f} s {value}"


class Kind(NamedTuple):
    """A kind of faults."""

    targets: Callable[[Scenario], Sequence[str]]
    seconds: float
    """How long it lasts in the mean; 0: it has no end."""
    weight: int
    """How often it is drawn."""
    needs: str | None = None
    """A field of Abilities."""
    value: Callable[[random.Random], Mapping[str, float]] = lambda luck: {}


def processes(scenario: Scenario) -> Sequence[str]:
    """Return the processes that the suite starts. Some are named twice: they have more to lose."""
    found = [*scenario.names, *scenario.coordinators, *scenario.services]
    found += 2 * list(scenario.gateways_elsewhere)
    return found + 3 * list(scenario.coordinators)


def parts(scenario: Scenario) -> Sequence[str]:
    """Return the processes that a supervisor starts."""
    if not scenario.gateways:
        return []
    return ["engine", *(f"gateway {number}" for number in range(scenario.gateways))]


def all_processes(scenario: Scenario) -> Sequence[str]:
    return [*processes(scenario), *parts(scenario)]


def orderly(scenario: Scenario) -> Sequence[str]:
    """Return the processes that end in order, by SIGTERM."""
    return [*scenario.coordinators, *scenario.names, *scenario.gateways_elsewhere]


def supervisors(scenario: Scenario) -> Sequence[str]:
    """Return the processes that can replace their gateways."""
    return scenario.coordinators if scenario.gateways else []


def disks(scenario: Scenario) -> Sequence[str]:
    return ["hub", "hub", *scenario.names, *scenario.gateways_elsewhere]


def powered(scenario: Scenario) -> Sequence[str]:
    """Return the machines that promise to survive a loss of power. Devices always do; a gateway
    elsewhere has nothing that is precious."""
    hub = ["hub", "hub"] if scenario.durable == "power" else []
    return [*hub, *scenario.names, *scenario.gateways_elsewhere]


def clocks(scenario: Scenario) -> Sequence[str]:
    return ["hub", *scenario.names, *scenario.gateways_elsewhere]


def links(scenario: Scenario) -> Sequence[str]:
    """Return pairs of machines that speak with each other."""
    found = [f"{name}-fleet" for name in scenario.gateways_elsewhere or ["hub"]]
    found += [f"{name}-store" for name in scenario.gateways_elsewhere]
    return found + (["hub-store"] if scenario.services else [])


def step(luck: random.Random) -> Mapping[str, float]:
    """A clock's step. The monotonic one never goes back; it leaps as after a sleep."""
    wall = luck.choice([-DAY, -60.0, -1.0, 1.0, 60.0, DAY, 400 * DAY])
    return {"wall": wall, "monotonic": luck.choice([0.0, 0.0, 0.0, 2.0, 20.0])}


def drift(luck: random.Random) -> Mapping[str, float]:
    """By how many seconds a clock is ahead or behind for each second. The monotonic one is slewed
    too, by no more than makes it stand still."""
    return {"wall": luck.uniform(-0.9, 2.0), "monotonic": luck.uniform(0.0, 1.0)}


KINDS: Mapping[str, Kind] = {
    "kill": Kind(processes, 0.7, 10),
    "kill-part": Kind(parts, 0.0, 8),
    "pause": Kind(all_processes, 2.0, 6),
    "stop": Kind(orderly, 0.7, 3),
    "replace": Kind(supervisors, 0.0, 3),
    "full": Kind(disks, 1.5, 3, "disks"),
    "power": Kind(powered, 0.7, 4, "power"),
    "step": Kind(clocks, 0.0, 3, "clocks", step),
    "drift": Kind(clocks, 3.0, 2, "clocks", drift),
    "slow": Kind(
        links, 2.0, 2, "machines", lambda luck: {"delay": luck.uniform(0.02, 0.3), "jitter": 0.05}
    ),
    "lossy": Kind(links, 2.0, 3, "machines", lambda luck: {"loss": luck.uniform(0.02, 0.4)}),
    "disorder": Kind(
        links, 2.0, 2, "machines",
        lambda luck: {"jitter": luck.uniform(0.01, 0.1), "double": luck.uniform(0.0, 0.5)},
    ),
    "cut": Kind(links, 1.5, 3, "machines"),
    "one-way": Kind(links, 1.5, 2, "machines", lambda luck: {"back": luck.choice([0.0, 1.0])}),
    "reset": Kind(links, 0.3, 3, "machines"),
}  # fmt: skip
"""Name -> kind. ``cut`` loses all packets, ``one-way`` those of one direction."""
