"""The suites of kills again, with the ledger of each run in PostgreSQL, whose batches are written
in a thread of their own. Each is a pytest of its own, so that no fixture is shared with the suites'
usual runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

SUITES = {
    "test_kills.py": "test_the_coordinator_killed_changes_nothing",
    "test_kills_evaluation.py": "",
}
"""File -> which of its tests; empty: all. The slow ones too."""


@pytest.mark.slow
@pytest.mark.usefixtures("postgres")
@pytest.mark.parametrize("suite", SUITES)
def test_the_same_kills(suite: str, tmp_path: Path) -> None:
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path}"]
    file = Path(__file__).with_name(suite)
    done = subprocess.run(
        [sys.executable, *words, "-k", SUITES[suite], str(file)],
        cwd=ROOT,
        env=os.environ | {"FLEETLEARN_TESTS_IN_POSTGRES": "yes"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
