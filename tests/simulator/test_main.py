"""The command: errors of the system are one line that names the file."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_simulator.__main__ import app
from typer.testing import CliRunner

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
    done = CliRunner().invoke(app, ["run", str(tmp_path / "s.toml"), "--output", str(tmp_path / "file" / "run")])
    assert done.exit_code == 1
    assert done.stderr.startswith("fleetlearn-simulate: ")
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path / 'file'}" in done.stderr
    assert "Errno" not in done.stderr
    assert "not a directory" in done.stderr
