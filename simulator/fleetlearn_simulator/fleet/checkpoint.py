"""The state of a fleet after a round, as tensors and JSON: a run that was stopped goes on from it.

It is taken when a round's model is made. Only tasks that outlive their round run then
(checkpoint_tasks.py), and exchanges may be open (checkpoint_exchanges.py).
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Any

import numpy as np
from fleetlearn_coordinator.rounds.engine import Snapshot
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from numpy.typing import NDArray

from fleetlearn_simulator.fleet import checkpoint_exchanges, checkpoint_tasks
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.fleet.events import Event
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.fleet.selection import to_json

LASTING_EVENTS = ("leave", "crash", "fill", "back", "window", "return", "answered")
"""Events that are expected across rounds. The others belong to tasks, and follow from them."""
OPTIMIZER = "optimizer."
"""Prefix of the server optimizer's tensors."""
KEPT, TIED, RESIDUALS = "kept.", "tied.", "residual."
"""Prefixes of the tensors that say which row is whose kept state, whose tied vectors and whose
residual."""
TASKS = "tasks."
"""Prefix of the tensors of the tasks that run."""
EXCHANGES = "exchanges."
"""Prefix of the tensors of the exchanges that are open."""
NOISE = "noise."
"""Prefix of the tensors of correlated noise, in a private run."""
RETURNS = "returns."
"""Prefix of the tensors that say when devices come back, with pace steering."""


def state_of(fleet: Fleet) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the fleet's tensors, and the rest of its state. Call it in ``Fleet.before_commit``."""
    coordinator, connections, events = fleet.coordinator, fleet.connections, fleet.events
    engine = fleet.engine.snapshot()
    tensors: dict[str, NDArray[Any]] = {
        "model": coordinator.model,
        "earlier": coordinator.earlier,
        "has_bundle": np.array(sorted(fleet.tasks.has_bundle), np.int64),
    }
    for prefix, rows in _kept_rows(fleet):
        tensors |= {f"{prefix}{name}": value for name, value in rows.state().items()}
    tensors |= coordinator.state.vectors
    slots = coordinator.state.optimizer_state
    tensors |= {f"{OPTIMIZER}{name}": np.asarray(value) for name, value in slots.items()}
    privacy = coordinator.state.privacy
    if privacy is not None:
        tensors |= {f"{NOISE}{name}": value for name, value in privacy.buffers.items()}
    of_tasks, tasks = checkpoint_tasks.snapshot(fleet.tasks)
    tensors |= {f"{TASKS}{name}": value for name, value in of_tasks.items()}
    of_exchanges, exchanges = checkpoint_exchanges.snapshot(fleet.exchanges)
    tensors |= {f"{EXCHANGES}{name}": value for name, value in of_exchanges.items()}
    of_returns, returns = ({}, None) if fleet.returns is None else fleet.returns.snapshot()
    tensors |= {f"{RETURNS}{name}": value for name, value in of_returns.items()}
    state = {
        "now": events.now,
        "version": engine.version + 1,
        "round": engine.round,
        "releases": engine.releases,
        "limits": engine.limits,
        "measured": engine.measured,
        "goal": engine.goal,
        "fleet_is_there": engine.fleet_is_there,
        "book": engine.book,
        "pace": engine.pace,
        "tasks": tasks,
        "returns": returns,
        "rates": coordinator.saved_rates(),
        "privacy": coordinator.saved_privacy(),
        "series": engine.exchanges,
        "exchanges": exchanges,
        "change": fleet.history[-1]["change"],
        "metrics": fleet.metrics_of(fleet.history[-1]),
        "connected": [
            [device, None if end == inf else end] for device, end in connections.connected.items()
        ],
        "away": list(connections.away.items()),
        "heap": sorted(event[:4] for event in events.heap if event.kind in LASTING_EVENTS),
        "serial": events.serial,
        "filling": connections.refill_expected,
        "arrivals": connections.arrivals,
        **(
            {"without_examples": sorted(connections.without_examples)}
            if connections.without_examples
            else {}
        ),
        "selection": to_json(fleet.engine),
    }
    return tensors, state


def restore(fleet: Fleet, tensors: dict[str, NDArray[Any]], state: dict[str, Any]) -> None:
    """Bring a new fleet into this state, and let it go on. ``fleet.history`` is not part of the
    state, and is there already."""
    coordinator, connections, events = fleet.coordinator, fleet.connections, fleet.events
    vectors = {name: tensors[name] for name in coordinator.state.vectors}
    slots = _named(tensors, OPTIMIZER)
    coordinator.restore_model(
        state["version"],
        tensors["model"],
        tensors["earlier"],
        slots,
        vectors,
        state.get("privacy"),
        _named(tensors, NOISE),
    )
    for prefix, rows in _kept_rows(fleet):
        rows.restore(_named(tensors, prefix))
    fleet.tasks.has_bundle = set(tensors["has_bundle"].tolist())
    events.now = coordinator.last_end = state["now"]
    connections.connected = {
        device: inf if end is None else end for device, end in state["connected"]
    }
    connections.away = dict(map(tuple, state["away"]))
    connections.arrivals, connections.refill_expected = state["arrivals"], state["filling"]
    # an earlier version had none
    connections.without_examples = {*state.get("without_examples", ())}
    events.heap, events.serial = [Event(*row[:4]) for row in state["heap"]], state["serial"]
    heapq.heapify(events.heap)
    there = [device for device in connections.connected if device not in connections.away]
    taken = Snapshot(
        state["version"] - 1,
        state["round"],
        state.get("book"),
        state.get("pace"),
        state.get("series") or _series_of_earlier_version(state),
        state.get("releases", 0),  # an earlier version had none
        state.get("limits"),
        [(version, value) for version, value in state.get("measured", ())],
        state.get("goal"),  # an earlier version had neither
        state.get("fleet_is_there", False),
    )
    coordinator.resume(taken, list(map(name_of, there)), state.get("selection"))
    coordinator.restore_rates(state.get("rates"))
    if state.get("tasks") is not None:  # in an earlier version no task ran
        checkpoint_tasks.restore(fleet.tasks, _named(tensors, TASKS), state["tasks"])
    if state.get("exchanges") is not None:  # in an earlier version no exchange was open
        of_exchanges = _named(tensors, EXCHANGES)
        checkpoint_exchanges.restore(fleet.exchanges, of_exchanges, state["exchanges"])
    if fleet.returns is not None:
        fleet.returns.take_up(_named(tensors, RETURNS), state["returns"])
    fleet.state([*connections.connected])
    fleet.carry_out(
        fleet.engine.committed(
            fleet.now,
            change=state["change"],
            metrics=state["metrics"],
            done=fleet.coordinator.done,
        )
    )


def _series_of_earlier_version(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the series of a checkpoint that has the last evaluation alone, or not even that."""
    number, version = state.get("evaluated", (0, 0))
    done = {"number": number, "version": version, "phase": 1}
    return {EVALUATION: done | {"requested": False, "is_open": False}}


def _kept_rows(fleet: Fleet) -> list[tuple[str, DeviceRows]]:
    kept = fleet.coordinator.kept
    rows = (
        []
        if kept is None
        else [(KEPT, kept.states), (TIED, kept.tied), (RESIDUALS, kept.residuals)]
    )
    return [(prefix, row) for prefix, row in rows if row is not None]


def _named(tensors: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Return the tensors with this prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
