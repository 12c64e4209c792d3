"""fleetlearn-simulate privacy: the coordinator's table, of a scenario's plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_simulator.__main__ import app
from typer.testing import CliRunner
from virtual import write_scenario

PRIVACY: dict[str, Any] = {"noise": 2.0, "delta": 1e-6, "population": 1000, "clip": 0.5}


def scenario(folder: Path, bundle: Path, **privacy: Any) -> Path:
    rounds = {"goal": 100, "minimum": 1, "over_selection": 1.0, "deadline": 60.0}
    return write_scenario(
        folder,
        bundle,
        1000,
        plan__round=rounds,
        plan__stop={"rounds": 4},
        plan__privacy=PRIVACY | privacy,
    )


def test_it_is_the_plans(private_line: Path, tmp_path: Path) -> None:
    path = scenario(tmp_path, private_line)
    done = CliRunner().invoke(app, ["privacy", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["spending"][-1]["epsilon"] == pytest.approx(4.8866, abs=5e-5)
    shown = CliRunner().invoke(app, ["privacy", str(path)]).stdout
    assert "Not protected" in shown
    assert "4.887" in shown


def test_a_plan_without_privacy_is_one_line(private_line: Path, tmp_path: Path) -> None:
    path = write_scenario(tmp_path, private_line, 9)
    done = CliRunner().invoke(app, ["privacy", str(path)])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "has no [privacy]" in done.stderr
