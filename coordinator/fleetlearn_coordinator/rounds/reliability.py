"""How reliable devices are, so that devices which never report do not hold up every round.

Only devices with failures are remembered. A fleet in which everybody reports costs nothing, and
devices are chosen from it as if this file did not exist. One report that counts clears a device's
record.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

DOUBT = 3
"""Points at which a device is in doubt and chosen less: three tasks in a row failed, or one held up
its round."""
MAX_LEVEL = 6
"""A device of level n is given a trial with probability 2^-n where it is drawn for one; this is the
largest n."""
REMEMBERED = 100_000
"""Most devices with failures that are remembered. The device that failed longest ago is forgotten
first."""
PROVEN = 4096
"""Most devices that are remembered for their reports."""
MAX_CAUTION = 64
"""Most rounds that go mostly to proven devices after a round that was held up."""


@dataclass(slots=True)
class Reliability:
    """The memory of devices' last tasks. It does not depend on the time: the same events give the
    same memory."""

    points: dict[str, int] = field(default_factory=dict)
    """Device -> points since its last report that counted. The device that failed last is the
    last."""
    proven: dict[str, None] = field(default_factory=dict)
    """Devices whose reports counted lately, the latest last. Empty while rounds are not held up."""
    careful: int = 0
    """Rounds that are still to go mostly to proven devices."""
    caution: int = 0
    """How many careful rounds followed the last round that was held up. It doubles each time, and
    halves when a round of any devices goes well."""

    def fail(self, device: str, points: int) -> None:
        """A task of the device ended without a report that counts."""
        self.points[device] = min(self.points.pop(device, 0) + points, DOUBT * MAX_LEVEL)
        if len(self.points) > REMEMBERED:
            del self.points[next(iter(self.points))]

    def clear(self, devices: Collection[str]) -> None:
        """Reports of these devices count."""
        if self.points:
            for device in devices:
                self.points.pop(device, None)

    def level(self, device: str) -> int:
        """Return 0 for a device that is not in doubt, else 1 to ``MAX_LEVEL``: more for more
        failures."""
        return self.points.get(device, 0) // DOUBT

    def end_round(self, reported: Collection[str], held_up: int, spare: int) -> None:
        """Remember a round: the devices whose reports counted, how many tasks held it up, how many
        it could spare."""
        if held_up > spare:
            if not self.careful:
                self.caution = min(max(1, 2 * self.caution), MAX_CAUTION)
            self.careful = self.caution
        elif self.careful:
            self.careful -= 1
        else:
            self.caution //= 2
        if not self.caution:
            self.proven.clear()
            return
        for device in reported:
            self.proven.pop(device, None)
            self.proven[device] = None
        while len(self.proven) > PROVEN:
            del self.proven[next(iter(self.proven))]
