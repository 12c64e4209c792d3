"""Data directories that the first version left behind go on, to the same bits.

``data_directories_0_1.tar.xz`` was made by the code of that version, with a model of 50 elements:
``open-round``, as SIGKILL leaves it, has one round of FedAdam committed and in the next one 35 of
40 reports, 32 of them in a saved sum, 3 in files, and one task that failed; ``finished`` has two
rounds of FedAvgM. ``expected.npz`` has the updates that were still to come, and the models that the
first version went on to make.
"""

from __future__ import annotations

import sqlite3
import tarfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Commit
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import UPDATE
from peers import plan_text, report_of, write_test_bundle

SIZE = 50
NOW = Clocks(0.0, 1000.0)
ARCHIVE = Path(__file__).with_name("data_directories_0_1.tar.xz")


@pytest.fixture
def older(tmp_path: Path) -> Mapping[str, Any]:
    """Unpack the directories, and have them belong to the bundle that ``plan`` names. Returns what
    is expected."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    bundle = open_bundle(write_test_bundle(tmp_path / "test.bundle", SIZE))
    for name in ("open-round", "finished"):
        with closing(sqlite3.connect(tmp_path / name / DATABASE)) as database, database:
            database.execute("UPDATE meta SET value=? WHERE key='bundle'", (bundle.sha256,))
    with np.load(tmp_path / "expected.npz") as expected:
        return dict(expected)


def start(folder: Path, recipe: str, **settings: Any) -> Run:
    plan = Plan.parse(
        plan_text(folder.parent / "test.bundle", folder, recipe, **settings), folder.parent
    )
    bundle = open_bundle(plan.bundle)
    return Run(plan, bundle, open_store(plan.data_dir, bundle.sha256), NOW, 15.0)


def test_an_open_round_goes_on(tmp_path: Path, older: Mapping[str, Any]) -> None:
    run = start(tmp_path / "open-round", "fedadam", round__goal=40, round__minimum=35)
    assert run.resume(NOW) == []
    engine = run.engine
    assert (engine.version, engine.round, len(engine.accepted)) == (1, 2, 35)
    assert engine.causes() == {"failed: diverged": 1}
    assert set(engine.leases) == set(older["devices"])
    blobs = run.store.blobs
    for name, update, examples in zip(
        older["devices"], older["updates"], older["examples"], strict=True
    ):
        device, spool_file = str(name), blobs.take_spool_file()
        blobs.write_spool_file(spool_file, 0, update.tobytes())
        (lease,) = engine.check_in(device, None, 0.0)
        report = report_of(lease, update, examples=int(examples))  # type: ignore[arg-type]
        run.save_update(device, report, spool_file, {UPDATE: float(np.abs(update).max())})
        commands = run.record(engine.count_report(device, report.task, 0.0), NOW)
    (commit,) = commands
    assert isinstance(commit, Commit)
    run.commit(commit, NOW)
    assert {
        slot: values.tobytes() for slot, values in run.models.newest.optimizer_state.items()
    } == {
        "m": older["state_m"].tobytes(),
        "v": older["state_v"].tobytes(),
    }
    run.store.close()
    assert read_model(tmp_path / "open-round")[1].tobytes() == older["open"].tobytes()


def test_a_finished_run_stays_finished(tmp_path: Path, older: Mapping[str, Any]) -> None:
    run = start(tmp_path / "finished", "fedavgm", round__goal=2, stop__rounds=2)
    assert run.engine.phase is Phase.FINISHED
    assert run.resume(NOW) == []
    run.store.close()
    status = read_status(tmp_path / "finished")
    assert (status.version, status.finished) == (2, "2 rounds done")
    assert [row.summary["reports"] for row in status.rounds] == [2, 2]
    assert read_model(tmp_path / "finished")[1].tobytes() == older["finished"].tobytes()
