"""How often a device takes part: no more often than the noise of a private run is computed for.

A release is a committed round's noisy model, numbered from 1 in the order of commits: an abandoned
round is none, and a roll back takes none back. A device takes part in a release if a report of it
counts there. From one participation of a device to its next there are at least ``separation``
releases (b of Denisov et al., "Improved Differential Privacy for SGD via Optimal Private Linear
Operators on Adaptive Streams", arXiv 2202.08312, and of Choquette-Choo et al., "Multi-Epoch Matrix
Factorization Mechanisms for Private Machine Learning", arXiv 2211.06530), and in one segment of the
run it takes part at most ``participations`` times (their k). A segment begins where the plan's
limits change: participations are then counted from 0, the separation goes on.

A device is known by its name alone. One that enrols under two names takes part as two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError

from fleetlearn_coordinator.rounds.settings import Settings

NEVER = 2**62
"""Stands for the number of a release that never comes."""


class Participations(NamedTuple):
    """What is known of a device that took part."""

    last: int
    """The last release that it took part in."""
    times: int
    """How often it took part in the present segment."""


class PrivacyLimitError(ProtocolError):
    """A report that may not count: its device took part too lately, or too often."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.NOT_WANTED, text)


@dataclass(slots=True)
class ParticipationLimits:
    """Which devices may take part in which release."""

    separation: int
    """Fewest releases from one participation of a device to its next; 1: each release."""
    participations: int | None = None
    """Most participations of a device in a segment. None: any number."""
    release: int = 1
    """The next release: that of the open round, or of the next one to open."""
    known: dict[str, Participations] = field(default_factory=dict)
    """Device -> its participations in releases that were made."""
    pending: dict[str, list[int]] = field(default_factory=dict)
    """Device -> the releases, in order, that reports of it count for and that are not made yet."""

    # --- who may take part ---

    def first_release(self, device: str) -> int:
        """Return the first release that the device may take part in. NEVER: none."""
        known, pending = self.known.get(device), self.pending.get(device)
        if known is None and not pending:
            return 1
        last, times = known or Participations(1 - self.separation, 0)
        if pending:
            last, times = pending[-1], times + len(pending)
        if self.participations is not None and times >= self.participations:
            return NEVER
        return last + self.separation

    def may_take_part(self, device: str, release: int) -> bool:
        """Return whether a report of the device may count for this release."""
        return self.first_release(device) <= release

    def check(self, device: str, release: int) -> None:
        """Raise PrivacyLimitError if a report of the device may not count for this release."""
        if not self.may_take_part(device, release):
            text = f"the report may not count for release {release}: {self.why_not(device)}"
            raise PrivacyLimitError(text)

    def is_done(self, device: str) -> bool:
        """Return whether the device took part as often as it ever may."""
        return self.first_release(device) == NEVER

    def why_not(self, device: str) -> str:
        """Return why the device may not take part in the next release, for its owner; empty if it
        may."""
        first = self.first_release(device)
        if first <= self.release:
            return ""
        if first == NEVER:
            times = "once" if self.participations == 1 else f"{self.participations} times"
            return (
                f"the device took part {times}, as often as the plan's [privacy] allows "
                "(privacy.participations)"
            )
        return (
            f"the device took part in release {first - self.separation}, and may again from "
            f"release {first} on (privacy.separation = {self.separation}); the next is release "
            f"{self.release}"
        )

    # --- what happens ---

    def count(self, device: str, release: int) -> None:
        """A report of the device counts for this release. Raises PrivacyLimitError, and changes
        nothing, if it may not."""
        self.check(device, release)
        self.pending.setdefault(device, []).append(release)

    def taking_part(self) -> list[str]:
        """Return the devices whose reports count for the next release, sorted."""
        return sorted(device for device, own in self.pending.items() if own[0] == self.release)

    def commit(self) -> None:
        """The next release is made, with the reports that count for it."""
        for device in self.taking_part():
            known = self.known.get(device)
            self.known[device] = Participations(self.release, 1 + (known.times if known else 0))
        self._drop_first()
        self.release += 1

    def abandon(self) -> list[str]:
        """The next release will be that of a later round: reports that count for it so far do not.
        Returns their devices."""
        return self._drop_first()

    def give_up(self) -> list[str]:
        """No report counts any more that no release was made of. Returns the devices."""
        devices = sorted(self.pending)
        self.pending.clear()
        return devices

    def _drop_first(self) -> list[str]:
        devices = self.taking_part()
        for device in devices:
            own = self.pending[device]
            del own[0]
            if not own:
                del self.pending[device]
        return devices

    # --- the state, taken and brought back ---

    def restore(self, releases: int, rows: Iterable[tuple[str, int, int]]) -> None:
        """Go on after this many releases. ``rows``: device, its last release and how often it took
        part in the present segment, of each device that took part."""
        self.release = releases + 1
        self.known = {device: Participations(last, times) for device, last, times in rows}

    def snapshot(self) -> list[Any]:
        """Return the state as plain values: for ``take_up``."""
        return [
            self.release,
            [[device, *known] for device, known in self.known.items()],
            [[device, own] for device, own in self.pending.items()],
        ]

    def take_up(self, taken: Sequence[Any]) -> None:
        """Go on from what another object's ``snapshot`` returned."""
        release, known, pending = taken
        self.restore(release - 1, known)
        self.pending = {device: [*own] for device, own in pending}

    # --- for people ---

    def counts(self, devices: Collection[str]) -> tuple[int, int]:
        """Return how many of these devices may take part in a later release alone, and how many in
        none."""
        firsts = [self.first_release(device) for device in devices]
        done = firsts.count(NEVER)
        return sum(first > self.release for first in firsts) - done, done


def limits_of(settings: Settings) -> ParticipationLimits | None:
    """Return the limits that the settings ask for. None: a device may take part at any time."""
    if not settings.limits_participation:
        return None
    return ParticipationLimits(settings.separation, settings.participations)
