"""A private run that is killed around its commits: never a release without its spending, and no
release is counted twice. Real processes, real SIGKILL."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.service.training_run.private_budget import read_account
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import PRIVACY
from peers import write_test_bundle

CRASH = Path(__file__).with_name("crash_private_run.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    _names = runpy.run_path(str(CRASH))
    POINTS = list(_names["POINTS"])
SUPPORT = Path(__file__).parents[1] / "support"
RELEASES = 5
FINISHED = "epsilon 2.55 of 2.8 after 5 releases; another would make it 2.82\n"
"""How the run's reason to finish ends."""
pytestmark = pytest.mark.slow


def start(point: str, turn: int, bundle: Path, data_dir: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(CRASH), point, str(turn), str(bundle), str(data_dir)]
    path = os.pathsep.join([str(CRASH.parent), str(SUPPORT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


def check(data_dir: Path) -> tuple[int, float]:
    """Hold the account against the models and rounds. Returns the releases and their epsilon."""
    with find_storage(data_dir).read_ledger() as ledger:
        account = read_account(ledger.metadata().get(PRIVACY))
        versions = max(ledger.models(), default=0)
        committed = ledger.round_outcomes().get("committed", 0)
    releases = 0 if account is None else account.releases
    assert releases == versions == committed
    return releases, 0.0 if account is None else account.epsilon


@pytest.mark.parametrize("point", POINTS)
def test_a_private_run_that_is_killed_at_each_release(tmp_path: Path, point: str) -> None:
    bundle, data_dir = write_test_bundle(tmp_path / "test.bundle"), tmp_path / "run"
    before = 0, 0.0
    for turn in (2, 1, 2):  # a start's own writes may be the first
        killed = start(point, turn, bundle, data_dir)
        assert killed.returncode == -9, killed.stderr
        found = check(data_dir)
        assert before <= found
        assert found[0] - before[0] <= turn
        before = found
    ended = start(point, 0, bundle, data_dir)
    assert (ended.stdout.endswith(FINISHED), ended.returncode) == (True, 0), ended.stderr
    assert check(data_dir)[0] == RELEASES
