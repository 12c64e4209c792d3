"""The supervisor starts again what a signal killed, and ends all where a process ends by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fleetlearn_coordinator.gateways import child_process
from fleetlearn_coordinator.gateways.supervisor import Supervised, _supervise, held_port

SCRIPT = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
number = len(list(folder.glob(name + ".*")))
(folder / f"{name}.{number}").write_text(str(os.getpid()))
os.read(0, 1)
"""


def command(folder: Path, name: str) -> list[str]:
    """Return the command of a process that writes its number, and ends with its input."""
    return [sys.executable, "-c", SCRIPT, str(folder), name]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def process(folder: Path, name: str) -> int | None:
    """Return the process number, once it is written."""
    file = folder / name
    text = file.read_text() if file.exists() else ""
    return int(text) if text else None


@pytest.mark.slow
def test_what_a_signal_kills_is_started_again(tmp_path: Path) -> None:
    async def test() -> int:
        commands = Supervised(command(tmp_path, "engine"), [command(tmp_path, "gateway")])
        supervising = asyncio.create_task(_supervise(commands))
        for name in ("engine", "gateway"):
            await until(lambda name=name: process(tmp_path, f"{name}.0") is not None)  # type: ignore[misc]
            os.kill(process(tmp_path, f"{name}.0") or 0, signal.SIGKILL)
            await until(lambda name=name: process(tmp_path, f"{name}.1") is not None)  # type: ignore[misc]
        os.kill(os.getpid(), signal.SIGTERM)
        return await supervising

    assert asyncio.run(test()) == 0
    assert not (tmp_path / "engine.2").exists(), "nor what is ended"
    for name in ("engine.1", "gateway.1"):
        with pytest.raises(ProcessLookupError):
            os.kill(process(tmp_path, name) or 0, 0)


def test_a_gateway_that_is_told_to_end_is_started_again(tmp_path: Path) -> None:
    """By hand, by SIGTERM: the service goes on. The engine process ends in order as a run does."""

    async def test() -> int:
        commands = Supervised(command(tmp_path, "engine"), [command(tmp_path, "gateway")])
        supervising = asyncio.create_task(_supervise(commands))
        for name in ("engine", "gateway"):
            await until(lambda name=name: process(tmp_path, f"{name}.0") is not None)  # type: ignore[misc]
        os.kill(process(tmp_path, "gateway.0") or 0, signal.SIGTERM)
        await until(lambda: process(tmp_path, "gateway.1") is not None)
        assert not supervising.done()
        os.kill(process(tmp_path, "engine.0") or 0, signal.SIGTERM)
        return await supervising

    assert asyncio.run(test()) == 0
    assert not (tmp_path / "engine.1").exists()


def test_it_ends_well_before_the_engine_process_has_begun(tmp_path: Path) -> None:
    """SIGTERM kills a Python that still imports what it will need."""

    async def test() -> int:
        importing = [sys.executable, "-S", "-c", "import os; os.read(0, 1)"]
        supervising = asyncio.create_task(_supervise(Supervised(importing, [])))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        return await supervising

    assert asyncio.run(test()) == 0


@pytest.mark.slow
def test_what_stays_stopped_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "LOOK", 0.05)
    monkeypatch.setattr(child_process, "STOPPED_LIMIT", 0.5)

    async def test() -> None:
        commands = Supervised(command(tmp_path, "engine"), [command(tmp_path, "gateway")])
        supervising = asyncio.create_task(_supervise(commands))
        for name in ("engine", "gateway"):
            await until(lambda name=name: process(tmp_path, f"{name}.0") is not None)  # type: ignore[misc]
        paused = process(tmp_path, "gateway.0") or 0
        os.kill(paused, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # less than the limit
        os.kill(paused, signal.SIGCONT)
        os.kill(process(tmp_path, "engine.0") or 0, signal.SIGSTOP)
        await until(lambda: process(tmp_path, "engine.1") is not None)
        os.kill(os.getpid(), signal.SIGTERM)
        await supervising

    asyncio.run(test())
    assert not (tmp_path / "gateway.1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["engine", "gateway"])
def test_who_ends_with_an_error_ends_all(tmp_path: Path, who: str) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit(3)"]
    commands = {name: command(tmp_path, name) for name in ("engine", "gateway")} | {who: failing}
    supervised = Supervised(commands["engine"], [commands["gateway"]])
    assert asyncio.run(_supervise(supervised)) == 3


def test_a_port_is_held_and_shared() -> None:
    with held_port("127.0.0.1", 0) as port:
        assert port > 0
        with socket.socket() as gateway:
            gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            gateway.bind(("127.0.0.1", port))
            gateway.listen()
            with (
                pytest.raises(OSError, match="another program listens there"),
                held_port("127.0.0.1", port, patience=0.2),
            ):
                raise AssertionError("another coordinator has the port")


def test_a_port_that_becomes_free_is_waited_for() -> None:
    """Gateways of a supervisor that was killed have it for a moment."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = threading.Timer(0.2, other.close)
        ended.start()
        with held_port("127.0.0.1", port) as held:
            assert held == port
        ended.join()


def test_connections_of_a_coordinator_that_has_just_ended_do_not_keep_the_port() -> None:
    """A process without gateways listens without sharing, and closed its devices' connections
    itself: they stay in TIME_WAIT for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as device:
            listener.accept()[0].close()
            assert device.recv(1) == b""
    with held_port("127.0.0.1", port) as held:
        assert held == port


READY_SCRIPT = """
import os, pathlib, signal, socket, sys
folder = pathlib.Path(sys.argv[1])
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if (folder / "broken").exists():
    sys.exit(3)
name = f"gateway.{options['--number']}"
ends = lambda number, frame: ((folder / name).write_text(signal.Signals(number).name), sys.exit(0))
signal.signal(signal.SIGTERM, ends)
signal.signal(signal.SIGINT, ends)
(folder / name).write_text(str(os.getpid()))
try:
    os.write(int(options["--ready"]), b"ready\\n")
except BrokenPipeError:
    pass
listening = socket.socket(fileno=int(options["--listening"].split(",")[0]))
if (folder / "answering").exists():
    listening.setblocking(True)
    while True:
        connection, _ = listening.accept()
        connection.sendall(name.encode())
        connection.close()
os.read(0, 1)
"""
ENGINE_SCRIPT = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
folder = pathlib.Path(sys.argv[1])
(folder / f"engine.{len(list(folder.glob('engine.*')))}").write_text(str(os.getpid()))
os.read(0, 1)
"""


@pytest.mark.slow
def test_all_are_replaced_on_sigusr1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gateways first, each once the new one is ready; what waits to be accepted is answered by the
    new one. Where that does not start nothing is replaced."""
    gateway = [sys.executable, "-c", READY_SCRIPT, str(tmp_path)]
    engine = [sys.executable, "-c", ENGINE_SCRIPT, str(tmp_path)]

    async def test() -> int:
        with held_port("127.0.0.1", 0) as port:
            address = "127.0.0.1", port
            supervising = asyncio.create_task(
                _supervise(Supervised(engine, [gateway, gateway], address))
            )
            for name in ("engine.0", "gateway.0", "gateway.1"):
                await until(lambda name=name: process(tmp_path, name) is not None)  # type: ignore[misc]
            (tmp_path / "answering").touch()
            waiting = [await asyncio.open_connection(*address) for _ in range(20)]
            os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: process(tmp_path, "engine.1") is not None)
            answers = {await reader.read() for reader, _ in waiting}
            assert answers == {b"gateway.2", b"gateway.3"}, "no connection was lost"
            for name in ("gateway.0", "gateway.1"):
                assert (tmp_path / name).read_text() == "SIGTERM"
            (tmp_path / "broken").touch()
            os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: "nothing else is replaced" in caplog.text)
            reader, writer = await asyncio.open_connection(*address)
            assert await reader.read() in answers
            for each in (writer, *(writer for _, writer in waiting)):
                each.close()
            os.kill(os.getpid(), signal.SIGTERM)
            return await supervising

    assert asyncio.run(test()) == 0
    assert not (tmp_path / "engine.2").exists()
    for name in ("gateway.2", "gateway.3"):
        assert (tmp_path / name).read_text() == "SIGINT", "where all is ended they end at once"
