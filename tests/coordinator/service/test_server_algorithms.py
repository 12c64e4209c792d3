"""Tasks of several vectors and reports of several parts, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_coordinator import Plan
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    CONTROL,
    UPDATE,
    Accepted,
    CheckIn,
    Grant,
    Held,
    Task,
    Uploaded,
    Welcome,
)
from fleetlearn_protocol.vector import Vector
from peers import BUFFERED, PERSONAL, SIZE, Peer, fleet, plan_text, report_of, write_personal_bundle

P, CHUNK = SIZE - PERSONAL, 2**17


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


async def report(peer: Peer, task: Task, **vectors: Vector) -> None:
    parts = tuple(FLOAT32.part(name, vectors[name].tobytes()) for name in task.parts)
    await peer.send(report_of(task, vectors[UPDATE], parts=parts))
    grant: Grant = await peer.expect(Grant)
    begin = 0
    for part in parts:
        content = vectors[part.name].tobytes()
        for offset in range(0, part.size, CHUNK):
            await peer.send(
                pack_chunk(grant.transfer, begin + offset, content[offset : offset + CHUNK])
            )
        begin += part.size
    await peer.send(Uploaded(task.task))
    await peer.expect(Accepted)


def test_a_control_variate_that_changed_is_served_where_the_model_did_not_change(
    tmp_path: Path,
) -> None:
    """Near the optimum the mean of the updates rounds to nothing before c does."""

    async def test() -> None:
        bundle = write_personal_bundle(tmp_path / "scaffold.bundle")
        settings = {"round__goal": 1, "server__devices": 1, "local__lr": 0.5}
        plan = Plan.parse(plan_text(bundle, tmp_path / "run", "scaffold", **settings), tmp_path)
        async with fleet(plan) as (_, join):
            peer: Peer = await join("a", check_in=False)
            await peer.send(CheckIn(1, "a", 10, algorithms=("scaffold",)))
            await peer.expect(Welcome)
            first = await peer.task()
            assert first.kept is None
            zeros, ones = np.zeros(P, np.float32), np.ones(P, np.float32)
            await report(peer, first, update=zeros, control=ones)
            second = await peer.task()
            assert second.kept == first.task
            assert second.vector("model") == first.vector("model")
            assert await peer.fetch(second.vector(CONTROL).sha256) == ones.tobytes()

    run(test())


def test_a_device_that_wants_its_old_task_again_does_not_end_the_coordinator(
    tmp_path: Path,
) -> None:
    """It was lost, says that it has done its task, whose model's file is gone by now, and then that
    it has not."""

    async def test() -> None:
        bundle = write_personal_bundle(tmp_path / "scaffold.bundle")
        settings = BUFFERED | {
            "recipe": "scaffold",
            "round__participation": "asynchronous",
            "round__goal": 1,
        }
        settings |= {"server__devices": 5, "local__lr": 0.5, "round__grace": 0.0}
        plan = Plan.parse(plan_text(bundle, tmp_path / "run", **settings), tmp_path)
        update = np.ones(P, np.float32)
        async with fleet(plan) as (coordinator, join):

            async def connect(name: str, held: Held | None = None) -> Peer:
                peer: Peer = await join(name, check_in=False)
                await peer.send(CheckIn(1, name, 10, algorithms=("scaffold",), held=held))
                await peer.expect(Welcome)
                return peer

            a = await connect("a")
            task = await a.task()
            await report(a, task, update=update, control=update)
            task = await a.task()
            b = await connect("b")
            lost = await b.task()
            b.connection.transport.abort()
            while "b" in coordinator.engine.leases:
                await asyncio.sleep(0.01)
            for _ in range(5):
                await report(a, task, update=update, control=update)
                task = await a.task()
            await connect("b", Held(lost.task, lost.round))
            again = await (await connect("b")).task()
            assert again.task == lost.task
            assert again.vector("model") == lost.vector("model")
            await report(a, task, update=update, control=update)

    run(test())
