"""A run as people see it: by hand, while its coordinator runs, and in older data directories."""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.views import run_views
from fleetlearn_coordinator.service.views.records import RunView, Trend
from fleetlearn_coordinator.service.views.run_views import RunPlace, glance, run_view, turns
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, RoundClosed, RoundOpened, Row
from peers import PlanMaker, fleet, update_of

ARCHIVE = Path(__file__).parents[1] / "data_directories_0_1.tar.xz"


def place_of(plan: Plan) -> RunPlace:
    return RunPlace(plan.name, plan.data_dir, str(plan.file))


def summary(**values: Any) -> dict[str, Any]:
    nothing = {"reports": 0, "partial": 0, "dropped": {}, "metrics": {}, "change": 0.0}
    return {**nothing, "bytes_up": 0, "bytes_down": 0, "seconds": 1.0, **values}


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    """A run's ledger: rounds 1 to 5, of which 3 was abandoned, each a minute long."""
    storage = find_storage(tmp_path)
    with storage.lock():
        ledger = storage.open_ledger(power=False, any_thread=False)
        ledger.create({"plan": '{"round": {"goal": 9}, "stop": {"rounds": 10}}'})
        version = 0
        for number in range(1, 6):
            outcome = "abandoned" if number == 3 else "committed"
            metrics = {} if number == 3 else {"loss": 1.0 / number, "accuracy": 0.1 * number}
            rows: list[Row] = [RoundOpened(number, 60.0 * number)]
            dropped = {"lost": number, "failed: diverged": 1, "rejected: out-of-range": 2}
            if outcome == "committed":
                version += 1
                rows.append(ModelMade(version, f"{version:064d}", number, 60.0 * (number + 1)))
            found = summary(reports=5, dropped={**dropped, "surplus": 3}, metrics=metrics)
            rows.append(RoundClosed(number, outcome, found, 60.0 * (number + 1)))
            ledger.write(rows)
        yield ledger
        ledger.close()


def test_rounds_trend_and_rate_by_hand(ledger: Any, tmp_path: Path) -> None:
    found = run_view(RunPlace("r", tmp_path), last=2)
    assert (found.committed, found.abandoned, found.version, found.goal) == (4, 1, 4, 9)
    assert found.last_model == 360.0
    # the first one began at 60 s, the last one ended at 360 s: 4 in 300 s
    assert found.rounds_per_hour == pytest.approx(48.0)
    assert found.trend["loss"] == Trend([1.0, 0.5, 0.25, 0.2], -0.8)
    assert found.metrics == {"loss": 0.2, "accuracy": 0.5}
    assert [row.number for row in found.rounds] == [4, 5]
    row = found.rounds[-1]
    assert row.lost == {"failed: diverged": 1, "lost": 5}
    assert (row.refused, row.surplus, row.loss) == ({"out-of-range": 2}, 3, 0.2)
    assert (row.opened, row.closed) == (300.0, 360.0)
    assert found.eta is None, "no coordinator runs"
    assert len(run_view(RunPlace("r", tmp_path), last=None).rounds) == 5


def test_when_a_running_coordinator_will_be_through(
    ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"pid": 1, "time": 370.0, "accepted": 2, "leases": 3, "connected": 4, "deadline": 390.0}
    ledger.write([Metadata("live", msgspec.json.encode(live).decode())])
    monkeypatch.setattr("time.time", lambda: 370.0)
    found = run_view(RunPlace("r", tmp_path))
    # 6 models are left, 48 an hour
    assert found.eta == pytest.approx(360.0 + 6 * 75.0)
    assert (found.state, found.running, found.deadline) == ("running", True, 390.0)
    assert (found.accepted, found.leases, found.connected) == (2, 3, 4)
    monkeypatch.setattr("time.time", lambda: 5000.0)
    assert run_view(RunPlace("r", tmp_path)).eta == 5000.0, "it is late, and not in the past"
    ledger.write([Metadata("finished", "10 rounds")])
    assert run_view(RunPlace("r", tmp_path)).eta is None


def test_what_a_coordinator_said_of_an_older_round_is_not_shown(
    ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at itself once in a while; its database has the next round by then."""
    live = {"pid": 1, "time": 370.0, "accepted": 2, "leases": 3, "connected": 4, "deadline": 390.0}
    live |= {"round": 5, "phase": "open", "waits_for": "round 5 waits for a"}
    ledger.write([Metadata("live", msgspec.json.encode(live).decode())])
    monkeypatch.setattr("time.time", lambda: 370.0)
    found = run_view(RunPlace("r", tmp_path))
    assert (found.round, found.waits_for, found.accepted) == (5, "round 5 waits for a", 2)
    ledger.write([RoundOpened(6, 369.0)])
    found = run_view(RunPlace("r", tmp_path))
    assert (found.round, found.waits_for, found.phase) == (6, "", None)
    assert (found.accepted, found.leases, found.deadline) == (0, 0, None)
    assert (found.running, found.connected) == (True, 4)


def test_a_computation_ends_when_it_is_done_so_that_no_end_is_foretold(
    ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"pid": 1, "time": 370.0, "accepted": 2, "leases": 3, "connected": 4, "deadline": 390.0}
    found = summary(reports=5, computation="level 1 of 5")
    ledger.write(
        [
            Metadata("live", msgspec.json.encode(live).decode()),
            RoundOpened(6, 360.0),
            RoundClosed(6, "committed", found, 365.0),
        ]
    )
    monkeypatch.setattr("time.time", lambda: 370.0)
    shown = run_view(RunPlace("r", tmp_path))
    assert (shown.running, shown.eta) == (True, None)


def test_a_run_whose_coordinator_is_down(make_plan: PlanMaker) -> None:
    """What the open round has is in its tasks."""
    plan = make_plan(round__goal=3, round__minimum=1, round__grace=2.0)
    run = Fleet(plan)
    first, second, third = leases(run.check_in("a", "b", "c"))
    run.save_update(first, update_of(1.0))
    run.carry_out(run.run.engine.count_report(first.device, first.task, 0.0))
    run.carry_out(run.run.engine.disconnect(second.device, 1.0))
    run.carry_out(run.run.engine.tick(3.5), Clocks(3.5, 1003.5))
    run.store.close()
    found = glance(place_of(plan))
    assert (found.state, found.running, found.round, found.opened) == ("stopped", False, 1, 1000.0)
    assert (found.accepted, found.leases, found.dropped) == (1, 1, {"lost": 1})
    assert (found.deadline, found.phase, found.goal) == (None, None, 3)
    states = {row.device: row.state for row in turns(place_of(plan)).tasks}
    assert states == {first.device: "accepted", second.device: "lost", third.device: "assigned"}
    assert turns(place_of(plan), 7) == turns(place_of(plan), 7).__class__(7, None, [])


def test_a_run_whose_coordinator_runs(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=2, round__minimum=1)

    async def test() -> RunView:
        async with asyncio.timeout(30), fleet(plan) as (coordinator, join):
            peers = [await join("a"), await join("b")]
            for peer in peers:
                await peer.task()
            while (found := run_view(place_of(plan))).leases < 2 or found.phase is None:
                await asyncio.sleep(0.01)
            assert found.address == coordinator.host.address
            return found

    found = asyncio.run(test())
    assert (found.state, found.phase, found.round, found.goal) == ("running", "open", 1, 2)
    assert found.deadline is not None
    assert found.opened is not None
    assert found.began is not None
    assert found.seen is not None
    assert found.deadline - found.opened == pytest.approx(plan.round.deadline, abs=5.0)
    assert found.connected == 2
    down = run_view(place_of(plan))
    assert (down.state, down.running, down.connected, down.deadline) == ("stopped", False, 0, None)


def test_data_directories_of_the_first_version_are_shown(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    found = run_view(RunPlace("open-round", tmp_path / "open-round"))
    assert (found.version, found.round, found.accepted) == (1, 2, 35)
    assert found.dropped == {"failed: diverged": 1}
    assert (found.goal, found.stop, found.eta) == (None, {}, None)
    done = run_view(RunPlace("finished", tmp_path / "finished"))
    assert (done.state, done.version, [row.number for row in done.rounds]) == (
        "finished",
        2,
        [1, 2],
    )


def test_what_is_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a coordinator's data directory"):
        run_views.glance(RunPlace("r", tmp_path / "nowhere"))
