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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, NoReturn

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
    since: int = 1
    """The first release of the present segment."""
    known: dict[str, Participations] = field(default_factory=dict)
    """Device -> its participations in releases that were made."""
    pending: dict[str, list[int]] = field(default_factory=dict)
    """Device -> the releases, in order, that reports of it count for and that are not made yet."""
    seconds: float | None = None
    """Seconds from one release to the next, lately. None: not known."""
    _made_at: float | None = None
    """When the last release was made, on the engine's clock. None: by another process."""

    # --- who may take part ---

    def first_release(self, device: str) -> int:
        """Return the first release that the device may take part in. NEVER: none."""
        known, pending = self.known.get(device), self.pending.get(device)
        if pending is not None:
            last, times = pending[-1], len(pending) + (0 if known is None else known.times)
        elif known is not None:
            last, times = known
        else:
            return 1
        if self.participations is not None and times >= self.participations:
            return NEVER
        return last + self.separation

    def may_take_part(self, device: str, release: int) -> bool:
        """Return whether a report of the device may count for this release."""
        return self.first_release(device) <= release

    def refuse(self, device: str, release: int) -> NoReturn:
        """Raise PrivacyLimitError: a report of the device may not count for this release."""
        text = f"the report may not count for release {release}: {self.why_not(device)}"
        raise PrivacyLimitError(text)

    def is_done(self, device: str) -> bool:
        """Return whether the device took part as often as it ever may."""
        return self.first_release(device) == NEVER

    def seconds_until(self, device: str) -> float:
        """Return in how many seconds, about, the release comes that the device may take part in. 0:
        it is the next one, or nobody knows. Infinite: it never comes."""
        first = self.first_release(device)
        if first == NEVER:
            return inf
        return max(0, first - self.release) * (self.seconds or 0.0)

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
        """A report of the device counts for this release, which the device may take part in."""
        self.pending.setdefault(device, []).append(release)

    def taking_part(self) -> list[str]:
        """Return the devices whose reports count for the next release, sorted."""
        return sorted(device for device, own in self.pending.items() if own[0] == self.release)

    def commit(self, now: float) -> None:
        """The next release is made, with the reports that count for it. ``now``: seconds on the
        engine's clock."""
        for device in self._drop_first():
            known = self.known.get(device)
            self.known[device] = Participations(self.release, 1 + (known.times if known else 0))
        self.release += 1
        if self._made_at is not None:
            lately = now - self._made_at
            self.seconds = lately if self.seconds is None else (self.seconds + lately) / 2
        self._made_at = now

    def take_back(self, devices: Iterable[str]) -> None:
        """One report of each of these devices does not count for the next release any more."""
        for device in devices:
            own = self.pending[device]
            own.remove(self.release)
            if not own:
                del self.pending[device]

    def abandon(self) -> list[str]:
        """The round is abandoned: of its reports no release is made. Returns their devices."""
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

    def restore(self, releases: int, rows: Iterable[tuple[str, int, int]], since: int = 1) -> None:
        """Go on after this many releases, with the segment that began with release ``since``.
        ``rows``: device, its last release and how often it took part in the segment, of each device
        that took part. Call before the engine restores its open round."""
        self.release, self.since = releases + 1, since
        self.known = {device: Participations(last, times) for device, last, times in rows}

    def made(self) -> tuple[int, list[tuple[str, int, int]], int]:
        """Return what is known of the releases that were made: for ``restore``."""
        rows = [(device, *known) for device, known in self.known.items()]
        return self.release - 1, rows, self.since

    def snapshot(self) -> list[Any]:
        """Return the state as plain values: for ``take_up``."""
        return [
            self.release,
            self.since,
            self.seconds,
            self._made_at,
            [[device, *known] for device, known in self.known.items()],
            [[device, own] for device, own in self.pending.items()],
        ]

    def take_up(self, taken: Sequence[Any]) -> None:
        """Go on from what another object's ``snapshot`` returned."""
        release, since, self.seconds, self._made_at, known, pending = taken
        self.restore(release - 1, known, since)
        self.pending = {device: [*own] for device, own in pending}


@dataclass(slots=True)
class LimitedDevices:
    """Connected devices that may not take part in the next release."""

    first: dict[str, int] = field(default_factory=dict)
    """Device -> the first release that it may take part in."""
    _by_release: dict[int, set[str]] = field(default_factory=dict)
    """The same by release: those that are due are found without a look at the others."""

    def __contains__(self, device: str) -> bool:
        return device in self.first

    def __len__(self) -> int:
        return len(self.first)

    def add(self, device: str, first: int) -> None:
        """Add a device that is not there."""
        self.first[device] = first
        self._by_release.setdefault(first, set()).add(device)

    def discard(self, device: str) -> None:
        """Remove the device, if it is there."""
        first = self.first.pop(device, None)
        if first is not None:
            devices = self._by_release[first]
            devices.remove(device)
            if not devices:
                del self._by_release[first]

    def take_due(self, release: int) -> set[str]:
        """Remove the devices that may take part in this release. Returns them."""
        due = set[str]()
        for first in [first for first in self._by_release if first <= release]:
            due |= self._by_release.pop(first)
        for device in due:
            del self.first[device]
        return due

    def done(self) -> int:
        """Return how many of them may take part in no release."""
        return len(self._by_release.get(NEVER, ()))


def limits_of(settings: Settings) -> ParticipationLimits | None:
    """Return the limits that the settings ask for. None: a device may take part at any time."""
    if not settings.limits_participation:
        return None
    return ParticipationLimits(settings.separation, settings.participations)
