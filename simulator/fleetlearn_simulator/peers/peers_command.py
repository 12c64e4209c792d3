"""The command ``fleetlearn-simulate peers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from fleetlearn_device.runtimes.providers import PROVIDERS
from fleetlearn_protocol.errors import FleetError, in_words
from fleetlearn_protocol.typer_app import fail, show_table
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fleetlearn_simulator.interrupts import STOP_REQUESTED, interruptible
from fleetlearn_simulator.peers.peers_run import simulate_peers
from fleetlearn_simulator.results.run_folder import CHECKPOINT, SCENARIO, SUMMARY
from fleetlearn_simulator.run import Options, Outcome
from fleetlearn_simulator.scenario.scenario import Scenario, expand
from fleetlearn_simulator.training.choice import BACKENDS

app = typer.Typer()


@app.command()
def peers(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.toml", help="A scenario with [peers].")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: NAME.peers beside the scenario.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, bundle (peer after peer) or vectorized (many in one call).")
    ] = "auto",
    workers: Annotated[
        int, typer.Option(help="Processes that train; 0: as many as are useful.", min=0)
    ] = 0,
    events: Annotated[bool, typer.Option(help="Write the event log.")] = True,
    test_every: Annotated[
        int, typer.Option(help="Steps between tests; 0: after the last one alone.", min=0)
    ] = 1,
    provider: Annotated[
        str, typer.Option(help="Where peers are trained: cpu or cuda (an NVIDIA GPU).")
    ] = "cpu",
) -> None:
    """Let devices train without a coordinator: each mixes its model with its neighbours'."""
    if backend not in ("auto", *BACKENDS):
        fail("fleetlearn-simulate", f"--backend {backend}: expected auto, bundle or vectorized")
    if provider not in PROVIDERS:
        fail("fleetlearn-simulate", f"--provider {provider}: expected {' or '.join(PROVIDERS)}")
    options = Options(
        backend,  # type: ignore[arg-type]
        workers or None,
        events=events,
        test=test_every,
        provider=provider,  # type: ignore[arg-type]
    )
    try:
        runs = expand(Scenario.load(scenario))
        folder = output or scenario.with_name(f"{scenario.stem}.peers")
        if any((folder / name).exists() for name in (SUMMARY, CHECKPOINT)) or any(
            folder.glob(f"*/{SCENARIO}")
        ):
            text = "holds a run already: delete it, or choose another folder with --output"
            fail("fleetlearn-simulate", f"{folder} {text}")
        outcomes = [
            _one(run, folder if len(runs) == 1 else folder / run.name, options) for run in runs
        ]
    except (FleetError, OSError) as error:
        fail("fleetlearn-simulate", in_words(error, file=True))
    show_table(_table([run.name for run in runs], outcomes), stderr=True)
    print(f"fleetlearn-simulate compare {folder}")


def _one(run: Scenario, folder: Path, options: Options) -> Outcome:
    """Do one run, and show its progress."""
    console = Console(stderr=True, markup=False)
    hidden = not console.is_terminal  # in a file it would be blank lines
    with interruptible(), Progress(console=console, transient=True, disable=hidden) as shown:
        bar = shown.add_task(f"{run.name}: starting", total=run.plan.stop.rounds)
        outcome = simulate_peers(
            run,
            folder,
            options,
            progress=lambda row: shown.update(
                bar,
                completed=row["round"] + 1,
                description=f"{run.name}: consensus error {row['peers']['consensus']:.3g}",
            ),
            should_stop=STOP_REQUESTED.is_set,
        )
    if outcome is None:
        text = f"stopped; {folder} has the steps until then. Runs of peers begin again"
        console.print(text, highlight=False, soft_wrap=True)
        raise typer.Exit(130)
    return outcome


def _table(names: Sequence[str], outcomes: Sequence[Outcome]) -> Table:
    """Return what the runs came to, a line for each."""
    table = Table(title="after the last step", title_justify="left")
    for column in ("run", "topology", "neighbours", "gap", "consensus error"):
        table.add_column(column, justify="left" if column in ("run", "topology") else "right")
    measured = {name: None for outcome in outcomes for name in outcome.summary["test"]}
    # Lines stay short: the loss is shown where it is all that there is.
    metrics = [name for name in measured if name != "loss"] or list(measured)
    for name in metrics:
        table.add_column(f"{name}, mean model", justify="right")
        table.add_column(f"{name}, own models", justify="right")
    table.add_column("bytes a peer", justify="right")
    for name, outcome in zip(names, outcomes, strict=True):
        found = outcome.summary["peers"]
        each = sum(outcome.summary["bytes"].values()) / outcome.summary["devices"]
        words = found["topology"] + (", gossip" if found["mode"] == "gossip" else "")
        table.add_row(
            name,
            words,
            f"{found['neighbours']:.3g}",
            f"{found['gap']:.3g}",
            f"{found['consensus']:.3g}",
            *(
                cell
                for metric in metrics
                for cell in _cells(metric, outcome.summary["test"], found["own"])
            ),
            f"{each:,.0f}",
        )
    return table


def _cells(name: str, of_mean: Mapping[str, float], own: Mapping[str, Any]) -> tuple[str, str]:
    """Return a metric of the mean model, and of the peers' own models: the mean, and from the least
    to the greatest."""
    spread = own.get(name)
    cell = (
        "-"
        if spread is None
        else f"{spread['mean']:.3g} ({spread['least']:.3g} to {spread['greatest']:.3g})"
    )
    return f"{of_mean[name]:.4g}" if name in of_mean else "-", cell
