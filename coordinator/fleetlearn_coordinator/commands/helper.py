"""``fleetlearn-coordinator helper``: the other operator's process of secure aggregation."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import commands_under, say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.commands.options import AsJson

app = commands_under(
    "helper", "The helper of secure aggregation, which another operator runs: adds masks up."
)
File = Annotated[Path, typer.Argument(metavar="HELPER.toml", help="The helper's settings.")]
FILE, DATABASE = "helper.toml", "helper.sqlite"


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where the files are written.")],
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Host names and IP addresses of this machine."),
    ],
    minimum: Annotated[
        int, typer.Option(help="The fewest devices whose masks are added up.", min=2, max=65536)
    ] = 10,
    days: Annotated[int, typer.Option(help="Of the certificate.", min=1, max=3650)] = 365,
) -> None:
    """Make a helper: its settings, its key, its certificate. Overwrites nothing."""
    from fleetlearn_coordinator.secure.helper_settings import helper_file
    from fleetlearn_coordinator.secure.helper_store import make_helper_store
    from fleetlearn_coordinator.service.private_ca import make_certificate

    file = folder / FILE
    with expected_errors():
        if file.exists():
            raise FleetError(Code.DUPLICATE, f"{file} is there already: it stays as it is")
        make_certificate(folder / "tls", names, days)
        make_helper_store(folder / DATABASE, time.time())
        file.write_text(helper_file(minimum), "utf-8")
    say(f"wrote {file}, and what it names")
    _tell(file, as_json=False)


@app.command()
def serve(
    file: File,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Answer coordinators, until a signal ends it."""
    from fleetlearn_coordinator.secure.helper_port import serve_helper
    from fleetlearn_coordinator.secure.helper_settings import HelperSettings

    with expected_errors():
        settings = HelperSettings.load(file)
        log_at(log_level, settings.log_format)
        serve_helper(settings)


@app.command()
def enrol(
    file: File,
    roster: Annotated[
        Path,
        typer.Argument(metavar="ROSTER", help="A line for each device: its name, its public key."),
    ],
) -> None:
    """Let devices in, also while the helper serves. Names and keys come from the devices' owner,
    and not from the coordinator: it could invent devices."""
    from fleetlearn_protocol.secure.roster import read_roster

    from fleetlearn_coordinator.secure.helper_settings import HelperSettings
    from fleetlearn_coordinator.secure.helper_store import HelperStore

    with expected_errors():
        rows = read_roster(roster)
        with closing(HelperStore(HelperSettings.load(file).database)) as store:
            new = store.enrol(rows, time.time())
    say(f"{new} of {len(rows)} devices are new")


@app.command()
def revoke(file: File, device: Annotated[str, typer.Argument(help="The device's name.")]) -> None:
    """End a device's part, at once: a sum with it is refused."""
    from fleetlearn_coordinator.secure.helper_settings import HelperSettings
    from fleetlearn_coordinator.secure.helper_store import HelperStore

    with (
        expected_errors(),
        closing(HelperStore(HelperSettings.load(file).database)) as store,
    ):
        if not store.revoke(device, time.time()):
            raise FleetError(Code.UNKNOWN_CONTENT, f"no device called {device} is enrolled here")
    say(f"{device} is revoked")


@app.command()
def status(file: File, as_json: AsJson = False) -> None:
    """Say what devices and coordinators are to be given, and how much was done."""
    with expected_errors():
        _tell(file, as_json=as_json)


def _tell(file: Path, *, as_json: bool) -> None:
    from fleetlearn_coordinator.secure.helper_views import helper_view

    view = helper_view(file)
    if as_json:
        print(msgspec.json.encode(view).decode())
        return
    for label, text in view.lines():
        print(f"{label:<12} {text}")
