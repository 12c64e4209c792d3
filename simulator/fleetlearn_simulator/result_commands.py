"""The command of ``fleetlearn-simulate`` that takes a simulation's numbers to other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_coordinator.results.send_results import (
    ResultOptions,
    send,
    targets,
    with_options,
)
from fleetlearn_protocol.errors import FleetError, in_words
from fleetlearn_protocol.typer_app import fail

from fleetlearn_simulator.results.measured import load_results

app = typer.Typer()


@app.command()
@with_options
def results(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    *,
    wanted: ResultOptions,
) -> None:
    """Write what a run measured for other tools: tables, TensorBoard, MLflow. It may still run."""
    try:
        key = str(folder.resolve())
        to = targets(key, wanted)
        send(lambda: load_results(folder), to, wanted.follow)
    except (FleetError, OSError) as error:
        fail("fleetlearn-simulate", in_words(error, file=True))
