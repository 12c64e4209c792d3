"""A real server whose rounds want a share of the devices: the fleet grows and shrinks, and a
restart in the middle of a round changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.results.run_results import RunResults
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.live_run import LiveRun
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.views.run_views import RunPlace, glance, run_view
from peers import Peer, PlanMaker, fleet, update_of

SHARE: dict[str, Any] = {
    "round__goal": 5,
    "round__goal_share": 0.5,
    "round__minimum": 1,
    "round__gather": 0.3,
    "round__over_selection": 1,
    "stop__rounds": 4,
}


async def report(coordinator: RunServer, peers: dict[str, Peer], most: int) -> None:
    """Let this many of the devices with tasks report."""
    for device in sorted(coordinator.engine.leases)[:most]:
        await peers[device].do_round(update_of(len(device)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_rounds_follow_the_fleet_and_a_restart_keeps_the_goal(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    plan = make_plan(**SHARE)
    place = RunPlace("test", plan.data_dir)

    async def grow() -> None:
        async with fleet(plan) as (coordinator, join):
            peers = {name: await join(name) for name in "abcd"}
            await until(lambda: coordinator.engine.phase is Phase.OPEN)
            assert coordinator.live()["goal"] == 2
            assert glance(place).goal == 2
            state = LiveRun("test", coordinator).state()
            assert (state["goal"], state["about"]["goal_share"]) == (2, 0.5)
            await report(coordinator, peers, 1)
            for name in "efgh":  # the open round keeps its goal
                peers[name] = await join(name)
            assert coordinator.engine.settings.goal == 2
            await report(coordinator, peers, 1)
            await until(lambda: coordinator.engine.round == 2)
            assert coordinator.engine.settings.goal == 4
            await report(coordinator, peers, 1)  # and then this process ends

    async def shrink() -> None:
        """Another process, with fewer devices."""
        async with fleet(plan) as (coordinator, join):
            engine = coordinator.engine
            assert (engine.round, engine.settings.goal) == (2, 4), "as it was opened"
            assert glance(place).goal == 4
            held = dict(engine.leases)
            peers = {name: await join(name) for name in held}
            await report(coordinator, peers, 3)
            await until(lambda: engine.round == 3)
            assert engine.settings.goal == 2, "three devices are there"
            await report(coordinator, peers, 2)
            await until(lambda: engine.round == 4)
            await report(coordinator, peers, 2)
            await asyncio.wait_for(coordinator.done, 10)

    asyncio.run(grow())
    asyncio.run(shrink())
    rounds = read_status(plan.data_dir).rounds
    assert [row.summary["goal"] for row in rounds] == [2, 4, 2, 2]
    assert [row.summary["reports"] for row in rounds] == [2, 4, 2, 2]
    assert [row.goal for row in run_view(place).rounds] == [2, 4, 2, 2]
    assert [row["goal"] for row in RunResults.load(plan.data_dir).rounds().rows] == [2, 4, 2, 2]
    said = "round 2 begins: it wants the reports of 4, and 8 devices are there"
    assert caplog.messages.count(said) == 1, "a restart opens no round again"
    assert any("round 1 committed: 2 of 2 reports" in line for line in caplog.messages)
