"""An own local algorithm from the page, over real sockets between real processes, also where a
device is killed; a device that does not allow it is told."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol import open_bundle
from line_bundle import line_data, write_line_bundle
from processes import ROOT, Processes, free_port, service_file, wait_for

CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
PAGE = ROOT / "docs" / "start" / "your-own-algorithm.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
NAME = "local_rules:short"
DATA = line_data(40)


def begin(run: Processes) -> tuple[Path, str]:
    """Write plan, bundle, data and the page's module. Returns the plan and the address."""
    bundle = write_line_bundle(run.folder / "line.bundle", references=["anchor"], buffer=False).path
    plan = run.folder / "plan.toml"
    plan.write_text(
        f'name = "line"\nbundle = "{bundle}"\ndata_dir = "run"\n'
        f'[local]\nalgorithm = "{NAME}"\nparameters = {{ longest = 0.05 }}\n'
        "epochs = 2\nbatch_size = 10\nlr = 0.5\nevaluate = false\n"
        "[round]\ngoal = 1\nminimum = 1\nover_selection = 1.0\ngrace = 60.0\n"
        "deadline = 300.0\n[stop]\nrounds = 3\n"
    )
    np.savez(run.folder / "a.npz", x=DATA[0], y=DATA[1])
    (run.folder / "local_rules.py").write_text(BLOCKS["local_rules"])
    port = free_port()
    service_file(plan, port)
    return plan, f"ws://127.0.0.1:{port}"


def device(run: Processes, url: str, *wrapper: str | Path) -> Any:
    command = [*(wrapper or ("-m", "fleetlearn_device")), "run", "--coordinator", url]
    command += ["--data", run.folder / "a.npz", "--state", run.folder / "a.state"]
    command += ["--name", "a", "--until-finished", "--allow-function", NAME]
    return run.start("a", sys.executable, *command, cwd=run.folder)


def check(run: Processes, plan: Path) -> None:
    for name in ("coordinator", "a"):
        assert run.wait(name) == 0, run.log(name)
    status = read_status(run.folder / "run")
    assert [row.summary["reports"] for row in status.rounds] == [1, 1, 1]
    _, found = read_model(run.folder / "run")
    begin = open_bundle(run.folder / "line.bundle").parameters()
    moved = float(np.linalg.norm(found[: begin.size] - begin))
    assert 0 < moved <= 0.15 * (1 + 1e-5), "three rounds of at most 0.05"


def test_devices_train_by_their_owners_function(run: Processes) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    run.device("d", url, run.folder / "a.npz")
    text = f"this run trains by the function {NAME}; the device's owner allows none"
    wait_for(lambda: text in run.log("d"), "the device to be told")
    assert f"--allow-function {NAME} allows it" in run.log("d")
    device(run, url)
    check(run, plan)
    assert run.wait("d") == 0, run.log("d")


@pytest.mark.slow
def test_a_device_killed_trains_again(run: Processes) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    crashing = device(run, url, CRASH_DEVICE, "the work is done but not on disk", "2")
    assert crashing.wait(60) == -9, run.log("a")
    device(run, url)
    check(run, plan)
