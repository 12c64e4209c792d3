"""``fleetlearn-simulate data-quality``: whom a simulated look names, beside who is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_simulator import Options, Scenario, simulate
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario.corruptions import corruptions_of
from line_bundle import line_data
from typer.testing import CliRunner
from virtual import write_scenario

SIZE = 12
LABELS = {"share": 0.2, "kind": "labels", "factor": 9.0}
SCALED = {"share": 0.1, "kind": "flipped", "factor": 4.0}


def scenario(folder: Path, line: Path, *corrupt: dict[str, Any], **more: Any) -> Scenario:
    x, y = line_data(40, seed=77)
    np.savez(folder / "held_out.npz", x=x, y=y)
    usual = {
        "seed": 6,
        "plan__local": {"epochs": 1, "batch_size": 10, "lr": 0.005, "evaluate": False},
        "plan__evaluation": {"data": "held_out.npz"},
        "plan__quality": {"every": 10, "contributions": 1, "utilities": 64},
        "plan__stop__rounds": 16,
        "failures": {"corrupt": [*corrupt]},
    }
    return Scenario.load(write_scenario(folder, line, SIZE, **(usual | more)))


def asked(folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data-quality", str(folder), *options])
    return result.exit_code, result.output


def test_damaged_devices_are_found(tmp_path: Path, line: Path) -> None:
    made = scenario(tmp_path, line, LABELS, SCALED)
    outcome = simulate(made, tmp_path / "run.sim", Options("bundle", 1))
    assert outcome is not None
    codes, _ = corruptions_of(made, np.arange(SIZE))
    damaged = {name_of(at): ("", "", "", "", "flipped", "labels")[code]
               for at, code in enumerate(codes.tolist()) if code}  # fmt: skip
    assert {*damaged.values()} == {"labels", "flipped"}
    code, text = asked(outcome.folder, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["damaged"] == damaged
    assert found["found"] == sorted(damaged)
    assert found["accused"] == []
    worst = [each["device"] for each in found["look"]["contributions"][: len(damaged)]]
    assert {*worst} == {*damaged}
    assert all(each["log10_p"] < -2 for each in found["look"]["contributions"][: len(damaged)])
    code, text = asked(outcome.folder)
    assert code == 0
    assert f"has damaged {len(damaged)} devices of those that were looked at" in text
    assert f"of them are named: {', '.join(sorted(damaged))}; not named: none" in text
    assert "named without damage: none" in text
    assert "its updates make the held-out loss worse" in text


def test_where_nothing_is_damaged_nobody_is_named(tmp_path: Path, line: Path) -> None:
    made = scenario(tmp_path, line, seed=8)
    outcome = simulate(made, tmp_path / "run.sim", Options("bundle", 1))
    assert outcome is not None
    found = json.loads(asked(outcome.folder, "--json")[1])
    assert (found["damaged"], found["found"], found["accused"]) == ({}, [], [])
    assert "the scenario has damaged none of the devices" in asked(outcome.folder)[1]
    assert len(read_rows(outcome.folder, ROUNDS)[0]["contributions"]) == SIZE


def test_runs_without_a_look_say_why(tmp_path: Path, line: Path) -> None:
    assert "holds no run" in asked(tmp_path)[1]
    made = Scenario.load(write_scenario(tmp_path, line, 3))
    assert simulate(made, tmp_path / "plain.sim", Options("bundle", 1)) is not None
    code, text = asked(tmp_path / "plain.sim")
    assert code == 1
    assert "the plan has no [quality]" in text
    stopped = tmp_path / "stopped.sim"
    assert simulate(
        scenario(tmp_path, line), stopped, Options("bundle", 1), should_stop=lambda: True
    ) is None  # fmt: skip
    assert "no look at the devices' data is over yet" in " ".join(asked(stopped)[1].split())
