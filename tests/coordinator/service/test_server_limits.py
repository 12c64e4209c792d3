"""Devices of a private run over real sockets on 127.0.0.1: who took part lately, or as often as it
may, is told so, and is given no task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fleetlearn_protocol.messages import CheckIn, Welcome
from peers import Peer, PlanMaker, fleet, update_of

PRIVATE: dict[str, Any] = {
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 10_000,
    "privacy__clip": 1.0,
    "round__goal": 1,
    "round__minimum": 1,
}
Join = Callable[..., Awaitable[Peer]]


async def welcomed(join: Join, name: str) -> tuple[Peer, Welcome]:
    peer = await join(name, check_in=False)
    await peer.send(CheckIn(1, name, 10))
    return peer, await peer.expect(Welcome)


def test_who_took_part_as_often_as_it_may_is_told_so(make_plan: PlanMaker) -> None:
    async def check() -> None:
        plan = make_plan("dp-fedavg", **PRIVATE, privacy__participations=1)
        async with asyncio.timeout(30), fleet(plan) as (coordinator, join):
            a, welcome = await welcomed(join, "a")
            assert welcome.ineligible == ""
            await a.do_round(update_of(0.1))
            _, welcome = await welcomed(join, "a")
            assert welcome.ineligible == (
                "the device took part once, as often as the plan's [privacy] allows "
                "(privacy.participations)"
            )
            assert coordinator.live()["waits_for"] == (
                "a round needs 1 device, and none can take part; of the connected devices, 1 took "
                "part as often as they may (privacy.participations = 1). Others have to connect"
            )
            b, welcome = await welcomed(join, "b")
            assert welcome.ineligible == ""
            await b.do_round(update_of(0.1))
            assert coordinator.engine.version == 2

    asyncio.run(check())


def test_who_took_part_lately_is_told_when_it_may_again(make_plan: PlanMaker) -> None:
    async def check() -> None:
        plan = make_plan("dp-fedavg", **PRIVATE, privacy__separation=2)
        async with asyncio.timeout(30), fleet(plan) as (coordinator, join):
            a, _ = await welcomed(join, "a")
            await a.do_round(update_of(0.1))
            a, welcome = await welcomed(join, "a")
            assert welcome.ineligible == ""
            assert welcome.waits == (
                "the device took part in release 1, and may again from release 3 on "
                "(privacy.separation = 2); the next is release 2"
            )
            b, _ = await welcomed(join, "b")
            await b.do_round(update_of(0.1))
            await a.do_round(update_of(0.1))  # release 3
            assert coordinator.engine.version == 3

    asyncio.run(check())
