"""How long ago a run's metric was better than ever: what early stopping goes by.

Prechelt, "Early Stopping - But When?" (1998), third class of criteria, with a least improvement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple


class MeasuredModel(NamedTuple):
    """A model's value of the metric."""

    version: int
    value: float


@dataclass(slots=True)
class Improvement:
    """The values that were measured, and what follows from them: a function of ``values`` alone, so
    a restart finds the same from the summaries that it reads."""

    below: bool = False
    """Whether a smaller value is better."""
    least: float = 0.0
    """An improvement is a value that is better than the last improvement's by more than this."""
    values: dict[int, float] = field(default_factory=dict)
    """Version of the model -> its value."""
    best: MeasuredModel | None = None
    """The best value; of equals that of the oldest version."""
    without: int = 0
    """Measured models since the last improvement, of newer versions than its."""
    _reference: float | None = None
    """The last improvement's value."""

    def note(self, version: int, value: float) -> None:
        """A model was measured, perhaps again, or after a newer one."""
        in_order = not self.values or version > next(reversed(self.values))
        self.values[version] = value
        if in_order:
            self._add(version, value)
            return
        values = dict(sorted(self.values.items()))
        self.clear()
        for each in values.items():
            self._add(*each)
        self.values = values

    def clear(self) -> None:
        """Forget what was measured: the run goes on from an earlier model."""
        self.values, self.best, self.without, self._reference = {}, None, 0, None

    def _add(self, version: int, value: float) -> None:
        self.without += 1
        if not isfinite(value):  # the model has diverged
            return
        if self.best is None or self._exceeds(value, self.best.value):
            self.best = MeasuredModel(version, value)
        if self._reference is None or self._exceeds(value, self._reference, self.least):
            self._reference, self.without = value, 0

    def _exceeds(self, value: float, other: float, by: float = 0.0) -> bool:
        return value < other - by if self.below else value > other + by
