"""A device inside a program: in a thread, in an event loop, paused and gone on with, and used by
other programs at its socket."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device import BufferWriter, Device
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.status import read_status
from fleetlearn_device.training import progress
from fleetlearn_protocol.messages import Failed, Report
from scripted import PATIENCE, Line, Scripted, Served, scripted

ROOT = Path(__file__).parents[2]
QUICK = Timing(send=0.5, close=0.5, base=0.01)
EPOCHS = 40


@pytest.fixture(scope="module")
def served(cases: Callable[[str], Any]) -> Served:
    return Served(cases("softmax").path)


class Held:
    """Batches that stop at one of them until the test lets them go on."""

    def __init__(self, case: Any, at: int = 0) -> None:
        self.batches = [(case.x[i : i + 4], case.y[i : i + 4]) for i in range(0, 20, 4)]
        self.given, self.at = 0, at
        self.reached, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.given += 1
            if self.given == self.at:
                self.reached.set()
                assert self.go.wait(PATIENCE)
            yield batch


@pytest.fixture
def held(cases: Callable[[str], Any]) -> Held:
    return Held(cases("softmax"), at=60)


@pytest.fixture
def worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every training be worth keeping, however short it was."""
    monkeypatch.setattr(progress, "WORTH_KEEPING", 0.0)


def device_at(coordinator: Scripted, data: Any, folder: Path, **options: Any) -> Device:
    examples = None if isinstance(data, str) else 20
    return Device(coordinator.url, data, folder, examples=examples, timing=QUICK, **options)


async def joined(device: Device) -> None:
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.to_thread(device.join)


async def give(
    coordinator: Scripted, served: Served, name: str = "t1", epochs: int = EPOCHS
) -> Line:
    """A connection on which a task was given, and what it lacks was sent."""
    line = await coordinator.line()
    await line.check_in(heartbeat=0.02)
    await line.say(served.task(name, epochs=epochs, batch_size=4))
    return line


async def in_training(coordinator: Scripted, served: Served, held: Held) -> tuple[Line, Any]:
    line = await give(coordinator, served)
    fetches = asyncio.create_task(line.answer_fetches(Failed))
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.to_thread(held.reached.wait, PATIENCE)
    return line, fetches


async def undisturbed(coordinator: Scripted, served: Served, held: Held, folder: Path) -> bytes:
    """The update of the same task without an interruption."""
    plain = Held.__new__(Held)
    plain.batches, plain.given, plain.at = held.batches, 0, 0
    with device_at(coordinator, plain, folder):
        line = await give(coordinator, served)
        return await line.accept(await line.answer_fetches(Report))


def test_in_a_thread_beside_somebody_s_event_loop(
    served: Served, held: Held, tmp_path: Path
) -> None:
    """As in a notebook's cell: a loop runs in this thread. Signal handlers stay as they are."""
    held.at = 0

    async def test() -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        async with scripted(served.contents) as coordinator:
            device = device_at(coordinator, held, tmp_path)
            device.start()
            with pytest.raises(RuntimeError, match="started already"):
                device.start()
            line = await give(coordinator, served, epochs=2)
            await line.accept(await line.answer_fetches(Report))
            assert {number: signal.getsignal(number) for number in before} == before
            assert not device.join(0.0)
            device.stop()
            assert await line.closed() == 1000
            await joined(device)
            with device:  # and once more
                await (await coordinator.line()).check_in()
        StateDirectory(tmp_path).close()  # nobody holds it any more

    asyncio.run(test())


def test_join_says_what_ended_the_device(held: Held, tmp_path: Path) -> None:
    other = StateDirectory(tmp_path)
    device = Device("ws://127.0.0.1:9", held, tmp_path, examples=20)
    device.start()
    with pytest.raises(StateError, match="in use by another process"):
        device.join(PATIENCE)
    assert device.join()
    other.close()


def test_two_devices_in_one_program(served: Served, cases: Any, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            devices = [
                device_at(coordinator, Held(cases("softmax")), tmp_path / name) for name in "ab"
            ]
            with devices[0], devices[1]:
                lines = [await give(coordinator, served, epochs=2) for _ in devices]
                updates = [await line.accept(await line.answer_fetches(Report)) for line in lines]
                assert updates[0] == updates[1]

    asyncio.run(test())


def test_a_pause_gives_a_task_back_that_has_just_begun(
    served: Served, held: Held, tmp_path: Path
) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            device = device_at(coordinator, held, tmp_path)
            with device:
                line, fetches = await in_training(coordinator, served, held)
                device.pause()
                assert (await fetches).code == "paused"
                held.go.set()
                assert await line.closed() == 1000
                assert len(coordinator.lines) == 1
                device.resume()
                line = await give(coordinator, served, "t2", epochs=1)
                await line.accept(await line.answer_fetches(Report))

    asyncio.run(test())


@pytest.mark.usefixtures("worth_keeping")
def test_a_pause_in_mid_training_keeps_the_task(served: Served, held: Held, tmp_path: Path) -> None:
    """The training ends within a step. When the device is back, its task goes on to the same
    update."""

    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            expected = await undisturbed(coordinator, served, held, tmp_path / "undisturbed")
            device = device_at(coordinator, held, tmp_path / "paused")
            with device:
                line, fetches = await in_training(coordinator, served, held)
                device.pause()
                fetches.cancel()
                with suppress(asyncio.CancelledError):
                    await fetches
                assert await line.closed() == 1000, "and no word that the task failed"
                held.go.set()
                given = held.given
                device.resume()
                line = await give(coordinator, served)  # as a coordinator does, within the grace
                update = await line.accept(await line.answer_fetches(Report))
                assert update == expected
                # The batches that were seen are passed over, up to the one that it was stopped at.
                assert held.given == given + 5 * EPOCHS - 55

    asyncio.run(test())


@pytest.mark.usefixtures("worth_keeping")
def test_a_stop_is_as_good_as_a_kill(served: Served, held: Held, tmp_path: Path) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            expected = await undisturbed(coordinator, served, held, tmp_path / "undisturbed")
            first = device_at(coordinator, held, tmp_path / "stopped")
            first.start()
            line, fetches = await in_training(coordinator, served, held)
            first.stop()
            fetches.cancel()
            with suppress(asyncio.CancelledError):
                await fetches
            assert await line.closed() == 1000
            held.go.set()
            await joined(first)
            assert (tmp_path / "stopped" / "checkpoint").exists()
            status = read_status(tmp_path / "stopped")
            assert status is not None
            assert status.task == "is kept: the next start goes on with its training"
            held.at = 0
            with device_at(coordinator, held, tmp_path / "stopped"):
                line = await give(coordinator, served)
                update = await line.accept(await line.answer_fetches(Report))
                assert update == expected

    asyncio.run(test())


def test_a_device_that_starts_paused_does_not_connect(
    served: Served, held: Held, tmp_path: Path
) -> None:
    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            device = device_at(coordinator, held, tmp_path)
            device.pause()
            with device:
                while not (tmp_path / "status.json").exists():
                    await asyncio.sleep(0.005)
                assert coordinator.lines == []
                device.resume()
                await (await coordinator.line()).check_in()

    asyncio.run(test())


# Programs at the socket


class Program:
    """A program that is connected to the device's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, **question: Any) -> Any:
        self.writer.write(json.dumps(question).encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            return json.loads(await self.reader.readline())


async def program(path: Path) -> Program:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return Program(*await asyncio.open_unix_connection(path))
            except OSError:
                await asyncio.sleep(0.01)


def test_programs_use_the_device(served: Served, cases: Any, tmp_path: Path) -> None:
    case, path = cases("softmax"), tmp_path / "device.sock"
    arrays = {"x": (np.float32, case.x.shape[1:]), "y": (np.int64, ())}
    with BufferWriter(tmp_path / "live.flb", arrays, 50) as buffer:
        buffer.append(x=case.x[0], y=case.y[0])

    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            data = str(tmp_path / "live.flb")
            device = device_at(coordinator, data, tmp_path / "state", socket=path, keep_model=True)
            with device:
                mine = await program(path)
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                line = await coordinator.line()
                assert (await line.check_in()).examples == 1
                before = await mine.ask(do="predict", arrays={"x": case.x[:1].tolist()})
                assert not before["ok"]
                assert "no model for predictions" in before["error"]
                for row in range(1, 8):
                    record = {"x": case.x[row].tolist(), "y": int(case.y[row])}
                    said = await mine.ask(do="append", arrays=record, id=row)
                    assert said == {"id": row, "ok": True, "number": row + 1}
                await line.say(served.task("t1"))
                report = await line.answer_fetches(Report)
                assert report.examples == 8, "what was appended is trained on"
                await line.accept(report)
                found = await mine.ask(do="predict", arrays={"x": case.x[:3].tolist()})
                np.testing.assert_array_equal(
                    np.array(found["outputs"], np.float32), device.predict(case.x[:3])
                )
                status = await mine.ask(do="status")
                assert status["status"]["history"]["accepted"] in (0, 1)
                assert not status["paused"]
                assert await mine.ask(do="pause") == {"ok": True}
                assert await line.closed() == 1000
                assert (await mine.ask(do="status"))["paused"]
                assert await mine.ask(do="resume") == {"ok": True}
                await (await coordinator.line()).check_in()
                wrong = await mine.ask(do="append", arrays={"x": [1.0], "y": 0})
                assert "expected float32 and" in wrong["error"]
                assert await mine.ask(do="stop") == {"ok": True}
                await joined(device)
                mine.writer.close()
            assert not path.exists()

    asyncio.run(test())


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.slow
def test_the_program_in_c(served: Served, held: Held, tmp_path: Path) -> None:
    source, path = ROOT / "examples" / "agent" / "ask.c", tmp_path / "device.sock"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", tmp_path / "ask", source], check=True)

    async def test() -> None:
        async with scripted(served.contents) as coordinator:
            with device_at(coordinator, held, tmp_path / "state", socket=path):
                await (await coordinator.line()).check_in()
                asked = await asyncio.create_subprocess_exec(
                    tmp_path / "ask", path, '{"do": "status"}', stdout=subprocess.PIPE
                )
                said, _ = await asked.communicate()
                assert json.loads(said)["ok"]
                assert asked.returncode == 0

    asyncio.run(test())
