"""Real SIGKILL in asynchronous rounds: tasks keep the versions that they began from, and no update
is lost or counted twice.

The devices are connections of the test, so that their updates come in an order that the test
decides. So the models can be compared bit for bit, with stale updates among those that count.
"""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    Accepted,
    FromCoordinator,
    Grant,
    Held,
    Refused,
    Task,
)
from peers import BUFFERED, Peer, plan_text, report_of, update_of, write_test_bundle
from processes import Processes, free_port, processes, service_file
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

CRASH = Path(__file__).with_name("crash_coordinator.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    _names = runpy.run_path(str(CRASH))
    POINTS, SYNCHRONOUS = _names["POINTS"], _names["SYNCHRONOUS"]
LONG = ("a small sum is being written", "a small sum is written but not recorded")
"""These wait ten seconds for a sum."""
ORDER = "abacbacababcbaa"
"""Whose update comes next. Buffers of three: device c is slow."""
TURNS = {
    "tasks are decided but not recorded": 7,
    "tasks are recorded but not sent": 6,
    "a task was sent": 8,
    "an upload is granted": 8,
    "a chunk is spooled": 20,
    "an update is complete but not recorded": 7,
    "an update is recorded but not acknowledged": 9,
    "an update is acknowledged but not summed": 6,
    "an update is half summed": 20,
    "an update is summed": 7,
    "a small update is summed and counted": 4,
    "the new model is made but not written": 3,
    "the new model is written but not in its place": 3,
    "the new model is in its place but not recorded": 2,
    "a round is closed and its commit not begun": 3,
    # a sum may be skipped where updates come quickly
    **{point: 1 for point in POINTS if point.startswith("a sum ")},
}
"""Point -> which time it kills; else the second."""


class Devices:
    """Three devices that outlive their coordinator, which is started again whenever it is dead."""

    def __init__(self, run: Processes, plan: Path, url: str) -> None:
        self.run, self.plan, self.url = run, plan, url
        self.peers: dict[str, Peer] = {}
        self.tasks: dict[str, Task] = {}
        self.done: set[str] = set()
        """Devices whose task is trained and not acknowledged."""

    async def disconnect(self) -> None:
        for peer in self.peers.values():
            peer.connection.transport.abort()
            await peer.connection.wait_closed()
        self.peers.clear()

    async def connect(self) -> None:
        """Connect all devices, in order, and let each hear of its task."""
        await self.disconnect()
        while len(self.peers) < 3:
            if self.run.running["coordinator"].poll() is not None:
                self.run.coordinator(self.plan)
            name = "abc"[len(self.peers)]
            try:
                connection = await connect(
                    self.url,
                    subprotocols=[Subprotocol(PROTOCOL_NAME)],
                    compression=None,
                    max_size=None,
                )
                peer = Peer(name, connection)
                held = self.tasks[name] if name in self.done else None
                await peer.check_in(None if held is None else Held(held.task, held.round))
            except (OSError, WebSocketException):
                await asyncio.sleep(0.02)
                continue
            self.peers[name] = peer

    async def hear(
        self, name: str, kind: type[FromCoordinator] | tuple[type, ...]
    ) -> FromCoordinator:
        """The next message of this kind. A task is remembered."""
        while True:
            message = await self.peers[name].receive()
            if isinstance(message, Task):
                self.tasks[name] = message
            if isinstance(message, kind):
                return message

    async def report(self, name: str, value: float) -> None:
        """Train the device's task and report, through whatever deaths of the coordinator."""
        while True:
            try:
                if name not in self.done:
                    await self.hear(name, Task)
                    self.done.add(name)
                await self.send(name, value)
                self.done.discard(name)
                return
            except (OSError, WebSocketException, AssertionError):
                await self.connect()

    async def send(self, name: str, value: float) -> None:
        peer, task = self.peers[name], self.tasks[name]
        await peer.send(report_of(task, update_of(value)))
        while isinstance(answer := await self.hear(name, (Grant, Accepted, Refused)), Grant):
            await peer.send_update(answer, update_of(value))
        # it had counted before
        assert isinstance(answer, Accepted) or answer.code == "stale-round", answer


def train(
    run: Processes, bundle: Path, crash: tuple[str, int] | None
) -> tuple[bytes, list[object]]:
    """Return the final model, and the staleness of each round."""
    port = free_port()
    settings = {"round__goal": 3, "round__grace": 30.0, "stop__rounds": len(ORDER) // 3}
    optimizer = {"server__optimizer": "adam", "server__lr": 0.05}
    plan = run.folder / "plan.toml"
    plan.write_text(plan_text(bundle, run.folder / "run", **(BUFFERED | settings | optimizer)))
    service_file(plan, port)
    run.coordinator(plan, *(() if crash is None else (CRASH, crash[0], str(crash[1]), plan)))
    first = run.running["coordinator"]

    async def play() -> None:
        devices = Devices(run, plan, f"ws://127.0.0.1:{port}")
        async with asyncio.timeout(60):
            await devices.connect()
            for number, name in enumerate(ORDER, 1):
                await devices.report(name, 0.1 * number)
            await devices.disconnect()

    asyncio.run(play())
    assert run.wait("coordinator") in (0, -9), run.log("coordinator")
    if run.running["coordinator"].returncode == -9:  # it was killed after its last update
        assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    if crash is not None:
        assert first.returncode == -9, f"it was to die at {crash}: {run.log('coordinator')}"
    version, model = read_model(run.folder / "run")
    assert version == len(ORDER) // 3
    rounds = [row.summary for row in read_status(run.folder / "run").rounds]
    assert [row["reports"] for row in rounds] == [3] * version
    return model.tobytes(), [row["staleness"] for row in rounds]


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_test_bundle(tmp_path_factory.mktemp("bundle") / "test.bundle")


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, plain_bundle: Path
) -> tuple[bytes, list[object]]:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        return train(run, plain_bundle, None)


def test_there_are_stale_updates(undisturbed: tuple[bytes, list[object]]) -> None:
    assert max(row["max"] for row in undisturbed[1]) >= 1  # type: ignore[index]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=pytest.mark.slow if point in {*SYNCHRONOUS, *LONG} else ())
        for point in POINTS
    ],
)
def test_the_coordinator_killed_changes_nothing(
    run: Processes, plain_bundle: Path, undisturbed: tuple[bytes, list[object]], point: str
) -> None:
    assert train(run, plain_bundle, (point, TURNS.get(point, 2))) == undisturbed


def test_real_devices_train_on_while_their_coordinator_dies(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """Four device processes, as quick as they are. Whatever was acknowledged counts, once."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    settings = {
        "round__goal": 3,
        "round__concurrency": 4,
        "round__grace": 30.0,
        "stop__rounds": 8,
        "local__lr": 0.1,
    }
    plan.write_text(plan_text(bundle_path, data_dir, **(BUFFERED | settings)))
    service_file(plan, port)
    names = [f"device-{number}" for number in range(4)]
    for name, shard in zip(names, shards, strict=False):
        run.device(name, f"ws://127.0.0.1:{port}", shard)
    for point, turn in (
        ("an update is recorded but not acknowledged", 5),
        ("the new model is half recorded", 2),
    ):
        assert run.coordinator(plan, CRASH, point, str(turn), plan).wait(60) == -9, run.log(
            "coordinator"
        )
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    rounds = [row.summary for row in read_status(data_dir).rounds]
    assert [row["reports"] for row in rounds] == [3] * 8
    tasks = [
        task
        for number in range(1, 9)
        for task in read_tasks(data_dir, number)[1]
        if task.state == "accepted"
    ]
    assert len(tasks) == len({task.task for task in tasks}) == 24
    for name in names:  # some wait to connect again, to a coordinator that has ended
        acknowledged = run.log(name).count(": update accepted")
        unfinished = sum(
            task.device == name for task in read_tasks(data_dir, 9)[1] if task.state == "accepted"
        )
        assert acknowledged <= sum(task.device == name for task in tasks) + unfinished
