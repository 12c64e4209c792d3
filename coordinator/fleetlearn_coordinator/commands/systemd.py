"""``fleetlearn-coordinator install-service``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_protocol.systemd import write_unit
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.service.systemd_unit import make_unit

app = typer.Typer()


@app.command("install-service")
def install_service(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="The plan of a run, or a service file that names a folder of runs.",
        ),
    ],
    service: Annotated[
        Path | None,
        typer.Option(metavar="SERVICE.toml", help="The service file with which a plan is served."),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the service.")] = "fleetlearn",
    user: Annotated[
        str | None,
        typer.Option(help="The account that it runs as. Default: one that systemd makes for it."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="The program fleetlearn-coordinator. Default: this environment's."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where systemd finds units.")] = Path(
        "/etc/systemd/system"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the unit, and write nothing.")
    ] = False,
) -> None:
    """Write a systemd service that serves a plan or a host from boot on, and may do little
    else. Start it yourself: the command says how."""
    path = folder / f"{name}.service"
    with expected_errors():
        unit = make_unit(source, name=name, service=service, user=user, command=command)
        if dry_run:
            print(unit.text, end="")
        else:
            write_unit(path, unit.text)
    for remark in unit.remarks:
        say(f"first: {remark}")
    if dry_run:
        say(f"nothing was written; without --dry-run it would be {path}")
        return
    say(f"wrote {path}. Next:")
    if unit.user is not None:
        say(f"    sudo chown -R {unit.user}: {unit.folder}")
    say("    sudo systemctl daemon-reload")
    say(f"    sudo systemctl enable --now {name}")
    say(f"    systemctl status {name}; journalctl -u {name} -f")
