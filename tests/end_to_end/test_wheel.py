"""The wheel that ``make dist`` builds, installed with the device's extra alone in an empty
environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import line_bundle
import numpy as np
import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_protocol import open_bundle
from line_bundle import line_data
from processes import ROOT, free_port, processes, service_file

Run = Callable[..., subprocess.CompletedProcess[str]]
PLAN = """
name = "line"
bundle = "line.bundle"
recipe = "fedavg"
data_dir = "run"
local = { lr = 0.01 }
round = { goal = 1, minimum = 1, over_selection = 1.0 }
stop = { rounds = 2 }
"""
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert [path.suffix for path in sorted(folder.iterdir())] == [".whl", ".gz"]
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of the environment, in a folder where nothing of the repository is."""
    folder = tmp_path_factory.mktemp("device")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    command = [
        *PIP,
        "--python",
        python,
        "install",
        "--constraint",
        ROOT / "constraints.txt",
        f"{wheel}[device]",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        words = [python.with_name(program), *arguments]
        return subprocess.run(
            words,
            cwd=folder,
            env={"PATH": "/bin:/usr/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_the_wheel_has_the_rooms_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    rooms = {
        f"fleetlearn_{room}"
        for room in ("protocol", "device", "coordinator", "export", "simulator")
    }
    assert {name.partition("/")[0] for name in names} == rooms | {
        f"fleetlearn-{version('fleetlearn')}.dist-info"
    }
    assert {f"{room}/py.typed" for room in rooms} <= {*names}
    assert {
        f"fleetlearn_simulator/{file}" for file in ("scenario/example.toml", "results/page.html")
    } <= {*names}


def test_the_device_s_command(installed: Run) -> None:
    for arguments, text in (
        (["--version"], f"fleetlearn-device {version('fleetlearn')}\n"),
        (["--help"], "Train models where the data is."),
        (["run", "--help"], "--coordinator URL"),
    ):
        done = installed("fleetlearn-device", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout


def test_it_trains_for_a_coordinator(installed: Run, tmp_path: Path) -> None:
    bundle = line_bundle.write_line_bundle(tmp_path / "line.bundle").path
    x, y = line_data(10, seed=1)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    port = free_port()
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    service_file(plan, port)
    with processes(tmp_path) as run:
        coordinator = run.coordinator(plan)
        done = installed(
            "fleetlearn-device",
            "run",
            "--coordinator",
            f"ws://127.0.0.1:{port}",
            "--data",
            tmp_path / "data.npz",
            "--state",
            tmp_path / "state",
            "--until-finished",
        )
        assert done.returncode == 0, done.stderr
        assert coordinator.wait(30) == 0, run.log("coordinator")
    version, model = read_model(tmp_path / "run")
    assert version == 2
    assert not np.array_equal(model, open_bundle(bundle).parameters())


def test_it_needs_neither_torch_nor_the_coordinator(installed: Run, tmp_path: Path) -> None:
    bundle = line_bundle.write_line_bundle(tmp_path / "line.bundle").path
    program = (
        "import sys; from fleetlearn_device import open_runtime; "
        "print(open_runtime(sys.argv[1]).version); print(sorted({*sys.modules} & {'torch', 'onnx', "
        "'typer', 'fleetlearn_coordinator'}))"
    )
    done = installed("python", "-c", program, bundle)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{version('onnxruntime')}\n[]\n", "")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("fleetlearn-coordinator", "coordinator"),
        ("fleetlearn-simulate", "simulator"),
        ("fleetlearn-export", "export"),
    ],
)
@pytest.mark.parametrize("arguments", [["--help"], ["anything"]])
def test_the_other_commands_name_what_is_missing(
    installed: Run, command: str, extra: str, arguments: list[str]
) -> None:
    done = installed(command, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f'{command} needs: pip install "fleetlearn[{extra}]" (No module named'
    )
    assert done.stderr.count("\n") == 1


def test_from_a_program_too(installed: Run) -> None:
    done = installed("python", "-c", "from fleetlearn_export import export_bundle")
    needs = (
        "exporting needs torch, onnx, onnxscript, not installed here: pip install "
        '"fleetlearn[export]"'
    )
    assert f"ImportError: {needs}" in done.stderr


@pytest.mark.parametrize("command", ["coordinator", "device", "export", "simulate"])
def test_every_command_knows_its_version(command: str) -> None:
    """This environment has all of them."""
    program = Path(sys.executable).with_name(f"fleetlearn-{command}")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"fleetlearn-{command} {version('fleetlearn')}\n",
        "",
    )
