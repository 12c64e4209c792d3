"""A rehearsal of an own function: the states are those of the same functions without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.plan.plan_for_bundle import PlanError
from fleetlearn_protocol import extensions
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from own_functions import EXAMPLES, allowed_examples, computed_by, questions

MODULE = """
import numpy as np

def examples(device, seed):
    return 5 + device % 7

def table(device, seed):
    random = np.random.default_rng([seed, device])
    places = np.array([[155.0, 55.0], [172.0, 70.0], [186.0, 93.0]])
    which = random.integers(0, 3, examples(device, seed))
    return {"x": places[which] + random.normal(0, 4, (len(which), 2))}
"""
ALONE = Options(workers=1, events=False)


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    with extensions.apart():
        yield


def scenario(folder: Path, devices: int = 12, plugins: tuple[str, ...] = ("kmeans",)) -> Scenario:
    bundle = write_computation_bundle(folder / "a.bundle", "centres", questions("kmeans"))
    (folder / "tables_of_points.py").write_text(MODULE)
    shutil.copy(EXAMPLES / "kmeans.py", folder)
    tables: dict[str, Any] = {
        "seed": 3,
        "plan": {
            "recipe": "function",
            "name": "centres",
            "bundle": str(bundle),
            "round": {"goal": devices, "minimum": devices, "over_selection": 1.0},
        },
        "population": {"size": devices},
        "data": {"kind": "function", "function": "tables_of_points:table"},
    }
    return Scenario.read(tables, folder, plugins=plugins)


def test_a_simulation_ends_with_the_state_of_the_functions_alone(tmp_path: Path) -> None:
    outcome = simulate(scenario(tmp_path), tmp_path / "run", ALONE)
    assert outcome is not None
    names: dict[str, Any] = {}
    exec(MODULE, names)
    with allowed_examples() as functions:
        tables = [names["table"](device, 3) for device in range(12)]
        expected, states = computed_by(questions("kmeans"), tables, functions)
    assert outcome.model.tobytes() == states[-1].tobytes()
    assert outcome.summary["result"] == expected


def test_a_module_that_is_not_listed_is_not_imported(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the module kmeans is not allowed here"):
        simulate(scenario(tmp_path, plugins=()), tmp_path / "run", ALONE)


def test_a_function_that_fails_ends_the_rehearsal_by_name(tmp_path: Path) -> None:
    of = scenario(tmp_path)
    broken = (tmp_path / "kmeans.py").read_text().replace('rows["x"]', 'rows["height"]')
    (tmp_path / "kmeans_broken.py").write_text(broken)
    extensions.allow(["kmeans_broken"], tmp_path)
    settings = questions("kmeans")
    changed = msgspec.structs.replace(settings, device="kmeans_broken:sums")
    write_computation_bundle(tmp_path / "a.bundle", "centres", changed)
    with pytest.raises(SimulatorError, match="kmeans_broken:sums failed: KeyError: 'height'"):
        simulate(of, tmp_path / "run", ALONE)
