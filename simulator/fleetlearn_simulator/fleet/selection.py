"""The coordinator's selection in a simulation whose plan has rules for it: what devices state and
report, and the state that outlives a crash of the coordinator or a stop of the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.selection_rules import tags_in
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.population.statements import statements_of
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.trained_devices import TrainedDevices


def ruled(engine: Engine) -> RuledSelection | None:
    """Return the engine's selection if the plan has rules for it, else None."""
    return engine.selection if isinstance(engine.selection, RuledSelection) else None


def state(engine: Engine, scenario: Scenario, source: Source, devices: Sequence[int]) -> None:
    """Tell the engine's selection what these devices state, which are about to check in."""
    selection = ruled(engine)
    if selection is not None and devices:
        ids = np.array(devices, np.int64)
        stated = statements_of(scenario, ids, source.examples(ids))
        names = [*map(name_of, devices)]
        if (regions := scenario.plan.regions) is not None:
            stated = [
                each._replace(region=regions.region_of(name, tags_in(each.labels), None))
                for name, each in zip(names, stated, strict=True)
            ]
        selection.stated.update(zip(names, stated, strict=True))


def forget(engine: Engine, device: int) -> None:
    """The device has left."""
    selection = ruled(engine)
    if selection is not None:
        selection.stated.pop(name_of(device), None)


def learn(
    engine: Engine, tasks: RunningTasks, rows: slice, found: TrainedDevices, times: Sequence[float]
) -> None:
    """Tell the engine's selection of these reports, which arrive at these times. The engine counts
    them next."""
    selection = ruled(engine)
    if selection is None or not selection.rules.remember:
        return
    columns = (
        tasks.name[rows],
        found.loss.tolist(),
        found.examples.tolist(),
        times,
        tasks.began[rows],
    )
    for name, loss, examples, time, began in zip(*columns, strict=True):
        selection.learn(name, engine.report_terms(name).round, loss, examples, time - began)


def committed(engine: Engine, devices: Iterable[int]) -> dict[str, Any]:
    """Tell the engine's selection that a round of these devices' reports is committed. Returns what
    is added to the round's summary. The engine hears of it next."""
    selection = ruled(engine)
    found = {} if selection is None else selection.utility_of(map(name_of, devices))
    if selection is not None:
        selection.committed(engine.version + 1, found)
    return {"selection": found} if found else {}


def hand_over(before: Engine, after: Engine) -> None:
    """Let a new engine remember what the coordinator's ledger has, and what connected devices
    state."""
    old, new = ruled(before), ruled(after)
    if old is not None and new is not None:
        new.memory, new.pacer, new.stated = old.memory, old.pacer, old.stated


def to_json(engine: Engine) -> dict[str, Any] | None:
    """Return what the engine's selection remembers, for a checkpoint."""
    selection = ruled(engine)
    if selection is None:
        return None
    pacer = selection.pacer
    return {
        "devices": [
            [device_of(name), *record] for name, record in selection.memory.records.items()
        ],
        "pacer": None if pacer is None else [pacer.preferred, [*pacer.history]],
    }


def from_json(engine: Engine, state: dict[str, Any] | None) -> None:
    """Let the engine's selection remember what ``to_json`` returned."""
    selection = ruled(engine)
    if selection is None or state is None:
        return
    rows = ((device, DeviceRecord._make(record)) for device, *record in state["devices"])
    selection.memory.recall(
        (name_of(device), record._replace(labels=tuple(record.labels))) for device, record in rows
    )
    if selection.pacer is not None:
        selection.pacer.preferred = state["pacer"][0]
        selection.pacer.history.extend(state["pacer"][1])
