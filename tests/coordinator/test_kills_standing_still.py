"""A coordinator that is killed while its store stands still, after it decided more: nothing that
the rows in the store need was replaced.

Each test fails where one of these waits for no rows: saving another sum, dropping models, using a
spool file again (tried, one by one).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator_thread import CoordinatorThread
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.storage import find_storage, store
from fleetlearn_coordinator.storage.ledger import ReportAccepted, RoundOpened, TaskGiven
from fleetlearn_coordinator.storage.store import Store, open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import PROTOCOL_NAME, Accepted, Grant, Task
from fleetlearn_protocol.vector import Vector, digest
from memory_storage import SLOW_SCHEME, MemoryStorage, slow_storage
from peers import BUFFERED, Peer, plan_text, report_of, update_of
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

PLACE = f"{SLOW_SCHEME}://run"
UPDATES = {name: update_of(1.0 + number) for number, name in enumerate("abcd")}


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStorage]:
    monkeypatch.setitem(find_storage.STORES, SLOW_SCHEME, slow_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    found = slow_storage(PLACE)
    yield found
    found.may_write.set()


def plan_of(bundle: Path, **settings: Any) -> Plan:
    return Plan.parse(plan_text(bundle, PLACE, **settings), bundle.parent)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


def has_sum(storage: MemoryStorage) -> bool:
    """Return whether a saved sum counts."""
    tables = storage.contents.tables
    return tables is not None and tables.metadata.get("sum") is not None


class Devices:
    """A coordinator's devices, which do what the test says."""

    def __init__(self, coordinator: CoordinatorThread) -> None:
        self.coordinator = coordinator
        self._peers: dict[str, Peer] = {}

    async def join(self, *names: str) -> None:
        for name in names:
            connection = await connect(
                str(self.coordinator.address),
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=None,
            )
            self._peers[name] = Peer(name, connection)
            await self._peers[name].check_in()

    async def begin(self, name: str) -> Callable[[], Awaitable[None]]:
        """Let the device have its task and the leave to upload. Returns what uploads."""
        peer = self._peers[name]
        await peer.send(report_of(await peer.task(), UPDATES[name]))
        grant = await peer.expect(Grant)
        return lambda: peer.send_update(grant, UPDATES[name])

    async def is_counted(self, name: str) -> None:
        """The device hears that its update counts."""
        await self._peers[name].expect(Accepted)

    async def do_task(self, name: str) -> None:
        await (await self.begin(name))()
        await self.is_counted(name)

    @property
    def engine(self) -> Engine:
        return self.coordinator.server.engine

    @property
    def store(self) -> Store:
        return self.coordinator.server.run.store

    def vanish(self) -> None:
        for peer in self._peers.values():
            peer.connection.transport.abort()


@asynccontextmanager
async def serving(plan: Plan, storage: MemoryStorage) -> AsyncIterator[Devices]:
    """A coordinator that is killed at the end of the block."""
    coordinator = CoordinatorThread(plan)
    await until(lambda: coordinator.address or coordinator.is_over())
    if coordinator.error is not None:
        raise coordinator.error
    devices = Devices(coordinator)
    try:
        yield devices
    finally:
        storage.kill()
        storage.may_write.set()
        devices.vanish()  # the first row of what follows kills it
        await until(coordinator.is_over)


def test_another_sum_does_not_replace_the_one_that_counts(
    bundle_path: Path, storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 1)
    plan = plan_of(bundle_path, round__goal=4, round__minimum=4, round__gather=30.0, stop__rounds=1)

    async def first() -> None:
        async with serving(plan, storage) as devices:
            await devices.join(*"abcd")
            uploads = {name: await devices.begin(name) for name in "abc"}
            await uploads["a"]()
            await devices.is_counted("a")
            await until(lambda: has_sum(storage) and devices.store.is_safe)
            storage.may_write.clear()
            for count, name in enumerate("bc", 2):
                await uploads[name]()
                await until(lambda count=count: len(devices.engine.accepted) == count)  # type: ignore[misc]

    async def second() -> None:
        async with serving(plan, storage) as devices:
            await devices.join(*"bcd")
            for name in "bcd":
                await devices.do_task(name)
            await until(lambda: read_status(Path(PLACE)).finished)

    asyncio.run(first())
    asyncio.run(second())
    (round,) = read_status(Path(PLACE)).rounds
    assert round.summary["reports"] == 4
    np.testing.assert_allclose(read_model(Path(PLACE))[1] - first_model(bundle_path), 2.5, 1e-6)


def first_model(bundle: Path) -> Vector:
    return open_bundle(bundle).parameters()


def test_a_model_that_counts_is_not_dropped(bundle_path: Path, storage: MemoryStorage) -> None:
    """Two more are made of updates that were granted before the store stood still."""
    asynchronous = {
        **BUFFERED,
        "round__participation": "asynchronous",
        "round__goal": 1,
        "round__concurrency": 2,
        "models__last": 1,
    }
    plan = plan_of(bundle_path, **asynchronous)

    async def first() -> None:
        async with serving(plan, storage) as devices:
            await devices.join("b", "c")
            for name in "bc":
                await devices.do_task(name)
            uploads = {name: await devices.begin(name) for name in "bc"}
            await until(lambda: devices.store.is_safe)
            assert devices.engine.version == 2
            storage.may_write.clear()
            await uploads["b"]()
            await until(lambda: devices.engine.version == 3)
            await uploads["c"]()
            # The second waits: to make its model drops version 2, which a next start begins with.
            engine = devices.engine
            await until(lambda: engine.phase is Phase.COMMITTING or engine.version == 4)

    asyncio.run(first())
    version, model = read_model(Path(PLACE))
    assert version == 2

    async def second() -> None:
        async with serving(plan, storage) as devices:
            assert digest(devices.coordinator.server.run.models.newest.model) == digest(model)
            await devices.join("b", "c")
            for name in "bc":
                await devices.do_task(name)
            await until(lambda: read_model(Path(PLACE))[0] == 4)

    asyncio.run(second())


def test_spool_files_are_used_again_once_the_rows_are_safe(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices cannot see this, since no leave to upload is said meanwhile."""
    calls = deque[Callable[[], None]]()
    kept = open_store(PLACE, "bundle")
    kept.write_beside(calls.append, lambda: lambda: None, pytest.fail)
    files = [kept.blobs.take_spool_file() for _ in range(2)]
    reports = [report_of(task_of(name), UPDATES[name]) for name in "ab"]
    kept.write([RoundOpened(1, 0.0)])
    for name, report, file in zip("ab", reports, files, strict=True):
        kept.write([TaskGiven(report.task, 1, name, 0)])
        kept.record_report(ReportAccepted(report, 1, file))
    kept.wait_until_safe()
    storage.may_write.clear()
    kept.end_save(kept.begin_save({"sum": np.zeros(3)})())
    assert kept.blobs.take_spool_file() not in files
    storage.may_write.set()
    kept.wait_until_safe()
    while calls:
        calls.popleft()()
    assert kept.blobs.take_spool_file() in files
    kept.close()


def task_of(device: str) -> Task:
    return Task(f"t1-{device}", 1, "bundle", (), {}, {}, 1, 1, 0, 1.0)
