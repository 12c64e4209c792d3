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
from fleetlearn_coordinator.gateways import supervisor
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


@pytest.mark.slow
def test_what_stays_stopped_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOOK", 0.05)
    monkeypatch.setattr(supervisor, "STOPPED_LIMIT", 0.5)

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
