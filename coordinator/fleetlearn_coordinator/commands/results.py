"""The command of ``fleetlearn-coordinator`` that takes a run's numbers to other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.results.run_results import coordinator_results
from fleetlearn_coordinator.results.send_results import (
    EvaluationsFiles,
    Experiment,
    Follow,
    History,
    MLflowStore,
    RoundsFiles,
    TensorBoardFolder,
    send,
    targets,
)
from fleetlearn_coordinator.service.views.run_views import RunPlace

app = typer.Typer()


@app.command()
def results(
    run: Annotated[
        Path, typer.Argument(metavar="PLAN.toml|DATA", help="A plan, or a run's data directory.")
    ],
    rounds: RoundsFiles = None,
    evaluations: EvaluationsFiles = None,
    tensorboard: TensorBoardFolder = None,
    mlflow: MLflowStore = None,
    experiment: Experiment = "fleetlearn",
    history: History = None,
    follow: Follow = None,
) -> None:
    """Write what a run measured for other tools: tables, TensorBoard, MLflow. The coordinator may
    run meanwhile, or not; it does not notice."""
    with expected_errors():
        place = _place(run)
        key = str(place.data.resolve())
        to = targets(key, rounds, evaluations, tensorboard, mlflow, experiment, history)
        send(lambda: coordinator_results(place), to, follow)


def _place(run: Path) -> RunPlace:
    if run.is_dir():
        return RunPlace(run.name, run)
    plan = Plan.load(run)
    return RunPlace(plan.name, plan.data_dir, str(plan.file))
