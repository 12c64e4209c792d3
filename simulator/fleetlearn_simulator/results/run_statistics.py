"""What a run is judged by: when it reached a target, what was wasted, and which devices are in its
model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.loaded_run import Floats, LoadedRun, series, traffic


class Target(NamedTuple):
    """A value of a metric that a run should reach."""

    metric: str
    value: float
    below: bool
    """True: reached at or below the value. False: reached at or above it."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``accuracy>=0.9`` or ``loss<=0.5``. With ``=``, the loss must be at or below the
        value and any other metric at or above it, as in a plan's stop.target. Raises
        SimulatorError."""
        parts = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|=)\s*([^<>=\s]+)\s*", text)
        try:
            value = float(parts[3]) if parts else inf
        except ValueError:
            value = inf
        if not parts or not isfinite(value):
            raise SimulatorError(
                f"target {text!r} is refused: expected a metric and a number, as accuracy=0.9, "
                "'accuracy>=0.9' or 'loss<=0.5' (the last two in quotes: > and < have a meaning in "
                "a shell)"
            )
        below = parts[2] == "<=" or (parts[2] == "=" and parts[1] == "loss")
        return cls(parts[1], value, below)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.below else '>='} {self.value:g}"


class Reached(NamedTuple):
    """What a run had spent when its target was first reached, at the end of that round."""

    rounds: int
    """Committed rounds, with this one."""
    time: float
    """Seconds of virtual time."""
    bytes: float
    """Bytes sent in both directions."""
    device_seconds: float
    """Seconds that devices spent on tasks."""
    wasted: float
    """Device-seconds that are not in the model."""


def reached(run: LoadedRun, target: Target, kind: str = "test") -> Reached | None:
    """Return what the run had spent when the metric, measured on ``kind`` (see
    ``loaded_run.KINDS``), first reached the target. None: it never did, or it was not measured. The
    metric need not stay there."""
    kinds = series(run).get(target.metric, {})
    if kind not in kinds:
        return None
    indices, values = kinds[kind]
    there = indices[values <= target.value if target.below else values >= target.value]
    if not len(there):
        return None
    index = int(there[0])
    rows = run.rows[: index + 1]
    return Reached(
        sum(row.how == "committed" for row in rows),
        rows[-1].time,
        float(traffic(run)[index]),
        sum(sum(row.device_seconds.values()) for row in rows),
        sum(row.wasted for row in rows),
    )


def median(values: Sequence[float | None]) -> float | None:
    """Return the median. None stands for never, which is later than any time."""
    middle = (
        float(np.median([inf if value is None else value for value in values])) if values else inf
    )
    return middle if isfinite(middle) else None


def lost_share(run: LoadedRun) -> float:
    """Return the share of the tasks that were lost."""
    tasks = run.total(lambda round_: round_.assigned).total()
    return run.total(lambda round_: round_.causes).total() / tasks if tasks else 0.0


def wasted_share(run: LoadedRun) -> float:
    """Return the share of the devices' time on tasks that is not in the model. Of an abandoned
    round that is all."""
    seconds = run.total(lambda round_: round_.device_seconds).total()
    return float(run.column(lambda round_: round_.wasted).sum() / seconds) if seconds else 0.0


class Participation(NamedTuple):
    """How much the tiers contribute to the model: arrays of shape (tiers,), NaN where the divisor
    is 0."""

    tiers: list[str]
    kept: Floats
    """Accepted reports divided by tasks."""
    heard: Floats
    """The tier's share of the accepted reports, divided by its share of the population. 1: its
    devices are heard as often as the average device."""

    @property
    def evenness(self) -> float:
        """The tier that is heard least, divided by the tier that is heard most. 1: all tiers are
        heard equally. 0: one tier is not heard at all. (Jain's index would still be 0.75 if one of
        four tiers is not heard.)"""
        return float(self.heard.min() / self.heard.max()) if len(self.heard) else float("nan")


def participation(run: LoadedRun) -> Participation:
    """Return the tiers' participation over all rounds. Reports of abandoned rounds are in no model,
    and do not count. The shares of the population are taken from the scenario. A run without a
    scenario has no tiers."""
    tiers: dict[str, dict[str, float]] = run.scenario.get("tiers", {})
    shares = np.array([float(tier.get("share", 1.0)) for tier in tiers.values()])
    tasks = run.total(lambda round_: round_.assigned)
    reports = run.total(lambda round_: round_.accepted if round_.how == "committed" else {})
    assigned, accepted = (
        np.array([counts[number] for number in range(len(tiers))], np.float64)
        for counts in (tasks, reports)
    )
    # A tier without tasks, or a run without reports, is NaN: shown as absent.
    with np.errstate(invalid="ignore", divide="ignore"):
        return Participation(
            list(tiers), accepted / assigned, accepted / accepted.sum() / (shares / shares.sum())
        )
