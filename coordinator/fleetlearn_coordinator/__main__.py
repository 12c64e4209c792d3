"""The command fleetlearn-coordinator: serve a plan, look at a run, take the model out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from fleetlearn_protocol.command_line import log_on_stderr, needs

with needs("fleetlearn-coordinator", "coordinator"):
    import msgspec
    import typer
    from fleetlearn_protocol import open_bundle, write_inference_model
    from fleetlearn_protocol.typer_app import (
        command_app,
        expected_errors,
        plain_table,
        say,
        show_table,
    )

    from fleetlearn_coordinator import (
        administrator_commands,
        backup_commands,
        identity_commands,
        key_commands,
        model_commands,
        result_commands,
        run_commands,
    )
    from fleetlearn_coordinator.aggregation.round_summary import BEFORE, measured_when
    from fleetlearn_coordinator.identity_commands import date
    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.plan.service_settings import ServiceSettings, is_service_file
    from fleetlearn_coordinator.service.held_out import measure_by_hand
    from fleetlearn_coordinator.service.serve import serve as serve_plan
    from fleetlearn_coordinator.service.several.operations import operating
    from fleetlearn_coordinator.service.several_runs import serve_runs
    from fleetlearn_coordinator.service.status import Status, read_model, read_status
    from fleetlearn_coordinator.service.versions import choose_version
    from fleetlearn_coordinator.storage.find_storage import find_storage

app = command_app("fleetlearn-coordinator", "Federated learning's coordinator.")
app.add_typer(identity_commands.app)
app.add_typer(key_commands.app)
app.add_typer(model_commands.app)
app.add_typer(result_commands.app)
app.add_typer(administrator_commands.app)
app.add_typer(run_commands.app)
app.add_typer(backup_commands.app)
NOT_RUNNING = 3
"""Exit status of ``status`` where the coordinator does not run and the training is not finished."""
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan of the run.")]


@app.command()
def serve(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="The plan of a run, or a service file that names a folder of runs.",
        ),
    ],
    service: Annotated[
        Path | None,
        typer.Option(
            metavar="SERVICE.toml",
            help="Address, limits and the like. Default: every key's default.",
        ),
    ] = None,
    stay: Annotated[bool, typer.Option(help="Once finished, go on telling devices so.")] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of /metrics, /healthz and /readyz; 0: any. Default: [metrics] of the file.",
            min=0,
            max=65535,
        ),
    ] = None,
) -> None:
    """Run a plan's training, or go on with it. Ends by itself when a stop rule is met; SIGTERM
    stops it cleanly.

    With a service file that has the key runs: serve all of its runs (`fleetlearn-coordinator run`),
    until SIGTERM."""
    _log(log_level)
    with expected_errors():
        if is_service_file(plan):
            if service is not None or stay:
                raise typer.BadParameter(
                    f"{plan} is a service file with runs: --service and --stay are for a plan"
                )
            serve_runs(ServiceSettings.load(plan).with_metrics_port(metrics_port))
            return
        settings = ServiceSettings.load(service) if service else ServiceSettings()
        settings = settings.with_metrics_port(metrics_port)
        serve_plan(Plan.load(plan), service=settings, stay=stay)  # its last words are in the log


@app.command()
def status(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="The plan of a run, or a service file that names a folder of runs.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="As JSON, all rounds.")] = False,
    last: Annotated[int, typer.Option(help="How many rounds to show.", min=1)] = 10,
    run: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the service file's runs.")
    ] = None,
) -> None:
    """Show how far a run is, or all runs of a service file. They may be running or not.

    Exit status: 0 if the coordinator runs or the training is finished, 3 if neither is so, 1 for
    errors."""
    with expected_errors():
        if is_service_file(plan):
            with operating(ServiceSettings.load(plan)) as operations:
                if run is None:
                    run_commands.show_runs(operations, json=json)
                    sys.exit(0 if run_commands.is_served(operations) else NOT_RUNNING)
                plan = operations.find(run).plan
        elif run is not None:
            raise typer.BadParameter(f"{plan} is no service file with runs", param_hint="--run")
        found = read_status(Plan.load(plan).data_dir)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found, last)
    if not found.running and found.finished is None:
        sys.exit(NOT_RUNNING)


@app.command()
def evaluate(plan: PlanFile) -> None:
    """Ask for an evaluation of the newest model on devices' own data. The coordinator begins it
    within a second, or at its next start."""
    with expected_errors():
        place = Plan.load(plan).data_dir
        find_storage(place).requests.ask_for_evaluation()
        found = read_status(place)
    when = (
        "within a second"
        if found.running and found.finished is None
        else "when the plan is served again"
    )
    say(f"an evaluation begins {when}; `fleetlearn-coordinator status` shows its result")


@app.command("evaluate-held-out")
def evaluate_held_out(
    plan: PlanFile,
    data: Annotated[Path, typer.Option(metavar="FILE.npz", help="The bundle's arrays.")],
) -> None:
    """Measure the models that are kept on held-out data, here and now. A model that was measured
    before is not measured again."""
    _log("INFO")
    with expected_errors():
        found = measure_by_hand(Plan.load(plan), data)
    for version, result in found.items():
        print(f"version {version}: {result['examples']} examples, {_listed(result['metrics'])}")


@app.command("export-model")
def export_model(
    plan: PlanFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The ONNX file to write.")],
    version: Annotated[
        str | None,
        typer.Option(
            metavar="N|newest|measured|best",
            help=(
                "Which model. Default: the one that met the target, where that ended the run; else "
                "the newest."
            ),
        ),
    ] = None,
) -> None:
    """Write the trained model as an ONNX file that any ONNX Runtime runs."""
    with expected_errors():
        settings = Plan.load(plan)
        chosen = choose_version(settings, version)
        number, vector = read_model(settings.data_dir, chosen.version)
        bundle = open_bundle(settings.bundle)
        content = write_inference_model(bundle, vector)
        draft = output.with_name(output.name + ".draft")
        try:
            draft.write_bytes(content)
            draft.replace(output)
        except OSError as error:  # its own text would name the draft
            raise OSError(error.errno, error.strerror, str(output)) from None
    say(f"wrote version {number} ({chosen.why}) to {output} ({len(content)} bytes)")
    personal = bundle.manifest.local_size - bundle.manifest.size
    if personal:
        say(
            f"{personal} personal parameters have the bundle's initial values: the trained are on "
            "the devices"
        )


def _show(found: Status, last: int) -> None:
    state = f"running at {found.address}" if found.running else "not running"
    print(f"{found.finished or 'not finished'}; {state}; model version {found.version}")
    if not found.running and found.finished is None and found.live:
        seen = date(found.live["time"])
        died = f"the coordinator died: it was killed, or its machine went down, after {seen}"
        why = died if found.died else f"the coordinator was stopped at {seen}"
        print(f"{why}; `fleetlearn-coordinator serve` goes on with the run")
    if found.running:
        shown = ("phase", "round", "connected", "leases", "accepted", "uploading")
        print(", ".join(f"{key} {found.live[key]}" for key in shown if key in found.live))
        if waits := found.live.get("waits_for"):
            print(waits)
        if found.live.get("ineligible") or found.live.get("barred"):
            causes = ", ".join(
                f"{count} by {key}" for key, count in sorted(found.live["ineligible_by"].items())
            )
            print(
                f"{found.live['ineligible']} devices are not "
                f"eligible{f' ({causes})' if causes else ''}; {found.live['barred']} took part "
                "lately"
            )
        if "away" in found.live:
            hours = found.live["all_back_in"] / 3600
            print(
                f"{found.live['away']} devices are away, told to come back within {hours:.2g} hours"
            )
    if not found.rounds:
        return
    metrics = list(dict.fromkeys(name for row in found.rounds for name in row.summary["metrics"]))
    # On a narrow terminal the causes take more lines, and every number stays whole.
    table = plain_table(
        "round", "outcome", "reports", "dropped", *metrics, "change", "seconds", wraps="dropped"
    )
    if metrics:
        when = measured_when(
            next(row.summary for row in reversed(found.rounds) if row.summary["metrics"])
        )
        model = "of the model that a round began with, " if when == BEFORE else ""
        print(
            f"{', '.join(metrics)}: {model}on the training examples of the round's own devices, "
            f"{when}"
        )
    for row in found.rounds[-last:]:
        dropped = ", ".join(
            f"{count} {cause}" for cause, count in sorted(row.summary["dropped"].items())
        )
        values = (
            f"{row.summary['metrics'][name]:.4g}" if name in row.summary["metrics"] else ""
            for name in metrics
        )
        table.add_row(
            str(row.number), row.outcome, str(row.summary["reports"]), dropped, *values,
            f"{row.summary['change']:.3g}", f"{row.summary['seconds']:.2f}",
        )  # fmt: skip
    show_table(table)
    if found.evaluations:
        _show_evaluations(found, last)
    for version in [*found.held_out][-last:]:
        print(f"version {version} on held-out data: {_listed(found.held_out[version]['metrics'])}")


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _show_evaluations(found: Status, last: int) -> None:
    rows = found.evaluations[-last:]
    metrics = list(dict.fromkeys(name for row in rows for name in row.summary["metrics"]))
    columns = ("evaluation", "version", "outcome", "devices", "examples", *metrics)
    table = plain_table(*columns, title="evaluations on devices, of their own training examples")
    for row in rows:
        values = (
            f"{row.summary['metrics'][name]:.4g}" if name in row.summary["metrics"] else ""
            for name in metrics
        )
        counts = str(row.summary["devices"]), str(row.summary["examples"])
        table.add_row(str(row.number), str(row.version), row.outcome, *counts, *values)
    show_table(table)


def _log(level: str) -> None:
    known = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level.upper() not in known:
        raise typer.BadParameter(
            f"{level!r} was given; one of {', '.join(known)} is expected", param_hint="--log-level"
        )
    logger = logging.getLogger("fleetlearn")
    logger.addHandler(log_on_stderr())
    logger.setLevel(level.upper())


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
