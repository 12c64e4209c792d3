"""Reports that were accepted under other rules than a private round's are in no release."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.aggregation.exact_mean import add_up
from fleetlearn_coordinator.service.training_run import participations
from fleetlearn_protocol.messages import UPDATE
from peers import PlanMaker, update_of

PLAIN: dict[str, Any] = {
    "round__goal": 3,
    "round__minimum": 1,
    "round__weighting": "uniform",
    "local__evaluate": False,
}
PRIVATE = {
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "privacy__clip": 0.01,
}
BEFORE = {
    "a larger clip norm": PLAIN | PRIVATE | {"privacy__clip": 5.0},
    "a larger weight": PLAIN
    | PRIVATE
    | {"round__weighting": "examples", "round__max_weight": 1000},
}


def begin_with(make_plan: PlanMaker, before: dict[str, Any]) -> Fleet:
    """Return a run with the rules PRIVATE, after a start with others in which two of three devices
    reported; one report is in the saved sum."""
    fleet = Fleet(make_plan(**before))
    first, second, _ = leases(fleet.check_in("a", "b", "c"))
    fleet.report(first, update_of(1.0) * np.float32(100))
    store = fleet.store
    store.end_save(store.begin_save(fleet.run.reports.round.sums.to_tensors())())
    fleet.report(second, update_of(2.0) * np.float32(100))
    store.close()
    fleet = Fleet(make_plan(**(PLAIN | PRIVATE)))
    fleet.run.resume(NOW)
    return fleet


def longest_sum(fleet: Fleet) -> float:
    """Return the norm of the open round's sum."""
    fleet.run.work.do_work(NOW)
    sums = fleet.run.reports.round.sums
    sums.add_waiting()
    return float(np.linalg.norm(add_up(sums.states[UPDATE])))


@pytest.mark.parametrize("before", BEFORE)
def test_a_sum_of_other_rules_is_given_up(make_plan: PlanMaker, before: str) -> None:
    fleet = begin_with(make_plan, BEFORE[before])
    assert longest_sum(fleet) == 0
    for lease in leases(fleet.check_in("a", "b", "c")):
        fleet.report(lease, update_of(1.0))
    fleet.store.close()
    rounds = read_status(fleet.run.plan.data_dir).rounds
    assert [(row.number, row.outcome) for row in rounds] == [(1, "abandoned"), (2, "committed")]


@pytest.mark.parametrize("before", BEFORE)
def test_without_that_its_sum_would_be_longer_than_its_noise_allows(
    make_plan: PlanMaker, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participations, "give_up_rows", lambda ledger: [])
    fleet = begin_with(make_plan, BEFORE[before])
    assert longest_sum(fleet) > 2 * 0.01
    fleet.store.close()


def test_the_same_rules_give_up_nothing_however_often_the_run_starts(make_plan: PlanMaker) -> None:
    plan = make_plan(**(PLAIN | PRIVATE))
    fleet = Fleet(plan)
    tasks = leases(fleet.check_in("a", "b", "c"))
    for count, lease in enumerate(tasks[:2]):
        fleet.report(lease, update_of(1.0))
        fleet.store.close()
        fleet = Fleet(plan)
        fleet.run.resume(NOW)
        assert len(fleet.run.reports.round) == count + 1
    assert 0.01 < longest_sum(fleet) <= 0.02
    fleet.store.close()
