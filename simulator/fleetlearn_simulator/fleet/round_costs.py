"""What one round costs its devices: tasks, seconds and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import add, sub
from typing import Any

from fleetlearn_simulator.fleet.running_tasks import RunningTasks


class RoundCosts:
    """The costs of all tasks of a round."""

    def __init__(self) -> None:
        self.opened = 0.0
        """When the round opened."""
        self.accepted: Counter[int] = Counter()
        """Tier -> how many reports were accepted."""
        self.causes: Counter[str] = Counter()
        """Cause -> tasks that were lost by it."""
        self.assigned: Counter[int] = Counter()
        """Tier -> tasks."""
        self.useful = self.wasted = 0.0
        """Seconds that devices spent on tasks whose reports were accepted, and on lost tasks."""
        self.down = self.up = 0
        """Bytes that devices fetched and sent."""

    def accept(self, tasks: RunningTasks, rows: slice, times: Sequence[float]) -> None:
        """The reports of these tasks arrived at these times, and count."""
        self.accepted.update(tasks.tier[rows])
        # Added one after the other, as if they came alone. sum() rounds differently from Python
        # 3.12 on.
        self.useful = reduce(add, map(sub, times, tasks.began[rows]), self.useful)

    def summary(self) -> dict[str, Any]:
        """Return what goes into the round's line of rounds.jsonl."""
        return {
            "causes": dict(sorted(self.causes.items())),
            "assigned": dict(sorted(self.assigned.items())),
            "accepted": dict(sorted(self.accepted.items())),
            "device_seconds": {"useful": self.useful, "wasted": self.wasted},
            "bytes": {"down": self.down, "up": self.up},
        }
