"""Limits on how many devices transfer at a time, as the server has them. The others wait, first
come first served."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from fleetlearn_simulator.population.traits import Floats

T = TypeVar("T")


class DownloadQueue:
    """Downloads, at most ``limit`` at a time. Devices ask when they get their tasks: their wait is
    known then.

    A device that goes offline during its download counts for as long as the download would have
    taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[float] = []
        """When the downloads that go on end: a heap."""

    def clear(self) -> None:
        """Forget all transfers: their round is over."""
        self._free.clear()

    def snapshot(self) -> list[float]:
        """Return the transfers that go on, for ``take_up``."""
        return [*self._free]

    def take_up(self, taken: Sequence[float]) -> None:
        """Go on from what another object's ``snapshot`` returned."""
        self._free = [*taken]

    def wait(self, now: float, seconds: Floats) -> Floats:
        """Return how long each of these devices waits. They ask now, one after the other, and take
        ``seconds``."""
        free, waits = self._free, []
        while free and free[0] <= now:
            heapq.heappop(free)
        for taken in seconds.tolist():
            if len(free) < self.limit:
                heapq.heappush(free, now + taken)
                waits.append(0.0)
            else:
                waits.append(free[0] - now)
                heapq.heapreplace(free, free[0] + taken)
        return np.array(waits, np.float64)


class UploadQueue(Generic[T]):
    """Uploads, at most ``limit`` at a time. ``ask`` and ``end`` return what was given with the
    tasks that begin."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.expected: dict[str, float] = {}
        """Task that has not asked yet -> the seconds that its upload takes."""
        self._taken: set[str] = set()
        self._waiting: dict[str, tuple[float, T]] = {}
        self._order: deque[str] = deque()

    def clear(self) -> None:
        """Forget all transfers: their round is over."""
        self.expected.clear()
        self._taken.clear()
        self._waiting.clear()
        self._order.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return the transfers that go on or are to come, for ``take_up``."""
        waiting = [(task, self._waiting[task][0]) for task in self._order if task in self._waiting]
        return {"expected": dict(self.expected), "taken": sorted(self._taken), "waiting": waiting}

    def take_up(self, taken: Mapping[str, Any], of: Callable[[str], T]) -> None:
        """Go on from what another object's ``snapshot`` returned. ``of``: returns what is to be
        returned with a task."""
        self.expected, self._taken = dict(taken["expected"]), {*taken["taken"]}
        self._waiting = {task: (seconds, of(task)) for task, seconds in taken["waiting"]}
        self._order = deque(self._waiting)

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Announce tasks that will ask."""
        self.expected.update(seconds)

    def ask(self, task: str, what: T) -> list[tuple[float, T]]:
        """Let a task wait for its turn. Returns the uploads that begin now."""
        self._waiting[task] = self.expected.pop(task), what
        self._order.append(task)
        return self._begin()

    def end(self, task: str) -> list[tuple[float, T]]:
        """End a task, whatever its upload has come to. Returns the uploads that begin now."""
        self.expected.pop(task, None)
        self._waiting.pop(task, None)
        self._taken.discard(task)
        return self._begin()

    def _begin(self) -> list[tuple[float, T]]:
        begun = []
        while self._order and len(self._taken) < self.limit:
            task = self._order.popleft()
            if task in self._waiting:  # else it has ended
                begun.append(self._waiting.pop(task))
                self._taken.add(task)
        return begun
