"""The command of ``fleetlearn-coordinator`` that takes a run's numbers to other tools."""

from __future__ import annotations

import typer

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.local import open_local
from fleetlearn_coordinator.commands.options import WordsAndRun
from fleetlearn_coordinator.commands.target import refuse_url, split
from fleetlearn_coordinator.results.run_results import coordinator_results
from fleetlearn_coordinator.results.send_results import (
    ResultOptions,
    send,
    targets,
    with_options,
)

app = typer.Typer()


@app.command()
@with_options
def results(
    words: WordsAndRun = None,
    *,
    wanted: ResultOptions,
) -> None:
    """Write what a run measured for other tools: tables, TensorBoard, MLflow. The coordinator may
    run meanwhile, or not; it does not notice."""
    where, names = split(words, 0, 1, "RUN")
    with expected_errors():
        refuse_url(where, "Type it where the coordinator's files are")
        with open_local(where, None, make=False) as local:
            place = local.place(names[0] if names else None)
        key = str(place.data.resolve())
        to = targets(key, wanted)
        send(lambda: coordinator_results(place), to, wanted.follow)
