"""Names in order, of which any can be taken by its place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator

from sortedcontainers import SortedList

SHORT = 4096
"""Up to so many names are a list: of that some are taken soonest. More stay sorted in parts."""
FEW = 32
"""Up to how many times as many as are added are sorted anew with them."""


class Idle:
    """Sorted names, each once. Equal to another where the names are."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: list[str] | SortedList[str] = []
        self.update([*names])

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        if not isinstance(self._names, list):
            return name in self._names
        place = bisect_left(self._names, name)
        return self._names[place : place + 1] == [name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Idle) and [*self] == [*other]

    def __repr__(self) -> str:
        return f"Idle({[*self]})"

    def add(self, name: str) -> None:
        """One that is not there."""
        if isinstance(self._names, list):
            insort(self._names, name)
            if len(self._names) > SHORT:
                self._names = SortedList(self._names)
        else:
            self._names.add(name)

    def discard(self, name: str) -> None:
        if not isinstance(self._names, list):
            self._names.discard(name)
        elif name in self:
            del self._names[bisect_left(self._names, name)]

    def take(self, drawn: Iterable[int]) -> list[str]:
        """One for each number, one after the other: that at the number modulo how many there are."""
        names = self._names
        return [names.pop(number % len(names)) for number in drawn]

    def update(self, names: Collection[str]) -> None:
        """Add these, none of which is there."""
        if FEW * len(names) < len(self):
            for name in names:
                self.add(name)
        else:  # runs in order are cheap to sort
            together = [*self._names, *names]
            self._names = sorted(together) if len(together) <= SHORT else SortedList(together)
