"""The command ``results`` of ``fleetlearn-coordinator`` and ``fleetlearn-simulate``: its options,
and what it does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.results.errors import ResultsError
from fleetlearn_coordinator.results.run_results import RunResults
from fleetlearn_coordinator.results.trackers import HistoryFile, MLflow, TensorBoard, Tracker


class ResultOptions(NamedTuple):
    """The options of ``results``: where results go, and whether the command goes on."""

    rounds: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Write the rounds, a row for each: .parquet, .csv or .jsonl by the name's end.",
        ),
    ] = None
    evaluations: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The same of the evaluations on devices."),
    ] = None
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Add to TensorBoard's files there.")
    ] = None
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Add to a run of MLflow, such as sqlite:///mlflow.db or http://127.0.0.1:5000.",
        ),
    ] = None
    experiment: Annotated[str, typer.Option(help="The experiment in MLflow.")] = "fleetlearn"
    history: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Add lines with Weights & Biases' keys to a file."),
    ] = None
    follow: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="Go on until the run is finished: look again every SECONDS.",
        ),
    ] = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer that has the options of ``ResultOptions`` behind its own
    arguments. ``command`` is given what they say as ``wanted``."""
    own = inspect.signature(command, eval_str=True)
    kinds = get_type_hints(ResultOptions, include_extras=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for (name, kind), default in zip(
            kinds.items(), ResultOptions._field_defaults.values(), strict=True
        )
    ]
    kept = [parameter for name, parameter in own.parameters.items() if name != "wanted"]

    def run(**given: Any) -> None:
        wanted = ResultOptions(**{name: given.pop(name) for name in ResultOptions._fields})
        command(**given, wanted=wanted)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*kept, *options)}
    return run


class Targets(NamedTuple):
    """Where results go."""

    rounds: tuple[Path, ...] = ()
    evaluations: tuple[Path, ...] = ()
    trackers: tuple[Tracker, ...] = ()


def targets(key: str, wanted: ResultOptions) -> Targets:
    """Return where the options say that results go. ``key``: where the run's data are. Raises
    ResultsError for none."""
    trackers: list[Tracker] = []
    if wanted.tensorboard is not None:
        trackers.append(TensorBoard(wanted.tensorboard))
    if wanted.mlflow is not None:
        trackers.append(MLflow(wanted.mlflow, wanted.experiment, key))
    if wanted.history is not None:
        trackers.append(HistoryFile(wanted.history))
    if not (wanted.rounds or wanted.evaluations or trackers):
        raise ResultsError(
            "nothing says where the results go: give --rounds FILE, --evaluations FILE, "
            "--tensorboard FOLDER, --mlflow URI or --history FILE"
        )
    return Targets((*(wanted.rounds or ()),), (*(wanted.evaluations or ()),), (*trackers,))


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
