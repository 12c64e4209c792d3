"""The command fleetlearn-simulate: simulate a fleet, resume a run, compare runs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from http import HTTPStatus
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NoReturn

from fleetlearn_protocol.command_line import needs

with needs("fleetlearn-simulate", "simulator"):
    import typer
    from fleetlearn_coordinator.dashboard.replay import serve_replay
    from fleetlearn_coordinator.network.http_port import RefusedError
    from fleetlearn_device.runtimes.providers import ProviderName
    from fleetlearn_protocol.errors import FleetError, in_words
    from fleetlearn_protocol.typer_app import command_app, complain_of, fail, show_table
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table

    from fleetlearn_simulator import privacy_command, quality_command, result_commands
    from fleetlearn_simulator.audit import audit_command
    from fleetlearn_simulator.fleet.fleet import Fleet
    from fleetlearn_simulator.interrupts import STOP_REQUESTED, begin_worker, interruptible
    from fleetlearn_simulator.peers import peers_command
    from fleetlearn_simulator.results.family_runs import backend_words, member_words, own_lines
    from fleetlearn_simulator.results.private_runs import NOT_RELEASED, privacy_words
    from fleetlearn_simulator.results.replayed_run import replayed_runs
    from fleetlearn_simulator.results.run_folder import CHECKPOINT, SCENARIO, SUMMARY
    from fleetlearn_simulator.run import Options, Outcome, prepare_sweep, simulate, summary_alone
    from fleetlearn_simulator.scenario.scenario import Scenario, expand, init_text
    from fleetlearn_simulator.training.choice import BackendChoice

app = command_app("fleetlearn-simulate", "Simulates a fleet of devices in virtual time.")
app.add_typer(result_commands.app)
app.add_typer(privacy_command.app)
app.add_typer(quality_command.app)
app.add_typer(audit_command.app)
app.add_typer(peers_command.app)
ScenarioFile = Annotated[
    Path,
    typer.Argument(metavar="SCENARIO.toml", help="The plan, the devices, and what goes wrong."),
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        help=(
            "auto, bundle (trains device after device) or vectorized (trains many devices in one "
            "call)."
        ),
    ),
]
ProviderOption = Annotated[
    str,
    typer.Option(
        "--provider",
        help="Where devices are trained: cpu or cuda (an NVIDIA GPU, with onnxruntime-gpu).",
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        help=(
            "Processes that train; 0: as many as are useful; with Ray one for each CPU of the "
            "cluster."
        ),
        min=0,
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="processes (of this machine) or ray (of a Ray cluster; the results are the same).",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help=(
            "A module that may bring own algorithms, for the scenario and its plan to name: an "
            "installed one, or one in the scenario's folder. Repeatable."
        ),
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help=(
            "A Ray cluster that this machine is a node of. Default: RAY_ADDRESS, or else a new one "
            "on this machine."
        ),
    ),
]


@app.command()
def init(
    file: Annotated[
        Path,
        typer.Argument(metavar="SCENARIO.toml", help="The file to write; none is overwritten."),
    ],
) -> None:
    """Write a scenario file with every key and its meaning."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(init_text())
    except OSError as error:
        _fail(f"{file} cannot be written: {in_words(error)}")
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
    test_every: Annotated[
        int, typer.Option(help="Rounds between tests on the test data; 0: never.", min=0)
    ] = 1,
    engine: EngineOption = "processes",
    ray_address: RayAddress = None,
    provider: ProviderOption = "cpu",
    plugin: Plugins = None,
) -> None:
    """Run a scenario, or all runs of its sweep. Ctrl-C and SIGTERM stop it cleanly; `resume`
    continues."""
    with _errors():
        runs = expand(Scenario.load(scenario, plugin or ()))
        folder = output or scenario.with_name(f"{scenario.stem}.sim")
        if any((folder / name).exists() for name in (SUMMARY, CHECKPOINT)) or any(
            folder.glob(f"*/{SCENARIO}")
        ):
            _fail(
                f"{folder} holds a run already: resume it, delete it, or choose another folder "
                "with --output"
            )
        options = Options(
            _kind(backend),
            workers or None,
            events=events,
            test=test_every,
            provider=_provider(provider),
            **_training_place(engine, ray_address),
        )
        if len(runs) == 1:
            _one(runs[0], folder, options, resume=False)
        else:
            prepare_sweep(runs, folder, options)
            _sweep(runs, folder, options)


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a run, or of a sweep, that was stopped.")
    ],
    workers: Workers = 0,
    engine: EngineOption = "processes",
    ray_address: RayAddress = None,
) -> None:
    """Continue a stopped run from its last checkpoint, or the unfinished runs of a sweep. The
    results are the same as without the stop."""
    with _errors():
        if (folder / SUMMARY).exists():
            _fail(f"{folder}: this run is finished; its report is {folder / 'report.html'}")
        options = Options(workers=workers or None, **_training_place(engine, ray_address))
        if (folder / SCENARIO).exists():
            _one(Scenario.load_of_run(folder / SCENARIO), folder, options, resume=True)
            return
        folders = sorted(path.parent for path in folder.glob(f"*/{SCENARIO}"))
        if not folders:
            _fail(f"{folder} holds no run: {SCENARIO} is missing")
        _sweep(
            [
                Scenario.load_of_run(run / SCENARIO)
                for run in folders
                if not (run / SUMMARY).exists()
            ],
            folder,
            options,
        )


@app.command()
def view(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or a folder with several.")
    ],
    port: Annotated[
        int, typer.Option(help="TCP port of the page; 0: any that is free.", min=0, max=65535)
    ] = 0,
) -> None:
    """Show a simulation on the coordinator's live page: until Ctrl-C, on this machine alone."""
    with _errors(), suppress(KeyboardInterrupt):
        page = serve_replay(
            f"the simulation in {folder}",
            replayed_runs(folder),
            _nothing_else,
            port=port,
            announce=lambda link: print(f"open this link; Ctrl-C ends it:\n  {link}", flush=True),
            devices=False,
            models=False,
            virtual=True,
        )
        asyncio.run(page)


def _nothing_else(path: tuple[str, ...], query: Mapping[str, str]) -> NoReturn:
    raise RefusedError(HTTPStatus.NOT_FOUND, "a simulation has no other views than its rounds")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or of a sweep's runs.")],
    output: Annotated[Path, typer.Option(help="The page that is written.")] = Path("compare.html"),
    target: Annotated[
        str | None,
        typer.Option(
            help="When was it reached: accuracy=0.9, 'accuracy>=0.9' or 'loss<=0.5', in quotes."
        ),
    ] = None,
) -> None:
    """Compare runs: tables in the terminal, plots in a page."""
    from fleetlearn_simulator.results.comparison import comparison_tables, write_comparison
    from fleetlearn_simulator.results.run_statistics import Target

    with _errors():
        wanted = None if target is None else Target.parse(target)
        for table in comparison_tables(folders, wanted):
            show_table(table)
        print(write_comparison(folders, output, wanted))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write a run's page again."""
    from fleetlearn_simulator.results.run_report import write_report

    with _errors():
        print(write_report(folder))


def _one(
    scenario: Scenario, folder: Path, options: Options, *, resume: bool, page: bool = True
) -> None:
    """Run or resume one run, and show its progress."""
    console = Console(stderr=True, markup=False)
    with interruptible(), _progress(console) as shown:
        bar = shown.add_task("starting", total=scenario.plan.stop.rounds)
        outcome = simulate(
            scenario,
            folder,
            options,
            resume=resume,
            progress=lambda fleet: shown.update(
                bar, completed=fleet.engine.version + 1, description=_state(fleet)
            ),
            should_stop=STOP_REQUESTED.is_set,
        )
    if outcome is None:
        _stopped(folder, console)
        raise typer.Exit(130)
    if page:
        outcome.report()
    _summarise(outcome)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # in a file it would be blank lines
    )


def _state(fleet: Fleet) -> str:
    """Return the state of a run in one line."""
    last = fleet.history[-1]
    test = last.get("test")
    loss, where = (
        (test or last["metrics"]).get("loss"),
        "on the test data" if test else "on the devices",
    )
    lost = ", ".join(f"{cause} {count}" for cause, count in last["causes"].items()) or "none"
    return (
        f"{_clock(fleet.now)}  {last['connected']:,} connected  {last['reports']:,} reports  lost: "
        f"{lost}"
    ) + ("" if loss is None else f"  loss {loss:.4g} {where}")


def _clock(seconds: float) -> str:
    """Return virtual time as people write it."""
    days, rest = divmod(int(seconds), 86400)
    return (
        f"day {days + 1} " if days else ""
    ) + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


MEASURED_ON = {
    "metrics": "the training examples of the last round's devices, in that round",
    "evaluation": "the training examples of the last evaluation's devices",
    "test": "the test data, of the last model",
}
"""Part of the summary -> whose examples its metrics are of."""
QUALITY = "`fleetlearn-simulate data-quality` says what updates are worth on them"


def _summarise(outcome: Outcome) -> None:
    summary = outcome.summary
    seconds = summary["device_seconds"]
    spent = sum(seconds.values())
    table = Table(title=f"{outcome.folder}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("ended", f"{summary['reason']}, after {_clock(summary['time'])} of virtual time")
    table.add_row("rounds", f"{summary['rounds']:,} committed, {summary['abandoned']:,} abandoned")
    table.add_row("reports", f"{summary['reports']:,} of {summary['devices']:,} devices")
    if "without_examples" in summary:
        table.add_row(
            "no examples", f"{summary['without_examples']:,} devices, which never connect"
        )
    table.add_row(
        "lost",
        ", ".join(f"{cause} {count:,}" for cause, count in summary["lost"].items()) or "none",
    )
    if spent:
        table.add_row(
            "device time",
            f"{spent / 3600:,.1f} h, {100 * seconds['wasted'] / spent:.1f} % of it wasted",
        )
    table.add_row("bytes", f"{summary['bytes']['down']:,} down, {summary['bytes']['up']:,} up")
    for what, where in MEASURED_ON.items():
        if summary.get(what):
            metrics = ", ".join(f"{name} {value:.5g}" for name, value in summary[what].items())
            table.add_row(what, f"{metrics}, on {where}{_marked(what, summary)}")
    if "privacy" in summary:
        table.add_row("privacy", privacy_words(summary["privacy"]))
    if "secure" in summary:
        table.add_row("hidden", summary["secure"])
    if "held_out" in summary:
        table.add_row("held-out data", f"{summary['held_out']}: {QUALITY}")
    for title, words in member_words(summary):
        table.add_row(title, words)
    for title, words in own_lines(summary):
        table.add_row(title, words)
    table.add_row("back end", backend_words(summary))
    page = outcome.folder / "report.html"
    if page.exists():
        table.add_row("report", str(page))
    show_table(table, stderr=True)


def _marked(what: str, summary: Mapping[str, Any]) -> str:
    """Return what is said of the test of a private run: it is no part of what a run releases."""
    return NOT_RELEASED if what == "test" and "privacy" in summary else ""


def _sweep(runs: list[Scenario], folder: Path, options: Options) -> None:
    """Do all runs of a sweep in their prepared folders. Their pages, 5 MB each, are written by
    `report` only."""
    if options.engine == "ray":
        for run in runs:
            _one(run, folder / run.name, options, resume=True, page=False)
    else:
        _side_by_side(
            runs, folder, options._replace(workers=1), options.workers or os.cpu_count() or 1
        )
    print(f"fleetlearn-simulate compare {folder}")


def _side_by_side(runs: list[Scenario], folder: Path, options: Options, processes: int) -> None:
    """Do each run in a separate process."""
    console, context = Console(stderr=True), get_context("spawn")
    # Its end here is closed to stop all of them: a signal may have reached this process alone.
    their_end, own_end = context.Pipe(duplex=False)
    with (
        interruptible(own_end.close),
        ProcessPoolExecutor(
            processes, context, initializer=begin_worker, initargs=(their_end,)
        ) as pool,
        Progress(
            *Progress.get_default_columns(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as shown,
    ):
        bar = shown.add_task(f"{len(runs)} runs", total=len(runs))
        waiting = {pool.submit(summary_alone, run, folder / run.name, options): run for run in runs}
        for done in as_completed(waiting):
            if done.exception():  # without this the other runs would come first, and then the error
                pool.shutdown(cancel_futures=True)
            summary = done.result()
            if STOP_REQUESTED.is_set() or summary is None:
                pool.shutdown(cancel_futures=True)
                _stopped(folder, console)
                raise typer.Exit(130)
            shown.advance(bar)
            what = "test" if summary["test"] else "metrics"
            metrics = ", ".join(f"{k} {v:.4g}" for k, v in summary[what].items())
            console.print(
                f"{waiting[done].name}: {summary['rounds']} rounds, {metrics}, on "
                f"{MEASURED_ON[what]}",
                markup=False,
                highlight=False,
            )


def _stopped(folder: Path, console: Console) -> None:
    text = f"stopped; fleetlearn-simulate resume {folder} goes on"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _kind(name: str) -> BackendChoice:
    match name:
        case "auto" | "bundle" | "vectorized":
            return name
    _fail(f"--backend {name}: expected auto, bundle or vectorized")
    raise AssertionError


def _provider(name: str) -> ProviderName:
    match name:
        case "cpu" | "cuda":
            return name
    _fail(f"--provider {name}: expected cpu or cuda")
    raise AssertionError


def _training_place(engine: str, address: str | None) -> dict[str, Any]:
    """Return the options that say where devices are trained."""
    if engine not in ("processes", "ray"):
        _fail(f"--engine {engine}: expected processes or ray")
    if address and engine != "ray":
        _fail(f"--ray-address {address} is for --engine ray")
    return {"engine": engine, "ray_address": address}


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (FleetError, OSError) as error:
        complain_of("fleetlearn-simulate", error)
        sys.exit(1)


def _fail(text: str) -> NoReturn:
    fail("fleetlearn-simulate", text)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
