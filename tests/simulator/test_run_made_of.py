"""A run, or a sweep, goes on only with what it began with: values, and the contents of files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.run_folder import (
    CHECKPOINT,
    MADE_OF,
    SUMMARY,
    read_json,
    write_json,
)
from fleetlearn_simulator.run import prepare_sweep, summary_alone
from fleetlearn_simulator.scenario.scenario import Scenario, expand
from line_bundle import write_line_bundle
from typer.testing import CliRunner
from virtual import make_scenario, write_scenario

ONE = Options(backend="bundle", workers=1, checkpoint=1)
TRACED: dict[str, Any] = {
    "availability": {"kind": "trace", "file": "online.csv"},
    "plan__stop__rounds": 4,
}
READING = """
import numpy as np
from helper import load

def examples(device, seed):
    return 10

def make(device, seed):
    return load(device)
"""
HELPER = """
from pathlib import Path
import numpy as np

def load(device):
    x = np.load(Path(__file__).with_name("numbers.npy"))
    return {"x": x, "y": x.sum(1)}
"""


def traced(folder: Path, line: Path, **settings: Any) -> Scenario:
    """Three devices that are always online, by a trace."""
    (folder / "online.csv").write_text("device,on,off\na,0,900000\n")
    return make_scenario(folder, line, 3, **(TRACED | settings))


def reading(folder: Path, line: Path) -> Scenario:
    """Three devices whose data a function reads from a file, through a module beside it."""
    (folder / "reader.py").write_text(READING)
    (folder / "helper.py").write_text(HELPER)
    np.save(folder / "numbers.npy", np.ones((10, 3), np.float32))
    return make_scenario(
        folder, line, 3, data={"kind": "function", "function": "reader:make"}, plan__stop__rounds=4
    )


def begin(scenario: Scenario, folder: Path) -> None:
    """Run it until it has a checkpoint."""
    seen: list[Any] = []
    assert (
        simulate(scenario, folder, ONE, progress=seen.append, should_stop=lambda: len(seen) > 1)
        is None
    )
    assert (folder / CHECKPOINT).exists()


def refused(scenario: Scenario, folder: Path) -> str:
    """Return why the run does not go on. Nothing in its folder changes."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SimulatorError) as caught:
        simulate(scenario, folder, ONE, resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return caught.value.text


def test_another_trace_is_refused_and_the_same_one_elsewhere_is_not(
    line: Path, tmp_path: Path
) -> None:
    scenario = traced(tmp_path, line)
    begin(scenario, tmp_path / "run")
    (tmp_path / "moved").mkdir()
    elsewhere = traced(tmp_path / "moved", line)
    (tmp_path / "online.csv").write_text("device,on,off\na,0,900000\nb,0,5\n")
    text = refused(Scenario.load(tmp_path / "scenario.toml"), tmp_path / "run")
    assert (
        "since this run, or its sweep, was begun, this has changed: availability.file online.csv. "
        "Its"
    ) in text
    assert simulate(elsewhere, tmp_path / "run", ONE, resume=True) is not None


def test_changed_code_and_changed_data_of_a_function_are_refused(
    line: Path, tmp_path: Path
) -> None:
    scenario = reading(tmp_path, line)
    begin(scenario, tmp_path / "run")
    (tmp_path / "unused.py").write_text("an = 1")
    np.save(tmp_path / "numbers.npy", 2 * np.ones((10, 3), np.float32))
    text = refused(scenario, tmp_path / "run")
    assert "this has changed: what the data's code makes, though it is the same" in text
    (tmp_path / "helper.py").write_text(HELPER.replace("sum(1)", "sum(1) + 1"))
    assert "this has changed: data.function's helper.py. Its" in refused(scenario, tmp_path / "run")
    (tmp_path / "helper.py").write_text(HELPER)
    np.save(tmp_path / "numbers.npy", np.ones((10, 3), np.float32))
    assert simulate(scenario, tmp_path / "run", ONE, resume=True) is not None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"plan__local__lr": 0.02}, "plan.local.lr was 0.01 and is 0.02"),
        ({"failures": {"crash": 0.5}}, "failures.crash was 0.0 and is 0.5"),
        ({"tiers__b": {"latency": 1.0}}, 'tiers was ["device"] and is ["b","device"]'),
        ({"seed": 5}, "data.seed was 0 and is 5; seed was 0 and is 5."),
        ({"plan__stop__rounds": 5}, None),
    ],
)
def test_another_scenario_is_refused_except_for_its_stop_rules(
    line: Path, tmp_path: Path, settings: dict[str, Any], text: str | None
) -> None:
    begin(traced(tmp_path, line), tmp_path / "run")
    other = traced(tmp_path, line, **settings)
    if text is None:
        outcome = simulate(other, tmp_path / "run", ONE, resume=True)
        assert outcome is not None
        assert outcome.summary["rounds"] == 5
    else:
        said = refused(other, tmp_path / "run")
        assert text in said, said


def test_another_bundle_is_refused_and_a_copy_is_not(line: Path, tmp_path: Path) -> None:
    begin(traced(tmp_path, line), tmp_path / "run")
    other = write_line_bundle(tmp_path / "other.bundle").path
    assert "this has changed: the bundle. Its" in refused(traced(tmp_path, other), tmp_path / "run")
    copy = Path(shutil.copytree(line, tmp_path / "copy.bundle"))
    assert simulate(traced(tmp_path, copy), tmp_path / "run", ONE, resume=True) is not None


def test_a_sweep_stops_where_its_trace_was_changed_before_a_run_began(
    line: Path, tmp_path: Path
) -> None:
    """Its first run is done then, and its second has no checkpoint."""
    traced(tmp_path, line)
    path = write_scenario(tmp_path, line, 3, **TRACED, sweep={"seed": [1, 2]})
    first, second = expand(Scenario.load(path))
    prepare_sweep([first, second], tmp_path / "sweep", ONE)
    assert summary_alone(first, tmp_path / "sweep" / first.name, ONE) is not None
    (tmp_path / "online.csv").write_text("device,on,off\na,0,800000\n")
    done = CliRunner().invoke(app, ["resume", str(tmp_path / "sweep")])
    assert done.exit_code == 1
    assert (
        f"{tmp_path / 'sweep' / second.name}: since this run, or its sweep, was begun, this has"
        in done.stderr
    )
    assert "availability.file online.csv" in done.stderr
    assert not (tmp_path / "sweep" / second.name / SUMMARY).exists()


def test_a_measured_step_is_not_measured_again(line: Path, tmp_path: Path) -> None:
    scenario = traced(tmp_path, line, compute={"step_seconds": "measure"})
    prepare_sweep([scenario], tmp_path, ONE)
    assert (
        read_json(tmp_path / scenario.name / MADE_OF)["values"]["compute.step_seconds"] == "measure"
    )
    begin(scenario, tmp_path / "run")
    kept = read_json(tmp_path / "run" / MADE_OF)
    assert kept["values"]["compute.step_seconds"] not in ("measure", 7.5)
    kept["values"]["compute.step_seconds"] = 7.5
    write_json(tmp_path / "run" / MADE_OF, kept)
    assert simulate(scenario, tmp_path / "run", ONE, resume=True) is not None
    assert "step_seconds = 7.5" in (tmp_path / "run" / "scenario.toml").read_text()


def test_keys_of_a_later_version_are_not_compared(line: Path, tmp_path: Path) -> None:
    scenario = traced(tmp_path, line)
    begin(scenario, tmp_path / "run")
    kept = read_json(tmp_path / "run" / MADE_OF)
    assert kept["values"].pop("failures.crash") == 0.0
    write_json(tmp_path / "run" / MADE_OF, kept)
    changed = msgspec.structs.replace(scenario.failures, crash=0.01)
    outcome = simulate(
        msgspec.structs.replace(scenario, failures=changed), tmp_path / "run", ONE, resume=True
    )
    assert outcome is not None
    assert read_json(tmp_path / "run" / MADE_OF)["values"]["failures.crash"] == 0.01
