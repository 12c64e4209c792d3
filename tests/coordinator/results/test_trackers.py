"""Curves in other tools, read back by these tools' own readers: each row once, whatever was there
before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator import RunResults
from fleetlearn_coordinator.results.errors import ResultsError
from fleetlearn_coordinator.results.points import curves_of, points_of
from fleetlearn_coordinator.results.trackers import MARKER, HistoryFile, MLflow, TensorBoard
from fleetlearn_coordinator.storage.find_storage import find_storage
from hand_written_run import add_round, write_hand_written_run

ROUNDS, EVALUATIONS = 3, 1
# MLflow's own use of SQLAlchemy.
of_mlflow = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_hand_written_run(tmp_path / "trial")


def go_on(data: Path, number: int) -> RunResults:
    """The run commits one more round."""
    storage = find_storage(data)
    with storage.lock():
        ledger = storage.open_ledger(power=False, any_thread=False)
        add_round(ledger, number)
        ledger.close()
    return RunResults.load(data)


def test_a_diverged_run_has_no_point() -> None:
    row = {"round": 1, "outcome": "committed", "time": 2.0, "train/loss": float("nan"), "change": 1}
    assert [(point.curve, point.value) for point in points_of(row)] == [("round/change", 1.0)]


def test_a_column_that_was_not_measured_has_no_curve() -> None:
    assert curves_of({"round": 1, "time": 2.0, "train/loss": None, "lost": 3}) == {"round/lost": 3}


def test_tensorboard(data: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "board"
    tracker = TensorBoard(folder)
    assert tracker.add(RunResults.load(data)) == ROUNDS + EVALUATIONS
    assert tracker.add(RunResults.load(data)) == 0, "they are there"
    assert TensorBoard(folder).add(go_on(data, 4)) == 1
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    loss = [
        (event.wall_time, event.step, event.tensor_proto.float_val[0])
        for event in found.Tensors("train/loss")
    ]
    assert loss == [
        (120.0, 1, 1.0),
        (240.0, 3, pytest.approx(1 / 3)),
        (300.0, 4, 0.25),
    ]
    evaluated = found.Tensors("fleet-evaluation/accuracy")
    assert [(event.wall_time, event.step) for event in evaluated] == [(150.0, 1)]
    tags = {*found.Tags()["tensors"]}
    assert {"round/reports", "lost/lost", "refused/out-of-range", "held-out/accuracy"} <= tags


def test_a_damaged_marker_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(ResultsError, match=rf"{MARKER} is damaged .* delete its folder"):
        TensorBoard(tmp_path).add(RunResults.load(data))


@of_mlflow
def test_mlflow(data: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = MLflow(uri, "trials", str(data))
    assert tracker.add(RunResults.load(data)) == ROUNDS + EVALUATIONS
    assert tracker.add(RunResults.load(data)) == 0
    other = MLflow(uri, "trials", "another run's data")
    assert other.add(RunResults.load(data)) == ROUNDS + EVALUATIONS, "it is another run"
    assert MLflow(uri, "trials", str(data)).add(go_on(data, 4)) == 1

    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "trials"]
    runs = client.search_runs([experiment.experiment_id])
    assert {run.data.tags["fleetlearn.key"] for run in runs} == {str(data), "another run's data"}
    (run,) = [each for each in runs if each.data.tags["fleetlearn.key"] == str(data)]
    assert (run.info.run_name, run.info.status) == ("trial", "RUNNING")
    assert run.data.params == {"round.goal": "9"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value, each.timestamp) for each in history] == [
        (1, 1.0, 120_000),
        (3, 1 / 3, 240_000),
        (4, 0.25, 300_000),
    ]


@of_mlflow
def test_mlflow_learns_that_a_run_is_finished(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    data = write_hand_written_run(tmp_path / "run", finished=True)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    MLflow(uri, "trials", "k").add(RunResults.load(data))
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("trials")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"


@of_mlflow
def test_a_store_that_mlflow_does_not_know_is_named(data: Path) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(ResultsError, match=r"MLflow at nowhere:///x refuses"):
        MLflow("nowhere:///x", "trials", "k").add(RunResults.load(data))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return msgspec.json.Decoder(dict[str, Any]).decode_lines(file.read_bytes())


def test_history_by_hand(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    assert HistoryFile(file).add(RunResults.load(data)) == ROUNDS + EVALUATIONS
    whole = lines_of(file)
    where = [(line["_step"], line["_timestamp"], line["_runtime"]) for line in whole]
    # The first round took 59.5 s until 120 s: the history begins at 60.5 s.
    assert where == [(1, 120.0, 59.5), (1, 150.0, 89.5), (2, 180.0, 119.5), (3, 240.0, 179.5)]
    assert whole[1] == {
        "_step": 1,
        "_timestamp": 150.0,
        "_runtime": 89.5,
        "evaluation": 1,
        "version": 1,
        "fleet-evaluation/devices": 7.0,
        "fleet-evaluation/examples": 70.0,
        "fleet-evaluation/version": 1.0,
        "fleet-evaluation/accuracy": 0.6,
    }
    assert whole[0]["train/loss"] == 1.0
    assert whole[0]["round/bytes_up"] == 2000.0


def test_a_history_goes_on_where_it_ended(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    HistoryFile(file).add(RunResults.load(data))
    before = file.read_bytes()
    assert HistoryFile(file).add(RunResults.load(data)) == 0
    assert file.read_bytes() == before
    # A call that was killed has written half of its last line.
    file.write_bytes(before[:-20])
    assert HistoryFile(file).add(go_on(data, 4)) == 2, "the cut line, and the new one"
    assert file.read_bytes().startswith(before)
    assert lines_of(file)[-1]["_runtime"] == 239.5


def test_a_file_of_other_lines_is_left_alone(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(ResultsError, match=r"other\.jsonl has lines that were not written here"):
        HistoryFile(file).add(RunResults.load(data))
    assert file.read_text() == '{"a": 1}\n'
