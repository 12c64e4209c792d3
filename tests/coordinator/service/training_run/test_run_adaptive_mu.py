"""A mu that follows the loss, in the server: which tasks get which one, over restarts."""

from __future__ import annotations

import pytest
from answering import NOW, Fleet, hyper_of, leases
from fleetlearn_coordinator import read_status
from fleetlearn_protocol.messages import Evaluation
from peers import BUFFERED, PlanMaker, update_of


@pytest.mark.parametrize(("lr", "last"), [(0.1, 0.7), (1.6, 0.6)], ids=["far", "at the limit"])
def test_versions_keep_their_mu_over_restarts(make_plan: PlanMaker, lr: float, last: float) -> None:
    """The loss is 1, 2, 3, 2: mu begins at 0.5, and rises after the second and the third round.
    1 / lr is its limit."""
    plan = make_plan(**BUFFERED | {
        "recipe": "fedprox-adaptive", "local__mu": 0.5, "local__lr": lr, "round__goal": 1,
        "round__participation": "asynchronous", "stop__rounds": 10,
    })  # fmt: skip
    fleet = Fleet(plan)
    fleet.check_in("a", "b")
    for loss in (1.0, 2.0, 3.0, 2.0):
        (lease,) = [each for each in leases(fleet.check_in("a")) if each.device == "a"]
        fleet.report(lease, update_of(0.0), evaluation=Evaluation(10, 10 * loss, {}))
    expected = [0.5, 0.5, 0.6, last, last]
    assert [hyper_of(fleet, version)["mu"] for version in range(5)] == expected
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert [hyper_of(fleet, version)["mu"] for version in range(5)] == expected
    assert hyper_of(fleet, 4)["lr"] == plan.hyper(fleet.run.bundle.manifest)["lr"]
    fleet.store.close()
    rows = [
        row.summary["mu"] for row in read_status(plan.data_dir).rounds if row.outcome == "committed"
    ]
    assert sorted(row["used"] for row in rows) == [0.5, 0.5, 0.6, last]


def test_without_it_all_tasks_have_the_plan_s_mu(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan("fedprox", local__mu=0.5))
    for lease in leases(fleet.check_in("a", "b")):
        fleet.report(lease, update_of(1.0))
    hyper = fleet.run.plan.hyper(fleet.run.bundle.manifest)
    assert hyper_of(fleet, 1) == hyper_of(fleet, 0) == hyper
    assert "mu" not in read_status(fleet.run.plan.data_dir).rounds[0].summary
    fleet.store.close()
