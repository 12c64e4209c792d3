"""Waiting devices in pools, for draws in proportion to weights.

Draws are without replacement, one after the other, each in proportion to the weights of those that
are left; this is the distribution of Efraimidis and Spirakis, "Weighted random sampling with a
reservoir" (Information Processing Letters 97, 2006). Their algorithm computes a key for each device
in each round. Here a device is put into the pool of its power of two, after Matias, Vitter and Ni,
"Dynamic generation of discrete random variates" (SODA 1993): a draw picks a pool, a device in it,
and accepts it with probability weight / power of two, which is more than a half. So a draw costs
the same however many devices wait, and whatever weights they claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sortedcontainers import SortedList

from fleetlearn_coordinator.rounds.random_draws import stream
from fleetlearn_coordinator.rounds.strategies.quotas import Quotas


class Kind(NamedTuple):
    """What the devices of a pool have in common."""

    explored: bool
    """Whether a report of theirs has counted."""
    labels: tuple[str, ...]
    """Their labels that have a quota."""
    power: int
    """Their weights are at most 2**power, and more than half of it."""


@dataclass(slots=True)
class Pools:
    """The names of devices. Who is drawn depends on the names alone, not on the order in which they
    came."""

    kind_of: Callable[[str], tuple[bool, tuple[str, ...], int]]
    """Returns for a device whether it is explored, its labels that have a quota, and its weight, at
    least 1."""
    pools: dict[Kind, SortedList[str]] = field(default_factory=dict)
    """Kind -> the devices of this kind. No pool is empty."""
    _found: dict[str, tuple[Kind, int]] = field(default_factory=dict)
    """Device -> its kind and weight."""

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, device: str) -> bool:
        return device in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def add(self, device: str) -> None:
        """Add a device, or let it change its kind."""
        self.discard(device)
        explored, labels, weight = self.kind_of(device)
        kind = Kind(explored, labels, (weight - 1).bit_length())
        self._found[device] = kind, weight
        if kind not in self.pools:
            self.pools[kind] = SortedList()
        self.pools[kind].add(device)

    def discard(self, device: str) -> None:
        """Remove a device, if it is there."""
        found = self._found.pop(device, None)
        if found is not None:
            names = self.pools[found[0]]
            names.remove(device)
            if not names:
                del self.pools[found[0]]

    def explored(self) -> list[str]:
        """Return the devices whose reports have counted."""
        return [
            name for kind, names in sorted(self.pools.items()) if kind.explored for name in names
        ]

    def labels(self, device: str) -> tuple[str, ...]:
        """Return the labels of a device here that have a quota."""
        return self._found[device][0].labels

    def most(self, quotas: Quotas, label: str | None = None) -> int:
        """Return how many of the devices a new round could give tasks. With labels that overlap it
        may be fewer than the most that are possible. ``label``: only devices with it; None: all."""
        left = {label: share * quotas.size // 1 for label, share in quotas.exact.items()}
        found = 0
        for kind, names in sorted(self.pools.items(), key=lambda row: (len(row[0].labels), row[0])):
            if label is not None and label not in kind.labels:
                continue
            limited = [each for each in kind.labels if each in left]  # a region has no share
            count = min([len(names), *(int(left[each]) for each in limited)])
            for each in limited:
                left[each] -= count
            found += count
        return found

    def take(
        self, draws: Sequence[int], quotas: Quotas | None, explored: bool | None = None
    ) -> list[str]:
        """Take a device out for each number, 64 random bits, while a device is there that its
        quotas allow. The quotas count it as given a task; None: there are no quotas. ``explored``:
        only devices that are, or are not; None: both."""
        taken: list[str] = []
        places: list[int] = []  # of each pool: 2**power for each of its devices
        kinds: list[Kind] = []
        total = 0
        for draw in draws:
            if not taken or (quotas and quotas.shares):
                kinds = [
                    kind
                    for kind in sorted(self.pools)
                    if explored in (None, kind.explored)
                    and (quotas is None or quotas.has_room(kind.labels))
                ]
                places = [len(self.pools[kind]) << kind.power for kind in kinds]
                total = sum(places)
            if not total:
                break
            name, row = self._draw(draw, kinds, places, total)
            places[row] -= 1 << kinds[row].power
            total -= 1 << kinds[row].power
            self.discard(name)
            if quotas is not None:
                quotas.count(kinds[row].labels)
            taken.append(name)
        return taken

    def _draw(
        self, draw: int, kinds: Sequence[Kind], places: Sequence[int], total: int
    ) -> tuple[str, int]:
        """Return a device and the row of its pool."""
        numbers = stream(draw)
        while True:
            place = next(numbers) * total >> 64
            row = 0
            while place >= places[row]:
                place -= places[row]
                row += 1
            kind = kinds[row]
            name: str = self.pools[kind][place >> kind.power]
            if place & ((1 << kind.power) - 1) < self._found[name][1]:
                return name, row
