"""A supervisor that stands by: how it knows that its engine process has the run, and whose sockets
it removes. end_to_end/test_gateways_standby.py tries the rest with real processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.gateways import standby_group
from fleetlearn_coordinator.gateways.engine_host import SOCKET
from fleetlearn_coordinator.gateways.standby_group import remove_stale, speaks
from gateways import gateway_fleet
from peers import PlanMaker


def test_an_engine_process_that_has_the_run_speaks_at_once(make_plan: PlanMaker) -> None:
    plan = make_plan()
    bus = plan.data_dir / SOCKET

    async def test() -> None:
        assert not await speaks(bus), "nobody is there"
        async with gateway_fleet(plan, 1) as behind:
            assert await speaks(bus)
            assert [*behind.server.host.gateways] == [0], "whoever looks is no gateway"
            await behind.end_engine()
            assert not await speaks(bus)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_process_that_stands_still_does_not_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_group, "ANSWER", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        listening.listen()
        assert not asyncio.run(asyncio.wait_for(speaks(tmp_path / "bus"), 30))


def test_sockets_of_supervisors_that_were_killed_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = tmp_path / f"gateways-{os.getpid()}.sock"
    files = [own, tmp_path / f"gateways-{os.getppid()}.sock", tmp_path / "gateways.sock"]
    for file in (*files, tmp_path / f"gateways-{dead.pid}.sock"):
        file.touch()
    remove_stale(own)
    assert {*tmp_path.iterdir()} == {*files}
