"""The command: errors of the system are one line that names the file."""

from __future__ import annotations

import re
from pathlib import Path

from fleetlearn_simulator.__main__ import app
from typer.testing import CliRunner
from virtual import SOFTMAX, write_scenario

SCENARIO = """
name = "a"
seed = 1
plan = {{ bundle = "{bundle}", round = {{ goal = 2 }}, stop = {{ rounds = 1 }} }}
population = {{ size = 9 }}
sweep = {{ seed = [1, 2] }}
"""


def test_a_folder_that_cannot_be_made_is_named(line: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "s.toml").write_text(SCENARIO.format(bundle=line))
    done = CliRunner().invoke(
        app, ["run", str(tmp_path / "s.toml"), "--output", str(tmp_path / "file" / "run")]
    )
    assert done.exit_code == 1
    assert done.stderr.startswith("fleetlearn-simulate: ")
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path / 'file'}" in done.stderr
    assert "Errno" not in done.stderr
    assert "not a directory" in done.stderr


def test_the_summary_says_whose_examples_each_number_is_of(softmax: Path, tmp_path: Path) -> None:
    path = write_scenario(
        tmp_path, softmax, 9, **(SOFTMAX | {"plan__local__evaluate": True, "plan__stop__rounds": 2})
    )
    wide = {"COLUMNS": "200"}
    done = CliRunner().invoke(
        app, ["run", str(path), "--workers", "1", "--backend", "bundle"], env=wide
    )
    assert done.exit_code == 0, done.stderr
    assert "" not in done.stderr.splitlines(), "where the output is a file"
    said = " ".join(done.stderr.split())
    assert re.search(
        r"metrics .*accuracy [\d.e-]+, on the training examples of the last round's devices", said
    )
    assert re.search(r"test .*accuracy [\d.e-]+, on the test data, of the last model", said)
    path = write_scenario(tmp_path, softmax, 9, **SOFTMAX, sweep={"seed": [1, 2]})
    folder = str(tmp_path / "sweep")
    swept = CliRunner().invoke(
        app,
        ["run", str(path), "--output", folder, "--workers", "2", "--backend", "bundle"],
        env=wide,
    )
    assert "" not in swept.stderr.splitlines()
    assert re.search(
        r"seed-1: 1 rounds, .*accuracy [\d.e-]+, on the test data, of the last model", swept.stderr
    )
