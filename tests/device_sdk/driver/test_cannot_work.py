"""A device that cannot work tells its coordinator so, once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.driver.address import checked_address
from fleetlearn_device.driver.cannot_work import tell_cannot_work
from fleetlearn_device.runtimes.providers import PROVIDERS, Provider
from fleetlearn_device.storage.credential import note_let_in
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_protocol.messages import CheckIn
from processes import free_port
from scripted import scripted


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state directory of a device that a coordinator has let in."""
    directory = StateDirectory(tmp_path / "state", "sensor-7")
    note_let_in(directory.path)
    directory.close()
    return directory.path


def heard(command: Any) -> tuple[CheckIn, Any]:
    """What a coordinator hears, and what the command returns with its URL."""

    async def test() -> tuple[CheckIn, Any]:
        async with scripted({}) as coordinator:
            running = asyncio.create_task(asyncio.to_thread(command, coordinator.url))
            line = await coordinator.line()
            check_in = await line.check_in()
            assert await line.closed() == 1000
            return check_in, await running

    return asyncio.run(test())


def test_data_that_cannot_be_read_reach_the_coordinator(state: Path, tmp_path: Path) -> None:
    def command(url: str) -> int:
        gone = str(tmp_path / "gone.npz")
        return main(["run", "--coordinator", url, "--state", str(state), "--data", gone])

    check_in, status = heard(command)
    assert status == 2
    assert check_in.device == "sensor-7"
    assert "gone.npz" in check_in.error


def test_a_runtime_that_cannot_be_loaded_reaches_the_coordinator(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROVIDERS, "cuda", Provider("NoSuchExecutionProvider", {}, "cuda"))
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 3), "f4"), y=np.zeros(4))

    def command(url: str) -> int:
        words = ["run", "--coordinator", url, "--state", str(state), "--provider", "cuda"]
        return main([*words, "--data", str(tmp_path / "mine.npz")])

    check_in, status = heard(command)
    assert status == 1
    assert "NoSuchExecutionProvider" in check_in.error


def test_who_was_never_let_in_or_is_spoken_for_says_nothing(state: Path, tmp_path: Path) -> None:
    """The address would answer nobody: the result is there before it is tried."""
    address = checked_address(f"ws://127.0.0.1:{free_port()}")
    assert not asyncio.run(tell_cannot_work(address, tmp_path / "new", "no runtime"))
    assert not (tmp_path / "new").exists()
    running = StateDirectory(state)
    assert not asyncio.run(tell_cannot_work(address, state, "no runtime"))
    running.close()


def test_a_coordinator_that_is_not_there_changes_nothing(state: Path) -> None:
    address = checked_address(f"ws://127.0.0.1:{free_port()}")
    assert not asyncio.run(tell_cannot_work(address, state, "no runtime"))
