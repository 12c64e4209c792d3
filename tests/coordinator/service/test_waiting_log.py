"""What a run waits for is said after a minute without news, then less and less often."""

from __future__ import annotations

import asyncio
import re

import pytest
from fleetlearn_coordinator.service.waiting_log import WaitingLog
from fleetlearn_protocol.messages import Failed
from peers import PlanMaker, fleet, update_of


def test_too_few_devices_are_named_again_and_again(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")

    async def test() -> None:
        async with fleet(make_plan(round__goal=3, round__minimum=3)) as (coordinator, join):
            waiting = WaitingLog()
            said: list[int] = []
            for second in range(4 * 3600):
                before = len(caplog.messages)
                waiting.look(coordinator, 1000.0 + second)
                said += [second] * (len(caplog.messages) - before)
                if second == 70:
                    await join("a")
                    await join("b")  # no news: still no round can open
            assert said == [60, 180, 420, 900, 1860, 3780, 7380, 10980]

    asyncio.run(asyncio.wait_for(test(), 30))
    lines = [text for text in caplog.messages if "nothing has happened" in text]
    assert lines[0] == (
        "nothing has happened for 1 min: a round needs 3 devices (round.minimum), and none can "
        "take part. No device is connected"
    )
    assert lines[1] == (
        "nothing has happened for 3 min: a round needs 3 devices (round.minimum), and 2 can take "
        "part. 2 devices are connected"
    )


def test_devices_that_may_not_take_part_are_counted(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")

    async def test() -> None:
        async with fleet(make_plan(recipe="fedavg", selection__tags=["roof"])) as (
            coordinator,
            join,
        ):
            peer = await join("a", check_in=False)
            await peer.check_in(tags=("cellar",))
            other = await join("b", check_in=False)
            await other.check_in(trusts=("ab" * 32,), challenge="cd" * 32)
            waiting = WaitingLog()
            for second in (0.0, 61.0):
                waiting.look(coordinator, second)
            assert coordinator.live()["unable"] == 1

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "nothing has happened" in text)
    assert (
        "and none can take part. 2 devices are connected; 1 cannot do this run's tasks, as their "
        "own logs say; "
    ) in line
    assert "1 may not take part (1 by selection.tags)" in line


def test_an_open_round_names_the_devices_that_it_waits_for(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")

    async def test() -> None:
        async with fleet(make_plan(round__goal=3, round__minimum=3)) as (coordinator, join):
            a, b, c = [await join(name) for name in "abc"]
            waiting = WaitingLog()
            await a.do_round(update_of(1.0))
            task = await b.task()
            await c.task()
            c.connection.transport.abort()
            while "c" not in coordinator.engine.book.absent:
                await asyncio.sleep(0.01)
            waiting.look(coordinator, 0.0)
            waiting.look(coordinator, 61.0)
            await b.send(Failed(task.task, "diverged", "nan"))
            while len(coordinator.engine.leases) > 1:
                await asyncio.sleep(0.01)
            waiting.look(coordinator, 62.0)
            waiting.look(coordinator, 63.0)

    asyncio.run(asyncio.wait_for(test(), 30))
    (line,) = (text for text in caplog.messages if "nothing has happened" in text)
    seconds = re.sub(r".*for (\d+) s more.*", r"\1", line)
    assert line == (
        "nothing has happened for 1 min: round 1 has 1 of 3 reports, and waits for b, c (1 of them "
        f"not connected), for {seconds} s more at most. 2 devices are connected"
    )
