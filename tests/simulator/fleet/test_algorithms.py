"""Fleets that train by SCAFFOLD and FedDyn: where they arrive, and what devices and the coordinator keep of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.kept_rows import NO_ROW
from numpy.typing import NDArray
from quadratics import OPTIMUM, TWO, Quadratic, fedavg_fixed_point, optimum, quadratics_bundle
from virtual import drive, make_fleet, make_scenario

DEVICES = (*TWO, Quadratic((2.0, 1.0), (4.0, -3.0), 3), Quadratic((0.5, 3.0), (1.0, 8.0), 2))
MODULE = """
from quadratics import Quadratic

DEVICES = {devices!r}

def examples(device, seed):
    return DEVICES[device].copies

def make(device, seed):
    return DEVICES[device].data
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle").path


def scenario(folder: Path, bundle: Path, recipe: str, count: int = 2, **more: Any) -> Scenario:
    """``count`` devices with 10 steps each, all of them in each round unless ``more`` says otherwise."""
    made = make_scenario(
        folder, bundle, count,
        **{
            "plan__recipe": recipe,
            "plan__local": {"epochs": 10, "batch_size": 0, "lr": 0.05, "evaluate": False},
            "plan__server": {} if recipe == "fedavg" else {"devices": count},
            "data": {"kind": "function", "function": "quads:make"},
        } | more,
    )  # fmt: skip
    (folder / "quads.py").write_text(MODULE.format(devices=DEVICES))
    return made


UNIFORM = {"goal": 2, "over_selection": 1.0, "minimum": 1, "deadline": 1e4, "weighting": "uniform"}


@pytest.mark.parametrize("recipe", ["scaffold", "scaffold-gradient", "feddyn", "fedavg"])
def test_where_two_quadratics_are_least(tmp_path: Path, bundle: Path, recipe: str) -> None:
    """(-6.6, -10.5 / 1.7), to 1e-5 with ten local steps; FedAvg arrives elsewhere."""
    local = {"epochs": 10, "batch_size": 0, "lr": 0.05, "evaluate": False}
    local |= {"scaffold-gradient": {"algorithm": recipe}, "feddyn": {"mu": 1.0}}.get(recipe, {})
    found = drive(
        scenario(
            tmp_path, bundle, recipe.removesuffix("-gradient"),
            plan__local=local, plan__round=UNIFORM, plan__stop__rounds=200,
        )
    ).model  # fmt: skip
    if recipe == "fedavg":
        np.testing.assert_allclose(found, fedavg_fixed_point(TWO, 0.05, 10), atol=1e-5)
        assert np.abs(found - OPTIMUM).max() > 1
    else:
        np.testing.assert_allclose(found, OPTIMUM, atol=1e-5)


def by_hand(rounds: list[list[int]], lr: float, steps: int) -> tuple[Any, Any, dict[int, Any]]:
    """SCAFFOLD's algorithm 1 in float64, option II: the model, c, and each c_k."""
    model, control, own = np.array([3.0, 4.0]), np.zeros(2), {device: np.zeros(2) for device in range(len(DEVICES))}
    for devices in rounds:
        updates, changes = [], []
        for device in devices:
            y = model.copy()
            for _ in range(steps):
                y -= lr * (DEVICES[device].gradient(y) + control - own[device])
            change = -control + (model - y) / (steps * lr)
            own[device] = own[device] + change
            updates.append(y - model)
            changes.append(change)
        model = model + np.mean(updates, axis=0)
        control = control + np.sum(changes, axis=0) / len(DEVICES)
    return model, control, own


def kept(fleet: Fleet, device: int) -> NDArray[np.float32]:
    """c_k; zeros if the device has none."""
    rows = fleet.coordinator.kept
    assert rows is not None
    assert rows.tied is not None
    (row,) = rows.tied.of([device])
    return np.zeros(2, np.float32) if row == NO_ROW else rows.tied.file.read(row)


def test_partial_participation_by_hand(tmp_path: Path, bundle: Path) -> None:
    """Two of four devices in a round, drawn by the engine: the algorithm in float64, and c is the mean of all c_k."""
    run = drive(scenario(tmp_path, bundle, "scaffold", 4, plan__round=UNIFORM, plan__stop__rounds=12))
    accepted: dict[str, list[int]] = {}
    for row in run.events:
        if row["event"] == "accepted":
            accepted.setdefault(row["task"].split("-")[1], []).append(row["device"])
    assert len({tuple(sorted(devices)) for devices in accepted.values()}) >= 3
    model, control, own = by_hand([*accepted.values()], 0.05, 10)
    np.testing.assert_allclose(run.model, model, rtol=1e-4)
    found = run.fleet.coordinator.control
    assert found is not None
    np.testing.assert_allclose(found.vector, control, rtol=1e-3, atol=1e-5)
    for device in range(4):
        np.testing.assert_allclose(kept(run.fleet, device), own[device], rtol=1e-3, atol=1e-4)
    mean = np.mean([kept(run.fleet, device) for device in range(4)], axis=0)
    np.testing.assert_allclose(found.vector, mean, rtol=1e-5, atol=1e-6)


def test_it_converges_with_two_of_four_devices_in_a_round(tmp_path: Path, bundle: Path) -> None:
    run = drive(scenario(tmp_path, bundle, "scaffold", 4, plan__round=UNIFORM, plan__stop__rounds=600))
    np.testing.assert_allclose(run.model, optimum(DEVICES), atol=1e-3)


def test_both_vectors_travel_both_ways(tmp_path: Path, bundle: Path) -> None:
    """Bytes of the model of two elements: down the model and c, up the update and the change of c_k."""
    runs = [
        drive(scenario(tmp_path, bundle, recipe, plan__round=UNIFORM, plan__stop__rounds=2))
        for recipe in ("fedavg", "scaffold")
    ]
    (plain, _), (scaffold, _) = (run.rounds for run in runs)
    assert (plain["bytes"]["up"], scaffold["bytes"]["up"]) == (2 * 8, 2 * 16)
    assert scaffold["bytes"]["down"] - plain["bytes"]["down"] == 2 * 8


def test_a_round_without_a_model_leaves_all_as_it_was(tmp_path: Path, bundle: Path) -> None:
    """The second round is abandoned: what its one report changed counts neither here nor on its device."""
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,1000000\n1,0,150\n")
    fleet = make_fleet(
        scenario(
            tmp_path, bundle, "scaffold", plan__round=UNIFORM | {"minimum": 2, "deadline": 300.0},
            availability={"kind": "trace", "file": "trace.csv"}, plan__stop__rounds=5,
        )
    )  # fmt: skip
    while not fleet.history:
        fleet.advance()
    control = fleet.coordinator.control
    assert control is not None
    before = [fleet.model.tolist(), control.vector.tolist(), *(kept(fleet, device).tolist() for device in range(2))]
    assert all(any(values) for values in before)
    while len(fleet.history) < 2:
        fleet.advance()
    assert [row["how"] for row in fleet.history] == ["committed", "abandoned"]
    assert fleet.history[1]["reports"] == 1
    after = [fleet.model.tolist(), control.vector.tolist(), *(kept(fleet, device).tolist() for device in range(2))]
    assert after == before


def test_a_change_that_no_sum_can_hold_is_refused(tmp_path: Path, bundle: Path) -> None:
    """Minima of 10^9 give gradients whose sum with others is beyond the exact sum; the updates are small."""
    made = scenario(
        tmp_path, bundle, "scaffold", plan__round=UNIFORM | {"deadline": 300.0},
        plan__local={"epochs": 1, "batch_size": 0, "lr": 1e-9, "evaluate": False},
    )  # fmt: skip
    far = (Quadratic((1.0, 2.0), (1e9, 0.0)), TWO[1])
    (tmp_path / "quads.py").write_text(MODULE.format(devices=far))
    fleet = make_fleet(made)
    while not fleet.history:
        fleet.advance()
    assert fleet.history[0]["causes"] == {"rejected: out-of-range": 1}
    assert fleet.history[0]["reports"] == 1
    assert not kept(fleet, 0).any()
