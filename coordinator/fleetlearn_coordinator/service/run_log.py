"""The log lines about one run. They begin with its name where one process serves several."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from typing import Any

from fleetlearn_coordinator.conversation.limits import LINE_BURST, LINE_RATE
from fleetlearn_coordinator.network.peer_log import FewLines
from fleetlearn_coordinator.rounds.commands import LATE, LOST, STALE, STALLED, SURPLUS, Ended
from fleetlearn_coordinator.rounds.waiting_words import named

WHY = {
    LOST: "lost: the connection ended, and the device was not back in time",
    LATE: "late: the time was over before the report was here",
    SURPLUS: "surplus: the round had its reports without it",
    STALLED: "stalled: no step and no byte for too long (round.stall)",
    STALE: "stale: the model that the task began from is too old",
}
"""The engine's own causes. What devices fail and what is rejected is logged where their messages are read."""

_tasks = logging.getLogger("fleetlearn.coordinator.tasks")
_tasks.addFilter(FewLines(LINE_RATE, LINE_BURST, "tasks"))


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """The log of one run."""

    def __init__(self, name: str = "") -> None:
        """``name``: the run's, of several. Empty: its process serves no other."""
        super().__init__(logging.getLogger("fleetlearn.coordinator"), {})
        self.begin = f"run {name}: " if name else ""
        """What each line begins with."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Return a line as it is logged."""
        return f"{self.begin}{msg}", kwargs

    def say_ended(self, ended: Iterable[Ended]) -> None:
        """Say which devices' tasks ended without a report that counts, and why: a line for each cause and round."""
        devices = defaultdict[tuple[int, str], list[str]](list)
        for device, _, number, cause in ended:
            if cause in WHY:
                devices[number, cause].append(device)
        for (number, cause), names in devices.items():
            who = f"device {names[0]} is" if len(names) == 1 else f"{named(names)} are"
            _tasks.info("%sround %d: %s %s", self.begin, number, who, WHY[cause])
