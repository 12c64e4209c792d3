"""``fleetlearn-coordinator serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, is_service_file
from fleetlearn_coordinator.service.serve import serve as serve_plan
from fleetlearn_coordinator.service.several_runs import serve_runs

app = typer.Typer()


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
    standby: Annotated[
        bool,
        typer.Option(help="Wait while another coordinator serves the run, and go on after it."),
    ] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: Annotated[
        str | None,
        typer.Option(help="text, or json: a line of JSON for each. Default: the service file's."),
    ] = None,
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
    with expected_errors():
        several = is_service_file(plan)
        if several and (service is not None or stay or standby):
            raise typer.BadParameter(
                f"{plan} is a service file with runs: --service, --stay and --standby are for a "
                "plan"
            )
        file = plan if several else service
        settings = ServiceSettings.load(file) if file else ServiceSettings()
        settings = settings.with_metrics_port(metrics_port)
        log_at(log_level, log_format or settings.log_format)
        if several:
            serve_runs(settings)
        else:  # its last words are in the log
            serve_plan(Plan.load(plan), service=settings, stay=stay, standby=standby)
