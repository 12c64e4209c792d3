"""An upload outlives its coordinator: a process that is killed in the middle of one, twice, and the
bytes that its device sends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_coordinator.conversation.uploads import CHECKPOINT_BYTES
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.frames import CHUNK_BYTES
from fleetlearn_protocol.vector import Vector
from peers import plan_text, write_test_bundle
from processes import PATIENCE, Processes, free_port
from slow_link import ReturningDevice, slow_link

MIB = 2**20
UPDATE = 48 * MIB
"""Bytes of the update."""
DEATHS = 18 * MIB, 34 * MIB
"""After how many of them the coordinator ends, a little after each checkpoint."""
RATE = 12.0 * MIB
IN_FLIGHT = 2 * MIB
"""Bytes that may have crossed the link when the coordinator dies, and were not read by it."""

End = Callable[[Processes, Path], Awaitable[None]]
"""Ends the coordinator, or a part of it, and begins it again."""


async def _restarted(run: Processes, plan: Path, how: int) -> None:
    process = run.running["coordinator"]
    process.send_signal(how)
    await asyncio.to_thread(process.wait)
    run.coordinator(plan)


async def killed(run: Processes, plan: Path) -> None:
    await _restarted(run, plan, signal.SIGKILL)


async def stopped(run: Processes, plan: Path) -> None:
    await _restarted(run, plan, signal.SIGTERM)


async def gateways_killed(run: Processes, plan: Path) -> None:
    """All gateways are killed; the supervisor begins others."""
    log = run.folder / "coordinator.log"
    found = re.findall(r"gateway (\d) \(process (\d+)\) is there", log.read_text())
    for process in dict(found).values():
        os.kill(int(process), signal.SIGKILL)


async def deliver(run: Processes, plan: Path, port: int, update: Vector, end: End) -> int:
    """Deliver the update while the coordinator ends twice. Returns the bytes that crossed the
    link."""
    async with slow_link(port, RATE) as link, asyncio.timeout(2 * PATIENCE):
        device = ReturningDevice(link, update)
        delivery = asyncio.ensure_future(device.deliver())
        run.coordinator(plan)
        for grants, part in enumerate(DEATHS, 1):
            while len(device.offsets) < grants or device.came() < part:
                assert not delivery.done(), delivery.result()
                assert run.running["coordinator"].poll() is None
                await asyncio.sleep(0.01)
            await end(run, plan)
        await delivery
        assert len(device.offsets) == 1 + len(DEATHS), device.offsets
        return link.up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "gateways", "again"),
    [
        pytest.param(killed, 0, CHECKPOINT_BYTES, id="killed"),
        pytest.param(stopped, 0, CHUNK_BYTES, id="stopped"),
        pytest.param(stopped, 2, CHUNK_BYTES, id="stopped with gateways"),
        pytest.param(gateways_killed, 2, CHECKPOINT_BYTES, id="gateways killed"),
    ],
)
def test_an_upload_goes_on_after_its_coordinator_s_death(
    run: Processes, tmp_path: Path, end: End, gateways: int, again: int
) -> None:
    """At most a checkpoint of it is sent twice for each kill, and less than a chunk for each
    orderly stop."""
    port, bundle = free_port(), write_test_bundle(tmp_path / "test.bundle", UPDATE // 4)
    plan = tmp_path / "plan.toml"
    settings = {"round__goal": 1, "round__grace": 60.0, "round__deadline": 600.0}
    plan.write_text(plan_text(bundle, tmp_path / "run", **settings, stop__rounds=1))
    (tmp_path / "service.toml").write_text(f"port = {port}\ngateways = {gateways}\n")
    update = np.random.default_rng(5).standard_normal(UPDATE // 4, np.float32)
    sent = asyncio.run(deliver(run, plan, port, update, end))
    assert UPDATE < sent < UPDATE + len(DEATHS) * (again + IN_FLIGHT)
    assert run.running["coordinator"].wait(PATIENCE) == 0, "the run ends with its round"
    before = open_bundle(bundle).parameters()
    _, after = read_model(tmp_path / "run")
    np.testing.assert_allclose(after, before + update, rtol=1e-6, atol=1e-6)
    assert list((tmp_path / "run" / "uploads").glob("*.begun")) == []
