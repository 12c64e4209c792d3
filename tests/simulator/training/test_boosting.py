"""Simulated devices boost trees: the same state as all rows in one place, whoever fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from boosting_run import TREES, boosting_bundle, pooled_state
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario

MODULE = """
from boosting_run import TABLES, as_arrays

def examples(device, seed):
    return len(TABLES["abc"[device]]["ill"])

def table(device, seed):
    return as_arrays(TABLES["abc"[device]])
"""


def test_a_simulation_grows_the_pooled_trees(tmp_path: Path) -> None:
    bundle = boosting_bundle(tmp_path, TREES)
    (tmp_path / "boosting_devices.py").write_text(MODULE)
    tables = {
        "seed": 3,
        "plan": {
            "recipe": "boosted-trees",
            "name": "illness",
            "bundle": str(bundle.path),
            "round": {"goal": 3, "minimum": 3, "over_selection": 1.0, "deadline": 1e5},
        },
        "population": {"size": 3},
        "coordinator": {"crashes": [0.5, 1.5], "restart": 0.5},
        "data": {"kind": "function", "function": "boosting_devices:table"},
    }
    scenario = Scenario.read(tables, tmp_path)
    outcome = simulate(scenario, tmp_path / "run", Options(workers=1, events=False))
    assert outcome is not None
    assert np.array_equal(outcome.model, pooled_state(TREES))
    assert "the computation is done: 3 boosting rounds" in outcome.summary["reason"]
