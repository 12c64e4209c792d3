"""A coordinator whose run is in memory, killed at each point of crash_coordinator.py: what counts
is in the store.

The store is there by its protocols alone. Coordinator, connections and devices are real; the
coordinator has an event loop of its own, which ends where it is killed.
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_thread import CoordinatorThread, kill_at
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.storage import find_storage, store
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.file_requests import FileRequests
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_protocol.vector import digest
from honest_devices import HonestDevice
from memory_storage import (
    SCHEME,
    SLOW_SCHEME,
    MemoryBlobs,
    MemoryLedger,
    MemoryRequests,
    MemoryStorage,
    memory_storage,
    slow_storage,
)
from peers import plan_text

SCRIPTS = Path(__file__).parents[1] / "end_to_end"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SCRIPTS))
    _names = runpy.run_path(str(SCRIPTS / "crash_coordinator.py"))
    POINTS, SMALL, USUAL = (_names[name] for name in ("POINTS", "SMALL", "SYNCHRONOUS"))
    ROLL_BACK = runpy.run_path(str(SCRIPTS / "crash_roll_back.py"))["POINTS"]
    EVALUATION = runpy.run_path(str(SCRIPTS / "crash_evaluation.py"))["COORDINATOR"]
FIRST = {
    "a small sum is written but not recorded",
    "a sum is to be written",
    "a sum is written but not recorded",
    "a sum is recorded",
}
"""Points at which the first time kills. At the others it is the second, where a round is over and
adam has a state."""
THREE_ROUNDS = {
    "round__goal": 4, "round__minimum": 4, "round__gather": 30.0, "round__grace": 30.0,
    "stop__rounds": 3, "server__optimizer": "adam", "server__lr": 0.05,
}  # fmt: skip
NAMES = [f"device-{number}" for number in range(4)]
PATIENCE = 60.0
"""Seconds after which a run that is not over has failed."""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(find_storage.STORES, SCHEME, memory_storage)
    monkeypatch.setitem(find_storage.STORES, SLOW_SCHEME, slow_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 1)  # so that a round writes several sums


def in_memory(point: Any) -> Any:
    """Return the same point with a store in memory."""
    match point.owner, point.function:
        case owner, "write" if owner is SqliteLedger:
            return point._replace(owner=MemoryLedger)
        case owner, "_write" if owner is SqliteLedger:
            counts = point.counts
            return point._replace(
                owner=MemoryLedger, counts=lambda one, tables, row: counts(one, row)
            )
        case owner, _ if owner is FileBlobs:
            return point._replace(owner=MemoryBlobs)
        case owner, _ if owner is FileRequests:
            return point._replace(owner=MemoryRequests)
        case _, "pwrite":
            return type(point)(
                MemoryBlobs, "_write_sum", True, lambda blobs, *piece: has_sum(blobs._storage)
            )
        case _, "replace":
            return type(point)(MemoryBlobs, "_put_model", False)
    return point


def has_sum(storage: MemoryStorage) -> bool:
    """Return whether a sum of the open round counts, so that another one must not spoil it."""
    tables = storage.contents.tables
    return tables is not None and tables.metadata.get("sum") is not None


def plan_of(place: str | Path, bundle: Path, **settings: Any) -> Plan:
    return Plan.parse(plan_text(bundle, place, **(THREE_ROUNDS | settings)), bundle.parent)


def storage_of(plan: Plan) -> MemoryStorage:
    found = find_storage.find_storage(plan.data_dir)
    assert isinstance(found, MemoryStorage)
    return found


async def train(plan: Plan, *, late: bool = False) -> tuple[int, list[HonestDevice]]:
    """Serve the plan, with a new coordinator where one was killed, until it is over. Returns how
    many were killed, and the devices. ``late``: sums are written while the round is open. The third
    device reports once there is one, and the last device once a coordinator was killed."""
    served, kills = [CoordinatorThread(plan)], 0
    devices = [HonestDevice(name, lambda: served[-1].address) for name in NAMES]
    if late:
        devices[2].may_report.clear()
        devices[3].may_report.clear()
    running = [asyncio.create_task(device.run()) for device in devices]
    async with asyncio.timeout(PATIENCE):
        while not served[-1].is_over() or served[-1].killed:
            if served[-1].is_over():
                kills += 1
                devices[2].may_report.set()
                devices[3].may_report.set()
                served.append(CoordinatorThread(plan))
            if late and has_sum(storage_of(plan)):
                devices[2].may_report.set()
            await asyncio.sleep(0.005)
    # A device that was not connected at the end is not told of it: it would go on asking.
    for task in running:
        task.cancel()
    ends = await asyncio.gather(*running, return_exceptions=True)
    for error in (*ends, served[-1].error):
        if isinstance(error, Exception):
            raise error
    return kills, devices


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, bundle_path: Path) -> str:
    """The model of a run in files that nobody kills."""
    plan = plan_of(tmp_path_factory.mktemp("undisturbed"), bundle_path)
    assert asyncio.run(train(plan))[0] == 0
    return digest(read_model(plan.data_dir)[1])


def tried() -> Iterator[Any]:
    """Yield each point with each store. The slow tests try a slow store at all points."""
    for name in POINTS:
        yield pytest.param(name, SCHEME, id=name)
        marks = () if name in USUAL else pytest.mark.slow
        yield pytest.param(name, SLOW_SCHEME, id=f"{name}, slow store", marks=marks)


@pytest.mark.parametrize(("name", "scheme"), [*tried()])
def test_the_coordinator_killed_changes_nothing(
    bundle_path: Path, undisturbed: str, scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one goes on from the store: the undisturbed run's model, bit for bit."""
    if name not in SMALL:
        monkeypatch.setattr(server, "LARGE_MODEL", 0)
    plan = plan_of(f"{scheme}://run", bundle_path)
    turn = 1 if name in FIRST else 2
    has_died = kill_at(monkeypatch, in_memory(POINTS[name]), turn, storage_of(plan))
    kills, devices = asyncio.run(train(plan, late="sum " in name))
    assert has_died()
    assert kills == 1
    version, model = read_model(plan.data_dir)
    assert version == 3
    assert [row.summary["reports"] for row in read_status(plan.data_dir).rounds] == [4, 4, 4]
    assert digest(model) == undisturbed
    assert {len(device.accepted) for device in devices} <= {2, 3}, (
        "one may be lost with the coordinator"
    )


def evaluated(plan: Plan) -> tuple[str, list[Any]]:
    keys = ("devices", "examples", "metrics", "behind")
    rows = [
        (row.version, row.outcome, {key: row.summary[key] for key in keys})
        for row in read_status(plan.data_dir).evaluations
    ]
    return digest(read_model(plan.data_dir)[1]), rows


MEASURED = {
    "stop__rounds": 2,
    "evaluation__every": 1,
    "evaluation__devices": 4,
    "evaluation__minimum": 4,
}


@pytest.fixture(scope="module")
def undisturbed_evaluation(
    tmp_path_factory: pytest.TempPathFactory, bundle_path: Path
) -> tuple[str, list[Any]]:
    plan = plan_of(tmp_path_factory.mktemp("evaluated"), bundle_path, **MEASURED)
    asyncio.run(train(plan))
    found = evaluated(plan)
    assert [row[:2] for row in found[1]] == [(1, "valid"), (2, "valid")]
    return found


@pytest.mark.parametrize("scheme", [SCHEME, SLOW_SCHEME])
@pytest.mark.parametrize("name", EVALUATION)
def test_the_coordinator_killed_in_an_evaluation_changes_nothing(
    bundle_path: Path,
    undisturbed_evaluation: tuple[str, list[Any]],
    scheme: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(f"{scheme}://run", bundle_path, **MEASURED)
    kill_at(monkeypatch, in_memory(EVALUATION[name]), 2, storage_of(plan))
    assert asyncio.run(train(plan))[0] == 1
    assert evaluated(plan) == undisturbed_evaluation


def roll_back(place: str | Path, bundle: Path) -> Plan:
    """Train for two rounds, and ask for version 1. Returns the plan of two rounds more."""
    assert asyncio.run(train(plan_of(place, bundle, stop__rounds=2)))[0] == 0
    plan = plan_of(place, bundle, stop__rounds=5)
    find_storage.find_storage(plan.data_dir).requests.ask_for_roll_back(1, "ada")
    return plan


def rolled_back(plan: Plan) -> tuple[str, list[Any]]:
    storage = find_storage.find_storage(plan.data_dir)
    assert storage.requests.roll_back() is None
    with storage.read_ledger() as ledger:
        rows = [(made.version, made.restores) for made in ledger.known_models()]
    return digest(read_model(plan.data_dir)[1]), rows


@pytest.fixture(scope="module")
def undisturbed_roll_back(
    tmp_path_factory: pytest.TempPathFactory, bundle_path: Path
) -> tuple[str, list[Any]]:
    plan = roll_back(tmp_path_factory.mktemp("rolled-back"), bundle_path)
    asyncio.run(train(plan))
    found = rolled_back(plan)
    assert found[1] == [(0, None), (1, None), (2, None), (3, 1), (4, None), (5, None)]
    return found


@pytest.mark.parametrize("scheme", [SCHEME, SLOW_SCHEME])
@pytest.mark.parametrize("name", ROLL_BACK)
def test_the_coordinator_killed_in_a_roll_back_changes_nothing(
    bundle_path: Path,
    undisturbed_roll_back: tuple[str, list[Any]],
    scheme: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = roll_back(f"{scheme}://run", bundle_path)
    kill_at(monkeypatch, in_memory(ROLL_BACK[name]), 1, storage_of(plan))
    assert asyncio.run(train(plan))[0] == 1
    assert rolled_back(plan) == undisturbed_roll_back


PRIVATE = {
    "privacy__noise": 1.0, "privacy__delta": 1e-6, "privacy__population": 100, "privacy__clip": 1.0,
    "privacy__separation": 2, "privacy__participations": 2, "round__goal": 2, "round__minimum": 2,
    "round__gather": 0.0,
}  # fmt: skip
COUNTED = {
    "an update is recorded but not acknowledged": True,
    "the new model is in its place but not recorded": False,
    "the new model is half recorded": False,
    "a round is recorded and the engine not told": True,
    "a round is recorded and nobody told": False,
}
"""Point of a private run -> whether the usual tests try it with a store that is not slow."""


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param(name, scheme, marks=() if usual and scheme == SCHEME else pytest.mark.slow)
        for name, usual in COUNTED.items()
        for scheme in (SCHEME, SLOW_SCHEME)
    ],
)
def test_a_private_run_that_is_killed_counts_each_participation_once(
    bundle_path: Path, name: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices take part in a release, and the other two in the next one."""
    plan = plan_of(f"{scheme}://run", bundle_path, **PRIVATE)
    has_died = kill_at(monkeypatch, in_memory(POINTS[name]), 2, storage_of(plan))
    assert asyncio.run(train(plan))[0] == 1
    assert has_died()
    tables = storage_of(plan).contents.tables
    assert tables is not None
    rows = sorted((row.last, row.times) for row in tables.participations.values())
    assert rows == [(2, 1), (2, 1), (3, 2), (3, 2)]
