"""The runs that studies keep: a study that was killed goes on with the run that it was in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_simulator.results.run_folder import CHECKPOINT, ROUNDS, SUMMARY, read_rows
from line_bundle import write_line_bundle
from virtual import write_scenario

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
SUPPORT = Path(__file__).parents[1] / "support"
CHILD = """
import sys
from pathlib import Path
from dropout import kept_run
from fleetlearn_simulator import Options
from fleetlearn_simulator.scenario.scenario import Scenario

if __name__ == "__main__":
    options = Options("bundle", 1, events=False, checkpoint=1)
    kept_run(Scenario.load(sys.argv[1]), Path(sys.argv[2]), options)
"""


def begin(scenario: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Begin the run in another process: a study puts its neighbours on Python's path."""
    child = scenario.with_name("child.py")
    child.write_text(CHILD)
    places = os.pathsep.join(map(str, (SUPPORT, STUDIES, STUDIES.parent)))
    words = [sys.executable, str(child), str(scenario), str(folder)]
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": places})


def kept_run(scenario: Path, folder: Path) -> list[Any]:
    assert begin(scenario, folder).wait(100) == 0
    return read_rows(folder, ROUNDS)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_another_scenario_begins_again(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle", references=["anchor"]).path
    scenario = write_scenario(tmp_path, bundle, 10, plan__stop__rounds=300)
    folder, limit = tmp_path / "kept", time.monotonic() + 60
    child = begin(scenario, folder)
    try:
        while not (folder / CHECKPOINT).exists():
            assert child.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (folder / SUMMARY).exists(), "it was killed in the middle"
    rows = (folder / ROUNDS).read_bytes()
    marked = rows.replace(b"committed", b"COMMITTED", 1)  # a run that begins again writes its own
    assert marked != rows
    (folder / ROUNDS).write_bytes(marked)
    first, *others = kept_run(scenario, folder)
    expected = kept_run(scenario, tmp_path / "whole")
    assert "COMMITTED" in first.values(), "it went on, and did not begin again"
    assert others == expected[1:]
    assert len(others) == 299

    other = write_scenario(tmp_path, bundle, 10, plan__stop__rounds=3)
    assert len(kept_run(other, folder)) == 3
