"""A day of many devices in the simulator, with the real engine: how many check in, take part and
stay connected in each hour, and what the simulation itself costs."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _add_studies_to_path  # noqa: F401
import _measure as measure
import _servers
import numpy as np
import pace
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.run import rare_garbage_collection
from fleetlearn_simulator.training.backend import local_settings

HOUR = 3600


class Hour(NamedTuple):
    """What came of the day by the end of one of its hours."""

    hours: int
    check_ins: int
    """In this hour."""
    most_check_ins: int
    """In one second of it."""
    devices: int
    """Devices that have checked in since the day began."""
    rounds: int
    """Committed in this hour."""
    reports: int
    """That counted in them."""
    round_seconds: float
    """Mean time of a round of this hour."""
    connected: int
    """At the hour's end."""
    cpu_seconds: float
    """That the simulation of the day took so far."""
    peak_mib: float
    """Of the process so far."""


def simulate_day(
    devices: int, goal: int, steering: dict[str, Any], hours: int, tell: Callable[[Hour], None]
) -> list[Hour]:
    """Simulate so many hours of a fleet that comes and goes with the time of day. ``goal``: reports
    of a round. ``steering``: the plan's [pace]. ``tell``: called with each hour."""
    with measure.scratch() as folder, rare_garbage_collection():
        bundle = _servers.write_placeholder_bundle(folder / "bundle", pace.PARAMETERS)
        return _simulate(bundle, devices, goal, steering, hours, tell)


def _simulate(
    bundle: Path,
    devices: int,
    goal: int,
    steering: dict[str, Any],
    hours: int,
    tell: Callable[[Hour], None],
) -> list[Hour]:
    run, opened = pace.scenario(bundle, devices, goal, pace.Way(steering)), open_bundle(bundle)
    begin = time.process_time()
    local = local_settings(run.plan, opened)
    fleet = Fleet(run, [opened], pace.Alike(), pace.Nothing(), local, lambda lines: None)  # type: ignore[arg-type]
    came = np.zeros(devices, np.bool_)
    counts = np.zeros(hours * HOUR + 1, np.int64)

    def checked_in(device: int) -> None:
        counts[min(int(fleet.now), hours * HOUR)] += 1
        came[device] = True

    assert fleet.returns is not None
    fleet.returns.checked_in = checked_in
    told: list[Hour] = []
    seen = 0
    for hour in range(1, hours + 1):
        while fleet.now < hour * HOUR and fleet.advance():
            pass
        seconds = counts[(hour - 1) * HOUR : hour * HOUR]
        rows = [row for row in fleet.history[seen:] if row["how"] == "committed"]
        seen = len(fleet.history)
        told.append(
            Hour(
                hour,
                int(seconds.sum()),
                int(seconds.max()),
                int(came.sum()),
                len(rows),
                sum(row["reports"] for row in rows),
                sum(row["seconds"] for row in rows) / len(rows) if rows else 0.0,
                len(fleet.connections.connected),
                time.process_time() - begin,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            )
        )
        tell(told[-1])
    return told
