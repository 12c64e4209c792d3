"""A device whose conditions come and go, on a real socket and with real training."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_device import Device
from fleetlearn_device.conditions.conditions import Conditions
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.storage.state_directory import describe
from fleetlearn_protocol.messages import Accepted, Failed, Report
from scripted import PATIENCE, Line, Scripted, Served, scripted

TIMING = Timing(base=0.02, cap=0.1, paused=0.03)
LONG = {"epochs": 10**6, "deadline": 1e6}


@pytest.fixture(scope="module")
def served(cases: Callable[[str], Any]) -> Served:
    return Served(cases("softmax").path)


@pytest.fixture(scope="module")
def data(cases: Callable[[str], Any]) -> dict[str, Any]:
    case = cases("softmax")
    names = [row.name for row in Served(case.path).bundle.manifest.batch]
    return dict(zip(names, (case.x[:20], case.y[:20]), strict=True))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


class Switch:
    """The condition of a test: a reason, or none."""

    def __init__(self, why: str = "") -> None:
        self.why, self.looks = why, 0

    def __call__(self) -> bool | str:
        self.looks += 1
        return self.why or True


@asynccontextmanager
async def paired(
    served: Served, data: Any, folder: Path, switch: Switch
) -> AsyncIterator[tuple[Scripted, Device]]:
    async with scripted(served.contents) as coordinator:
        device = Device(
            coordinator.url, data, folder, timing=TIMING, conditions=Conditions(check=switch)
        )
        task = asyncio.create_task(device.serve())
        try:
            yield coordinator, device
        finally:
            device.stop()
            async with asyncio.timeout(PATIENCE):
                await task


async def in_training(coordinator: Scripted, served: Served, **options: Any) -> Line:
    line = await coordinator.line()
    await line.check_in(heartbeat=0.02)
    await line.say(served.task("t1", **(LONG | options)))
    fetches = asyncio.create_task(line.answer_fetches(Failed))
    await until(lambda: any(beat.steps > 3 for beat in line.heartbeats))
    fetches.cancel()
    await asyncio.gather(fetches, return_exceptions=True)
    return line


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def test_a_condition_that_ends_in_mid_training_gives_the_task_back_until_it_holds(
    served: Served, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fleetlearn")
    switch = Switch()

    async def test() -> None:
        async with paired(served, data, tmp_path, switch) as (coordinator, _):
            line = await in_training(coordinator, served)
            switch.why = "the pump runs"
            failed = await line.expect(Failed)
            assert (failed.task, failed.code, failed.text) == ("t1", "paused", "the pump runs")
            assert await line.closed() == 1000
            looks = switch.looks
            await until(lambda: switch.looks > looks + 3)
            assert len(coordinator.lines) == 1, "it connects while a condition does not hold"
            assert status(tmp_path)["paused"] == "the pump runs"
            assert status(tmp_path)["paused_by"] == "check"
            switch.why = ""
            again = await coordinator.line()
            await again.check_in()
            await again.say(served.task("t2"))
            await again.accept(await again.answer_fetches(Report))

    asyncio.run(test())
    assert status(tmp_path)["paused"] == ""
    lines = [text for text in caplog.messages if "pause" in text]
    assert lines == ["paused: the pump runs", "no longer paused: all conditions hold"]


def test_with_a_time_budget_what_was_done_is_reported_before_the_device_goes(
    served: Served, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fleetlearn")
    switch = Switch()

    async def test() -> None:
        async with paired(served, data, tmp_path, switch) as (coordinator, _):
            line = await in_training(coordinator, served, time_budget=1e5)
            switch.why = "the pump runs"
            report = await line.expect(Report)
            assert not report.complete
            assert report.steps > 3
            await line.accept(report)
            assert await line.closed() == 1000
        assert describe(tmp_path).pending is None

    asyncio.run(test())
    assert "(partial: the device pauses)" in caplog.text


def test_no_task_is_begun_while_a_condition_does_not_hold(
    served: Served, data: Any, tmp_path: Path
) -> None:
    """It ended since the last heartbeat: the device looks again before it begins."""
    switch = Switch()

    async def test() -> None:
        async with paired(served, data, tmp_path, switch) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in(heartbeat=1e4)
            switch.why = "the pump runs"
            await line.say(served.task("t1"))
            assert (await line.expect(Failed)).code == "paused"
            assert await line.closed() == 1000
            assert line.fetches == []

    asyncio.run(test())


def test_a_device_that_may_not_work_at_its_start_waits_and_can_be_stopped(
    served: Served, data: Any, tmp_path: Path
) -> None:
    switch = Switch("the pump runs")

    async def test() -> None:
        async with paired(served, data, tmp_path, switch) as (coordinator, _):
            await until(lambda: switch.looks > 3)
            assert coordinator.lines == []

    asyncio.run(test())
    assert status(tmp_path)["end"] == "it was stopped"


def test_an_idle_device_leaves_at_its_next_heartbeat(
    served: Served, data: Any, tmp_path: Path
) -> None:
    switch = Switch()

    async def test() -> None:
        async with paired(served, data, tmp_path, switch) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in(heartbeat=0.02)
            switch.why = "the pump runs"
            assert await line.closed() == 1000

    asyncio.run(test())


def test_a_finished_update_is_sent_although_the_device_pauses(
    served: Served, data: Any, tmp_path: Path
) -> None:
    switch = Switch()

    async def test() -> None:
        async with paired(served, data, tmp_path, switch) as (coordinator, _):
            line = await coordinator.line()
            await line.check_in()
            await line.say(served.task("t1"))
            report = await line.answer_fetches(Report)
            switch.why = "the pump runs"
            await until(lambda: status(tmp_path)["paused"] == "the pump runs")
            await line.take_upload(report)
            await line.say(Accepted("t1"))
            assert await line.closed() == 1000

    asyncio.run(test())
