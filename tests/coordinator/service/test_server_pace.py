"""Pace steering over real sockets: who is sent away, and what a restart remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.service.serve import SWEEP
from fleetlearn_coordinator.service.status import read_status
from fleetlearn_protocol.messages import Accepted, ComeBack, Held, Task
from peers import Peer, PlanMaker, fleet, report_of, update_of

PACED: dict[str, Any] = {
    "round__goal": 1,
    "round__gather": 0.0,
    "pace__connected": 2,
    "pace__longest": 1000.0,
    "pace__check_ins": 0.5,
}
"""One task at a time, and one device more that waits."""


@pytest.fixture
def plan(make_plan: PlanMaker) -> Plan:
    return make_plan(**PACED)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


async def first_to_leave(*peers: Peer) -> tuple[Peer, ComeBack]:
    """Wait until one of them is told to come back; its connection is closed then."""
    told = {asyncio.ensure_future(peer.receive()): peer for peer in peers}
    done, others = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    await asyncio.wait(others) if others else None
    (one,) = done
    message = one.result()
    assert isinstance(message, ComeBack)
    assert message.reason == "no-task"
    assert await told[one].closed() == 1000
    return told[one], message


def test_a_device_that_is_not_needed_is_told_when_to_come_back(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            a = await join("a")
            task = await a.task()
            b, c = await join("b"), await join("c")
            first, told = await first_to_leave(b, c)
            assert 10.0 <= told.after < 10.1  # a hundredth of the longest wait
            stays = c if first is b else b
            d = await join("d")
            second, told = await first_to_leave(stays, d)
            assert 11.9 < told.after <= 12.1  # the next booking: one in two seconds
            # a had its task, and leaves for the next one.
            assert isinstance(await a.upload(task, update_of(1.0)), Accepted)
            stays = d if second is stays else stays
            assert isinstance(await stays.receive(), Task)
            await join("e")
            assert (await first_to_leave(a))[0] is a
            assert coordinator.engine.pace.present == {stays.name, "e"}

    run(test())


def test_a_device_with_an_update_stays(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (_, join):
            a, b = await join("a"), await join("b")
            task = await a.task()
            a.connection.transport.abort()
            a = await join("a", held=Held(task.task, task.round))
            for name in "cde":
                newcomer = await join(name)
                gone, _ = await first_to_leave(b, newcomer)
                b = newcomer if gone is b else b
            await a.send(report_of(task, update_of(1.0)))
            answer = await a.receive()
            await a.send_update(answer, update_of(1.0))  # type: ignore[arg-type]
            assert isinstance(await a.receive(), Accepted)

    run(test())


def test_the_status_says_who_is_away_and_a_restart_goes_on_with_the_bookings(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (_, join):
            await (await join("a")).task()
            b = await join("b")
            for name in "cdef":
                c = await join(name)
                gone, told = await first_to_leave(b, c)
                b = c if gone is b else b
            while "away" not in (live := read_status(plan.data_dir).live) or live["away"] < 4:
                await asyncio.sleep(SWEEP / 4)
            assert (live["connected"], live["sent_away"]) == (2, 4)
            assert 0 < live["all_back_in"] <= told.after + 2.0
        async with fleet(plan) as (_, join):
            await (await join("a")).expect(Task)
            x, y = await join("x"), await join("y")
            _, later = await first_to_leave(x, y)
            assert later.after > told.after - 10.0, (
                "the times that were given before are not given again"
            )

    run(test())


def test_without_a_plan_for_it_all_stay(make_plan: PlanMaker) -> None:
    async def test() -> None:
        async with fleet(make_plan(round__goal=1)) as (coordinator, join):
            await asyncio.gather(*(join(name) for name in "abcdef"))
            assert len(coordinator.host.devices) == 6
            assert "away" not in coordinator.live()

    run(test())
