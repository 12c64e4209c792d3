"""``fleetlearn-coordinator serve-gateway``: a gateway on another machine than the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.gateways.distant_gateway import serve_distant_gateway
from fleetlearn_coordinator.plan.service_settings import ServiceSettings

app = typer.Typer()


@app.command("serve-gateway")
def serve_gateway(
    service: Annotated[
        Path,
        typer.Argument(metavar="SERVICE.toml", help="The service file, with bus and [gateway]."),
    ],
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: Annotated[
        str | None,
        typer.Option(help="text, or json: a line of JSON for each. Default: the service file's."),
    ] = None,
) -> None:
    """Hold connections of a run's devices on this machine, and reach the run over the bus. SIGTERM
    lets them go on at other gateways."""
    with expected_errors():
        settings = ServiceSettings.load(service)
        log_at(log_level, log_format or settings.log_format)
        serve_distant_gateway(settings)
