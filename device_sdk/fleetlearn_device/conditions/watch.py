"""Looks at the conditions, as often as each asks for, and remembers which do not hold."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from math import inf

from fleetlearn_device.conditions.condition import Condition, UnreadableError
from fleetlearn_device.session.pause import Pause

LONGEST_WAIT = 600.0
"""Most seconds between two looks while a clock says when the condition holds again: the clock may
be set meanwhile."""
SPREAD = 60.0
"""Seconds over which devices come back whose hours begin at the same time."""


class ConditionWatch:
    """Keeps account of the conditions of one device. Looks may come from several threads."""

    def __init__(
        self,
        conditions: Sequence[Condition],
        paused_look: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        dice: random.Random | None = None,
    ) -> None:
        """``paused_look``: seconds, about, between two looks while a condition does not hold."""
        self.conditions, self._clock = tuple(conditions), clock
        self._paused_look = paused_look
        self._dice = dice or random.SystemRandom()
        self._lock = threading.Lock()
        self._looked: dict[str, float] = {}
        """When each condition was last looked at."""
        self._reasons: dict[str, str] = {}
        """Why each condition that does not hold does not."""
        self.pause: Pause | None = None
        """What the last look found. None: all conditions hold, or nobody has looked."""

    def is_due(self) -> bool:
        """Return whether the time has come to look at any condition."""
        now = self._clock()
        return any(self._due(each, now) for each in self.conditions)

    def _due(self, condition: Condition, now: float) -> bool:
        return now >= self._looked.get(condition.name, -inf) + condition.every

    def look(self, *, fresh: bool) -> Pause | None:
        """Look at the conditions whose time has come, at all where ``fresh``. Returns why the
        device must not work now; None where all conditions hold.

        May take as long as the owner's check does.
        """
        with self._lock:
            now = self._clock()
            for condition in self.conditions:
                name = condition.name
                if not (fresh or self._due(condition, now)):
                    continue
                held = name not in self._reasons
                try:
                    why = condition.why_not(held)
                except UnreadableError as error:
                    why = f"the condition {name} cannot be read ({error})"
                self._looked[name] = now
                if why is None:
                    self._reasons.pop(name, None)
                else:
                    self._reasons[name] = why
            self.pause = self._pause()
            return self.pause

    def _pause(self) -> Pause | None:
        failing = [each for each in self.conditions if each.name in self._reasons]
        if not failing:
            return None
        text = "; ".join(self._reasons[each.name] for each in failing)
        names = tuple(each.name for each in failing)
        return Pause(names, text, all(each.sends for each in failing))

    def next_look(self, *, works: bool) -> float | None:
        """Return in how many seconds to look again. None: at the next heartbeat or task, so that a
        device that waits wakes for nothing else.

        ``works``: whether the device has a task.
        """
        if works:
            return min((each.every for each in self.conditions), default=None)
        if self.pause is None:
            return None
        failing = [each for each in self.conditions if each.name in self._reasons]
        opens_in = [each.opens_in() for each in failing if each.opens_in is not None]
        if len(opens_in) < len(failing):
            return self._dice.uniform(0.5, 1.5) * self._paused_look
        return min(max(opens_in), LONGEST_WAIT) + self._dice.uniform(0.0, SPREAD)
