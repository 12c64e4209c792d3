"""``simulate`` called by a script as the README shows it: at the top, without
``if __name__ == "__main__":``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import line_bundle
import pytest
from virtual import write_scenario

SCRIPT = """\
print("begun")
from fleetlearn_simulator import Options, Scenario, simulate

outcome = simulate(Scenario.load("scenario.toml"), "run.sim", Options(backend="bundle", workers=2))
print(outcome.summary["rounds"], "rounds")
"""


@pytest.mark.parametrize("how", ["file", "module", "standard input"])
def test_a_script_needs_no_main_guard(line: Path, tmp_path: Path, how: str) -> None:
    """The worker processes do not run the script again."""
    write_scenario(tmp_path, line, 6, plan__stop={"rounds": 2})
    script = tmp_path / "rehearse.py"
    script.write_text(SCRIPT)
    words = {"file": [str(script)], "module": ["-m", "rehearse"], "standard input": ["-"]}
    # for the data
    path = os.pathsep.join(
        [str(Path(line_bundle.__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    with script.open() as text:
        done = subprocess.run(
            [sys.executable, *words[how]],
            cwd=tmp_path,
            stdin=text,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": path},
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n2 rounds\n", "")
