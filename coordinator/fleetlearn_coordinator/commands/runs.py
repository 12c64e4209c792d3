"""``fleetlearn-coordinator run``: a host's runs are added and removed, while it serves them or not.

Each command takes the service file, and writes what is wanted into the database of runs. A host
that runs does it within a second. The verbs of earlier releases, such as ``run pause``, go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_protocol.typer_app import commands_under, say

from fleetlearn_coordinator.commands import acts, look
from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.network.gate import NAME
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.several.operations import Operations, operating
from fleetlearn_coordinator.storage.runs import Population

app = commands_under("run", "Add a run to a host, or remove one.")
ServiceFile = Annotated[
    Path,
    typer.Argument(
        metavar="SERVICE.toml", help="The coordinator's service file, with the key runs."
    ),
]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name.")]

for _name, _command in (
    ("pause", acts.pause),
    ("resume", acts.resume),
    ("drain", acts.drain),
    ("stop", acts.stop),
    ("roll-back", acts.rollback),
    ("list", look.runs),
):
    app.command(_name, hidden=True)(_command)


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
def remove(service: ServiceFile, name: RunName) -> None:
    """Stop a run and forget it. Its data directory stays; `add` with the same plan would go on with
    it."""
    with _operating(service) as operations:
        run = operations.find(name)
        operations.remove(name)
        _say(
            operations, f"{name} is removed; what it learnt stays where {run.plan} says", "it ends"
        )


def _say(operations: Operations, what: str, then: str) -> None:
    when = "within a second" if operations.runs.is_locked() else "when the service file is served"
    say(f"{what}; {then} {when}")


@contextmanager
def _operating(service: Path) -> Iterator[Operations]:
    """Open the runs of a service file. Expected errors are one line and exit status 1."""
    with expected_errors(), operating(ServiceSettings.load(service)) as operations:
        yield operations
