"""The data of a task: prepared as the bundle says, and without what is held out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from features import examples, features_bundle
from fleetlearn_device.data.buffer_writer import BufferWriter
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import as_data, load_npz
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.task_data import TaskDataMaker, hold_out
from fleetlearn_device.training.train import evaluate_data, train
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol import Bundle, open_bundle, write_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.exchanges import EVALUATION
from fleetlearn_protocol.messages import Evaluation, Question, Task
from fleetlearn_protocol.preprocessing import read_preprocessing
from line_bundle import line_data, write_line_bundle

MODEL = np.array([0.5, 2, -1, 9, 0.25], np.float32)
TOLD = {
    "arrays": {
        "x": {"columns": "force", "steps": [{"op": "standardise", "mean": 1, "std": 2}]},
        "y": {"columns": "label", "label": "last", "steps": [{"op": "scale", "factor": 0.1}]},
    },
    "windows": {"length": 3, "hop": 1},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_line_bundle(tmp_path_factory.mktemp("line") / "line.bundle")


def with_preprocessing(bundle: Bundle, folder: Path, told: Any) -> Bundle:
    manifest = msgspec.structs.replace(
        bundle.manifest, preprocessing=read_preprocessing(told), version=3
    )
    return open_bundle(
        write_bundle(folder, manifest, {path: bundle.read(path) for path in manifest.files})
    )


@pytest.fixture(scope="module")
def prepared(plain: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return with_preprocessing(plain, tmp_path_factory.mktemp("prepared") / "line.bundle", TOLD)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


def stream(rows: int = 40) -> tuple[Any, Any]:
    force = np.sin(np.arange(rows) * 0.7).round(3)
    return force, np.arange(rows)


def by_hand(rows: int = 40) -> tuple[Any, Any]:
    """The examples that TOLD makes of the stream."""
    force, label = stream(rows)
    x = [(force[begin : begin + 3] - 1) / 2 for begin in range(rows - 2)]
    y = [label[begin + 2] * 0.1 for begin in range(rows - 2)]
    return np.array(x, np.float32), np.array(y, np.float32)


def of_arrays(folder: Path) -> Any:
    return dict(zip(("force", "label"), stream(), strict=True))


def of_csv(folder: Path) -> Any:
    lines = [f"{force},{label}" for force, label in zip(*stream(), strict=True)]
    (folder / "a.csv").write_text("force,label\n" + "\n".join(lines))
    return str(folder / "a.csv")


def of_buffer(folder: Path) -> Any:
    arrays: Any = {"force": ("float64", ()), "label": ("int64", ())}
    with BufferWriter(folder / "a.flb", arrays, 40) as buffer:
        for force, label in zip(*stream(), strict=True):
            buffer.append(force=force, label=label)
    return str(folder / "a.flb")


def alike(one: Evaluation, other: Evaluation) -> bool:
    """Whether both measured the same; the sums are rounded by batches of other sizes."""
    sums = (one.loss_sum, one.metric_sums), (other.loss_sum, other.metric_sums)
    return one.examples == other.examples and sums[0] == (
        pytest.approx(sums[1][0], rel=1e-5),
        pytest.approx(sums[1][1], rel=1e-5),
    )


def after_a_task(bundle: Bundle, data: Any, folder: Path, **options: Any) -> tuple[Any, Any]:
    """(update, report) of a task of this bundle."""
    directory = StateDirectory(folder)
    try:
        target = directory.path / "bundles" / bundle.sha256
        write_bundle(target, bundle.manifest, {p: bundle.read(p) for p in bundle.manifest.files})
        reference = FLOAT32.reference("model", MODEL[: bundle.manifest.size])
        content = FLOAT32.encode(MODEL[: bundle.manifest.size])
        (directory.path / "models" / reference.sha256).write_bytes(content)
        settings: dict[str, Any] = {
            "round": 1,
            "parts": {"update": "float32", "buffers": "float32"},
            "hyper": {"lr": 0.05, "mu": 0.0},
            "epochs": 2,
            "batch_size": 5,
            "seed": 100,
            "deadline": 100.0,
            "evaluate": True,
        }
        task = Task("t1", bundle=bundle.sha256, vectors=(reference,), **settings)
        trainer = Trainer(directory, open_data(data), "onnx", 1, **options)
        finished = trainer.train(task, 100.0)
        question = Question("e1", EVALUATION, 100.0, bundle=bundle.sha256, vectors=(reference,))
        answer = trainer.evaluate(question, 100.0)
        assert finished.report.evaluation is not None
        assert alike(answer, finished.report.evaluation)
        return [bytes(content) for content in finished.contents], finished.report
    finally:
        directory.close()


@pytest.mark.parametrize("given", [of_arrays, of_csv, of_buffer])
def test_raw_data_train_as_what_they_are_prepared_to(
    given: Any, plain: Bundle, prepared: Bundle, tmp_path: Path
) -> None:
    update, report = after_a_task(prepared, given(tmp_path), tmp_path / "one")
    expected, other = after_a_task(plain, by_hand(), tmp_path / "two")
    assert update == expected
    assert (report.examples, report.evaluation) == (38, other.evaluation)


def test_a_file_of_held_out_data_is_prepared_too(prepared: Bundle, tmp_path: Path) -> None:
    force, label = stream()
    np.savez(tmp_path / "a.npz", force=force, label=label)
    arrays = load_npz(tmp_path / "a.npz", prepared.manifest)
    for found, expected in zip(arrays.values(), by_hand(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_batches_are_prepared_one_by_one_and_make_no_windows(
    plain: Bundle, prepared: Bundle, tmp_path: Path
) -> None:
    told = {
        "arrays": {
            "x": {"columns": "raw", "steps": [{"op": "scale", "factor": 2}]},
            "y": {"columns": "y"},
        }
    }
    bundle = with_preprocessing(plain, tmp_path / "line.bundle", told)
    x, y = line_data(12)
    batches = as_data([{"raw": x[:7], "y": y[:7]}, {"raw": x[7:], "y": y[7:]}], 12)
    data = TaskDataMaker(batches).of(bundle.manifest).training
    hyper = {"lr": 0.05, "mu": 0.0}
    options: Any = {"hyper": hyper, "epochs": 1, "batch_size": 0, "seed": 1}
    one, two = open_runtime(bundle), open_runtime(bundle)
    train(one, data, **options)
    train(two, as_data([(2 * x[:7], y[:7]), (2 * x[7:], y[7:])], 12), **options)
    np.testing.assert_array_equal(one.parameters, two.parameters)
    with pytest.raises(DataError, match="makes windows of a stream; expected the stream"):
        TaskDataMaker(batches).of(prepared.manifest)
    unnamed = TaskDataMaker(as_data([(x, y)], 12)).of(bundle.manifest).training
    with pytest.raises(DataError, match="expects a dict of arrays by name"):
        list(unnamed.batches(0, None))
    with pytest.raises(DataError, match="arrays without names were given"):
        TaskDataMaker(as_data((x, y))).of(bundle.manifest)


def test_what_is_held_out_is_about_the_share_and_stays_while_data_grow() -> None:
    few, many = np.arange(500, dtype=np.uint64), np.arange(20_000, dtype=np.uint64)
    held, trained = hold_out(many, many, 0.1)
    assert sorted([*held, *trained]) == list(range(20_000))
    # Binomial: 2,000 plus or minus 42; six standard deviations.
    assert abs(len(held) - 2000) < 255
    assert hold_out(few, few, 0.1)[0].tolist() == [row for row in held.tolist() if row < 500]
    for share in (1e-9, 0.999999):
        pair = np.arange(2, dtype=np.uint64)
        assert [len(side) for side in hold_out(pair, pair, share)] == [1, 1]
    one = np.arange(1, dtype=np.uint64)
    assert [len(side) for side in hold_out(one, one, 1e-9)] == [0, 1]


@pytest.mark.parametrize("share", [0.1, 0.5, 1e-9, 0.9])
def test_windows_of_both_sides_have_no_row_in_common(share: float) -> None:
    first = np.arange(3000, dtype=np.uint64)
    last = first + np.uint64(9)
    held, trained = hold_out(first, last, share, 160)
    rows = [{row + k for row in side.tolist() for k in range(10)} for side in (held, trained)]
    assert not rows[0] & rows[1]
    assert held.size
    assert trained.size
    # What lies on a border is left out of both: at most 9 windows for each border.
    assert 3000 - len(held) - len(trained) <= 9 * (3000 // 160 + 2)


def test_a_task_trains_on_one_side_and_measures_on_the_other(plain: Bundle, tmp_path: Path) -> None:
    x, y = line_data(60)
    rows = np.arange(60, dtype=np.uint64)
    held, trained = hold_out(rows, rows, 0.25)
    assert 0 < len(held) < 30
    update, report = after_a_task(plain, (x, y), tmp_path / "one", hold_out=0.25)
    expected, other = after_a_task(plain, (x[trained], y[trained]), tmp_path / "two")
    assert update == expected
    assert report.examples == len(trained)
    runtime = open_runtime(plain)
    runtime.load(MODEL)
    assert alike(report.evaluation, evaluate_data(runtime, (x[held], y[held])))
    assert not alike(report.evaluation, other.evaluation)


def test_windows_are_held_out_by_blocks_of_a_stream(prepared: Bundle, tmp_path: Path) -> None:
    maker = TaskDataMaker(open_data(of_csv(tmp_path)), 0.5)
    made = maker.of(prepared.manifest)
    assert made.held_out is not None
    assert made.training.examples + made.held_out.examples < 38  # the border between two blocks
    assert made.measured is made.held_out


def test_features_are_of_both_sides(tmp_path: Path) -> None:
    bundle = features_bundle(tmp_path / "features.bundle").bundle
    x, y = examples(40)
    given = {"x": x.numpy(), "y": y.numpy()}
    rows = np.arange(40, dtype=np.uint64)
    held, trained = hold_out(rows, rows, 0.3)
    directory = StateDirectory(tmp_path / "state")
    try:
        trainer = Trainer(directory, open_data(given), "onnx", 1, feature_cache=2**20, hold_out=0.3)
        trainer._open_features(bundle)
        made = trainer.task_data(bundle)
        assert made.held_out is not None
        runtime = open_runtime(bundle, from_features=True)
        found = evaluate_data(runtime, made.held_out)
        whole = evaluate_data(open_runtime(bundle), (x.numpy()[held], y.numpy()[held]))
        assert found.examples == whole.examples == len(held)
        assert found.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
        assert made.training.examples == len(trained)
    finally:
        directory.close()


def test_shares_and_data_that_are_not_allowed() -> None:
    x, y = line_data(12)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="expected a share from 0"):
            TaskDataMaker(as_data((x, y)), share)
    with pytest.raises(DataError, match="with a BatchData, whose examples have no places"):
        TaskDataMaker(as_data([(x, y)], 12), 0.1)
