"""A learning rate that changes from round to round, in the server: which tasks get which one, over
restarts."""

from __future__ import annotations

import pytest
from answering import NOW, Fleet, hyper_of, leases
from peers import BUFFERED, PlanMaker, update_of


def test_versions_keep_their_rate_over_restarts(make_plan: PlanMaker) -> None:
    """Two rounds of warm-up from a half, then a step after each two rounds."""
    schedule = {"kind": "step", "every": 2, "factor": 0.1, "warm_up": 2, "start": 0.5}
    plan = make_plan(**BUFFERED | {
        "recipe": "fedbuff", "local__lr": 0.4, "local__schedule": schedule, "round__goal": 1,
        "round__participation": "asynchronous", "stop__rounds": 10,
    })  # fmt: skip
    fleet = Fleet(plan)
    fleet.check_in("a", "b")
    for _ in range(4):
        (lease,) = [each for each in leases(fleet.check_in("a")) if each.device == "a"]
        fleet.report(lease, update_of(0.0))
    expected = pytest.approx([0.2, 0.3, 0.4, 0.4, 0.04], rel=1e-15)
    rates = [hyper_of(fleet, version)["lr"] for version in range(5)]
    assert rates == expected
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert [hyper_of(fleet, version)["lr"] for version in range(5)] == rates
    fleet.store.close()
