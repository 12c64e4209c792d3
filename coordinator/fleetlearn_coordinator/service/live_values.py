"""What ``status`` and the live page show of a run that is served."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from fleetlearn_coordinator.network.run_host import GatewayNow, UploadsNow
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.rounds.waiting_words import waits_for
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.run import Run


class RunConnections(NamedTuple):
    """What a run's host holds for it."""

    connected: int
    """Devices that are connected and may serve the run."""
    unable: int
    """Those of them that lack what the run's tasks need."""
    uploads: UploadsNow
    gateways: Sequence[GatewayNow]
    """Empty: devices connect to the coordinator's own process."""


def live_values(run: Run, there: RunConnections, now: float) -> dict[str, Any]:
    """Return what ``status`` shows of the run. ``now``: in seconds on the engine's clock."""
    engine = run.engine
    deadline = deadline_of(engine, now)
    return {
        "time": time.time(),
        "phase": engine.phase.value,
        "round": engine.round,
        "version": engine.version,
        "connected": there.connected,
        "idle": engine.waiting(),
        "unable": there.unable,
        "leases": len(engine.leases),
        "goal": engine.settings.goal,
        "deadline": deadline,
        "accepted": len(engine.accepted),
        "dropped": engine.causes(),
        "uploading": there.uploads.arriving,
        "waits_for": waits_for(engine, now),
        "queued": there.uploads.waiting,
        **({} if run.selection is None else run.selection.selection.live()),
        **({} if engine.pace is None else engine.pace.status(now)),
        "exchanges": open_exchanges(engine),
        **({"gateways": [each._asdict() for each in there.gateways]} if there.gateways else {}),
        **tasks_of_members(run.members, engine),
        **regions(engine, now, is_open=deadline is not None),
    }


def deadline_of(engine: Engine, now: float) -> float | None:
    """Return when the open round ends at the latest, in Unix time. None: no round is open, or the
    run is paused."""
    if engine.phase is not Phase.OPEN or engine.paused:
        return None
    return time.time() + engine.deadline - now


def open_exchanges(engine: Engine) -> dict[str, Any]:
    """Return kind -> how far its open exchange is."""
    return {
        kind: {
            "number": series.number,
            "phase": series.phase,
            "version": series.version,
            "devices": len(series.book.accepted),
            "of": series.terms.devices,
        }
        for kind, series in engine.exchanges.items()
        if series.is_open
    }


def tasks_of_members(members: Members, engine: Engine) -> dict[str, Any]:
    """Return, under ``members``, how many running tasks each member of a family has."""
    if not members.is_family:
        return {}
    counts = Counter(members.of_task(task).name for task in engine.book.tasks.values())
    return {"members": {member.name: counts[member.name] for member in members.all}}


def regions(engine: Engine, now: float, *, is_open: bool) -> dict[str, Any]:
    """Return, under ``regions``, how each is doing, where rounds have some. ``is_open``: whether a
    round is, and the run is not paused."""
    if engine.regional is None:
        return {}
    deadline = engine.deadline if is_open else inf
    return {"regions": [each._asdict() for each in engine.regional.in_numbers(deadline, now)]}
