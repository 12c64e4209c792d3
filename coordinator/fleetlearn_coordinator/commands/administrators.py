"""``fleetlearn-coordinator administrator``: who may operate a coordinator over the network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import (
    commands_under,
    plain_table,
    say,
    show_table,
)

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.identities import identities_folder
from fleetlearn_coordinator.commands.options import AsJson, ServiceFile
from fleetlearn_coordinator.commands.show import date
from fleetlearn_coordinator.network.gate import NAME
from fleetlearn_coordinator.service.views.records import AdministratorView
from fleetlearn_coordinator.storage.administrators import Administrators, Role

app = commands_under(
    "administrator", "Who may operate the coordinator over its administrators' port."
)
Name = Annotated[str, typer.Argument(help="The administrator's name.")]


@app.command()
def add(
    service: ServiceFile,
    name: Name,
    role: Annotated[str, typer.Option(help="view: may look; operate: may also change.")],
    hours: Annotated[
        float | None,
        typer.Option(help="How long. Default: until it is removed.", min=0.01, max=24 * 3660.0),
    ] = None,
) -> None:
    """Print the token of a new administrator. It is shown this once."""
    if not NAME.fullmatch(name):
        raise typer.BadParameter("letters, digits and ._- each", param_hint="NAME")
    roles: tuple[Role, ...] = get_args(Role)
    if role not in roles:
        raise typer.BadParameter(
            f"{role!r} was given; one of {', '.join(roles)} is expected", param_hint="--role"
        )
    with _administrators(service) as administrators:
        now = time.time()
        print(administrators.add(name, role, None if hours is None else now + 3600 * hours, now))


@app.command("list")
def list_all(service: ServiceFile, as_json: AsJson = False) -> None:
    """List the administrators."""
    with _administrators(service) as administrators:
        found = administrators.administrators()
    if as_json:
        views = [AdministratorView(*row) for row in found]
        print(msgspec.json.encode(views).decode())
        return
    table = plain_table("administrator", "role", "added", "until")
    for row in found:
        table.add_row(
            row.name, row.role, date(row.added), "" if row.until is None else date(row.until)
        )
    show_table(table)


@app.command()
def remove(service: ServiceFile, name: Name) -> None:
    """End an administrator's token, at once."""
    with _administrators(service) as administrators:
        if not administrators.remove(name, time.time()):
            names = ", ".join(row.name for row in administrators.administrators()) or "nobody"
            raise FleetError(
                Code.UNKNOWN_CONTENT, f"no administrator is called {name}; there is {names}"
            )
    say(f"{name} is no administrator any more")


@contextmanager
def _administrators(service: Path) -> Iterator[Administrators]:
    """Open the administrators of a service file. Expected errors are one line and a status."""
    with expected_errors(), closing(Administrators(identities_folder(service))) as found:
        yield found
