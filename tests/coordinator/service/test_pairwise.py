"""Pairwise masks through a run's server and real sockets: what each device is asked, which answers
count, who is left out by name, and what a restart asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_device.driver.signatures import public_key_of
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.training.pairwise_sessions import PairwiseSessions
from fleetlearn_protocol.exchanges import content_of, fields_of
from fleetlearn_protocol.messages import Accepted, CheckIn, Question, Refused, Reply, Task, Welcome
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE, PairwiseAnswer
from fleetlearn_protocol.secure.roster import RosterError
from peers import Peer, PlanMaker, fleet

NAMES = "abcde"


SETTINGS: dict[str, Any] = {
    "secure__mode": "pairwise",
    "secure__clip": 1.0,
    "secure__dropouts": 0.0,
    "round__goal": 5,
    "round__minimum": 3,
    "round__gather": 20.0,
    "round__grace": 0.05,
    "local__evaluate": False,
}


@pytest.fixture
def plan(make_plan: PlanMaker) -> Plan:
    return make_plan(**SETTINGS)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


class Fleet:
    """Peers with the sessions of real devices."""

    def __init__(self, folder: Path) -> None:
        self.sessions = {}
        for name in NAMES:
            (folder / name).mkdir()
            self.sessions[name] = PairwiseSessions(name, folder / name)
        self.peers: dict[str, Peer] = {}

    async def join(self, join: Any, *names: str) -> None:
        for name in names or NAMES:
            peer = self.peers[name] = await join(name, check_in=False)
            await peer.send(
                CheckIn(1, name, 10, exchanges=(PAIRWISE,), privacy=("clip", "secure"),
                        encodings=("float32", "masked"))
            )  # fmt: skip
            await peer.expect(Welcome)

    async def asked(self, *names: str) -> dict[str, Question]:
        return {name: await self.peers[name].expect(Question) for name in names or NAMES}

    async def answer(self, asked: dict[str, Question]) -> None:
        for name, question in asked.items():
            found = self.sessions[name].answer(question)
            await self.say(name, question, found)
            assert await self.peers[name].receive() == Accepted(question.task)

    async def say(self, name: str, question: Question, answer: PairwiseAnswer) -> None:
        await self.peers[name].send(Reply(question.task, PAIRWISE, fields_of(answer)))


def test_a_device_that_cannot_agree_on_masks_is_told_so(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            peer = await join("old", check_in=False)
            await peer.send(CheckIn(1, "old", 10, privacy=("clip", "secure")))
            welcome = await peer.expect(Welcome)
            assert "devices agree on masks with each other" in welcome.ineligible
            coordinator.end()

    run(test())


def test_who_answers_wrong_is_left_out_by_name_and_nobody_else(plan: Plan, tmp_path: Path) -> None:
    async def test() -> None:
        devices = Fleet(tmp_path)
        async with fleet(plan) as (coordinator, join):
            await devices.join(join)
            asked = await devices.asked()
            wrong = asked.pop("e")
            await devices.say("e", wrong, PairwiseAnswer(keys="00" * 64))
            refused = await devices.peers["e"].expect(Refused)
            assert refused.text.endswith("pairwise 1, phase 1: e: a key came twice: each is of one "
                                         "device and one use")  # fmt: skip
            await devices.answer(asked)
            asked = await devices.asked(*"abcd")
            lacking = devices.sessions["d"].answer(asked["d"])
            some = dict(list(lacking.shares.items())[:2])
            await devices.say("d", asked.pop("d"), PairwiseAnswer(shares=some))
            refused = await devices.peers["d"].expect(Refused)
            assert "phase 2: d: shares for 2 devices came; its 3 neighbours" in refused.text
            await devices.answer(asked)
            for name in "abc":
                task = await devices.peers[name].expect(Task)
                assert task.secure is not None
                assert {*task.secure.shares} == {*"abc"} - {name}
            causes = coordinator.engine.exchanges[PAIRWISE].book.causes()
            assert causes == {"rejected: bad-message": 1}
            coordinator.end()

    run(test())


@pytest.mark.parametrize("phase", [1, 2])
def test_a_restart_asks_the_same_and_nobody_who_has_answered(
    plan: Plan, tmp_path: Path, phase: int
) -> None:
    devices = Fleet(tmp_path)

    async def first() -> Question:
        async with fleet(plan) as (coordinator, join):
            await devices.join(join)
            for number in range(1, phase + 1):
                asked = await devices.asked()
                last = asked.pop("e") if number == phase else None
                await devices.answer(asked)
            coordinator.end()  # as if killed
            assert last is not None
            return last

    async def second(before: Question) -> None:
        async with fleet(plan) as (coordinator, join):
            await devices.join(join)
            asked = await devices.asked("e")
            assert asked["e"].task == before.task
            assert content_of(asked["e"]) == content_of(before)
            await devices.answer(asked)
            if phase == 1:
                await devices.answer(await devices.asked())
            sessions = set()
            for name in NAMES:
                task = await devices.peers[name].expect(Task)
                devices.sessions[name].check(task)
                assert task.secure is not None
                sessions.add(task.secure.session)
            assert len(sessions) == 1
            coordinator.end()

    async def test() -> None:
        await second(await first())

    run(test())


def test_the_coordinators_list_of_devices_keeps_others_out(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    devices = Fleet(tmp_path)
    lines = [f"{name} {public_key_of(device_key(tmp_path / name)).hex()}" for name in "abcd"]
    lines[3] = f"d {'11' * 32}"
    (tmp_path / "roster.txt").write_text("\n".join(lines))
    plan = make_plan(**SETTINGS, secure__roster=str(tmp_path / "roster.txt"))

    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            await devices.join(join)
            asked = await devices.asked()
            for name, text in [("d", "not signed by the key"), ("e", "is not in secure.roster")]:
                question = asked.pop(name)
                await devices.say(name, question, devices.sessions[name].answer(question))
                assert text in (await devices.peers[name].expect(Refused)).text
            await devices.answer(asked)
            asked = await devices.asked(*"abc")
            assert {*content_of(asked["a"]).neighbours} == {"b", "c"}
            coordinator.end()

    run(test())


def test_a_list_that_cannot_be_read_ends_the_start(make_plan: PlanMaker) -> None:
    plan = make_plan(**SETTINGS, secure__roster="/nowhere/roster.txt")

    async def test() -> None:
        with pytest.raises(RosterError, match="the roster cannot be read"):
            async with fleet(plan):
                pass

    run(test())
