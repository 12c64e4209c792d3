"""How many devices transfer at a time, as with the server. Who finds no place free waits for one: first come first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np

from fleetlearn_simulator.population import Floats

T = TypeVar("T")


class Downloads:
    """Places to download. Devices ask when they get their tasks, so that what they wait is known then.

    A device whose time online ends, or whose region loses its network, during its download keeps its place for as long
    as the download would have taken.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self._free: list[float] = []
        """When the places that are taken are free again; a heap."""

    def clear(self) -> None:
        """All places are free: their round is over."""
        self._free.clear()

    def queue(self, now: float, seconds: Floats) -> Floats:
        """How long each of these devices waits that ask now, one after the other; ``seconds``: how long each takes."""
        free, waits = self._free, []
        while free and free[0] <= now:
            heapq.heappop(free)
        for taken in seconds.tolist():
            if len(free) < self.places:
                heapq.heappush(free, now + taken)
                waits.append(0.0)
            else:
                waits.append(free[0] - now)
                heapq.heapreplace(free, free[0] + taken)
        return np.array(waits, np.float64)


class Uploads(Generic[T]):
    """Places to upload. Each of the tasks has a T by which its owner knows it."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.expected: dict[str, float] = {}
        """Task that has not asked for a place -> seconds for which it will take it."""
        self._taken: set[str] = set()
        self._waiting: dict[str, tuple[float, T]] = {}
        self._order: deque[str] = deque()

    def clear(self) -> None:
        """All places are free: their round is over."""
        self.expected.clear()
        self._taken.clear()
        self._waiting.clear()
        self._order.clear()

    def expect(self, seconds: Mapping[str, float]) -> None:
        """These tasks will ask for a place."""
        self.expected.update(seconds)

    def ask(self, task: str, what: T) -> list[tuple[float, T]]:
        """The task wants to upload. Returns who begins now: it, or nobody."""
        self._waiting[task] = self.expected.pop(task), what
        self._order.append(task)
        return self._begin()

    def end(self, task: str) -> list[tuple[float, T]]:
        """The task is over, wherever it was. Returns who begins now."""
        self.expected.pop(task, None)
        self._waiting.pop(task, None)
        self._taken.discard(task)
        return self._begin()

    def _begin(self) -> list[tuple[float, T]]:
        begun = []
        while self._order and len(self._taken) < self.places:
            task = self._order.popleft()
            if task in self._waiting:  # else it ended meanwhile
                begun.append(self._waiting.pop(task))
                self._taken.add(task)
        return begun
