"""A copy of a run whose coordinator goes on writing: what its ledger names is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.storage import file_copy
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_blobs import model_path
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    ModelMade,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    TaskGiven,
)
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.store import SPOOL_FILES_HELD, Store, open_store
from fleetlearn_protocol import Code, FleetError
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector, check_finite, digest

SIZE, BUNDLE = 1000, "b" * 64


class Run:
    """A coordinator's run, with what its open round's sum ought to be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(folder, BUNDLE)
        self.total = exact_mean.init(SIZE)
        self.version = self.round = self.reports = 0
        self.save_model()

    def save_model(self) -> None:
        vector = np.full(SIZE, self.version, np.float32)
        made = ModelMade(self.version, digest(vector), self.round, 1.0)
        self.store.write(self.store.write_model(made, vector, {}, [self.version - 2]))

    def open_round(self) -> None:
        self.round += 1
        self.total = exact_mean.init(SIZE)
        self.store.write([RoundOpened(self.round, 0.0)])

    def report(self, round: int | None = None) -> None:
        """Let a device report. ``round``: the one that it counts for, if that is not open yet."""
        self.reports += 1
        task, update = f"t-{self.reports}", update_of(self.reports)
        self.store.write([TaskGiven(task, self.round, f"d{self.reports}", self.version)])
        spool_file = self.store.blobs.take_spool_file()
        self.store.blobs.write_spool_file(spool_file, 0, update.tobytes())
        report = Report(task, self.round, (FLOAT32.part("update", update),), 1, 1, 1.0, True, 0.5)
        self.store.record_report(ReportAccepted(report, 1, spool_file, 0, round), round)
        if round is None:
            exact_mean.add(self.total, (update,), 1, check_finite(update))
            if self.store.must_save_aggregator:
                self.store.end_save(self.store.begin_save(exact_mean.to_tensors(self.total))())

    def commit(self) -> None:
        self.version += 1
        self.save_model()
        self.store.write([RoundClosed(self.round, "committed", {}, 1.0)])


def update_of(number: int) -> Vector:
    return np.random.default_rng(number).normal(size=SIZE).astype(np.float32)


def summed(store: Store) -> exact_mean.Sum:
    """Do what a start does with the open round."""
    total, tensors = exact_mean.init(SIZE), store.load_aggregator({})
    if tensors is not None:
        total = exact_mean.from_tensors(tensors)
    found = store.ledger.unfinished(None)
    for row in found.reports:
        if row.spool_file is not None:
            update = np.frombuffer(
                store.take_back_update(row, None if row.round == found.round else row.round), "<f4"
            )
            if row.round == found.round:
                exact_mean.add(total, (update,), row.weight, check_finite(update))
    return total


def check_copy(run: Run, copied: CopiedRun, folder: Path, wanted: exact_mean.Sum) -> None:
    """The copy is the run: its newest model, and the open round's sum, bit for bit."""
    with closing(open_store(folder, BUNDLE)) as store:
        found = store.load_model()
        assert found is not None
        assert found[0] == run.version
        np.testing.assert_array_equal(found[1], run.version)
        assert (copied.version, copied.sha256) == (run.version, digest(found[1]))
        mean = summed(store)
        assert (mean.count, mean.weight) == (wanted.count, wanted.weight)
        np.testing.assert_array_equal(exact_mean.mean(mean), exact_mean.mean(wanted))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path / "run")
    yield found
    found.store.close()


@pytest.fixture(params=["files", pytest.param("postgres", marks=pytest.mark.slow)])
def a_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A run of each store that is copied by this module, in turn."""
    folder = tmp_path / "run"
    if request.param == "postgres":
        folder = request.getfixturevalue("in_postgres")
    found = Run(folder)
    yield found
    found.store.close()


@pytest.mark.parametrize("reports", [1, SPOOL_FILES_HELD, 2 * SPOOL_FILES_HELD + 3])
def test_an_open_round_is_copied_whole_while_it_is_served(
    a_run: Run, tmp_path: Path, reports: int
) -> None:
    a_run.open_round()
    for _ in range(reports):
        a_run.report()
    copied = find_storage(a_run.folder).copy_to(tmp_path / "copy")
    assert copied.round == 1
    assert copied.updates == reports % SPOOL_FILES_HELD
    assert not copied.given_up
    check_copy(a_run, copied, tmp_path / "copy", a_run.total)
    files = {path.name for path in (tmp_path / "copy").iterdir()}
    assert not {name for name in files if name.endswith(("-wal", "-shm"))}


def changing(monkeypatch: pytest.MonkeyPatch, times: int, change: Callable[[], None]) -> list[int]:
    """Let the run change between the copy of its ledger and that of its bytes, so many times.
    Returns a list that gets an entry for each copy of the ledger."""
    attempts: list[int] = []
    original = file_copy._Copy.take_ledger

    def replaced(copy: Any, opened: Any) -> Any:
        rows = original(copy, opened)
        attempts.append(len(attempts))
        if len(attempts) <= times:
            change()
        return rows

    monkeypatch.setattr(file_copy._Copy, "take_ledger", replaced)
    return attempts


def next_round(run: Run, reports: int) -> None:
    run.commit()
    run.open_round()
    for _ in range(reports):
        run.report()


def test_spool_files_that_are_used_again_meanwhile(
    a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run.open_round()
    for _ in range(5):
        a_run.report()
    attempts = changing(monkeypatch, 3, lambda: next_round(a_run, 5))
    copied = find_storage(a_run.folder).copy_to(tmp_path / "copy")
    assert len(attempts) == 4
    check_copy(a_run, copied, tmp_path / "copy", a_run.total)


def test_a_sum_that_is_saved_twice_meanwhile(
    a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_twice() -> None:
        for _ in range(2 * SPOOL_FILES_HELD):
            a_run.report()

    a_run.open_round()
    save_twice()
    attempts = changing(monkeypatch, 1, save_twice)
    copied = find_storage(a_run.folder).copy_to(tmp_path / "copy")
    assert len(attempts) == 2
    check_copy(a_run, copied, tmp_path / "copy", a_run.total)


def test_models_that_are_dropped_meanwhile(
    a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_rounds() -> None:
        next_round(a_run, 1)
        next_round(a_run, 1)

    a_run.open_round()
    a_run.report()
    attempts = changing(monkeypatch, 2, two_rounds)
    copied = find_storage(a_run.folder).copy_to(tmp_path / "copy")
    assert len(attempts) == 3  # the open round; the models were open
    check_copy(a_run, copied, tmp_path / "copy", a_run.total)
    here, there = (find_storage(a_run.folder).models, find_storage(tmp_path / "copy").models)
    assert there.model_versions() == here.model_versions() == [3, 4]


def test_old_models_that_are_dropped_meanwhile(
    a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copy, "HELD_OPEN", 1)
    a_run.open_round()
    next_round(a_run, 0)
    a_run.commit()
    assert find_storage(a_run.folder).models.model_versions() == [1, 2]

    def drop() -> None:
        a_run.store.blobs.drop_models([1])

    attempts = changing(monkeypatch, 1, drop)
    assert find_storage(a_run.folder).copy_to(tmp_path / "copy").version == 2
    assert len(attempts) == 2
    assert find_storage(tmp_path / "copy").models.model_versions() == [2]


def test_a_fleet_that_is_always_faster_costs_the_open_round_alone(
    a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        next_round(a_run, 3)
        a_run.report(a_run.round + 1)

    a_run.open_round()
    a_run.report()
    a_run.report(a_run.round + 1)
    attempts = changing(monkeypatch, 10**6, change)
    copied = find_storage(a_run.folder).copy_to(tmp_path / "copy")
    assert len(attempts) == file_copy.ATTEMPTS
    assert copied.given_up
    assert (copied.updates, copied.version) == (0, a_run.version - 1)
    with closing(open_store(tmp_path / "copy", BUNDLE)) as store:
        assert store.is_given_up(a_run.round - 1)
        assert all(row.spool_file is None for row in store.ledger.unfinished(None).reports)
        found = store.load_model()
        assert found is not None
        assert found[0] == a_run.version - 1


def test_damage_that_no_coordinator_makes_is_named(a_run: Run, tmp_path: Path) -> None:
    a_run.open_round()
    a_run.report()
    a_run.store.close()
    (path,) = (a_run.folder / "uploads").iterdir()
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"slot-0000 is missing or damaged, and no coordinator"):
        find_storage(a_run.folder).copy_to(tmp_path / "copy")


def test_a_damaged_model_is_not_copied(a_run: Run, tmp_path: Path) -> None:
    path = model_path(a_run.folder, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"v00000000.safetensors is damaged") as caught:
        find_storage(a_run.folder).copy_to(tmp_path / "copy")
    assert str(a_run.folder) in caught.value.text, "the original is named, and not the copy"


def test_a_damaged_ledger_is_not_copied(run: Run, tmp_path: Path) -> None:
    run.store.close()
    path = run.folder / "coordinator.sqlite3"
    content = bytearray(path.read_bytes())
    content[4096 + 3 : 4096 + 600] = bytes(597)
    path.write_bytes(content)
    with pytest.raises(FleetError, match=r"damaged|malformed"):
        find_storage(run.folder).copy_to(tmp_path / "copy")


def test_what_people_ask_and_measured_is_copied(a_run: Run, tmp_path: Path) -> None:
    here = find_storage(a_run.folder)
    here.requests.ask_for_evaluation()
    here.requests.ask_for_roll_back(0, "ann")
    here.held_out.write(0, {"examples": 3, "metrics": {}})
    here.copy_to(tmp_path / "copy")
    there = find_storage(tmp_path / "copy")
    assert there.requests.evaluation() == here.requests.evaluation()
    assert there.requests.roll_back() == here.requests.roll_back()
    assert there.held_out.read_all() == {0: {"examples": 3, "metrics": {}}}


def test_a_folder_that_is_none_and_one_that_lost_its_ledger(run: Run, tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        find_storage(tmp_path).copy_to(tmp_path / "copy")
    assert caught.value.code is Code.UNKNOWN_CONTENT
    run.store.close()
    (run.folder / "coordinator.sqlite3").unlink()
    with pytest.raises(StoreError) as caught:
        find_storage(run.folder).copy_to(tmp_path / "copy")
    assert caught.value.code is Code.WRONG_HASH
    assert not (tmp_path / "copy").exists()
