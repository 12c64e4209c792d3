"""Devices as processes add the noise of differential privacy under their masks, with a helper and a
coordinator beside them: the model has the plan's noise, and the run ends at its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol import open_bundle
from processes import Processes
from secure_fleet import SecureFleet

pytestmark = pytest.mark.slow
CLIP, NOISE, BUDGET = 5.0, 1.0, 8.0


def private(**changed: object) -> dict[str, object]:
    """Next to nothing is learnt: what moves the model is noise, of z C / 3 on each of the means.
    Two releases cost 7.29, three 9.26."""
    return {
        "secure__clip": None,
        "privacy__mechanism": "distributed",
        "privacy__clip": CLIP,
        "privacy__noise": NOISE,
        "privacy__epsilon": BUDGET,
        "privacy__delta": 1e-6,
        "privacy__population": 3,
        "local__lr": 1e-9,
        "stop__rounds": 9,
        **changed,
    }


def check(fleet: SecureFleet, bundle: Path) -> None:
    """Let all be over. The model has the noise of two releases, and the budget is spent."""
    run = fleet.run
    for name in ("coordinator", *fleet.names):
        assert run.wait(name) == 0, run.log(name)
    version, model = read_model(fleet.data)
    assert version == 2
    assert "the privacy budget is spent: epsilon 7.29 of 8 after 2 releases" in run.log(
        "coordinator"
    )
    last = read_status(fleet.data).rounds[-1].summary
    assert last["privacy"]["epsilon"] == pytest.approx(7.2861, abs=1e-3)
    moved = model - open_bundle(bundle).parameters()
    expected = NOISE * CLIP * 2**0.5 / 3
    # 650 elements: five standard deviations of their standard deviation.
    assert moved.std() == pytest.approx(expected, rel=5 / (2 * moved.size) ** 0.5)


def test_with_a_helper_the_model_has_the_plans_noise_and_the_run_ends_at_its_budget(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = SecureFleet(run, 3, ["d0", "d1", "d2"])
    fleet.write_plan(bundle_path, "dp-fedavg", **private())
    fleet.start_helper()
    run.coordinator(fleet.plan)
    fleet.start_devices(shards)
    check(fleet, bundle_path)


def test_with_pairwise_masks_too(run: Processes, bundle_path: Path, shards: list[Path]) -> None:
    """The devices that may work together with the coordinator are none here: by default their
    share of the noise is made up for."""
    fleet = SecureFleet(run, 3, ["d0", "d1", "d2"])
    of_helper = dict.fromkeys(("secure__helper", "secure__key", "secure__certificate"))
    pairwise = {"secure__mode": "pairwise", "secure__adversaries": 0.0, "secure__dropouts": 0.0}
    fleet.write_plan(bundle_path, "dp-fedavg", **private(**of_helper, **pairwise))
    run.coordinator(fleet.plan)
    fleet.start_devices(shards)
    check(fleet, bundle_path)
