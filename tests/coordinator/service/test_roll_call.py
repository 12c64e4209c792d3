"""An exchange of three phases that only tests have, through a run's server and real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import Accepted, CheckIn, Question, Reply, Welcome
from peers import Peer, PlanMaker, fleet
from roll_call import ROLL_CALL, RollCall, closed_phases, register


@pytest.fixture(autouse=True)
def _has_roll_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch.setitem, RollCall(deadline=30.0))


@pytest.fixture
def plan(make_plan: PlanMaker) -> Plan:
    """No round begins: each device is free to answer."""
    return make_plan(round__goal=9, round__minimum=9, round__grace=0.05)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


def request(coordinator: Any) -> None:
    now = coordinator.clock.now()
    coordinator._carry_out(coordinator.engine.request_exchange(ROLL_CALL, now), now)


async def able(join: Any, name: str) -> Peer:
    peer: Peer = await join(name, check_in=False)
    await peer.send(CheckIn(1, name, 10, exchanges=(ROLL_CALL,)))
    await peer.expect(Welcome)
    return peer


async def asked(peers: dict[str, Peer], phase: int) -> dict[str, Question]:
    """The question to each of these devices, of this phase."""
    found = {name: await peer.expect(Question) for name, peer in peers.items()}
    for question in found.values():
        assert (question.kind, question.phase) == (ROLL_CALL, phase)
        assert (question.bundle, question.vectors) == (None, ())
    return found


async def answer(peer: Peer, question: Question, number: int) -> None:
    await peer.send(Reply(question.task, ROLL_CALL, {"number": number}))
    assert await peer.receive() == Accepted(question.task)


def vanish(peers: dict[str, Peer], name: str) -> None:
    peers.pop(name).connection.transport.abort()


def test_devices_vanish_in_each_phase_and_the_others_go_on(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            peers = {name: await able(join, name) for name in "abcd"}
            bystander = await join("z")
            request(coordinator)
            given = await asked(peers, 1)
            assert {content_of(question).who == {} for question in given.values()} == {True}
            vanish(peers, "d")
            for number, (name, peer) in enumerate(peers.items(), 1):
                await answer(peer, given[name], number)
            given = await asked(peers, 2)
            for question in given.values():
                assert content_of(question).who == {"a": 1, "b": 2, "c": 3}
            vanish(peers, "c")
            for name, peer in peers.items():
                await answer(peer, given[name], 6)
            given = await asked(peers, 3)
            vanish(peers, "b")
            await answer(peers["a"], given["a"], 12)
            coordinator.engine.exchanges[ROLL_CALL].deadline = coordinator.clock.now()
            coordinator._set_alarm()
            while coordinator.engine.exchanges[ROLL_CALL].is_open:
                await asyncio.sleep(0)
            assert closed_phases(plan.data_dir) == [
                (1, True, {"a": 1, "b": 2, "c": 3}, {"lost": 1}),
                (2, True, {"a": 6, "b": 6}, {"lost": 1}),
                (3, False, {"a": 12}, {"lost": 1}),
            ]
            assert coordinator.engine.exchanges[ROLL_CALL].able == {"a"}
            assert bystander.connection.close_code is None, "it was asked nothing"
            coordinator.end()

    run(test())


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_phase_goes_on_after_the_coordinator_was_killed(plan: Plan, phase: int) -> None:
    """One of two devices has answered in this phase."""

    async def first() -> str:
        async with fleet(plan) as (coordinator, join):
            peers = {name: await able(join, name) for name in "ab"}
            request(coordinator)
            for number in range(1, phase + 1):
                given = await asked(peers, number)
                await answer(peers["a"], given["a"], number)
                if number < phase:
                    await answer(peers["b"], given["b"], 2 * number)
            coordinator.end()  # as if killed
            return str(given["b"].task)

    async def second(task: str) -> None:
        async with fleet(plan) as (coordinator, join):
            peers = {name: await able(join, name) for name in "ab"}
            given = await asked({"b": peers["b"]}, phase)
            assert given["b"].task == task
            await answer(peers["b"], given["b"], 2 * phase)
            for number in range(phase + 1, 4):
                given = await asked(peers, number)
                who = {"a": number - 1, "b": 2 * (number - 1)}
                assert content_of(given["a"]).who == who
                for name, peer in peers.items():
                    await answer(peer, given[name], number * (1 + (name == "b")))
            closed = [(number, True, {"a": number, "b": 2 * number}, {}) for number in (1, 2, 3)]
            assert closed_phases(plan.data_dir) == closed
            coordinator.end()

    async def test() -> None:
        await second(await first())

    run(test())
