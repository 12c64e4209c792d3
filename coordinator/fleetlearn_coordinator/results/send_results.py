"""The command ``results`` of ``fleetlearn-coordinator`` and ``fleetlearn-simulate``: its options,
and what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.results.errors import ResultsError
from fleetlearn_coordinator.results.run_results import RunResults
from fleetlearn_coordinator.results.trackers import HistoryFile, MLflow, TensorBoard, Tracker

RoundsFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--rounds",
        metavar="FILE",
        help="Write the rounds, a row for each: .parquet, .csv or .jsonl by the name's end.",
    ),
]
EvaluationsFiles = Annotated[
    list[Path] | None,
    typer.Option("--evaluations", metavar="FILE", help="The same of the evaluations on devices."),
]
TensorBoardFolder = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="FOLDER", help="Add to TensorBoard's files there."),
]
MLflowStore = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        help="Add to a run of MLflow, such as sqlite:///mlflow.db or http://127.0.0.1:5000.",
    ),
]
Experiment = Annotated[str, typer.Option(help="The experiment in MLflow.")]
History = Annotated[
    Path | None,
    typer.Option(
        "--history", metavar="FILE.jsonl", help="Add lines with Weights & Biases' keys to a file."
    ),
]
Follow = Annotated[
    float | None,
    typer.Option(
        "--follow",
        metavar="SECONDS",
        min=0.1,
        help="Go on until the run is finished: look again every SECONDS.",
    ),
]


class Targets(NamedTuple):
    """Where results go."""

    rounds: tuple[Path, ...] = ()
    evaluations: tuple[Path, ...] = ()
    trackers: tuple[Tracker, ...] = ()


def targets(
    key: str,
    rounds: list[Path] | None,
    evaluations: list[Path] | None,
    tensorboard: Path | None,
    mlflow: str | None,
    experiment: str,
    history: Path | None,
) -> Targets:
    """Return where the options say that results go. ``key``: where the run's data are. Raises
    ResultsError for none."""
    trackers: list[Tracker] = []
    if tensorboard is not None:
        trackers.append(TensorBoard(tensorboard))
    if mlflow is not None:
        trackers.append(MLflow(mlflow, experiment, key))
    if history is not None:
        trackers.append(HistoryFile(history))
    if not (rounds or evaluations or trackers):
        raise ResultsError(
            "nothing says where the results go: give --rounds FILE, --evaluations FILE, "
            "--tensorboard FOLDER, --mlflow URI or --history FILE"
        )
    return Targets((*(rounds or ()),), (*(evaluations or ()),), (*trackers,))


def send(load: Callable[[], RunResults], to: Targets, follow: float | None) -> None:
    """Write what ``load`` returns, once, or each ``follow`` seconds until the run is finished.
    Raises ResultsError, OSError, and what ``load`` raises."""
    while True:
        results = load()
        for file in to.rounds:
            results.rounds().write(file)
        for file in to.evaluations:
            results.evaluations().write(file)
        added = [tracker.add(results) for tracker in to.trackers]
        if follow is None or results.finished:
            break
        if any(added):
            say(f"round {results.round_rows[-1]['round']}")
        time.sleep(follow)
    say(f"{len(results.round_rows)} rounds, {len(results.evaluation_rows)} evaluations written")
