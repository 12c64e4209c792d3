"""``fleetlearn-device doctor``: the whole command, against a coordinator that answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.doctor import machine
from processes import free_port
from silent_server import silent_server


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 3)), y=np.zeros(4))
    return ["--state", str(tmp_path / "s"), "--data", str(tmp_path / "mine.npz")]


def test_all_is_good(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> int:
        async with silent_server() as port:
            words = ["doctor", "--coordinator", f"ws://127.0.0.1:{port}", *settings]
            return await asyncio.to_thread(main, words)

    assert asyncio.run(test()) == 0
    shown = capsys.readouterr().out
    names = [line.split()[1] for line in shown.splitlines() if not line.startswith(" ")]
    assert names == [
        "python", "runtime", "state", "credential", "disk", "disk", "memory", "name", "network",
        "coordinator", "clock", "data",
    ]  # fmt: skip
    assert "BAD" not in shown


def test_each_fault_is_said_and_the_exit_status_says_that_there_is_one(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--coordinator", f"ws://127.0.0.1:{free_port()}", *settings]
    assert main(words) == 6
    assert "BAD      network" in capsys.readouterr().out
    words = ["doctor", "--coordinator", "ws://fleet.example", *settings]
    assert main(words) == 6
    assert "BAD      address      ws://fleet.example is another machine's address without TLS" in (
        capsys.readouterr().out
    )
    assert main([*words, "--bundle", str(tmp_path / "no.bundle")]) == 6
    assert "BAD      bundle" in capsys.readouterr().out


def test_what_it_needs_to_know_is_refused_if_it_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--state", "s"]) == 2
    assert "coordinator is not set" in capsys.readouterr().err


def test_warnings_alone_are_no_fault(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "LOW_DISK", 2**70)

    async def test() -> int:
        async with silent_server() as port:
            words = ["doctor", "--coordinator", f"ws://127.0.0.1:{port}", *settings]
            return await asyncio.to_thread(main, words)

    assert asyncio.run(test()) == 0
    assert "warning  disk " in capsys.readouterr().out
