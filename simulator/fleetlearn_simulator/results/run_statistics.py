"""What a run is judged by: how soon it reached a target, what came to nothing, and whose reports it is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.loaded_run import Floats, Run, series, traffic


class Target(NamedTuple):
    """A metric's value that a run is to reach."""

    metric: str
    value: float
    below: bool
    """Whether it is reached at or below the value, or at or above it."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """``accuracy>=0.9``, ``loss<=0.5``, or with ``=`` alone, below for the loss and above for any other metric, as
        a plan's stop.target has it. Raises SimulatorError."""
        found = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|=)\s*([^<>=\s]+)\s*", text)
        try:
            value = float(found[3]) if found else inf
        except ValueError:
            value = inf
        if not found or not isfinite(value):
            raise SimulatorError(
                f"target {text!r} is refused: expected a metric and a number, as accuracy=0.9, 'accuracy>=0.9' or "
                "'loss<=0.5' (the last two in quotes: a shell takes > and < for its own)"
            )
        below = found[2] == "<=" or (found[2] == "=" and found[1] == "loss")
        return cls(found[1], value, below)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.below else '>='} {self.value:g}"


class Reached(NamedTuple):
    """What a run had spent at the end of the round that first reached its target."""

    rounds: int
    """Committed, this one included."""
    time: float
    """Seconds of virtual time."""
    bytes: float
    """Sent in both directions."""
    device_seconds: float
    """Of the devices, on tasks."""
    wasted: float
    """Device-seconds of these that came to nothing."""


def reached(run: Run, target: Target, kind: str = "test") -> Reached | None:
    """When the metric, as it was measured on ``kind`` (one of results.MEASURED), first was at its target; None: never,
    or it was not measured. That it stays there is not asked."""
    kinds = series(run).get(target.metric, {})
    if kind not in kinds:
        return None
    places, values = kinds[kind]
    there = places[values <= target.value if target.below else values >= target.value]
    if not len(there):
        return None
    place = int(there[0])
    rows = run.rows[: place + 1]
    return Reached(
        sum(row.how == "committed" for row in rows),
        rows[-1].time,
        float(traffic(run)[place]),
        sum(sum(row.device_seconds.values()) for row in rows),
        sum(row.wasted for row in rows),
    )


def median(values: Sequence[float | None]) -> float | None:
    """The median, where None stands for never, which is later than any time; None if it is never itself."""
    middle = float(np.median([inf if value is None else value for value in values])) if values else inf
    return middle if isfinite(middle) else None


def lost_share(run: Run) -> float:
    """Of the tasks, those that came to nothing."""
    tasks = run.total(lambda row: row.assigned).total()
    return run.total(lambda row: row.causes).total() / tasks if tasks else 0.0


def wasted_share(run: Run) -> float:
    """Of the devices' time on tasks, what came to nothing; in a round that was abandoned, all."""
    seconds = run.total(lambda row: row.device_seconds).total()
    return float(run.column(lambda row: row.wasted).sum() / seconds) if seconds else 0.0


class Participation(NamedTuple):
    """The tiers' parts in the model; arrays of shape (tiers,), nan where there is nothing to divide by."""

    tiers: list[str]
    kept: Floats
    """Accepted reports over tasks."""
    heard: Floats
    """The tier's share of the accepted reports over its share of the population: 1 where a device of it is heard as
    often as the average device."""

    @property
    def evenness(self) -> float:
        """A device of the tier that is heard least, over one of the tier that is heard most: 1 is even, 0 means that
        a tier is not heard at all. (Jain's index, with four tiers of which one is silent, is still 0.75.)"""
        return float(self.heard.min() / self.heard.max()) if len(self.heard) else float("nan")


def participation(run: Run) -> Participation:
    """Over all rounds; reports to one that was abandoned are in no model, and do not count. Shares of the population
    are those that the scenario gives; of a run without a scenario there are no tiers."""
    tiers: dict[str, dict[str, float]] = run.scenario.get("tiers", {})
    shares = np.array([float(tier.get("share", 1.0)) for tier in tiers.values()])
    tasks = run.total(lambda row: row.assigned)
    reports = run.total(lambda row: row.accepted if row.how == "committed" else {})
    assigned, accepted = (
        np.array([counts[number] for number in range(len(tiers))], np.float64) for counts in (tasks, reports)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return Participation(list(tiers), accepted / assigned, accepted / accepted.sum() / (shares / shares.sum()))
