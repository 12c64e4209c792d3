"""Asynchronous rounds and late updates without a network: what counts when, the models by hand, and
restarts."""

from __future__ import annotations

import shutil
from math import sqrt
from pathlib import Path

import msgspec
import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.aggregation.exact_mean import multiplier
from fleetlearn_coordinator.rounds.commands import Assign, CancelTask, Commit, Ended, Finish
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_coordinator.storage import store
from fleetlearn_protocol import Code, ProtocolError
from peers import BUFFERED, PlanMaker, update_of

HALF = multiplier(1, 1 / sqrt(2))
"""What an update of staleness 1 counts."""


@pytest.fixture
def asynchronous(make_plan: PlanMaker) -> PlanMaker:
    def make(**settings: object) -> Plan:
        return make_plan(**(BUFFERED | settings))

    return make


def change(plan: Plan, versions: int) -> float:
    """How far the models moved, the same in each element, up to this version."""
    return float(read_model(plan.data_dir, versions)[1][0] - read_model(plan.data_dir, 0)[1][0])


def test_a_buffer_is_committed_and_tasks_go_on(asynchronous: PlanMaker) -> None:
    """By hand: v1 = (1 + 2) / 2; then c's update of v0 counts with 1 / sqrt(2), and a's second one
    in full."""
    plan = asynchronous()
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
    assert {lease.version for lease in tasks.values()} == {0}
    (again,) = leases(fleet.report(tasks["a"], update_of(1.0)))
    assert (again.device, again.version, again.round) == ("a", 0, 1)
    assert again.seed != tasks["a"].seed, (
        "it trains in another order, since it begins from the same model"
    )
    (next_of_b,) = leases(fleet.report(tasks["b"], update_of(2.0)))
    assert (next_of_b.device, next_of_b.version, next_of_b.round) == ("b", 1, 2)
    assert set(fleet.run.engine.leases) == {"a", "b", "c"}, "nobody's task ended with the round"
    fleet.report(tasks["c"], update_of(4.0))
    fleet.report(next_of_b, update_of(8.0))
    fleet.store.close()
    assert change(plan, 1) == pytest.approx((1 + 2) / 2, abs=1e-6)
    assert change(plan, 2) - change(plan, 1) == pytest.approx((HALF * 4 + 8) / 2, abs=1e-6)
    rows = [row.summary["staleness"] for row in read_status(plan.data_dir).rounds]
    assert rows == [{"mean": 0.0, "max": 0, "stale": 0}, {"mean": 0.5, "max": 1, "stale": 1}]


def test_no_model_file_is_read_to_serve_an_older_model(
    asynchronous: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plan whose devices fetch the model alone: each commit would read and hash a whole file
    for nothing."""
    fleet = Fleet(asynchronous())
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
    first = fleet.run.models.newest.digest
    for device in ("a", "b"):
        fleet.report(tasks[device], update_of(1.0))
    monkeypatch.setattr(
        fleet.store.blobs, "load_model", lambda version, sha256: pytest.fail("a file was read")
    )
    assert (
        fleet.run.models.digests_of(0, fleet.run.plan.vectors, fleet.run.members.all[0])
        == {"model": first}
        != {"model": fleet.run.models.newest.digest}
    )
    fleet.store.close()


def test_a_restart_keeps_versions_staleness_and_what_was_accepted(
    asynchronous: PlanMaker, tmp_path: Path
) -> None:
    """The same as above with a new process between any two events, and sums in files: the same
    model bit for bit."""
    models = []
    for restarts in (False, True):
        plan = msgspec.structs.replace(
            asynchronous(round__goal=3), data_dir=tmp_path / f"restarts-{restarts}"
        )
        fleet = Fleet(plan)
        tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
        order = [("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 4.0), ("b", 5.0), ("a", 6.0), ("b", 7.0)]
        for device, value in order:
            if restarts:
                fleet.store.close()
                fleet = Fleet(plan)
                assert fleet.run.resume(NOW) == []
                fleet.check_in("a", "b", "c")
            held = fleet.run.engine.leases[device]
            version = fleet.run.engine.book.terms[device].version
            if device in tasks:
                assert (tasks[device].task, tasks[device].version) == (held, version)
            tasks |= {
                lease.device: lease
                for lease in leases(fleet.report(tasks[device], update_of(value)))
            }
        models.append(fleet.run.models.newest.model.tobytes())
        assert fleet.run.engine.version == 2
        assert len(fleet.run.engine.accepted) == 1
        fleet.store.close()
    assert models[0] == models[1]


def test_an_update_that_comes_during_a_commit_counts_for_the_next_round(
    asynchronous: PlanMaker,
) -> None:
    """As where another thread makes the model: the report is durable at once, and counts when the
    next round opens."""
    plan = asynchronous(round__concurrency=4)
    fleet = Fleet(plan)
    run = fleet.run
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c", "d"))}
    fleet.report(tasks["a"], update_of(1.0))
    fleet.save_update(tasks["b"], update_of(2.0))
    (commit,) = run.record(run.engine.count_report("b", tasks["b"].task, 0.0), NOW)
    assert isinstance(commit, Commit)
    run.begin_commit(commit, NOW)
    step = run.work.next_work()
    assert step is not None
    work = step.work()
    fleet.save_update(tasks["c"], update_of(4.0), add=False)
    assert run.record(run.engine.count_report("c", tasks["c"].task, 0.0), NOW) == []
    assert run.engine.has_counted("c", tasks["c"].task)
    assert run.work.next_work() is None, "it is not added to the round that is being committed"

    fleet.store.close()  # killed before the commit is recorded: the next process makes it again
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert fleet.run.engine.version == 1
    assert fleet.run.engine.accepted == {tasks["c"].task: "c"}
    assert fleet.run.reports.round.staleness() == [1]
    (lease,) = (row for row in leases(fleet.check_in("d")) if row.device == "d")
    assert (lease.task, lease.version, lease.again) == (tasks["d"].task, 0, True)
    fleet.report(tasks["d"], update_of(8.0))
    fleet.store.close()
    assert change(plan, 2) - change(plan, 1) == pytest.approx((HALF * 4 + HALF * 8) / 2, abs=1e-6)
    assert work is not None


def test_a_task_that_would_be_too_stale_is_cancelled_by_name(asynchronous: PlanMaker) -> None:
    plan = asynchronous(round__goal=1, staleness__max=1)
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b"))}
    (lease,) = leases(fleet.report(tasks["a"], update_of(1.0)))
    commands = fleet.report(lease, update_of(1.0))
    (cancel,) = (command for command in commands if isinstance(command, CancelTask))
    assert (cancel.device, cancel.code) == ("b", Code.STALE_ROUND)
    assert (
        cancel.text
        == f"task {tasks['b'].task} began from a model 2 versions ago; staleness.max is 1"
    )
    assert [row.state for row in read_tasks(plan.data_dir)[1] if row.task == tasks["b"].task] == [
        "stale"
    ]
    with pytest.raises(ProtocolError) as caught:
        fleet.run.engine.announce("b", tasks["b"].task, 1, 0.0)
    assert caught.value.code is Code.NOT_WANTED
    assert "(stale)" in caught.value.text
    fleet.store.close()


def test_a_lost_device_s_update_counts_with_its_staleness_when_it_is_back(
    asynchronous: PlanMaker,
) -> None:
    """Two commits and a restart later, with all slots taken."""
    plan = asynchronous(round__goal=1, round__concurrency=2)
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b"))}
    fleet.run.record(fleet.run.engine.disconnect("b", 0.0), NOW)
    commands = fleet.run.record(fleet.run.engine.tick(fleet.run.engine.settings.grace), NOW)
    assert not commands
    for _ in range(2):
        (tasks["a"],) = leases(fleet.report(tasks["a"], update_of(1.0)))
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    fleet.check_in("a", "c")
    assert len(fleet.run.engine.leases) == 2
    fleet.carry_out(fleet.run.engine.check_in("b", tasks["b"].task, 0.0))
    fleet.carry_out(fleet.run.engine.announce("b", tasks["b"].task, tasks["b"].round, 0.0))
    assert fleet.run.engine.report_terms("b").staleness == 2
    fleet.report(tasks["b"], update_of(1.0))
    assert read_status(plan.data_dir).rounds[-1].summary["staleness"]["max"] == 2
    fleet.store.close()


def test_tasks_end_by_their_own_time(asynchronous: PlanMaker) -> None:
    fleet = Fleet(asynchronous(round__deadline=60.0, round__stall=100.0))
    (lease,) = leases(fleet.check_in("a"))
    assert lease.deadline == 60.0
    ended, cancel = fleet.run.engine.tick(60.0)[:2]
    assert isinstance(ended, Ended)
    assert ended.cause == "late"
    assert isinstance(cancel, CancelTask)
    assert cancel.code is Code.ROUND_OVER
    assert fleet.run.engine.phase is Phase.OPEN, (
        "the round goes on without its buffer's two updates"
    )
    fleet.store.close()


def test_no_device_has_more_than_its_share_of_a_buffer(asynchronous: PlanMaker) -> None:
    fleet = Fleet(asynchronous(round__goal=4, round__max_share=0.5))
    (lease,) = leases(fleet.check_in("a"))
    (lease,) = leases(fleet.report(lease, update_of(1.0)))
    assert leases(fleet.report(lease, update_of(1.0))) == []
    (lease,) = leases(fleet.check_in("b"))
    (lease,) = leases(fleet.report(lease, update_of(1.0)))
    assert {row.device for row in leases(fleet.report(lease, update_of(1.0)))} == {"a", "b"}, (
        "the next buffer"
    )
    fleet.store.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_updates_weigh_by_the_inverse_of_how_many_of_their_device_count(
    asynchronous: PlanMaker, restarts: bool
) -> None:
    """By hand: a has both updates of the first buffer. In the second its third weighs a third of
    b's first."""
    plan = asynchronous(round__weighting="inverse-participation", staleness__function="constant")
    fleet = Fleet(plan)

    def again(device: str) -> Assign:
        """The device's task, which it gets again after a restart."""
        nonlocal fleet
        if restarts:
            fleet.store.close()
            fleet = Fleet(plan)
            fleet.run.resume(NOW)
            (lease,) = leases(fleet.check_in(device))
            return lease
        return tasks[device]

    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b"))}
    (tasks["a"],) = leases(fleet.report(tasks["a"], update_of(1.0)))
    for device, value in (("a", 2.0), ("a", 16.0), ("b", 4.0)):
        lease = again(device)
        tasks |= {lease.device: lease for lease in leases(fleet.report(lease, update_of(value)))}
    fleet.store.close()
    assert change(plan, 1) == pytest.approx((1 + 2) / 2, abs=1e-6)
    assert change(plan, 2) - change(plan, 1) == pytest.approx((16 / 3 + 4) / (1 / 3 + 1), rel=1e-5)


def test_a_finished_run_goes_on_with_what_was_under_way(asynchronous: PlanMaker) -> None:
    plan = asynchronous(stop__rounds=1)
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
    fleet.report(tasks["a"], update_of(1.0))
    (finish,) = fleet.report(tasks["b"], update_of(1.0))
    assert isinstance(finish, Finish)
    assert not fleet.run.engine.takes_report("c", tasks["c"].task)
    assert fleet.run.engine.tick(1e6) == []
    fleet.store.close()
    fleet = Fleet(asynchronous(stop__rounds=2))
    fleet.run.resume(NOW)
    assert fleet.run.engine.leases["c"] == tasks["c"].task
    fleet.store.close()


def test_a_sum_that_is_saved_leaves_out_what_came_early(
    asynchronous: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 1)
    plan = asynchronous(round__goal=2, round__concurrency=4)
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c", "d"))}
    order = ["a", "b", "c", "d"]
    for device in order:
        fleet.save_update(tasks[device], update_of(float(ord(device))), add=False)
        commands = fleet.run.record(
            fleet.run.engine.count_report(device, tasks[device].task, 0.0), NOW
        )
        for command in commands:
            if isinstance(command, Commit):
                fleet.run.begin_commit(command, NOW)
    heard = fleet.run.work.do_work(NOW)
    while commits := [command for command in heard if isinstance(command, Commit)]:
        heard = fleet.run.commit(commits[0], NOW)
    fleet.store.close()
    assert change(plan, 2) - change(plan, 1) == pytest.approx(
        HALF * (ord("c") + ord("d")) / 2, abs=1e-4
    )


def test_a_late_update_is_carried_into_the_next_round(make_plan: PlanMaker) -> None:
    """By hand: c is late for round 1, and counts in round 2 beside a with 1 / sqrt(2) of its ten
    examples."""
    plan = make_plan(round__goal=2, round__over_selection=1.5, round__late="carry")
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
    fleet.report(tasks["a"], update_of(1.0))
    second = {lease.device: lease for lease in leases(fleet.report(tasks["b"], update_of(2.0)))}
    assert "c" not in second
    assert set(fleet.run.engine.leases) == {"a", "b", "c"}
    fleet.report(tasks["c"], update_of(4.0))
    fleet.report(second["a"], update_of(8.0))
    fleet.store.close()
    stale = multiplier(10, 1 / sqrt(2))
    assert change(plan, 2) - change(plan, 1) == pytest.approx((stale * 4 + 10 * 8) / 20, abs=1e-6)


def test_a_late_update_counts_while_the_next_round_gathers(make_plan: PlanMaker) -> None:
    """After the deadline too few devices are there for a round; the late report is safe, and counts
    when one opens."""
    settings = {
        "round__goal": 2,
        "round__minimum": 2,
        "round__deadline": 60.0,
        "round__late": "carry",
        "round__stall": 100.0,
    }
    plan = make_plan(**settings, round__over_selection=1.5)
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
    engine = fleet.run.engine
    fleet.report(tasks["a"], update_of(1.0))
    for device in "ab":
        fleet.run.record(engine.disconnect(device, 50.0), Clocks(50.0, 1050.0))
    fleet.carry_out(engine.tick(55.0), Clocks(55.0, 1055.0))
    fleet.carry_out(engine.tick(60.0), Clocks(60.0, 1060.0))  # abandoned, with one report of two
    assert set(engine.leases) == {"c"}
    assert fleet.run.engine.phase is Phase.GATHERING
    fleet.save_update(tasks["c"], update_of(4.0))
    fleet.carry_out(engine.count_report("c", tasks["c"].task, 65.0), Clocks(65.0, 1065.0))
    assert engine.book.early == {tasks["c"].task: "c"}
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(Clocks(0.0, 1070.0))
    assert fleet.run.engine.book.early == {tasks["c"].task: "c"}
    (lease,) = leases(fleet.check_in("d"))
    assert fleet.run.engine.accepted == {tasks["c"].task: "c"}
    fleet.report(lease, update_of(2.0))
    fleet.store.close()
    assert change(plan, 1) == pytest.approx(3.0)
    assert np.all(read_model(plan.data_dir)[1] != read_model(plan.data_dir, 0)[1])


def test_a_round_that_is_given_up_takes_nothing_of_the_next_along(asynchronous: PlanMaker) -> None:
    """Somebody removed the damaged sum of a round while it was committed. What came early counts
    for the next round."""
    plan = asynchronous(round__concurrency=4)
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c"))}
    for device in "abc":
        fleet.save_update(tasks[device], update_of(1.0), add=False)
        fleet.run.record(fleet.run.engine.count_report(device, tasks[device].task, 0.0), NOW)
    fleet.store.close()
    shutil.rmtree(plan.data_dir / "sums")
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert (fleet.run.engine.version, fleet.run.engine.round) == (0, 2)
    assert fleet.run.engine.accepted == {tasks["c"].task: "c"}
    (lease,) = (row for row in leases(fleet.check_in("d")) if row.device == "d")
    fleet.report(lease, update_of(1.0))
    fleet.store.close()
    assert [row.outcome for row in read_status(plan.data_dir).rounds] == ["abandoned", "committed"]
