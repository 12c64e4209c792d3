"""What each update of a simulated round is worth, on held-out data: the numbers that a
coordinator's process would measure (tests/end_to_end/test_data_quality.py has the same fleet)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.quality import round_worth
from fleetlearn_coordinator.quality.contributions import leave_one_out, shapley
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator import Options, SimulatorError, simulate
from fleetlearn_simulator.fleet import coordinator
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.held_out_loss import HeldOutLoss
from quadratics import Quadratic, quadratics_bundle, quadratics_scenario
from virtual import drive

MINIMA = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (-9.0, -9.0))
DEVICES = tuple(Quadratic((1.0, 1.0), minimum) for minimum in MINIMA)
LR = 0.25


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadratics_bundle(tmp_path_factory.mktemp("quadratics") / "quadratics.bundle").path


def scenario(folder: Path, bundle: Path, *, file: bool = True, **more: Any) -> Scenario:
    if file:
        ones = np.ones((1, 2), np.float32)
        np.savez(folder / "held_out.npz", x=ones, y=ones)
    usual: dict[str, Any] = {
        "plan__local": {"epochs": 1, "batch_size": 0, "lr": LR, "evaluate": False},
        "plan__evaluation": {"data": "held_out.npz"},
        "plan__quality": {"every": 2, "contributions": 1},
        "plan__stop__rounds": 4,
    }
    return quadratics_scenario(folder, bundle, DEVICES, **(usual | more))


def test_values_are_those_of_the_losses_of_all_means(tmp_path: Path, bundle: Path) -> None:
    """One step of gradient descent on quadratics: each device's update is known, and so is the loss
    on held-out data of each mean of them."""
    run, model = drive(scenario(tmp_path, bundle)), open_bundle(bundle).parameters()
    minima = np.array(MINIMA, np.float32)
    for row in run.rounds:
        ends = model - LR * (model - minima)

        def utility(members: frozenset[int], start: Vector = model, ends: Vector = ends) -> float:
            at = ends[sorted(members)].mean(axis=0) if members else start
            return -float(((at - 1.0) ** 2).sum() / 2)

        exact, without = shapley(4, utility), leave_one_out(4, utility)
        told = [row["contributions"][name_of(device)] for device in range(4)]
        assert [each["shapley"] for each in told] == pytest.approx(exact.values, abs=1e-5)
        assert [each["left_out"] for each in told] == pytest.approx(without.values, abs=1e-5)
        model = ends.mean(axis=0)
    np.testing.assert_allclose(run.model, model, rtol=1e-5)


def test_each_so_many_th_round_is_measured(tmp_path: Path, bundle: Path) -> None:
    run = drive(scenario(tmp_path, bundle, plan__quality={"every": 2, "contributions": 2}))
    assert ["contributions" in row for row in run.rounds] == [False, True, False, True]
    assert not run.fleet.coordinator.contributions.is_due, "no update is kept for the next round"
    plain = drive(scenario(tmp_path, bundle, plan__quality={"every": 2}))
    assert plain.model.tobytes() == run.model.tobytes()
    assert plain.events == run.events
    assert plain.fleet.coordinator.contributions.held_out is None


def test_large_updates_are_measured_from_a_file(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drive(scenario(tmp_path, bundle)).rounds
    for module in (coordinator, "fleetlearn_simulator.fleet.trained_reports"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.LARGE_UPDATE", 1)
    run = drive(scenario(tmp_path, bundle))
    assert [row["contributions"] for row in run.rounds] == [
        row["contributions"] for row in expected
    ]


@pytest.mark.parametrize("trouble", ["too large", "diverged"])
def test_a_round_that_cannot_be_measured_is_committed_all_the_same(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble == "too large":
        monkeypatch.setattr(round_worth, "MOST_BYTES", 31)  # of four models of 8 bytes
    else:

        def fails(model: Vector) -> float:
            raise DivergedError("the loss is nan")

        monkeypatch.setattr(
            "fleetlearn_simulator.fleet.fleet.held_out_loss",
            lambda *given: HeldOutLoss(fails, "nothing"),
        )
    run = drive(scenario(tmp_path, bundle))
    assert [row["how"] for row in run.rounds] == ["committed"] * 4
    why = {row["contributions_failed"] for row in run.rounds}
    said = "models of 4 devices" if trouble == "too large" else "the loss is nan"
    assert len(why) == 1
    assert said in why.pop()
    assert all("contributions" not in row for row in run.rounds)


def test_test_examples_are_in_the_place_of_a_file_that_is_not_there(
    tmp_path: Path, bundle: Path
) -> None:
    made = scenario(tmp_path, bundle, file=False)
    with pytest.raises(SimulatorError, match=r"held_out\.npz \(evaluation\.data\) is not there"):
        simulate(made, tmp_path / "run", Options("bundle", 1))
    module = tmp_path / "quadratic_devices.py"
    module.write_text(
        module.read_text()
        + "\ndef test(seed):\n    ones = np.ones((1, 2), np.float32)\n"
        + "    return {'x': ones, 'y': ones}\n"
    )
    found = simulate(made, tmp_path / "run", Options("bundle", 1))
    assert found is not None
    assert "the scenario's test examples" in found.summary["held_out"]
    rows = read_rows(found.folder, ROUNDS)
    there = simulate(scenario(tmp_path, bundle), tmp_path / "there", Options("bundle", 1))
    assert there is not None
    assert there.summary["held_out"] == "held_out.npz (evaluation.data)"
    expected = [row["contributions"] for row in read_rows(there.folder, ROUNDS)]
    assert [row["contributions"] for row in rows] == expected
    with pytest.raises(SimulatorError, match=r"plan\.evaluation\.data held_out\.npz"):
        simulate(made, tmp_path / "run", Options("bundle", 1), resume=True)
