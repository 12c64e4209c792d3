"""A gateway that ends sends its devices to others, and loses nothing of what is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.gateways import draining
from fleetlearn_coordinator.gateways.draining import drain
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import Accepted, Grant, Held, Uploaded
from gateways import gateway_fleet
from peers import PlanMaker, plan_text, report_of, update_of, write_test_bundle

SIZE = 2**18


def large_plan(folder: Path) -> Plan:
    """Return the plan of a model whose updates are several chunks."""
    bundle = write_test_bundle(folder / "large.bundle", SIZE)
    return Plan.parse(plan_text(bundle, folder / "run", round__goal=2), folder)


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(60):
                await test(*args, **named)

        asyncio.run(within())

    return run


@run_async
async def test_devices_go_on_at_another_gateway(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=2, stop__rounds=1)
    async with gateway_fleet(plan) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        task, other = await a.task(), await b.task()
        waiting = await behind.join("c", 0)
        await drain(behind.gateways[0], asyncio.Event())
        assert (await a.closed(), await waiting.closed()) == (1001, 1001)
        with pytest.raises(OSError, match=r"111|Connect call failed"):
            await behind.join("d", 0)
        await behind.end_gateway(0)
        again = await behind.join("a", 1, held=Held(task.task, task.round))
        assert isinstance(await again.upload(task, update_of(1.0)), Accepted)
        assert isinstance(await b.upload(other, update_of(1.0)), Accepted)
        assert await behind.server.done == "1 rounds done"


@run_async
async def test_an_upload_comes_to_its_end(tmp_path: Path) -> None:
    async with gateway_fleet(large_plan(tmp_path)) as behind:
        a = await behind.join("a", 0)
        task, update = await a.task(), update_of(1.0, SIZE)
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        first, *others = pack_chunks(grant.transfer, update.tobytes())
        await a.send(first)
        draining = asyncio.create_task(drain(behind.gateways[0], asyncio.Event()))
        for chunk in others:
            await asyncio.sleep(0.1)
            await a.send(chunk)
        await a.send(Uploaded(task.task))
        await a.expect(Accepted)
        assert await a.closed() == 1001
        await draining


@run_async
async def test_a_slow_upload_goes_on_at_another_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "TRANSFER_PATIENCE", 0.2)
    async with gateway_fleet(large_plan(tmp_path)) as behind:
        a = await behind.join("a", 0)
        task, update = await a.task(), update_of(1.0, SIZE)
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        chunks = list(pack_chunks(grant.transfer, update.tobytes()))
        for chunk in chunks[:3]:
            await a.send(chunk)
        await drain(behind.gateways[0], asyncio.Event())
        assert await a.closed() == 1001
        await behind.end_gateway(0)
        again = await behind.join("a", 1, held=Held(task.task, task.round))
        await again.send(report_of(task, update))
        grant = await again.expect(Grant)
        assert grant.offset == 3 * len(update.tobytes()) // len(chunks)
        await again.send_update(grant, update)
        await again.expect(Accepted)


@run_async
async def test_they_are_sent_a_few_at_a_time(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "PACE", 40.0)
    async with gateway_fleet(make_plan(round__goal=20)) as behind:
        devices = [await behind.join(f"device-{number}", 0) for number in range(10)]
        loop, at = asyncio.get_running_loop(), list[float]()

        async def note(device: Any) -> None:
            await device.connection.wait_closed()
            at.append(loop.time())

        noted = asyncio.gather(*map(note, devices))
        await drain(behind.gateways[0], asyncio.Event())
        await noted
        assert at[-1] - at[0] > 0.15


@run_async
async def test_many_leave_faster(make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PACE", 0.1)
    monkeypatch.setattr(draining, "TRANSFER_PATIENCE", 0.5)
    async with gateway_fleet(make_plan(round__goal=20)) as behind:
        devices = [await behind.join(f"device-{number}", 0) for number in range(10)]
        async with asyncio.timeout(draining.DRAIN_TIMEOUT / 2):
            await drain(behind.gateways[0], asyncio.Event())
        assert [await device.closed() for device in devices] == [1001] * 10


@run_async
async def test_who_hurries_it_waits_for_nothing(tmp_path: Path) -> None:
    async with gateway_fleet(large_plan(tmp_path)) as behind:
        a = await behind.join("a", 0)
        task, update = await a.task(), update_of(1.0, SIZE)
        await a.send(report_of(task, update))
        await a.expect(Grant)
        hurried = asyncio.Event()
        draining = asyncio.create_task(drain(behind.gateways[0], hurried))
        await asyncio.sleep(0.1)
        assert not draining.done(), "its upload has begun"
        hurried.set()
        await draining
