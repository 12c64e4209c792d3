"""A training that is interrupted anywhere, by a process that dies or stops, and goes on in another
one: what it leaves is, bit for bit, what it leaves undisturbed."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.data.buffer_writer import BufferWriter
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.storage.errors import DiskFullError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.training_checkpoint import TrainingCheckpoint
from fleetlearn_device.storage.training_starts import TrainingStarts
from fleetlearn_device.training import progress as progress_module
from fleetlearn_device.training import trainer as trainer_module
from fleetlearn_device.training.data import ArrayData, BatchData, Data, as_data
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.progress import (
    FLASH_RATE,
    WORTH_KEEPING,
    DoneSteps,
    PartInProgress,
    Progress,
)
from fleetlearn_device.training.train import StoppedError
from fleetlearn_device.training.trainer import MAX_STARTS, FinishedUpdate, KilledError, Trainer
from fleetlearn_device.training.two_models import OWN
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import Task
from fleetlearn_protocol.vector import Vector
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted import ALGORITHMS, BUNDLES, DATA, bring, left, task_of
from line_bundle import line_data, write_line_bundle


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("lines")
    return {name: write_line_bundle(folder / name, **made) for name, made in BUNDLES.items()}


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a checkpoint after each step: neither time nor bytes bound them."""
    monkeypatch.setattr(progress_module, "WRITE_SHARE", np.inf)
    monkeypatch.setattr(progress_module, "FLASH_RATE", np.inf)


def train_once(
    folder: Path,
    bundle: Bundle,
    task: Task,
    die: int | None = None,
    data: Data = DATA,
    hold_out: float = 0.0,
) -> FinishedUpdate:
    """Train in a process of its own, as far as the state directory can tell. ``die``: the step
    before which it dies."""
    state = StateDirectory(folder)
    try:
        bring(state, bundle, task)
        trainer = Trainer(state, data, "onnx", 1, checkpoint_every=1e-9, hold_out=hold_out)
        if die is not None:
            count = trainer._count

            def count_or_die(steps: int, loss: float) -> None:
                if steps > die:
                    raise Killed
                count(steps, loss)

            trainer._count = count_or_die  # type: ignore[method-assign]
        finished = trainer.train(task, 100.0)
        state.outbox.save(*finished)
        trainer.forget_checkpoint()
        return finished
    finally:
        state.close()


def two_tasks(
    folder: Path, bundle: Bundle, algorithm: str, kills: list[int], data: Data = DATA
) -> list[dict[str, Any]]:
    """Do two tasks, the second of which goes on from what the first one left. In each, processes
    die before these steps, one after the other, and the last one lives."""
    found = []
    for number, kept in ((1, None), (2, "t1")):
        task = task_of(bundle, algorithm, number, kept)
        for die in (*kills, None):
            try:
                found.append(left(train_once(folder, bundle, task, die, data)))
                break
            except Killed:
                pass
    return found


@pytest.mark.parametrize(
    "algorithm",
    [
        name if name in ("plain", "ditto", "apfl") else pytest.param(name, marks=pytest.mark.slow)
        for name in ALGORITHMS
    ],
)
@pytest.mark.usefixtures("each_step")
def test_killed_after_each_step(bundles: dict[str, Bundle], tmp_path: Path, algorithm: str) -> None:
    bundle = bundles[ALGORITHMS[algorithm]]
    undisturbed = two_tasks(tmp_path / "undisturbed", bundle, algorithm, [])
    steps = undisturbed[0]["report"][1] + (3 if algorithm in ("ditto", "fedrep") else 0)
    each = {"pfedme": 3, "apfl": 2}.get(algorithm, 1)  # steps that the device tells of for a batch
    assert steps >= 6
    found = two_tasks(tmp_path / "killed", bundle, algorithm, [*range(each, each * steps, each)])
    assert found == undisturbed


@pytest.mark.parametrize(
    "mistake",
    [
        "model",
        "state",
        "loss",
        "kept",
        "measured",
        "own model",
        "result",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("seen", "batches", "passes")),
        pytest.param("steps", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("each_step")
def test_whatever_is_not_restored_shows(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """The comparison of the test above can fail: each thing that a checkpoint holds is needed."""
    algorithm = {
        "kept": "scaffold-gradient",
        "result": "ditto",
        "measured": "apfl",
        "own model": "pfedme",
    }.get(mistake, "plain")
    bundle = bundles[ALGORITHMS[algorithm]]
    die = 8 if mistake == "result" else 4
    undisturbed = two_tasks(tmp_path / "undisturbed", bundle, algorithm, [])
    original = trainer_module.read_checkpoint

    def wrong(*stored: Any) -> Any:
        found = original(*stored)
        assert found is not None
        done = found.part.done
        match mistake:
            case "model":
                return found._replace(local=found.local + np.float32(1))
            case "state":
                return found._replace(state=np.zeros_like(found.state))
            case "seen":
                done.seen += 1
            case "loss":
                done.loss_sum *= 2
            case "batches":
                done.batches_in_pass -= 1
            case "passes":
                done.passes = 0
            case "steps":
                done.steps += 1
            case "kept":
                found.kept["gradient"] = found.kept["gradient"] * 2
            case "own model":
                found.kept[OWN] = found.kept[OWN] + np.float32(1)
            case "measured":
                found.measured.clear()
            case _:
                found.results[0]["update"] = found.results[0]["update"] * 2
        return found

    monkeypatch.setattr(trainer_module, "read_checkpoint", wrong)
    try:
        found = two_tasks(tmp_path / "killed", bundle, algorithm, [die])
    except DataError:  # a pass that gives more examples than there are
        return
    assert found != undisturbed


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    kills=st.lists(st.integers(0, 9), max_size=4),
    every=st.integers(1, 4),
    torn=st.booleans(),
)
def test_killed_anywhere(
    bundles: dict[str, Bundle], algorithm: str, kills: list[int], every: int, torn: bool
) -> None:
    """Only each ``every``-th checkpoint is written; ``torn``: the process dies while it writes the
    next one."""
    bundle = bundles[ALGORITHMS[algorithm]]
    original, calls = TrainingCheckpoint.save, 0

    def save(self: TrainingCheckpoint, *arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls % every:
            if torn:
                self._path.with_name("checkpoint.tmp").write_bytes(b"half of it")
            return 0
        return original(self, *arguments)

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_module, "WRITE_SHARE", np.inf)
        patch.setattr(progress_module, "FLASH_RATE", np.inf)
        undisturbed = two_tasks(Path(folder, "undisturbed"), bundle, algorithm, [])
        patch.setattr(TrainingCheckpoint, "save", save)
        assert two_tasks(Path(folder, "killed"), bundle, algorithm, kills) == undisturbed


@pytest.mark.usefixtures("each_step")
def test_batches_of_the_user_s_own(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """Those that were seen are passed over."""
    batches = list(DATA.batches(5, 3))
    data = BatchData(batches, 12)
    bundle = bundles["everything"]
    undisturbed = two_tasks(tmp_path / "undisturbed", bundle, "plain", [], data)
    assert two_tasks(tmp_path / "killed", bundle, "plain", [1, 2, 4, 5], data) == undisturbed


class Counted:
    """Counts the steps that are done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        original = DoneSteps.add

        def add(done: DoneSteps, *arguments: Any) -> None:
            self.steps += 1
            original(done, *arguments)

        monkeypatch.setattr(DoneSteps, "add", add)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.mark.usefixtures("each_step")
def test_what_was_saved_is_not_done_again(
    bundles: dict[str, Bundle], tmp_path: Path, counted: Counted
) -> None:
    bundle = bundles["everything"]
    task = task_of(bundle, "plain", 1)
    with pytest.raises(Killed):
        train_once(tmp_path, bundle, task, die=4)
    assert counted.steps == 5, "the process dies after its fifth step, before it is saved"
    train_once(tmp_path, bundle, task)
    assert counted.steps == 5 + 2, "of six steps, four were saved"
    assert not (tmp_path / "checkpoint").exists(), "the update is saved: nothing goes on"


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize(
    "why",
    ["damaged", "cut", "another format", "more data", "moved data", "another task"],
)
def test_a_checkpoint_of_no_use(
    bundles: dict[str, Bundle],
    tmp_path: Path,
    counted: Counted,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    bundle = bundles["everything"]
    task = task_of(bundle, "plain", 1)
    with pytest.raises(Killed):
        train_once(tmp_path, bundle, task, die=4)
    path, data = tmp_path / "checkpoint", DATA
    content = bytearray(path.read_bytes())
    match why:
        case "damaged":
            content[40] ^= 1
        case "cut":
            del content[-1]
        case "another format":
            content[:8] = b"fleetck2"
        case "more data":
            data = as_data(line_data(11))
        case "moved data":  # a full live buffer: its oldest record has made way for another one
            assert isinstance(DATA, ArrayData)
            data = as_data([np.roll(array, -1, axis=0) for array in DATA.columns])
        case _:
            task = task_of(bundle, "plain", 2)
    path.write_bytes(content)
    counted.steps = 0
    with caplog.at_level(logging.WARNING):
        train_once(tmp_path, bundle, task, data=data)
    assert counted.steps == 6
    if why == "another task":
        assert caplog.messages == []
    elif why in ("more data", "moved data"):
        assert caplog.messages == [
            "task t1: the checkpoint of its training is of other data; the training begins again"
        ]
    else:
        assert caplog.messages == [
            f"{path} is damaged, or of another version; it is deleted, and the training that it "
            "was of begins again"
        ]


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("hold_out", [0.0, 0.3])
@pytest.mark.parametrize("room", [60, 24])
def test_records_that_come_meanwhile_are_for_later_tasks(
    bundles: dict[str, Bundle],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    room: int,
    hold_out: float,
) -> None:
    """A live buffer has more records at the restart. The training goes on with those that it began
    with, unless one of them has made way for a newer one (``room``)."""
    bundle = bundles["everything"]
    inputs = bundle.manifest.batch
    columns = ArrayData(line_data(48)).fit(inputs).columns
    records = [
        {row.name: column[at] for row, column in zip(inputs, columns, strict=True)}
        for at in range(48)
    ]
    arrays: Any = {row.name: (row.dtype, row.shape) for row in inputs}

    def train(folder: Path, path: Path, number: int, die: int | None = None) -> dict[str, Any]:
        data = open_data(str(path))
        return left(
            train_once(folder, bundle, task_of(bundle, "plain", number), die, data, hold_out)
        )

    def grown(name: str, count: int) -> Path:
        with BufferWriter(tmp_path / name, arrays, room) as buffer:
            for record in records[:count]:
                buffer.append(**record)
        return tmp_path / name

    undisturbed = train(tmp_path / "undisturbed", grown("first.flb", 24), 1)
    later = train(tmp_path / "later", grown("later.flb", 48), 1)
    path = grown("a.flb", 24)
    with pytest.raises(Killed):
        train(tmp_path / "killed", path, 1, die=2)
    with BufferWriter(path, arrays, room) as buffer:
        for record in records[24:]:
            buffer.append(**record)
    with caplog.at_level(logging.WARNING):
        found = train(tmp_path / "killed", path, 1)
    assert undisturbed != later
    assert found == (undisturbed if room == 60 else later)
    again = ["task t1: the checkpoint of its training is of other data; the training begins again"]
    assert caplog.messages == ([] if room == 60 else again)


@pytest.mark.usefixtures("each_step")
def test_a_full_disk_costs_no_training(
    bundles: dict[str, Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> int:
        raise DiskFullError("the disk is full")

    bundle = bundles["everything"]
    undisturbed = two_tasks(tmp_path / "undisturbed", bundle, "plain", [])
    monkeypatch.setattr(TrainingCheckpoint, "save", full)
    with caplog.at_level(logging.WARNING):
        assert two_tasks(tmp_path / "full", bundle, "plain", []) == undisturbed
    text = "no checkpoint of the training could be saved: the disk is full"
    assert set(caplog.messages) == {text}


@pytest.mark.usefixtures("each_step")
def test_deaths_after_progress_do_not_add_up(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long task survives any number of restarts, as long as each process gets on with it; one
    that kills each process at once is given back."""
    bundle = bundles["everything"]
    task = task_of(bundle, "plain", 1)

    def die(step: int) -> None:
        with pytest.raises(Killed):
            train_once(tmp_path, bundle, task, step)

    # A process that is killed does not come to this.
    monkeypatch.setattr(TrainingStarts, "clear", lambda self: None)
    for step in range(1, 6):
        die(step)
    for _ in range(MAX_STARTS - 1):
        die(5)
    with pytest.raises(KilledError, match=f"killed the process {MAX_STARTS} times"):
        train_once(tmp_path, bundle, task)


def stop_in_training(folder: Path, bundle: Bundle, task: Task, keep: bool) -> None:
    """Stop the training after its third step."""
    state = StateDirectory(folder)
    try:
        bring(state, bundle, task)
        trainer = Trainer(state, DATA, "onnx", 1, checkpoint_every=3600.0)
        count = trainer._count

        def count_and_stop(steps: int, loss: float) -> None:
            count(steps, loss)
            if steps == 3:
                trainer.keep_when_stopped = keep
                trainer.halt.set()

        trainer._count = count_and_stop  # type: ignore[method-assign]
        with pytest.raises(StoppedError):
            trainer.train(task, 100.0)
    finally:
        state.close()


def test_stopped_in_order(bundles: dict[str, Bundle], tmp_path: Path, counted: Counted) -> None:
    """A device that stops, and keeps its task, saves its last step, whatever the time."""
    bundle = bundles["everything"]
    undisturbed = two_tasks(tmp_path / "undisturbed", bundle, "plain", [])
    task, counted.steps = task_of(bundle, "plain", 1), 0
    stop_in_training(tmp_path / "stopped", bundle, task, keep=True)
    assert left(train_once(tmp_path / "stopped", bundle, task)) == undisturbed[0]
    assert counted.steps == 6


def test_a_cancelled_task_leaves_nothing(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundle = bundles["everything"]
    stop_in_training(tmp_path, bundle, task_of(bundle, "plain", 1), keep=False)
    assert not (tmp_path / "checkpoint").exists()


class Fake:
    """A runtime as a checkpoint sees it."""

    local: Vector = np.zeros(1000, np.float32)
    state: Vector = np.zeros(0, np.float32)


PART = PartInProgress(DoneSteps(), 0.0, 0.0, None)


def written_at(every: float, took: float, size: int, seconds: int) -> list[int]:
    """Return after which seconds of training checkpoints are written that take so long, and have
    so many bytes."""
    now = 0.0

    def write(content: bytes, vectors: Any) -> int:
        nonlocal now
        now += took
        return size

    progress = Progress(None, write, every=every, clock=lambda: now)
    runtime: Any = Fake()
    return [
        second
        for second in range(1, seconds + 1)
        if progress.after_step(1.0, lambda: PART, runtime)
    ]


def test_how_often_checkpoints_are_written() -> None:
    assert written_at(60.0, took=0.01, size=1000, seconds=200) == [60, 120, 180]
    slow = written_at(60.0, took=2.0, size=1000, seconds=400)
    assert slow == [60, 160, 260, 360], "2 s each 100 s: at most 2 % of the time"
    large = written_at(60.0, took=0.0, size=int(150 * FLASH_RATE), seconds=400)
    assert large == [60, 210, 360], "bytes to flash are bounded, however fast it is"


def test_when_a_task_is_worth_keeping() -> None:
    progress = Progress()
    runtime: Any = Fake()
    progress.after_step(WORTH_KEEPING - 1, lambda: PART, runtime)
    assert not progress.worth_keeping
    progress.after_step(1.0, lambda: PART, runtime)
    assert progress.worth_keeping


@pytest.mark.usefixtures("each_step")
def test_the_time_that_was_spent_counts(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """``time_budget`` is of the whole training: what an earlier process trained is part of it."""
    bundle = bundles["everything"]
    task = msgspec.structs.replace(task_of(bundle, "plain", 1), time_budget=1000.0)
    with pytest.raises(Killed):
        train_once(tmp_path, bundle, task, die=4)
    used_up = msgspec.structs.replace(task, time_budget=1e-6)
    report = train_once(tmp_path, bundle, used_up).report
    assert (report.steps, report.complete) == (4, False)


def test_without_checkpoints_nothing_is_written(
    bundles: dict[str, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise AssertionError

    monkeypatch.setattr(TrainingCheckpoint, "save", refuse)
    state = StateDirectory(tmp_path)
    bundle = bundles["everything"]
    bring(state, bundle, task_of(bundle, "plain", 1))
    Trainer(state, DATA, "onnx", 1).train(task_of(bundle, "plain", 1), 100.0)
    state.close()
