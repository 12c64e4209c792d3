"""What README.md and docs/start/devices.md tell a reader to type, typed."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import typed
from processes import DIGITS, ROOT, Processes, free_port, processes

README = (ROOT / "README.md").read_text()
DEVICES = (ROOT / "docs" / "start" / "devices.md").read_text()
COMMANDS = re.findall(r"^    (fleetlearn-.*)$", README, re.MULTILINE)
block = functools.partial(typed.block, README)


def command(name: str) -> list[str]:
    """The words of the README's command that begins so, with this environment's script."""
    (found,) = (line for line in COMMANDS if line.startswith(name))
    words = found.split()
    return [str(Path(sys.executable).with_name(words[0])), *words[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples beside it, a bundle by the README's Python, and two devices'
    data."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "export.py").write_text(block("python", "export_bundle("))
    subprocess.run(
        [sys.executable, "export.py"],
        cwd=folder,
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    x, y = DIGITS["data"]()[:2]
    for name, indices in zip(
        ("shard", "other"), DIGITS["dirichlet_shards"](y, 2, seed=3), strict=True
    ):
        np.savez(folder / f"{name}.npz", x=x[indices], y=y[indices])
    return folder


def test_the_export_command(folder: Path) -> None:
    words = command("fleetlearn-export")
    words[words.index("digits.bundle")] = "again.bundle"
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=300)
    first, again = (folder / name / "manifest.json" for name in ("digits.bundle", "again.bundle"))
    assert again.read_bytes() == first.read_bytes()


def test_the_runtime_block(folder: Path) -> None:
    text = "from examples import digits\nx, y = digits.data()[:2]\n" + typed.block(
        DEVICES, "python", "open_runtime"
    )
    words = [sys.executable, "-c", f"{text}\nprint(loss, vector.shape)"]
    shown = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
    assert re.fullmatch(r"2\.\d+ \(22602,\)", shown.strip())


def test_the_coordinator_and_two_devices(folder: Path) -> None:
    """One device by Python and one by the command; then status and the trained model."""
    port = free_port()
    (folder / "plan.toml").write_text(block("toml", "recipe"))
    served = block("python", "serve(").replace("import Plan,", "import Plan, ServiceSettings,")
    served = served.replace('"plan.toml")', f'"plan.toml"), service=ServiceSettings(port={port})')
    (folder / "serve.py").write_text(served)
    (folder / "device.py").write_text(block("python", "Device(").replace("8765", str(port)))
    with processes(folder) as run:
        finish(run, folder, port)
    shown = subprocess.run(
        command("fleetlearn-coordinator status"),
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "10 rounds done; not running" in shown
    subprocess.run(
        command("fleetlearn-coordinator export-model"), cwd=folder, check=True, capture_output=True
    )
    session = onnxruntime.InferenceSession(
        str(folder / "infer.onnx"), providers=["CPUExecutionProvider"]
    )
    _, _, x, y = DIGITS["data"]()
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x})
    assert (outputs.argmax(1) == y).mean() > 0.8


def finish(run: Processes, folder: Path, port: int) -> None:
    """Start everything as the README says and wait for its end."""
    run.start("coordinator", sys.executable, "serve.py", cwd=folder)
    run.start("device-python", sys.executable, "device.py", cwd=folder)
    words = [
        word.replace("8765", str(port)).replace("shard", "other")
        for word in command("fleetlearn-device")
    ]
    words[words.index("device.state")] = "other.state"
    run.start("device-command", sys.executable, "-m", "fleetlearn_device", *words[1:], cwd=folder)
    assert run.running["coordinator"].wait(120) == 0, run.log("coordinator")
    assert run.wait("device-python") == 0, run.log("device-python")
