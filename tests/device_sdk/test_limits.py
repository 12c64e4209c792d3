"""A device with limits, on a real socket and with real training."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_device import Device
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.limits import memory
from fleetlearn_device.limits.byte_rate import ByteRate
from fleetlearn_device.limits.device_limits import DeviceLimits
from fleetlearn_device.limits.pacing import Pacing
from fleetlearn_device.storage.content_cache import ContentCache
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol.messages import Failed, Report
from scripted import PATIENCE, Line, Served, scripted

TIMING = Timing(base=0.02, cap=0.1)


@pytest.fixture(scope="module")
def served(cases: Callable[[str], Any]) -> Served:
    return Served(cases("softmax").path)


@pytest.fixture(scope="module")
def data(cases: Callable[[str], Any]) -> dict[str, Any]:
    case = cases("softmax")
    names = [row.name for row in Served(case.path).bundle.manifest.batch]
    return dict(zip(names, (case.x[:20], case.y[:20]), strict=True))


@asynccontextmanager
async def checked_in(
    served: Served, data: Any, folder: Path, limits: DeviceLimits
) -> AsyncIterator[Line]:
    async with scripted(served.contents) as coordinator:
        device = Device(coordinator.url, data, folder, timing=TIMING, limits=limits)
        task = asyncio.create_task(device.serve())
        try:
            line = await coordinator.line()
            await line.check_in()
            yield line
        finally:
            device.stop()
            async with asyncio.timeout(PATIENCE):
                await task


def test_what_is_sent_and_received_is_slowed_down(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits themselves are left out: what is to be waited for is counted."""
    passed: dict[float, int] = {}

    async def count(rate: ByteRate, size: int) -> None:
        passed[rate.bytes_per_second] = passed.get(rate.bytes_per_second, 0) + size

    monkeypatch.setattr(ByteRate, "passed", count)

    async def test() -> None:
        limits = DeviceLimits(upload=16, download=32)
        async with checked_in(served, data, tmp_path, limits) as line:
            await line.say(served.task())
            report = await line.answer_fetches(Report)
            update = await line.accept(report)
            fetched = sum(map(len, served.contents.values()))
            assert passed[16 * 1024] >= len(update)
            names = {fetch.sha256 for fetch in line.fetches}
            assert passed[32 * 1024] >= sum(len(served.contents[name]) for name in names)
            assert passed[32 * 1024] < 2 * fetched

    asyncio.run(test())


def test_a_task_that_needs_more_memory_is_given_back_by_name(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device stays, and does what fits."""
    resident = [40 * 2**20]
    monkeypatch.setattr(memory.MemoryCeiling, "__init__", plain_init(lambda: resident[0]))

    async def test() -> None:
        async with checked_in(served, data, tmp_path, DeviceLimits(memory=64)) as line:
            await line.say(served.task("t1", batch_size=4))
            resident[0] = 80 * 2**20
            failed = await line.answer_fetches(Failed)
            assert (failed.task, failed.code) == ("t1", "out-of-memory")
            assert "and this device allows 64 MiB (limits.memory)" in failed.text

    asyncio.run(test())


def plain_init(resident: Callable[[], int]) -> Callable[..., None]:
    def init(self: memory.MemoryCeiling, mebibytes: float) -> None:
        self._most, self._resident, self._broken = round(mebibytes * 2**20), resident, {}

    return init


def test_the_training_rests_between_its_steps_and_ends_at_once_when_it_is_stopped(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = []

    def an_hour(pacing: Pacing) -> float:
        rests.append(pacing._share)
        return 3600.0

    monkeypatch.setattr(Pacing, "after_step", an_hour)

    async def test() -> None:
        async with checked_in(served, data, tmp_path, DeviceLimits(cpu=25)) as line:
            await line.say(served.task("t1"))
            fetches = asyncio.create_task(line.answer_fetches(Failed))
            async with asyncio.timeout(PATIENCE):
                while not rests:
                    await asyncio.sleep(0.005)
            fetches.cancel()
            await asyncio.gather(fetches, return_exceptions=True)

    asyncio.run(test())
    assert rests == [0.25]


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads")
def test_the_training_s_thread_has_its_priority_and_the_others_keep_theirs(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nice(native_id: int) -> int:
        text = Path(f"/proc/self/task/{native_id}/stat").read_text()
        return int(text.rpartition(")")[2].split()[16])

    seen: list[int] = []
    train = Trainer.train

    def look(*arguments: Any) -> Any:
        seen.append(nice(threading.get_native_id()))
        return train(*arguments)

    monkeypatch.setattr(Trainer, "train", look)
    before = nice(threading.get_native_id())

    async def test() -> None:
        async with checked_in(served, data, tmp_path, DeviceLimits(nice=19, io="idle")) as line:
            await line.say(served.task())
            await line.accept(await line.answer_fetches(Report))

    asyncio.run(test())
    assert seen == [19]
    assert nice(threading.get_native_id()) == before


def test_the_cache_has_its_quota(
    served: Served, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = []
    lacking = ContentCache.lacking

    def look(cache: ContentCache, *arguments: Any) -> Any:
        quotas.append(cache.quota)
        cache.quota = 10  # no bundle is as small
        return lacking(cache, *arguments)

    monkeypatch.setattr(ContentCache, "lacking", look)

    async def test() -> None:
        async with checked_in(served, data, tmp_path, DeviceLimits(cache=5)) as line:
            await line.say(served.task())
            failed = await line.answer_fetches(Failed)
            assert failed.code == "disk-full"
            assert "(limits.cache)" in failed.text

    asyncio.run(test())
    assert quotas[0] == 5 * 2**20
