"""The membership attack: on numbers whose distributions are known, and on trained fleets."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import family_round
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.audit.audit_command import audit_plan
from fleetlearn_simulator.audit.audit_report import AuditReport
from fleetlearn_simulator.audit.canary_run import CanaryAttack
from fleetlearn_simulator.audit.membership import (
    MembershipAttack,
    attack_runs,
    leave_out,
    run_membership,
)
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet import sent_updates
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.trained_devices import TrainedDevice, from_rows
from private_mistakes import ClippedAfterAveraging, DividedByWhoCame
from virtual import make_scenario

DELTA = 1e-6


def test_the_true_positive_rate_is_that_of_two_normal_distributions() -> None:
    """Two features whose means differ by 2 standard deviations together: at a false positive rate
    of 10 % the rate is Phi(2 - 1.2816)."""
    random = np.random.default_rng(1)
    coins = random.random((400, 50)) < 0.5
    levels = random.standard_normal((50, 2)) * 10  # each target has its own
    numbers = levels + random.standard_normal((400, 50, 2)) + coins[:, :, None] * np.sqrt(2.0)
    found = attack_runs(numbers, coins, DELTA)
    expected = NormalDist().cdf(2 - NormalDist().inv_cdf(0.9))
    assert found.true_positives[0.1] == pytest.approx(expected, abs=0.02)
    assert found.true_positives[0.01] == pytest.approx(
        NormalDist().cdf(2 - NormalDist().inv_cdf(0.99)), abs=0.04
    )
    assert (found.runs, found.guesses.bits) == (400, 10_000)
    assert found.guesses.epsilon > found.rates_epsilon > 0.5


def test_numbers_that_tell_nothing_prove_nothing() -> None:
    random = np.random.default_rng(2)
    coins = random.random((60, 20)) < 0.5
    found = attack_runs(random.standard_normal((60, 20, 2)), coins, DELTA)
    assert found.guesses.epsilon < 0.1
    assert found.rates_epsilon == 0.0


def test_a_target_that_is_left_out_sends_zeros() -> None:
    row = TrainedDevice(np.ones(3, np.float32), {}, 1, 1, 1, True, 0.5, 1.0)
    found = from_rows([row] * 3, 3, [])
    leave_out(np.array([False, True]))([0, 1, 2], found)
    assert found.updates.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert found.largest.tolist() == [0, 1, 1]


def scenario(folder: Path, bundle: Path, **privacy: Any) -> Scenario:
    """All of 60 devices take part in each of four rounds; the goal is 600, so that nine devices in
    ten are missing. Noise / sensitivity is 2."""
    usual = {"noise": 4.0, "delta": DELTA, "population": 600, "clip": 0.05}
    return make_scenario(
        folder,
        bundle,
        60,
        data={"kind": "synthetic", "alpha": 1.0, "beta": 1.0, "examples": 20},
        plan__recipe="dp-fedavg",
        plan__local={"epochs": 2, "batch_size": 10, "lr": 0.05},
        plan__round={"goal": 600, "minimum": 1, "over_selection": 1.0, "deadline": 1e4},
        plan__privacy=usual | privacy,
        plan__stop={"rounds": 4},
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OpenRound, DividedByWhoCame, ClippedAfterAveraging])
def test_an_attack_on_trained_models_proves_more_than_is_accounted_only_for_mistakes(
    tmp_path: Path, softmax: Path, kind: type[OpenRound]
) -> None:
    given = scenario(tmp_path, softmax)
    with ExitStack() as planted:
        planted.enter_context(patch.object(family_round, "OpenRound", kind))
        if kind is ClippedAfterAveraging:  # devices clip too: their own mistake is planted with it
            own = patch.object(sent_updates, "clip_rows", lambda rows, clip: np.zeros(len(rows)))
            planted.enter_context(own)
        report: AuditReport = audit_plan(
            given.plan,
            given,
            CanaryAttack(canaries=50, releases=2),
            MembershipAttack(shadow_runs=60, targets=20, seed=3),
        )
    canaries, membership, rates = report.findings
    assert canaries.holds  # planted in the fleet's rounds, not in those of the canaries
    assert membership.accounted == pytest.approx(2.2541, abs=1e-3)
    assert membership.holds == (kind is OpenRound)
    assert report.holds == (kind is OpenRound)
    assert rates.epsilon <= membership.epsilon or kind is OpenRound


def test_too_few_runs_and_too_many_targets_are_refused(tmp_path: Path, private_line: Path) -> None:
    given = make_scenario(
        tmp_path,
        private_line,
        3,
        plan__recipe="dp-fedavg",
        plan__privacy={"noise": 1.0, "delta": 1e-3, "population": 3, "clip": 1.0},
    )
    assert open_bundle(private_line).manifest.size == 4
    with pytest.raises(SimulatorError, match="0 shadow runs were done in -1 s; the attack takes"):
        run_membership(given, MembershipAttack(shadow_runs=10, targets=2, seconds=-1.0))
    with pytest.raises(SimulatorError, match="4 targets were asked for; the scenario has 3"):
        run_membership(given, MembershipAttack(targets=4))
