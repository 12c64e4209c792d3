"""The commands of ``fleetlearn-coordinator`` that are about the versions of a run's model. Each
takes the plan."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.typer_app import expected_errors, plain_table, say, show_table

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.settings import MEASURED_ON
from fleetlearn_coordinator.service.status import read_status
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.service.versions import compare
from fleetlearn_coordinator.service.views.model_views import model_views
from fleetlearn_coordinator.storage.identities import COMMAND

app = typer.Typer()
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command()
def models(
    plan: PlanFile,
    as_json: AsJson = False,
    gone: Annotated[
        bool, typer.Option("--all", help="Also the versions whose files are not kept.")
    ] = False,
) -> None:
    """List the versions of the model: what is kept and why, and what was measured of each."""
    with expected_errors():
        shown = model_views(Plan.load(plan), gone=gone)
    if as_json:
        print(msgspec.json.encode(shown).decode())
        return
    columns = list(
        dict.fromkeys(
            (source, name)
            for row in shown
            for source, metrics in row.metrics.items()
            for name in metrics
        )
    )
    measured = (f"{name} ({source})" for source, name in columns)
    table = plain_table("version", "made", "kept", "MiB", "change", *measured)
    for row in shown:
        made = "initial" if not row.version else f"round {row.round}"
        if row.restores is not None:
            made = f"of {row.restores}, rolled back"
        size = "" if row.size is None else f"{row.size / 2**20:.1f}"
        change = "" if row.change is None else f"{row.change:.3g}"
        values = [row.metrics.get(source, {}).get(name) for source, name in columns]
        cells = ("" if value is None else f"{value:.4g}" for value in values)
        table.add_row(str(row.version), made, row.kept or "", size, change, *cells)
    show_table(table)
    _explain(dict.fromkeys(source for source, _ in columns))


@app.command("compare-models")
def compare_models(
    plan: PlanFile,
    first: Annotated[int, typer.Argument(help="A version that is kept.")],
    second: Annotated[int, typer.Argument(help="Another one.")],
    most: Annotated[
        int,
        typer.Option(help="How many parameters to show, the one that changed most first.", min=1),
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show how far two versions of the model are apart, in which parameters, and what was measured
    of each."""
    with expected_errors():
        found = compare(Plan.load(plan), first, second)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    cosine = "none" if found.cosine is None else f"{found.cosine:.6f}"
    norms = " and ".join(f"{norm:.4g}" for norm in found.norms)
    print(f"distance {found.distance:.4g} (L2), cosine {cosine}, norms {norms}")
    table = plain_table("parameter", "shape", "change", "of its norm", "largest element")
    for row in found.parameters[:most]:
        share = f"{row.change / row.norm:.2%}" if row.norm else ""
        shape = " x ".join(map(str, row.shape)) or "1"
        table.add_row(row.name, shape, f"{row.change:.4g}", share, f"{row.largest:.4g}")
    show_table(table)
    table = plain_table("metric", *(f"version {version}" for version in found.versions))
    for source, metrics in found.metrics.items():
        for name, pair in metrics.items():
            table.add_row(
                f"{name} ({source})", *("" if value is None else f"{value:.4g}" for value in pair)
            )
    if found.metrics:
        show_table(table)
        _explain(found.metrics)


WHO_MEASURED = {
    "round": "the devices of the round that began with it",
    "evaluation": "the devices of an evaluation of it",
    "held-out": "a process beside the coordinator",
}


def _explain(sources: Iterable[str]) -> None:
    """Say who measured a version, and on whose examples."""
    for source in sources:
        print(f"({source}): measured by {WHO_MEASURED[source]}, on {MEASURED_ON[source]}")


@app.command("roll-back")
def roll_back(
    plan: PlanFile,
    version: Annotated[
        int, typer.Argument(help="The version whose model is to be the newest again.")
    ],
) -> None:
    """Go on from an earlier version of the model. The open round is given up, and the earlier model
    becomes the next version: within a second, or at the next start."""
    with expected_errors():
        settings = Plan.load(plan)
        ask_to_roll_back(settings.data_dir, version, COMMAND)
        found = read_status(settings.data_dir)
    running = found.running and found.finished is None
    text = "within a second" if running else "when the plan is served again"
    say(f"version {version}'s model becomes the newest {text}; `models` then lists it")
