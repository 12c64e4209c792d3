"""A clip norm that follows the updates: each round's comes from the release before, whatever is
restarted or rolled back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_status
from fleetlearn_coordinator.aggregation.exact_mean import add_up
from fleetlearn_coordinator.aggregation.privacy.noise_split import split_noise
from fleetlearn_coordinator.aggregation.weighing.norm_bound import moved_bound
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol.messages import UPDATE
from peers import PlanMaker, update_of

GOAL = 2
ADAPTIVE: dict[str, Any] = {
    "privacy__noise": 0.1,  # so little that the count of two devices can have its part of it
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "privacy__clip": 1.0,
    "privacy__clip_quantile": 0.5,
    "round__goal": GOAL,
}


def do_round(fleet: Fleet, tasks: list[Any], value: float, **fields: Any) -> list[Any]:
    commands: list[Any] = []
    for lease in tasks:
        commands += fleet.report(lease, update_of(value), **fields)
    return leases(commands)


def clip_of(fleet: Fleet) -> float:
    state = fleet.run.models.newest.privacy
    assert state is not None
    return state.clip


def last_release(plan: Plan) -> dict[str, Any]:
    about: dict[str, Any] = read_status(plan.data_dir).rounds[-1].summary["privacy"]
    return about


@pytest.mark.parametrize(
    ("value", "fields", "shorter"),
    [(1e-6, {}, True), (1e6, {}, False), (1e-6, {"clipped": True}, False)],
)
def test_the_clip_norm_follows_what_was_released(
    make_plan: PlanMaker, value: float, fields: dict[str, Any], shorter: bool
) -> None:
    """A device's word that it clipped counts as a longer update does."""
    plan = make_plan("dp-fedavg", **ADAPTIVE)
    fleet = Fleet(plan)
    tasks, clip = leases(fleet.check_in("a", "b")), 1.0
    for _ in range(8):
        tasks = do_round(fleet, tasks, value, **fields)
        about = last_release(plan)
        assert about["clip"] == clip
        clip = moved_bound(clip, 1 - about["clipped_share"], 0.5, 0.2)
        assert about["next_clip"] == clip_of(fleet) == pytest.approx(clip, rel=1e-12)
        clip = clip_of(fleet)
    assert (clip < 0.7) == shorter
    assert (clip > 1.4) != shorter
    for lease in tasks:
        fleet.save_update(lease, update_of(1e6))
    sums = fleet.run.reports.round.sums
    sums.add_waiting()
    added = float(np.linalg.norm(add_up(sums.states[UPDATE])))
    assert added == pytest.approx(len(tasks) * clip), "this round's updates are clipped to it"
    fleet.store.close()


def test_it_survives_a_restart_and_a_roll_back_keeps_it(make_plan: PlanMaker) -> None:
    """A roll back takes no release back, and so not what followed from it: the newest norm is what
    is known best of the updates."""
    plan = make_plan("dp-fedavg", **ADAPTIVE)
    fleet = Fleet(plan)
    tasks = do_round(fleet, leases(fleet.check_in("a", "b")), 1e6)
    do_round(fleet, tasks, 1e6)
    clip = clip_of(fleet)
    assert clip > 1.1
    find_storage(plan.data_dir).requests.ask_for_roll_back(0, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    fleet.run.work.do_work(NOW)
    assert (fleet.run.models.newest.version, clip_of(fleet)) == (3, clip)
    assert fleet.run.reports.round.weighing_state.bound == clip
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert clip_of(fleet) == clip
    assert fleet.run.reports.round.weighing_state.bound == clip
    fleet.store.close()


def test_the_mean_has_what_the_count_leaves_of_the_noise(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **ADAPTIVE)
    fleet = Fleet(plan)
    before = fleet.run.models.newest.model.astype(np.float64)
    do_round(fleet, leases(fleet.check_in("a", "b")), 1e-9)
    moved = fleet.run.models.newest.model - before
    split = split_noise(0.1, GOAL, adaptive=True, metrics_noise=None)
    assert moved.std() == pytest.approx(split.update / GOAL, rel=0.02)
    assert split.update > 0.115
    fleet.store.close()
