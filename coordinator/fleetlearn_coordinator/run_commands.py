"""The commands `fleetlearn-coordinator run ...`: what a host's runs are to do, while it serves them
or not.

Each takes the service file, and writes what is wanted into the database of runs. A host that runs
does it within a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.typer_app import (
    commands_under,
    expected_errors,
    plain_table,
    say,
    show_table,
)

from fleetlearn_coordinator.network.gate import NAME
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.several.operations import Operations, operating
from fleetlearn_coordinator.service.several.population import describe
from fleetlearn_coordinator.service.status import read_status
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.runs import Population, WantedRun

app = commands_under(
    "run", "The runs of a host: add, list, pause, resume, drain, stop, roll-back, remove."
)
ServiceFile = Annotated[
    Path,
    typer.Argument(
        metavar="SERVICE.toml", help="The coordinator's service file, with the key runs."
    ),
]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name.")]


@app.command()
def add(
    service: ServiceFile,
    name: RunName,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan of the run.")],
    tag: Annotated[
        list[str] | None, typer.Option(help="A tag that its devices have; may be given again.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="A tier of its devices; may be given again.")
    ] = None,
    runtime: Annotated[
        list[str] | None, typer.Option(help='What trains there, such as "onnx"; may be again.')
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of all devices, always the same: above 0, up to 1.")
    ] = 1.0,
) -> None:
    """Add a run, which begins at once. Which devices serve it is said here; by default all."""
    labels = [*(tag or []), *(tier or []), *(runtime or [])]
    if not all(map(NAME.fullmatch, labels)):
        raise typer.BadParameter(
            "tags, tiers and runtimes are of letters, digits and ._-, up to 64 of them"
        )
    if not 0 < share <= 1:
        raise typer.BadParameter(
            f"{share:g} was given; a number above 0 and up to 1 is expected", param_hint="--share"
        )
    population = Population(tuple(tag or ()), tuple(tier or ()), tuple(runtime or ()), share)
    with _operating(service) as operations:
        operations.add(name, plan, population)
        _say(operations, f"{name} is added", "it begins")


@app.command()
def pause(service: ServiceFile, name: RunName) -> None:
    """Give no more tasks of a run, and open no round. What devices have may still be reported, and
    no deadline passes meanwhile."""
    with _operating(service) as operations:
        operations.change(name, "paused")
        _say(operations, f"{name} is to be paused", "it is")


@app.command()
def resume(service: ServiceFile, name: RunName) -> None:
    """Let a run go on that was paused, drained or stopped, or failed."""
    with _operating(service) as operations:
        operations.change(name, "resumed")
        _say(operations, f"{name} is to be running", "it is")


@app.command()
def drain(service: ServiceFile, name: RunName) -> None:
    """Stop a run when its open round is over."""
    with _operating(service) as operations:
        operations.change(name, "drained")
        _say(operations, f"{name} is to be stopped after its open round", "it begins")


@app.command()
def stop(service: ServiceFile, name: RunName) -> None:
    """Stop a run at once. Its tasks are cancelled, its devices serve other runs; it goes on with
    `resume`."""
    with _operating(service) as operations:
        operations.change(name, "stopped")
        _say(operations, f"{name} is to be stopped", "it is")


@app.command("roll-back")
def roll_back(
    service: ServiceFile,
    name: RunName,
    version: Annotated[
        int, typer.Argument(help="The version whose model is to be the newest again.")
    ],
) -> None:
    """Go on from an earlier version of a run's model, also of a run that has finished."""
    with _operating(service) as operations:
        operations.roll_back(name, version)
        _say(operations, f"{name} is to go back to version {version}", "it does")


@app.command()
def remove(service: ServiceFile, name: RunName) -> None:
    """Stop a run and forget it. Its data directory stays; `add` with the same plan would go on with
    it."""
    with _operating(service) as operations:
        run = operations.find(name)
        operations.remove(name)
        _say(
            operations, f"{name} is removed; what it learnt stays where {run.plan} says", "it ends"
        )


@app.command("list")
def list_runs(
    service: ServiceFile, json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False
) -> None:
    """List the runs, and how far each is."""
    with _operating(service) as operations:
        show_runs(operations, json=json)


def show_runs(operations: Operations, *, json: bool) -> None:
    """Print the runs of a host, and how far each is."""
    found = [_row(run) for run in operations.runs.runs()]
    if json:
        print(msgspec.json.encode(found).decode())
        return
    if not is_served(operations):
        print("no coordinator serves these runs now")
    columns = ("run", "state", "version", "phase", "round", "devices", "tasks", "accepted", "for")
    table = plain_table(*columns)
    for row in found:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    show_table(table)
    for row in found:
        if row["failed"]:
            print(f"{row['run']} failed: {row['failed']}")
        if row["error"]:
            print(f"{row['run']}: {row['error']}")
        if row.get("waits_for"):
            print(f"{row['run']}: {row['waits_for']}")


def _row(run: WantedRun) -> dict[str, Any]:
    """Return what is known of a run, for the table and as JSON."""
    row: dict[str, Any] = {
        "run": run.name,
        "state": "failed" if run.failed else run.wanted,
        "plan": str(run.plan),
        "for": describe(run.population),
        "population": run.population._asdict(),
        "failed": run.failed,
        "error": "",
    }
    try:
        status = read_status(Plan.load(run.plan).data_dir)
    except (FleetError, OSError) as error:
        # no data directory yet
        not_begun = isinstance(error, StoreError) and error.code is Code.UNKNOWN_CONTENT
        if not (run.failed or not_begun):
            row["error"] = in_words(error, file=True)
        return row
    if status.finished is not None:
        row |= {"state": "finished", "finished": status.finished}
    row["version"] = status.version
    if status.running:
        live = status.live
        row |= {"phase": live["phase"], "round": live["round"], "devices": live["connected"]}
        row |= {
            "tasks": live["leases"],
            "accepted": live["accepted"],
            "waits_for": live.get("waits_for", ""),
        }
    return row


def is_served(operations: Operations) -> bool:
    """Return whether a coordinator serves the runs now."""
    return operations.runs.is_locked()


def _say(operations: Operations, what: str, then: str) -> None:
    when = "within a second" if is_served(operations) else "when the service file is served"
    say(f"{what}; {then} {when}")


@contextmanager
def _operating(service: Path) -> Iterator[Operations]:
    """Open the runs of a service file. Expected errors are one line and exit status 1."""
    with expected_errors(), operating(ServiceSettings.load(service)) as operations:
        yield operations
