"""Gateways add up the updates that they stored: the model is that of one process, bit for bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.gateways import gateway_adders, partial_sums
from fleetlearn_coordinator.service.training_run import pre_sums
from fleetlearn_coordinator.service.training_run.pre_sums import PreSums
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.sum_file import write_sum
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk
from fleetlearn_protocol.messages import Accepted, CheckIn, Grant, Task, Uploaded, Welcome
from gateways import (
    DistantPlace,
    GatewayFleet,
    distant_fleet,
    distant_place,
    gateway_fleet,
)
from peers import (
    BUFFERED_ELEMENTS,
    PERSONAL,
    SIZE,
    Peer,
    fleet,
    plan_text,
    report_of,
    write_buffered_bundle,
    write_personal_bundle,
    write_test_bundle,
)

DEVICES = 4
Fault = Callable[[GatewayFleet], Any]


@pytest.fixture(autouse=True)
def tiny_models_are_pre_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_sums, "SMALLEST", 1)
    monkeypatch.setattr(pre_sums, "FEWEST", 1)
    monkeypatch.setattr(pre_sums, "cores", lambda: 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistantPlace]:
    with distant_place(tmp_path_factory.mktemp("gateways")) as found:
        yield found


@pytest.fixture(autouse=True, params=["here", "apart"])
def gateways_on_other_machines(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "apart":
        place = request.getfixturevalue("place")

        def apart(plan: Plan) -> Any:
            return distant_fleet(plan, place)

        monkeypatch.setitem(globals(), "gateway_fleet", apart)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many updates each partial sum has that the engine process took."""
    found: list[int] = []
    read = PreSums.read

    def counted(self: PreSums, arrived: Any) -> Any:
        sums = read(self, arrived)
        found.append(0 if sums is None else len(arrived.reports))
        return sums

    monkeypatch.setattr(PreSums, "read", counted)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def updates(count: int, size: int = SIZE) -> np.ndarray:
    random = np.random.default_rng(7)
    scales = 10.0 ** random.uniform(-9, 2, (count, 1))
    return (random.standard_normal((count, size)) * scales).astype(np.float32)


def settings_of(**more: Any) -> dict[str, Any]:
    return {
        "round__goal": DEVICES,
        "round__over_selection": 1,
        "round__deadline": 60.0,
        "stop__rounds": 1,
        **more,
    }


Join = Callable[..., Any]


async def tasks_of(join: Join, count: int) -> list[tuple[Peer, Task]]:
    """Let devices check in, one after the other, at one gateway and the other in turns."""
    found = []
    for number in range(count):
        name = f"d{number}"
        peer: Peer = await join(name, number)
        await peer.send(CheckIn(1, name, 10, algorithms=("scaffold", "fedavg"), newest_protocol=3))
        await peer.expect(Welcome)
        found.append((peer, await peer.task()))
    return found


async def send(peer: Peer, task: Task, number: int, row: np.ndarray) -> None:
    if "control" in task.parts:
        row = row[: SIZE - PERSONAL]
    vectors = {"update": row, "control": row[::-1].copy(), "buffers": row[:BUFFERED_ELEMENTS] + 1}
    parts = tuple(FLOAT32.part(name, vectors[name].tobytes()) for name in task.parts)
    await peer.send(report_of(task, row, parts=parts, examples=10 + number))
    grant: Grant = await peer.expect(Grant)
    offset = 0
    for name in task.parts:
        content = vectors[name].tobytes()
        for begin in range(0, len(content), CHUNK_BYTES):  # no chunk holds bytes of two parts
            piece = content[begin : begin + CHUNK_BYTES]
            await peer.send(pack_chunk(grant.transfer, offset + begin, piece))
        offset += len(content)
    await peer.send(Uploaded(task.task))
    await peer.expect(Accepted)


async def train(join: Join, count: int, fault: Callable[[], Any] | None = None) -> None:
    """Every device sends its update; before the last one ``fault`` happens."""
    devices = await tasks_of(join, count)
    for number, ((peer, task), row) in enumerate(zip(devices, updates(count), strict=True)):
        if number == count - 1 and fault is not None:
            await fault()
        await send(peer, task, number, row)


async def undisturbed(plan: Plan, count: int = DEVICES) -> np.ndarray:
    """Return the model of one process that does everything."""
    async with fleet(plan) as (server, join):
        await train(lambda name, number: join(name, check_in=False), count)
        await server.done
    return read_model(plan.data_dir)[1]


async def behind_gateways(
    plan: Plan, count: int = DEVICES, fault: Fault | None = None
) -> np.ndarray:
    async with gateway_fleet(plan) as behind:

        def join(name: str, number: int) -> Any:
            return behind.join(name, number % 2, check_in=False)

        await train(join, count, None if fault is None else lambda: fault(behind))
        await asyncio.wait_for(asyncio.shield(behind.server.done), 20)
        assert not list((plan.data_dir / gateway_adders.SUMS).iterdir())
    return read_model(plan.data_dir)[1]


def fedavg(folder: Path, name: str, **more: Any) -> Plan:
    bundle = write_test_bundle(folder / f"{name}.bundle")
    return Plan.parse(plan_text(bundle, folder / name, **settings_of(**more)), folder)


def with_buffers(folder: Path, name: str) -> Plan:
    bundle = write_buffered_bundle(folder / f"{name}.bundle")
    return Plan.parse(plan_text(bundle, folder / name, **settings_of()), folder)


def scaffold(folder: Path, name: str) -> Plan:
    bundle = write_personal_bundle(folder / f"{name}.bundle")
    settings = settings_of(server__devices=DEVICES, local__lr=0.5)
    return Plan.parse(plan_text(bundle, folder / name, "scaffold", **settings), folder)


@pytest.mark.parametrize("make", [fedavg, with_buffers, scaffold])
def test_the_model_is_that_of_one_process(
    tmp_path: Path, merged: list[int], make: Callable[[Path, str], Plan]
) -> None:
    async def test() -> None:
        alone = await undisturbed(make(tmp_path, "alone"))
        assert not merged
        behind = await behind_gateways(make(tmp_path, "behind"))
        assert merged == [2, 2]
        assert alone.tobytes() == behind.tobytes()

    asyncio.run(test())


def with_regions(folder: Path, name: str, **more: Any) -> Plan:
    """Each gateway has a device of each region; a third region has none."""
    own = {"round__goal": None, "round__minimum": None, "round__over_selection": None}
    own["regions__each"] = {"goal": 2, "over_selection": 1, "minimum": 1, "deadline": 50.0}
    own |= {"regions__minimum": 1, "regions__goal": 2} | more
    own["regions__named"] = {
        "west": {"devices": ["d0", "d1"]},
        "east": {"devices": ["d2", "d3"]},
        "south": {"devices": ["s*"]},
    }
    return fedavg(folder, name, **own)


def test_regions_have_partial_sums_of_their_own(tmp_path: Path, merged: list[int]) -> None:
    """And the model of a round without regions."""

    async def test() -> None:
        alone = await undisturbed(fedavg(tmp_path, "alone"))
        assert not merged
        behind = await behind_gateways(with_regions(tmp_path, "behind"))
        assert merged == [1, 1, 1, 1]
        assert alone.tobytes() == behind.tobytes()
        merged.clear()
        lost = await behind_gateways(with_regions(tmp_path, "lost"), fault=gateway_ends)
        assert merged in ([1], [1, 1]), "what the other gateway has"
        assert alone.tobytes() == lost.tobytes()

    asyncio.run(test())


def test_more_updates_than_spool_files_are_held(
    tmp_path: Path, merged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is saved after each few of them: it has what the gateways added."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 4)

    async def test() -> None:
        plans = [fedavg(tmp_path, name, round__goal=14) for name in ("alone", "behind")]
        alone = await undisturbed(plans[0], 14)
        behind = await behind_gateways(plans[1], 14)
        assert alone.tobytes() == behind.tobytes()
        assert len(merged) > 4
        assert sum(merged) > 8

    asyncio.run(test())


async def gateway_ends(behind: GatewayFleet) -> None:
    await behind.end_gateway(0)
    await until(lambda: len(behind.server.host.gateways) == 1)


async def engine_ends(behind: GatewayFleet) -> None:
    await behind.end_engine()
    await behind.begin_engine()


async def file_is_torn(behind: GatewayFleet) -> None:
    def torn(path: Path, tensors: Any) -> int:
        crc32 = write_sum(path, tensors)
        content = path.read_bytes()
        path.write_bytes(content[:-8])
        return crc32

    partial_sums.write_sum = torn


async def file_is_changed(behind: GatewayFleet) -> None:
    partial_sums.write_sum = lambda path, tensors: write_sum(path, tensors) ^ 1


async def file_cannot_be_written(behind: GatewayFleet) -> None:
    def full(path: Path, tensors: Any) -> int:
        raise OSError(28, "No space left on device")

    partial_sums.write_sum = full


async def gateway_forgot(behind: GatewayFleet) -> None:
    for gateway in behind.gateways:
        own = gateway.link.runs[""].sums
        # A task is in its sum once the thread that adds it has done so.
        await until(lambda own=own: any(each.tasks for each in own._sums.values()))
        next(each for each in own._sums.values() if each.tasks).tasks.pop()


FAULTS = [
    gateway_ends,
    engine_ends,
    file_is_torn,
    file_is_changed,
    file_cannot_be_written,
    gateway_forgot,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_gateways_lose_is_added_by_the_engine_process(
    tmp_path: Path, merged: list[int], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(partial_sums, "write_sum", write_sum)  # to be put back

    async def test() -> None:
        alone = await undisturbed(fedavg(tmp_path, "alone"))
        behind = await behind_gateways(fedavg(tmp_path, "behind"), fault=fault)
        assert alone.tobytes() == behind.tobytes()
        assert sum(merged) < DEVICES, "the fault did nothing"

    asyncio.run(test())


def test_a_gateway_that_adds_too_slowly(
    tmp_path: Path, merged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine process adds its updates; what the gateway says later is dropped."""
    monkeypatch.setattr(gateway_adders, "PATIENCE", 0.0)
    release = threading.Event()

    async def slow(behind: GatewayFleet) -> None:
        for gateway in behind.gateways:
            gateway.link.runs[""].sums._thread.submit(release.wait)

    async def test() -> None:
        alone = await undisturbed(fedavg(tmp_path, "alone"))
        plan = fedavg(tmp_path, "behind")
        async with gateway_fleet(plan) as behind:

            def join(name: str, number: int) -> Any:
                return behind.join(name, number % 2, check_in=False)

            try:
                await train(join, DEVICES, lambda: slow(behind))
                await asyncio.wait_for(asyncio.shield(behind.server.done), 20)
            finally:
                release.set()
        assert alone.tobytes() == read_model(plan.data_dir)[1].tobytes()
        assert not merged

    asyncio.run(test())
