"""The command fleetlearn-simulate: rehearse a fleet, go on with a run, lay runs side by side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:  # pragma: no cover
    sys.exit(f"fleetlearn-simulate needs the extra: pip install 'fleetlearn[simulator]' ({error})")

from fleetlearn_protocol.errors import FleetError

from fleetlearn_simulator.fleet import Fleet
from fleetlearn_simulator.record import SCENARIO, SUMMARY, read_rows
from fleetlearn_simulator.run import Kind, Options, Outcome, simulate
from fleetlearn_simulator.scenario import Scenario, init_text

app = typer.Typer(
    help="A fleet of devices in virtual time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="The population and what befalls it.")]
BackendOption = Annotated[
    str, typer.Option("--backend", help="auto, bundle (device after device) or vectorized (many in one call).")
]
Workers = Annotated[int, typer.Option(help="Processes that train; 0: one for each core.", min=0)]


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Where to write it; nothing is overwritten.")],
) -> None:
    """Write a scenario with every key and what it means."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(init_text())
    except OSError as error:
        _fail(f"{file} is not written: {error}")
    print(f"{file}: edit it, then fleetlearn-simulate run {file}")


@app.command()
def run(
    scenario: ScenarioFile,
    output: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: NAME.sim beside the scenario.")
    ] = None,
    backend: BackendOption = "auto",
    workers: Workers = 0,
    events: Annotated[bool, typer.Option(help="Write the event log.")] = True,
    test_every: Annotated[int, typer.Option(help="Rounds between tests on the data kept back; 0: never.", min=0)] = 1,
) -> None:
    """Run a scenario, or each run of its sweep. Ctrl-C stops it cleanly; `resume` goes on."""
    with _errors():
        runs = Scenario.load_all(scenario)
        folder = output or scenario.with_name(f"{scenario.stem}.sim")
        options = Options(_kind(backend), workers or None, events=events, test=test_every)
        _run_all(runs, folder, options, resume=False)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")]) -> None:
    """Go on with a stopped run from its last checkpoint, to the same end."""
    with _errors():
        if (folder / SUMMARY).exists():
            _fail(f"{folder}: this run is finished; fleetlearn-simulate compare {folder} shows it")
        _run_all(Scenario.load_all(folder / SCENARIO), folder, Options(), resume=True)


def _kind(name: str) -> Kind:
    match name:
        case "auto" | "bundle" | "vectorized":
            return name
    _fail(f"--backend {name}: expected auto, bundle or vectorized")
    raise AssertionError


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FleetError as error:
        _fail(error.text)


def _fail(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(
        f"fleetlearn-simulate: {text}", style="red", markup=False, highlight=False
    )
    raise typer.Exit(1)
