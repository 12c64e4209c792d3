"""A device on 64-bit ARM: Debian's Python on an emulated Cortex-A72, everything else from aarch64
wheels, in the demo's fleet beside devices of this machine.

The memory that is printed is that of qemu's process, which has its own translations of all code
that ran.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import arm64
import numpy as np
import pytest
import scripted
from fleetlearn_coordinator import read_status
from fleetlearn_device import open_runtime
from fleetlearn_device.training.data import load_npz
from fleetlearn_device.training.train import train
from fleetlearn_protocol.messages import Report
from processes import Processes, free_port, service_file, status_of, wait_for

from examples.demo.fleet import PLAN

pytestmark = pytest.mark.slow
PATIENCE = 300.0
"""Seconds: a start takes ten, and several times that on a busy machine."""
TOLERANCE = 1e-4

Command = tuple[list[str], dict[str, str]]


@pytest.fixture(params=list(arm64.PYTHONS), scope="module")
def arm(request: pytest.FixtureRequest) -> Command:
    """The command of the device on ARM, and its environment."""
    try:
        command, environment = arm64.device_command(request.param)
    except arm64.UnavailableError as error:
        pytest.skip(f"no device is run on 64-bit ARM: {error}")
    return command, {**os.environ, **environment}


def memory(pid: int) -> dict[str, int]:
    """Return the MiB that a process has in memory, and how many of them are qemu's translations:
    the one mapping that may be written and executed."""
    found, mapping = {"all": 0, "translations": 0}, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            mapping = rest[0]
        elif key == "Rss:":
            found["all"] += int(rest[0])
            found["translations"] += int(rest[0]) if mapping.startswith("rwx") else 0
    return {name: kib // 1024 for name, kib in found.items()}


def test_its_update_is_this_machines(
    arm: Command,
    bundle_path: Path,
    shards: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed with the finished update, and started again: the same bytes."""
    monkeypatch.setattr(scripted, "PATIENCE", PATIENCE)
    served, (command, environment) = scripted.Served(bundle_path), arm
    figures: dict[str, Any] = {}
    rest = ["--data", str(shards[0]), "--state", str(tmp_path / "state")]

    @asynccontextmanager
    async def device(url: str) -> Any:
        words = [*command, "run", "--coordinator", url, *rest]
        with (tmp_path / "device.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*words, env=environment, stderr=log)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def test() -> bytes:
        async with scripted.scripted(served.contents) as coordinator:
            async with device(coordinator.url) as process:
                line = await coordinator.line()
                check_in = await line.check_in(chunk_bytes=256)
                assert check_in.runtime.startswith("onnx 1.")
                figures["idle"] = memory(process.pid)
                await line.say(served.task(epochs=3))
                report = await line.answer_fetches(Report)
                figures["trained"] = memory(process.pid)
                part = await line.take_upload(report, bytes_=512)
                process.kill()
                await process.wait()
            line.released.set()
            async with device(coordinator.url):
                line = await coordinator.line()
                held = (await line.check_in()).held
                assert held is not None
                assert held.task == "t1"
                assert await line.expect(Report) == report
                content = await line.accept(report)
            assert content.startswith(part)
            return content

    update = np.frombuffer(asyncio.run(test()), np.float32)
    runtime = open_runtime(bundle_path)
    runtime.load(served.model)
    settings = {"hyper": {"lr": 0.1, "mu": 0.01}, "epochs": 3, "batch_size": 8, "seed": 5}
    expected = train(runtime, load_npz(shards[0]), **settings)  # type: ignore[arg-type]
    figures["difference"] = float(np.abs(update - expected.update).max())
    with capsys.disabled():
        print(f"\nMiB and largest difference of an update: {figures}")
    np.testing.assert_allclose(update, expected.update, rtol=0, atol=TOLERANCE)
    assert np.abs(update).max() > 100 * TOLERANCE


def test_it_is_one_of_the_demos_fleet(
    arm: Command, run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """With two devices of this machine; killed after its first update, and started again."""
    command, environment = arm
    plan, port = run.folder / "plan.toml", free_port()
    text = PLAN.format(seed=7, goal=3, grace=60.0, rounds=3).replace("1.1", "1.0")
    text = text.replace("deadline = 30.0", "deadline = 600.0\nminimum = 3")
    plan.write_text(text.replace("digits.bundle", str(bundle_path)))
    service_file(plan, port)
    url = f"ws://127.0.0.1:{port}"
    words = [
        *("run", "--coordinator", url, "--data", shards[2]),
        *("--state", run.folder / "arm.state", "--name", "arm", "--until-finished"),
    ]
    run.coordinator(plan)
    for number in range(2):
        run.device(f"device-{number}", url, shards[number])
    run.start("arm", *command, *words, env=environment)
    wait_for(lambda: "update accepted" in run.log("arm"), "the update of the ARM", PATIENCE)
    run.kill("arm")
    status = status_of(run.folder / "run")
    assert status is not None
    assert status.version < 3
    run.start("arm", *command, *words, env=environment)
    for name in ("coordinator", "arm", "device-0", "device-1"):
        assert run.wait(name, PATIENCE) == 0, run.log(name)
    rounds = read_status(run.folder / "run").rounds
    assert [row.summary["reports"] for row in rounds] == [3, 3, 3]
