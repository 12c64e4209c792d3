"""For tests: small scenarios on a bundle written out by hand, whose times can be worked out by
heart; and their runs.

Device k has k + 1 batches of 10 examples. A step takes 10 seconds and transfers take none, so that
an epoch on device k takes 10 (k + 1) seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from weakref import finalize

import msgspec
import numpy as np
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, Outcome, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario import toml
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import PerDevice
from fleetlearn_simulator.training.family_backend import FamilyBackend
from fleetlearn_simulator.training.kept_rows import residual_file, row_files
from fleetlearn_simulator.training.run_bundles import numbers_of, run_bundles, source_of_run
from fleetlearn_simulator.training.trained_devices import COLUMNS, TrainedDevice, TrainedDevices
from line_bundle import line_data, line_step

MODULE = """
import numpy as np
from line_bundle import line_data

def examples(device, seed):
    return 10 * (device + 1)

def make(device, seed):
    x, y = line_data(10 * (device + 1), seed=1000 * seed + device)
    return {"x": x, "y": y}
"""
Row = dict[str, Any]
SOFTMAX: Row = {
    "data": {
        "kind": "synthetic",
        "alpha": 0.5,
        "beta": 0.5,
        "examples": 7,
        "power": 1.5,
        "largest": 60,
    },
    "plan__recipe": "fedprox",
    "plan__local": {"epochs": 2, "batch_size": 10, "lr": 0.01, "mu": 0.1},
    "failures": {"stragglers": 0.3, "train": 0.001},
}
"""Settings of ``write_scenario`` for a softmax regression on devices of different sizes, some of
which straggle."""


class Driven(NamedTuple):
    """A run in memory."""

    fleet: Fleet
    events: list[Row]
    rounds: list[Row]
    handled: int
    """How many times ``advance`` was called."""

    @property
    def model(self) -> Vector:
        return self.fleet.model

    def when(self, kind: str) -> list[float]:
        """The times of the events of this kind."""
        return [row["time"] for row in self.events if row["event"] == kind]

    def told(self, *kinds: str) -> list[tuple[Any, ...]]:
        """(time rounded to a millisecond, kind, device, cause) of these events."""
        return [
            (round(row["time"], 3), row["event"], row.get("device"), row.get("cause"))
            for row in self.events
            if row["event"] in kinds
        ]


def write_scenario(folder: Path, bundle: Path | None, size: int, **settings: Any) -> Path:
    """A scenario file; ``plan__round__goal=3`` for key goal of table plan.round, and so on; a dict
    replaces a table. ``bundle``: None in a plan with [family]."""
    (folder / "lines.py").write_text(MODULE)
    tables: Row = {
        "population": {"size": size, "connected": size},
        "data": {"kind": "function", "function": "lines:make"},
        "compute": {"step_seconds": 10.0},
        "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12}},
        "plan": {
            "name": "test",
            **({} if bundle is None else {"bundle": str(bundle)}),
            "recipe": "fedavg",
            "local": {"epochs": 1, "batch_size": 10, "lr": 0.01, "evaluate": False},
            "round": {"goal": size, "minimum": 1, "over_selection": 1.0, "deadline": 1000.0},
            "stop": {"rounds": 1},
        },
    }
    for key, value in settings.items():
        *parts, name = key.split("__")
        table = tables
        for part in parts:
            table = table.setdefault(part, {})
        table[name] = value
    path = folder / "scenario.toml"
    path.write_text(toml.dump(tables))
    return path


def make_scenario(folder: Path, bundle: Path, size: int, **settings: Any) -> Scenario:
    return Scenario.load(write_scenario(folder, bundle, size, **settings))


def make_fleet(
    scenario: Scenario,
    note: Callable[[Sequence[Any]], None] = lambda rows: None,
    backend: type[PerDevice] = PerDevice,
) -> Fleet:
    """A fleet that trains in this process, device after device unless another back end is given.
    What its devices keep is in a folder that ends with it."""
    bundles = run_bundles(scenario)
    manifests, task = [each.bundle.manifest for each in bundles], bundles[0].local
    folder = TemporaryDirectory(prefix="fleetlearn-")
    files = row_files(Path(folder.name), manifests, task.algorithm)
    residuals = residual_file(Path(folder.name), manifests[0], scenario.plan.encoding)
    backends = [backend(each.bundle, each.local, each.source, kept=files) for each in bundles]
    numbers = numbers_of(scenario)
    fleet = Fleet(
        scenario,
        [each.bundle for each in bundles],
        source_of_run(scenario, bundles),
        backends[0] if numbers is None else FamilyBackend(backends, numbers),
        task,
        note,
        files,
        residuals,
    )
    finalize(fleet, folder.cleanup)
    return fleet


def drive(scenario: Scenario, most: int = 100_000, backend: type[PerDevice] = PerDevice) -> Driven:
    """Run it to its end, or for ``most`` events."""
    events: list[Row] = []
    fleet = make_fleet(scenario, lambda rows: events.extend(msgspec.to_builtins(rows)), backend)
    handled = 1
    while handled < most and fleet.advance():
        handled += 1
    return Driven(fleet, events, fleet.history, handled)


def by_lines(model: Any, device: int, steps: int, lr: float, seed: int = 0) -> Any:
    """Return the model after this many full-batch steps of the line's bundle on a device's data, in
    float64."""
    now: Row = {"w": model[:3], "seen": model[3], "h": model[4]}
    for _ in range(steps):
        now, _, _ = line_step(now, {}, line_data(10 * (device + 1), seed=1000 * seed + device), lr)
    return np.array([*now["w"], now["seen"], now["h"]])


def bits(found: TrainedDevices) -> list[Row]:
    """Row by row, to the last bit; what is no number is there too."""
    columns: Row = {column.name: getattr(found, column.name) for column in fields(found)}
    for more in ("metrics", "vectors"):
        columns |= {f"{more}.{name}": values for name, values in columns.pop(more).items()}
    assert {len(values) for values in columns.values()} == {len(found)}
    return [
        {name: (values.dtype.str, values[row].tobytes()) for name, values in columns.items()}
        for row in range(len(found))
    ]


def one_by_one(outcomes: TrainedDevices) -> list[TrainedDevice]:
    columns = {name: getattr(outcomes, name).tolist() for name in COLUMNS}
    metrics = {name: column.tolist() for name, column in outcomes.metrics.items()}
    return [
        TrainedDevice(
            outcomes.updates[row],
            {name: values[row] for name, values in metrics.items() if np.isfinite(values[row])},
            vectors={name: values[row] for name, values in outcomes.vectors.items()},
            **{name: values[row] for name, values in columns.items()},
        )
        for row in range(len(outcomes))
    ]


def simulate_in_parts(scenario: Scenario, folder: Path) -> Outcome:
    """Simulate, and stop after each committed round; go on from the checkpoint each time."""
    outcome, times = None, 0
    while outcome is None:
        seen: list[int] = []
        outcome = simulate(
            scenario,
            folder,
            Options(backend="bundle", workers=1, checkpoint=1),
            resume=times > 0,
            progress=lambda fleet, seen=seen: (
                seen.append(1) if fleet.history[-1]["how"] == "committed" else None
            ),  # type: ignore[misc]
            should_stop=lambda seen=seen: bool(seen),  # type: ignore[misc]
        )
        times += 1
    assert times == len([row for row in read_rows(folder, ROUNDS) if row["how"] == "committed"])
    return outcome
