"""How late the event loop is: one look for all who watch."""

from __future__ import annotations

import asyncio
import time

import pytest
from fleetlearn_coordinator.network import loop_lag
from fleetlearn_coordinator.network.loop_lag import LoopLag


def test_all_who_watch_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "LOOK", 0.01)

    async def test() -> None:
        lag, first, second = LoopLag(), list[float](), list[float]()
        assert not timers(), "nobody watches"
        lag.watch(first.append)
        lag.watch(second.append)
        assert len(timers()) == 1
        async with asyncio.timeout(10):
            while len(second) < 3:
                await asyncio.sleep(0.001)
        assert first == second
        time.sleep(0.05)  # the loop stands still: that is what is measured
        seen = len(first)
        async with asyncio.timeout(10):
            while len(first) == seen:
                await asyncio.sleep(0.001)
        assert first[seen] > 0.03
        lag.leave(first.append)
        count = len(first)
        async with asyncio.timeout(10):
            while len(second) < count + 2:
                await asyncio.sleep(0.001)
        assert len(first) == count
        lag.leave(second.append)
        lag.leave(second.append)  # harmless
        assert not timers()

    def timers() -> list[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        found: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
        return [each for each in found if not each.cancelled() and "_look" in repr(each)]

    asyncio.run(test())
