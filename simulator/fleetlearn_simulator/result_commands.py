"""The command of ``fleetlearn-simulate`` that takes a simulation's numbers to other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
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
from fleetlearn_protocol.errors import FleetError, in_words
from fleetlearn_protocol.typer_app import fail

from fleetlearn_simulator.results.measured import load_results

app = typer.Typer()


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    rounds: RoundsFiles = None,
    evaluations: EvaluationsFiles = None,
    tensorboard: TensorBoardFolder = None,
    mlflow: MLflowStore = None,
    experiment: Experiment = "fleetlearn",
    history: History = None,
    follow: Follow = None,
) -> None:
    """Write what a run measured for other tools: tables, TensorBoard, MLflow. It may still run."""
    try:
        key = str(folder.resolve())
        to = targets(key, rounds, evaluations, tensorboard, mlflow, experiment, history)
        send(lambda: load_results(folder), to, follow)
    except (FleetError, OSError) as error:
        fail("fleetlearn-simulate", in_words(error, file=True))
