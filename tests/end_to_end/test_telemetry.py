"""ONNX Runtime's wheels report to their vendor from 1.29 on, unless ORT_DISABLE_TELEMETRY is set
before the import."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import line_bundle
import pytest
from processes import ROOT
from virtual import write_scenario

DEVICE = """
import sys, time
from fleetlearn_device import open_runtime
from line_bundle import line_data
runtime, until = open_runtime(sys.argv[1]), time.monotonic() + float(sys.argv[2])
runtime.step(line_data(10, seed=1), lr=0.01)
while time.monotonic() < until:
    runtime.step(line_data(10, seed=1), lr=0.01)
"""
SIMULATOR = """
from fleetlearn_simulator import Options, Scenario, simulate
options = Options(backend="bundle", workers=2)
assert simulate(Scenario.load("scenario.toml"), "run.sim", options) is not None
"""
EXPORT = """
import torch
from fleetlearn_export import export_bundle
example = torch.rand(4, 3), torch.rand(4, 2)
export_bundle(torch.nn.Linear(3, 2), torch.nn.functional.mse_loss, example, "a.bundle")
"""
HERE = ["-c", DEVICE, "line.bundle", "0"]
STRACE = shutil.which("strace")


def run(folder: Path, *words: str, before: tuple[str, ...] = ()) -> list[str]:
    """Run Python in the folder, and with a home of its own there. Returns what the home holds
    afterwards."""
    home = folder / "home"
    home.mkdir()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))
    }
    support = Path(line_bundle.__file__).parent
    path = os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*before, sys.executable, *words],
        cwd=folder,
        env={**kept, "HOME": str(home), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundle = line_bundle.write_line_bundle(tmp_path / "line.bundle").path
    write_scenario(tmp_path, bundle, 6)
    return tmp_path


@pytest.mark.parametrize(
    "words", [HERE, ["-c", SIMULATOR], ["-c", EXPORT]], ids=["device", "simulator", "export"]
)
def test_nothing_is_kept_about_the_machine(folder: Path, words: list[str]) -> None:
    """The telemetry's database and identifier of the machine are the first that one sees of it, at
    once."""
    assert run(folder, *words) == []


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize(
    "words",
    [[*HERE[:-1], "15"], ["-c", SIMULATOR], ["-c", EXPORT]],
    ids=["device", "simulator", "export"],
)
def test_nobody_is_looked_up_or_called(folder: Path, words: list[str]) -> None:
    """The telemetry looks its host up after some nine seconds."""
    traced = folder / "traced.txt"
    assert (
        run(
            folder,
            *words,
            before=(str(STRACE), "-f", "-e", "trace=network,openat", "-o", str(traced)),
        )
        == []
    )
    lines = traced.read_text().splitlines()
    assert any("libonnxruntime" in line or "onnxruntime_pybind11" in line for line in lines), (
        "it was seen"
    )
    assert [line for line in lines if re.search(r"AF_INET|/etc/(resolv.conf|hosts)", line)] == []


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of each import statement."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


ROOMS = {path.parent for path in ROOT.glob("*/fleetlearn_*/__init__.py")}
ASKS = re.compile(r"""^ *(import|from) onnxruntime|import_module\(f?"onnxruntime""", re.MULTILINE)
SET = 'os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")'


def test_whoever_imports_onnx_runtime_has_set_the_variable_before() -> None:
    """A package's ``__init__`` is run before any of its modules; a script has a line of its own."""
    rooms = 0
    for room in ROOMS:
        asked = [path for path in room.rglob("*.py") if ASKS.search(path.read_text())]
        text = (room / "__init__.py").read_text()
        assert not asked or SET in text, asked
        rooms += bool(asked)
    assert rooms == 2, "the device and export"
    scripts = [
        path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in scripts:
        lines = [
            line for line, module in imports(path) if module.partition(".")[0] == "onnxruntime"
        ]
        if lines:
            text = path.read_text()
            assert SET in text, path
            assert text[: text.index(SET)].count("\n") < min(lines), path


def test_a_setting_of_the_users_stays() -> None:
    program = (
        "import os, fleetlearn_device, fleetlearn_export; "
        "print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    for given, found in ((None, "1"), ("0", "0")):
        kept = {
            name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"
        }
        env = kept if given is None else {**kept, "ORT_DISABLE_TELEMETRY": given}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{found}\n"
