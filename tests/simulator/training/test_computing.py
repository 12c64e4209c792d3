"""Simulated devices that compute: the same states as without a simulation, whoever fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from computing import computed
from fleetlearn_coordinator.aggregation.computations.statistics import result
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon
from fleetlearn_device.computations import registry
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from statistics_bundle import statistics_bundle

ASKED = Statistics(
    numbers=(NumberColumn("age", quantiles=(0.5,), bins=4),),
    categories=(CategoryColumn("smoker", values=("yes", "no"), longest=8),),
)
MODULE = """
import numpy as np

def examples(device, seed):
    return 5 + device % 7

def table(device, seed):
    random = np.random.default_rng([seed, device])
    rows = examples(device, seed)
    smoker = np.array([b"yes", b"no"], "S8")[random.integers(0, 2, rows)]
    return {"age": random.normal(50, 15, rows), "smoker": smoker.view(np.uint8).reshape(rows, 8)}
"""
ALONE = Options(workers=1, events=False)


def scenario(
    folder: Path, devices: int = 12, asked: Statistics = ASKED, **changes: Any
) -> Scenario:
    bundle = statistics_bundle(folder, asked)
    (folder / "tables_of_devices.py").write_text(MODULE)
    plan = {"recipe": "statistics", "name": "fleet", "bundle": str(bundle.path)}
    goal = changes.pop("goal", devices)
    rounds = {"goal": goal, "minimum": goal, "over_selection": 1.0, "deadline": 1e5}
    tables = {
        "seed": 3,
        "plan": {**plan, "round": rounds, **changes.pop("plan", {})},
        "population": {"size": devices},
        "data": {"kind": "function", "function": "tables_of_devices:table"},
        **changes,
    }
    return Scenario.read(tables, folder)


def own_tables(folder: Path, devices: int) -> list[dict[str, np.ndarray]]:
    names: dict[str, Any] = {}
    exec(MODULE, names)
    return [names["table"](device, 3) for device in range(devices)]


def test_a_simulation_ends_with_the_state_of_all_rows(tmp_path: Path) -> None:
    outcome = simulate(scenario(tmp_path), tmp_path / "run", ALONE)
    assert outcome is not None
    expected, states = computed(ASKED, own_tables(tmp_path, 12))
    assert outcome.model.tobytes() == states[-1].tobytes()
    assert outcome.summary["result"] == expected
    assert outcome.summary["backend"] == "computation"
    assert outcome.summary["rounds"] == len(states)
    assert outcome.summary["metrics"] == outcome.summary["test"] == {}
    assert "the computation is done" in outcome.summary["reason"]
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["result"] == json.loads(json.dumps(expected))


def test_devices_that_fail_and_a_coordinator_that_dies_leave_true_totals(tmp_path: Path) -> None:
    failing = {"train": 0.5, "crash": 0.2}
    crashes = {"crashes": [0.5, 1.5], "restart": 0.5}
    of = scenario(tmp_path, 40, goal=20, failures=failing, coordinator=crashes)
    outcome = simulate(of, tmp_path / "run", ALONE)
    assert outcome is not None
    assert outcome.summary["lost"]
    found = outcome.summary["result"]
    assert (found["done"], found["devices"]) == (True, 20)
    values = found["columns"]["smoker"]
    assert sum(each["rows"] for each in values["values"]) == found["rows"]
    rows = found["columns"]["age"]["histogram"]["rows"]
    assert (
        sum(rows) + found["columns"]["age"]["below"] + found["columns"]["age"]["above"]
        == (found["rows"])
    )


MASKS = {"coordinator": {"masks": True}}
HELPER = {
    "mode": "helper",
    "helper": "https://helper:8770",
    "key": "a" * 64,
    "certificate": "b" * 64,
}
PAIRWISE = {"mode": "pairwise"}


@pytest.mark.parametrize(
    ("secure", "more"),
    [(HELPER, {}), (HELPER, MASKS), (PAIRWISE, {})],
    ids=["words", "masks", "pairs"],
)
def test_with_secure_aggregation_the_state_is_the_same(
    tmp_path: Path, secure: dict[str, Any], more: dict[str, Any]
) -> None:
    of = scenario(tmp_path, plan={"secure": secure}, **more)
    outcome = simulate(of, tmp_path / "run", ALONE)
    assert outcome is not None
    expected, states = computed(ASKED, own_tables(tmp_path, 12))
    assert outcome.model.tobytes() == states[-1].tobytes()
    assert outcome.summary["result"] == expected
    assert "sums of at least 12 devices, whole" in outcome.summary["secure"]
    assert outcome.summary["reports"] == 12 * len(states)


def test_masked_sums_are_exact_whoever_fails(tmp_path: Path) -> None:
    """The real helper's masks are taken off what is left of a round."""
    failing = {"train": 0.3, "crash": 0.2}
    runs = []
    for plan, more in (({}, {}), ({"secure": {**HELPER, "minimum": 2}}, MASKS)):
        of = scenario(tmp_path, 40, goal=20, failures=failing, plan=plan, **more)
        outcome = simulate(of, tmp_path / f"run{len(runs)}", ALONE)
        assert outcome is not None
        assert outcome.summary["lost"]
        runs.append(outcome)
    assert runs[0].model.tobytes() == runs[1].model.tobytes()


def test_a_device_gives_back_sums_that_might_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else could see that they are too large."""
    compute = registry.REGISTRY["statistics"]

    def large(state: Any, columns: Any, settings: Any) -> np.ndarray:
        sums = compute(state, columns, settings)
        if len(columns["age"]) == 5:  # of device 0, 7, 14 ...
            sums[1] = 2**62 // 12 + 1
        return sums

    monkeypatch.setitem(registry.REGISTRY, "statistics", large)
    of = scenario(tmp_path, 20, goal=12, plan={"secure": HELPER})
    outcome = simulate(of, tmp_path / "run", ALONE)
    assert outcome is not None
    assert outcome.summary["lost"]["failed: diverged"] > 0
    assert outcome.summary["result"]["devices"] == 12


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = simulate(scenario(tmp_path), tmp_path / "whole", ALONE)
    stops = iter([False, True])
    options = ALONE._replace(checkpoint=1)
    of = scenario(tmp_path)
    assert simulate(of, tmp_path / "part", options, should_stop=lambda: next(stops, True)) is None
    again = simulate(of, tmp_path / "part", options, resume=True)
    assert whole is not None
    assert again is not None
    assert again.model.tobytes() == whole.model.tobytes()
    assert result(again.model, ASKED)["done"]


def test_what_a_simulation_of_sums_cannot_have_is_refused(tmp_path: Path) -> None:
    corrupt = {"corrupt": [{"share": 0.5, "kind": "flipped"}]}
    with pytest.raises(SimulatorError, match="devices compute sums: leave it out"):
        scenario(tmp_path, failures=corrupt)
    with pytest.raises(SimulatorError, match="leave the back end to be chosen"):
        simulate(scenario(tmp_path), tmp_path / "run", ALONE._replace(backend="bundle"))
    with pytest.raises(SimulatorError, match="sums are computed in this process"):
        simulate(scenario(tmp_path), tmp_path / "run", ALONE._replace(engine="ray"))


def test_a_private_simulation_has_noise_and_says_how_much(tmp_path: Path) -> None:
    """With next to no noise it finds what all rows say; devices clip as real ones do."""
    asked = Statistics(
        numbers=(NumberColumn("age", range=(0.0, 100.0)),), categories=ASKED.categories, rounds=1
    )
    privacy = {"noise": 1e-3, "delta": 1e-6, "population": 12, "clip": 20.0}
    of = scenario(tmp_path, asked=asked, plan={"privacy": privacy, "stop": {"rounds": 1}})
    outcome = simulate(of, tmp_path / "run", ALONE)
    assert outcome is not None
    ages = np.concatenate([table["age"] for table in own_tables(tmp_path, 12)])
    found = outcome.summary["result"]
    assert found["noise"]["rows"] == pytest.approx(1e-3 * 20 * 5**0.5)
    assert found["rows"] == len(ages)
    assert found["columns"]["age"]["mean"] == pytest.approx(ages.mean(), abs=0.1)


def test_private_statistics_of_devices_that_take_part_by_a_coin(tmp_path: Path) -> None:
    """Poisson sampling: whoever comes, the noise is that of the plan, and epsilon is less."""
    asked = Statistics(
        numbers=(NumberColumn("age", range=(0.0, 100.0)),), categories=ASKED.categories, rounds=1
    )
    privacy = {"noise": 2.0, "delta": 1e-6, "population": 100, "clip": 20.0}
    plan = {
        "privacy": privacy | {"sampling": "poisson"},
        "stop": {"rounds": 1},
        "round": {"goal": 50, "minimum": 1, "over_selection": 1.0, "deadline": 1e5},
    }
    of = scenario(tmp_path, 100, asked=asked, plan=plan)
    outcome = simulate(of, tmp_path / "run", ALONE)
    assert outcome is not None
    assert outcome.summary["result"]["noise"]["rows"] == pytest.approx(2 * 20 * 5**0.5)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    (row,) = [json.loads(line) for line in lines]
    assert 0 < row["privacy"]["epsilon"] < gaussian_epsilon(1 / 2, 1e-6)
