"""What a run is made of: files that changed in the middle of a sweep are noticed, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.data.made_of import changed, made_of
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.run import prepare_sweep
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import MODULE, write_scenario

ONE = Options("bundle", 1)
TRACE = "device,on,off\n1,0,100000\n2,0,100000\n"


def write_arrays(file: Path, value: float) -> None:
    np.savez(file, x=np.full((40, 3), value, np.float32), y=np.ones(40, np.float32))


def write_all(folder: Path, bundle: Path) -> Path:
    """A scenario whose function imports a module beside it, and whose devices follow a trace."""
    availability = {"kind": "trace", "file": "trace.csv"}
    path = write_scenario(folder, bundle, 2, availability=availability, plan__stop__rounds=2)
    (folder / "lines.py").write_text("from helpers.scale import SCALE\n" + MODULE)
    (folder / "helpers").mkdir()
    (folder / "helpers" / "__init__.py").touch()
    (folder / "helpers" / "scale.py").write_text("SCALE = 1.0\n")
    (folder / "trace.csv").write_text(TRACE)
    (folder / "unused.py").write_text("")
    return path


CHANGES: dict[str, Callable[[Path], Any]] = {
    "data.function's lines.py": lambda folder: (folder / "lines.py").write_text(
        MODULE + "\nMORE = 1\n"
    ),
    "data.function's scale.py": lambda folder: (folder / "helpers" / "scale.py").write_text(
        "SCALE = 2.0\n"
    ),
    "availability.file trace.csv": lambda folder: (folder / "trace.csv").write_text(
        TRACE.replace("100000", "90000")
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_prepared_run_is_not_begun_with_other_files(
    line: Path, tmp_path: Path, name: str
) -> None:
    scenario = Scenario.load(write_all(tmp_path, line))
    prepare_sweep([msgspec.structs.replace(scenario, name="run")], tmp_path, ONE)
    before = {
        file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.suffix in (".py", ".csv")
    }
    CHANGES[name](tmp_path)
    with pytest.raises(SimulatorError, match=rf"was begun, this has changed: .*{name}.*Put back"):
        simulate(scenario, tmp_path / "run", ONE, resume=True)
    for file, content in before.items():
        file.write_bytes(content)
    (tmp_path / "unused.py").write_text("MORE = 1\n")
    outcome = simulate(scenario, tmp_path / "run", ONE, resume=True)
    assert outcome is not None
    assert outcome.summary["rounds"] == 2


def test_arrays_count_too(line: Path, tmp_path: Path) -> None:
    data = {"kind": "iid", "arrays": "arrays.npz", "examples": 10}
    path = write_scenario(tmp_path, line, 2, data=data)
    found = []
    for value in (1.0, 2.0):
        write_arrays(tmp_path / "arrays.npz", value)
        found.append(made_of(Scenario.load(path), {"": open_bundle(line)}, None))
    assert changed(*found) == ["data.arrays arrays.npz"]
    assert found[0]["the bundle"] == open_bundle(line).sha256
    assert changed(found[0], {})[:2] == ["the bundle", "data.arrays arrays.npz"]
