"""Events: once each, after they are durable, to everybody who watches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from answering import Fleet, leases
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.rounds.commands import Assign, Ended, Opened
from fleetlearn_coordinator.service.observers import (
    DeviceJoined,
    DeviceLeft,
    MessageRefused,
    Observers,
    RoundEnded,
    RunEvent,
    TaskFailed,
    UpdateSaved,
)
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_coordinator.service.training_run.run import Clocks
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import Failed, Refused
from peers import PlanMaker, fleet, report_of, update_of


def test_each_event_comes_once_after_it_is_durable(make_plan: PlanMaker) -> None:
    """The observer reads the data directory from outside: what an event says is there already."""
    plan = make_plan(round__goal=2, round__minimum=2, stop__rounds=1)
    run = Fleet(plan)
    seen: list[RunEvent] = []

    def look(events: Sequence[RunEvent]) -> None:
        seen.extend(events)
        for event in events:
            number, tasks = read_tasks(plan.data_dir, 1)
            states = {row.task: row.state for row in tasks}
            match event:
                case Opened(opened):
                    assert number == opened
                case Assign(_, task):
                    assert states[task] == "assigned"
                case UpdateSaved(_, report):
                    assert states[report.task] == "accepted"
                case RoundEnded(ended, outcome, version, summary):
                    status = read_status(plan.data_dir)
                    assert status.version == version
                    (row,) = status.rounds
                    assert (row.number, row.outcome, row.summary) == (ended, outcome, summary)

    run.run.observers.add(look)
    first, second = leases(run.check_in("a", "b"))
    for lease in (first, second):
        run.report(lease, update_of(1.0))
    run.store.close()
    assert [type(event).__name__ for event in seen] == [
        *("Opened", "Assign", "Assign", "UpdateSaved", "UpdateSaved"),
        *("Commit", "RoundEnded", "Finish"),
    ]
    saved = [event for event in seen if isinstance(event, UpdateSaved)]
    assert [(event.device, event.round, event.staleness) for event in saved] == [
        (first.device, 1, 0),
        (second.device, 1, 0),
    ]


def test_an_abandoned_round_comes_with_its_causes(make_plan: PlanMaker) -> None:
    run = Fleet(make_plan(round__goal=2, round__minimum=2, round__deadline=60.0))
    seen: list[RunEvent] = []
    lease, _ = leases(run.check_in("a", "b"))
    run.save_update(lease, update_of(1.0))
    run.carry_out(run.run.engine.count_report(lease.device, lease.task, 0.0))
    run.run.observers.add(seen.extend)
    run.carry_out(run.run.engine.tick(60.0), Clocks(60.0, 1060.0))
    run.store.close()
    assert [(event.device, event.cause) for event in seen if isinstance(event, Ended)] == [
        ("b", "stalled")
    ]
    (ended,) = (event for event in seen if isinstance(event, RoundEnded))
    assert (ended.number, ended.outcome, ended.version) == (1, "abandoned", 0)
    assert ended.summary["dropped"] == {"stalled": 1}
    assert ended.why == "1 reports at the deadline, 2 are the minimum"


def test_an_observer_that_fails_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """The others are, and the run goes on."""
    told: list[RunEvent] = []
    observers, calls = Observers(), 0

    def broken(events: Sequence[RunEvent]) -> None:
        nonlocal calls
        calls += 1
        raise OSError("the page is gone")

    observers.add(broken)
    observers.add(told.extend)
    observers.tell([])
    for number in (1, 2):
        observers.tell([Opened(number)])
    assert calls == 1
    assert told == [Opened(1), Opened(2)]
    (text,) = caplog.messages
    assert text.startswith("an observer failed and is told nothing more; the run goes on: ")


def test_a_run_whose_observer_fails_commits_its_round(make_plan: PlanMaker) -> None:
    run = Fleet(make_plan(round__goal=1, round__minimum=1))

    def broken(events: Sequence[RunEvent]) -> None:
        raise ZeroDivisionError

    run.run.observers.add(broken)
    (lease,) = leases(run.check_in("a"))
    run.report(lease, update_of(1.0))
    assert run.run.engine.version == 1
    run.store.close()


def test_what_is_refused_and_what_fails_is_told(make_plan: PlanMaker) -> None:
    """Over a socket: a report of another task, then a failure."""
    seen: list[RunEvent] = []

    async def test() -> None:
        async with asyncio.timeout(30):
            async with fleet(make_plan()) as (coordinator, join):
                coordinator.run.observers.add(seen.extend)
                peer = await join("roof-7")
                task = await peer.task()
                other = report_of(task, update_of(1.0), task=f"{task.task}9")
                await peer.send(other)
                assert (await peer.expect(Refused)).code == Code.UNKNOWN_TASK
                await peer.send(Failed(task.task, "diverged", "loss is <nan> at step 3"))
                while not any(isinstance(event, Ended) for event in seen):
                    await asyncio.sleep(0.01)
                await peer.connection.close()
                while not any(isinstance(event, DeviceLeft) for event in seen):
                    await asyncio.sleep(0.01)

    asyncio.run(test())
    (refused,) = (event for event in seen if isinstance(event, MessageRefused))
    assert (refused.device, refused.code) == ("roof-7", Code.UNKNOWN_TASK)
    assert "was not given to device roof-7" in refused.text
    (ended,) = (event for event in seen if isinstance(event, Ended))
    assert (ended.device, ended.cause) == ("roof-7", "failed: diverged")
    (joined,) = (event for event in seen if isinstance(event, DeviceJoined))
    assert joined.check_in.device == "roof-7"
    (failed,) = (event for event in seen if isinstance(event, TaskFailed))
    assert failed == ("roof-7", ended.task, "failed: diverged", "loss is <nan> at step 3")
    assert [event for event in seen if isinstance(event, DeviceLeft)] == [DeviceLeft("roof-7")]
