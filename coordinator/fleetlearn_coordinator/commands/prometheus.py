"""``fleetlearn-coordinator prometheus-rules``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.plan.service_settings import AlertSettings, ServiceSettings
from fleetlearn_coordinator.service.monitoring.alert_rules import prometheus_rules

app = typer.Typer()


@app.command("prometheus-rules")
def write_rules(
    service: Annotated[
        Path | None,
        typer.Argument(metavar="SERVICE.toml", help="Whose [alerts] has the limits."),
    ] = None,
) -> None:
    """Print alert rules for Prometheus (rule_files): those that [alerts] of a service file has,
    with its limits. Without a file: all rules, with their default limits."""
    with expected_errors():
        settings = ServiceSettings.load(service) if service else ServiceSettings()
        print(prometheus_rules(settings.alerts or AlertSettings()), end="")
