"""Six honest devices beside fifty-four ghosts, and what the server tells the engine of progress,
over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fleetlearn_coordinator.rounds.commands import STALLED
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.manifest import TRAIN
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    Content,
    Fetch,
    Grant,
    Heartbeat,
    Refused,
    Task,
    Uploaded,
    Waiting,
)
from fleetlearn_protocol.messages import decode_from_coordinator as decode
from peers import Peer, PlanMaker, fleet, report_of, update_of

from benchmarks._ghost_attacks import GHOSTS, ghosts_beating, ghosts_lying, ghosts_returning

Attack = Callable[[str, asyncio.Event], Awaitable[None]]
HEARTBEAT = 0.25
COHORT = 8
"""Tasks that a round gives at once, for a goal of six. Tasks with larger numbers replace others."""


async def work(peer: Peer) -> None:
    """An honest device, for ever: each task is reported at once."""
    update, task = update_of(1.0), None
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT / 2):
                message = await peer.connection.recv()
        except TimeoutError:
            await peer.send(Heartbeat())
            continue
        match decode(message) if isinstance(message, str) else None:
            case Task() as task:
                await peer.send(report_of(task, update))
            case Grant() as grant:
                await peer.send_update(grant, update)


@pytest.mark.parametrize(
    ("attack", "deadline"),
    [
        pytest.param(ghosts_beating, 20.0, id="beating"),
        pytest.param(ghosts_returning, 20.0, id="returning", marks=pytest.mark.slow),
        pytest.param(ghosts_lying, 1.0, id="lying", marks=pytest.mark.slow),
    ],
)
def test_rounds_go_on_beside_ghosts(make_plan: PlanMaker, attack: Attack, deadline: float) -> None:
    """After the first few rounds, the six that a round needs are honest devices among those that
    get its first tasks. So it takes as long as without ghosts. The first few take their whole
    deadline, or a stall.

    On a busy machine an honest device may stall too, and is then as far behind as the ghosts for
    some rounds: more than half of the last ones count. Where ghosts held up rounds, none would be
    so."""
    plan = make_plan(
        round__goal=6,
        round__over_selection=1.3,
        round__minimum=3,
        round__deadline=deadline,
        round__grace=0.3,
        round__stall=0.5,
        round__gather=0.2,
        local__evaluate=False,
    )

    async def test() -> None:
        stop = asyncio.Event()
        async with asyncio.timeout(60), fleet(plan, heartbeat=HEARTBEAT) as (coordinator, join):
            haunting = asyncio.create_task(attack(coordinator.host.address, stop))
            while len(coordinator.host.devices) < GHOSTS:
                await asyncio.sleep(0.01)
            devices = [
                asyncio.create_task(work(await join(f"honest-{number}"))) for number in range(6)
            ]
            while coordinator.engine.round < 61:
                await asyncio.sleep(0.01)
                assert not any(device.done() for device in devices)
            for device in devices:
                device.cancel()
            stop.set()
            await haunting
            await asyncio.gather(*devices, return_exceptions=True)

    asyncio.run(test())
    unhindered = 0
    for number in range(41, 61):
        accepted = [row for row in read_tasks(plan.data_dir, number)[1] if row.state == "accepted"]
        assert all(row.device.startswith("honest") for row in accepted)
        unhindered += [int(row.task.rpartition("-")[2]) <= COHORT for row in accepted] == [True] * 6
    assert unhindered > 10


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test with a plan in which a task stalls after half a second."""

    def run(make_plan: PlanMaker) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(make_plan(round__stall=0.5, round__minimum=2))

        asyncio.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


async def beat(peer: Peer, seconds: float, message: Callable[[int], Any]) -> None:
    """A heartbeat every 0.1 s, for so long."""
    for number in range(round(seconds / 0.1)):
        await peer.send(message(number))
        await asyncio.sleep(0.1)


@run_async
async def test_a_device_that_beats_and_makes_no_step_loses_its_task(plan: Any) -> None:
    async with fleet(plan, heartbeat=HEARTBEAT) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, _ = await a.task(), await b.task()
        beating = asyncio.create_task(
            beat(b, 2.0, lambda number: Heartbeat(coordinator.engine.leases.get("b"), number))
        )
        await beat(a, 1.0, lambda number: Heartbeat(task.task, 0))
        cancel: Cancel = await a.expect(Cancel)
        assert (cancel.task, cancel.code) == (task.task, Code.NOT_WANTED)
        assert coordinator.engine.causes() == {STALLED: 1}
        assert "b" in coordinator.engine.leases, "its steps rise"
        await a.send(report_of(task, update_of(1.0)))
        assert (await a.expect(Refused)).code is Code.NOT_WANTED
        beating.cancel()


@run_async
async def test_bytes_of_downloads_and_uploads_are_progress(plan: Any) -> None:
    """A device that moves something every 0.3 s, for several times the half second of a stall."""
    async with fleet(plan, heartbeat=HEARTBEAT) as (coordinator, join):
        a, _ = await join("a"), await join("b")
        task, update = await a.task(), update_of(1.0)
        began = coordinator.loop.time()
        bundle, model = coordinator.run.bundle, task.vector("model").sha256
        for sha256 in (bundle.sha256, bundle.manifest.files[TRAIN].sha256, model):
            await asyncio.sleep(0.2)
            await a.fetch(sha256)
        await asyncio.sleep(0.1)
        await a.send(report_of(task, update))
        grant: Grant = await a.expect(Grant)
        for chunk in pack_chunks(grant.transfer, update.tobytes()):
            await asyncio.sleep(0.2)
            await a.send(chunk)
        await a.send(Uploaded(task.task))
        await a.expect(Accepted)
        assert coordinator.loop.time() - began > 1.2
        assert STALLED in coordinator.engine.causes(), "of the other device, which did nothing"


@run_async
async def test_a_task_whose_device_waits_for_the_coordinator_goes_on(plan: Any) -> None:
    """Others have all places. The device waits for a grant, and for a content, for twice the time
    of a stall."""
    async with fleet(plan, heartbeat=HEARTBEAT) as (coordinator, join):
        a, b = await join("a"), await join("b")
        tasks = {"a": await a.task(), "b": await b.task()}
        uploads, downloads = coordinator.host.uploads.places, coordinator.host.downloads.places
        usual = uploads.limit, downloads.limit
        uploads.limit = downloads.limit = 0
        await a.send(report_of(tasks["a"], update_of(1.0)))
        await b.send(Fetch(tasks["b"].vector("model").sha256))
        await b.expect(Waiting)
        await asyncio.gather(*(beat(one, 1.2, lambda number: Heartbeat()) for one in (a, b)))
        assert coordinator.engine.leases == {name: task.task for name, task in tasks.items()}
        uploads.limit, downloads.limit = usual
        coordinator.host.grant()
        await a.send_update(await a.expect(Grant), update_of(1.0))
        await a.expect(Accepted)
        coordinator.host.downloads.go_on(coordinator.loop.time())
        await b.expect(Content)
        assert (await b.expect(Cancel)).code is Code.NOT_WANTED, (
            "once it has what it fetched, it is its turn"
        )
