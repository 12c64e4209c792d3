"""Asynchronous rounds over real sockets: which model a task is of, and that it is served while it
is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.service import server
from fleetlearn_protocol.messages import Accepted, Cancel, Grant, Held, Refused, Task
from peers import BUFFERED, SIZE, PlanMaker, fleet, report_of, update_of


@pytest.fixture(params=[server.LARGE_MODEL, 0], ids=["in the loop", "in a thread"])
def plan(
    request: pytest.FixtureRequest, make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    monkeypatch.setattr(server, "LARGE_MODEL", request.param)
    return make_plan(**BUFFERED)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


def served(task: Task) -> str:
    (model,) = task.vectors
    return model.sha256


def test_a_slow_device_fetches_the_model_that_its_task_began_from(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (_, join):
            a, b, c = [await join(name) for name in "abc"]
            first, _, slow = [await peer.task() for peer in (a, b, c)]
            for value in (1.0, 2.0):  # c has not fetched its model yet
                await a.upload(first, update_of(value))
                first = await a.task()
            assert served(first) != served(slow)
            content = np.frombuffer(await c.fetch(served(slow)), np.float32)
            np.testing.assert_array_equal(content, read_model(plan.data_dir, 0)[1])
            assert isinstance(await c.upload(slow, update_of(4.0)), Accepted)
            assert served(await c.task()) == served(first), "its next task is of the newest model"

    run(test())


def test_a_device_that_lost_its_work_gets_the_same_model_again_after_a_restart(plan: Plan) -> None:
    async def test() -> None:
        async with fleet(plan) as (_, join):
            a, b, c = [await join(name) for name in "abc"]
            task, _, slow = [await peer.task() for peer in (a, b, c)]
            for value in (1.0, 2.0):
                await a.upload(task, update_of(value))
                task = await a.task()
        async with fleet(plan) as (coordinator, join):
            c = await join("c")
            again = await c.task()
            assert (again.task, again.seed, served(again)) == (slow.task, slow.seed, served(slow))
            assert len(await c.fetch(served(slow))) == 4 * SIZE
            b = await join("b")
            assert isinstance(await c.upload(again, update_of(1.0)), Accepted)
            assert isinstance(await b.upload(await b.task(), update_of(1.0)), Accepted)
            await c.task()
            await b.task()  # after the commit
            assert coordinator.engine.version == 2

    run(test())


def test_a_held_update_counts_after_its_device_was_lost(make_plan: PlanMaker) -> None:
    async def test() -> None:
        plan = make_plan(**(BUFFERED | {"round__goal": 1, "round__grace": 0.0}))
        async with fleet(plan) as (coordinator, join):
            a, b = [await join(name) for name in "ab"]
            task, held = [await peer.task() for peer in (a, b)]
            b.connection.transport.abort()
            for _ in range(2):
                await a.upload(task, update_of(1.0))
                task = await a.task()
            assert "b" not in coordinator.engine.leases
            report = report_of(held, update_of(4.0))
            b = await join("b", held=Held(held.task, held.round))
            await b.send(report)
            await b.send_update(await b.expect(Grant), update_of(4.0))
            assert isinstance(await b.receive(), Accepted)
            assert coordinator.engine.version == 3

    run(test())


def test_a_task_that_became_too_stale_is_cancelled(make_plan: PlanMaker) -> None:
    async def test() -> None:
        plan = make_plan(**(BUFFERED | {"round__goal": 1, "staleness__max": 0}))
        async with fleet(plan) as (_, join):
            a, b = [await join(name) for name in "ab"]
            task, slow = [await peer.task() for peer in (a, b)]
            await a.upload(task, update_of(1.0))
            cancel = await b.receive()
            assert isinstance(cancel, Cancel)
            assert cancel.task == slow.task
            assert "staleness.max is 0" in cancel.text
            await b.send(report_of(slow, update_of(1.0)))
            answer = await b.receive()
            assert isinstance(answer, Refused)
            assert answer.task == slow.task

    run(test())
