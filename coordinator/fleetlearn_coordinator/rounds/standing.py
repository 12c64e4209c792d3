"""What the last tasks of devices came to, so that devices which never report do not hold up every round.

Only devices with failures are remembered, so a fleet in which everybody reports costs nothing and is chosen from as if
this file did not exist. One accepted report clears a device's record.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

DOUBT = 3
"""Points at which a device is chosen less: three tasks in a row that came to nothing, or one that held up its round."""
MAX_LEVEL = 6
"""A device of level n is given a trial with probability 2^-n where it is drawn for one; this is the largest n."""
REMEMBERED = 100_000
"""Most devices with failures that are remembered. The device that failed longest ago is forgotten first."""
PROVEN = 4096
"""Most devices that are remembered for their reports."""
MAX_CAUTION = 64
"""Most rounds that go mostly to proven devices after a round that was held up."""


@dataclass(slots=True)
class Standing:
    """The memory of devices' last tasks. Nothing in it depends on the time: the same events give the same memory."""

    points: dict[str, int] = field(default_factory=dict)
    """Device -> points since its last accepted report. The device that failed last is the last."""
    proven: dict[str, None] = field(default_factory=dict)
    """Devices whose reports were accepted lately, the latest last. Empty while rounds are not held up."""
    careful: int = 0
    """Rounds that are still to go mostly to proven devices."""
    caution: int = 0
    """How many such rounds followed the last round that was held up. It doubles each time, and halves when a round of
    any devices goes well."""

    def fail(self, device: str, points: int) -> None:
        """A task of the device came to nothing."""
        self.points[device] = min(self.points.pop(device, 0) + points, DOUBT * MAX_LEVEL)
        if len(self.points) > REMEMBERED:
            del self.points[next(iter(self.points))]

    def clear(self, devices: Collection[str]) -> None:
        """Reports of these devices were accepted."""
        if self.points:
            for device in devices:
                self.points.pop(device, None)

    def level(self, device: str) -> int:
        """0: as good as any device. Else 1 to ``MAX_LEVEL``, the more its tasks came to nothing."""
        return self.points.get(device, 0) // DOUBT

    def round_over(self, accepted: Collection[str], held_up: int, spare: int) -> None:
        """A round has ended: whose reports it has, how many of its tasks held it up, how many it could spare."""
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
        for device in accepted:
            self.proven.pop(device, None)
            self.proven[device] = None
        while len(self.proven) > PROVEN:
            del self.proven[next(iter(self.proven))]
