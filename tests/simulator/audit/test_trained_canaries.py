"""Canaries among devices that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import family_round
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_simulator.audit.audit_command import audit_plan
from fleetlearn_simulator.audit.canary_devices import CanaryDevices
from fleetlearn_simulator.audit.canary_run import CanaryAttack
from fleetlearn_simulator.audit.membership import MembershipAttack
from fleetlearn_simulator.audit.trained_canaries import run_trained_canaries, send_steps
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.trained_devices import TrainedDevice, from_rows
from private_mistakes import DividedByWhoCame
from virtual import make_scenario


def test_a_canary_sends_its_step_or_zeros_and_others_what_they_trained() -> None:
    row = TrainedDevice(np.full(2, 9, np.float32), {}, 1, 1, 1, True, 0.5, 9.0)
    found = from_rows([row] * 3, 2, [])
    directions = np.array([[1, 0], [0.6, 0.8]], np.float32)
    coins = np.array([False, True])
    canaries = CanaryDevices(directions, np.zeros((2, 1), np.bool_), coins)
    send_steps(canaries, lambda: 5.0)([1, 0, 2], found)
    assert found.updates.tolist() == [pytest.approx([3, 4]), [0, 0], [9, 9]]
    assert found.largest.tolist() == [4, 0, 9]


def scenario(folder: Path, bundle: Path, **more: Any) -> Scenario:
    """150 of 1,500 devices are there; noise / sensitivity is 2."""
    given: dict[str, Any] = {
        "data": {"kind": "synthetic", "iid": True, "examples": 10},
        "plan__recipe": "dp-fedavg",
        "plan__local": {"epochs": 1, "batch_size": 10, "lr": 0.05},
        "plan__round": {"goal": 1500, "minimum": 1, "over_selection": 1.0, "deadline": 1e4},
        "plan__privacy": {"noise": 4.0, "delta": 1e-6, "population": 1500, "clip": 0.5},
        "plan__stop": {"rounds": 4},
    }
    return make_scenario(folder, bundle, 150, **(given | more))


HELPER = {"helper": "https://helper.example:8770", "key": "a" * 64, "certificate": "b" * 64}
MASKED: dict[str, Any] = {
    "plan__secure": {"mode": "helper", **HELPER},
    "plan__round": {"goal": 1500, "minimum": 2, "over_selection": 1.0, "deadline": 1e4},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"), [(OpenRound, {}), (DividedByWhoCame, {}), (OpenRound, MASKED)]
)
def test_canaries_in_training_prove_more_than_is_accounted_only_for_a_mistake(
    tmp_path: Path, softmax: Path, kind: type[OpenRound], more: dict[str, Any]
) -> None:
    given = scenario(tmp_path, softmax, **more)
    with patch.object(family_round, "OpenRound", kind):
        attack = CanaryAttack(canaries=120, seed=2)
        report = audit_plan(given.plan, given, attack, MembershipAttack(0), train=True)
    (found,) = report.findings
    assert found.accounted == pytest.approx(2.2541, abs=1e-3)
    assert found.numbers["bits"] == 120
    assert found.holds == (kind is OpenRound)


def test_what_cannot_hold_canaries_is_refused(tmp_path: Path, private_line: Path) -> None:
    given = scenario(
        tmp_path,
        private_line,
        data={"kind": "function", "function": "lines:make"},
    )
    with pytest.raises(SimulatorError, match="a model of 4 elements is too small for 4 rounds"):
        run_trained_canaries(given, CanaryAttack())
    given = scenario(
        tmp_path,
        private_line,
        data={"kind": "function", "function": "lines:make"},
        plan__server={"optimizer": "adam", "lr": 0.1},
    )
    with pytest.raises(SimulatorError, match="sgd with lr = 1"):
        run_trained_canaries(given, CanaryAttack())
