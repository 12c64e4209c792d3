"""The commands of ``fleetlearn-coordinator`` that are about devices' identities. Each takes the
service file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from fleetlearn_protocol.command_line import needs
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import expected_errors, fail, plain_table, say, show_table

from fleetlearn_coordinator.network.gate import MOST_TAGS, NAME, public_keys
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.page import join_link
from fleetlearn_coordinator.storage.identities import RUN, AuditEvent, Identities, open_identities

app = typer.Typer()
TIMES = ("until", "certificate")
"""Values of the audit log that are Unix times: to when a token is good, from when a certificate
is."""
ServiceFile = Annotated[
    Path,
    typer.Argument(
        metavar="SERVICE.toml", help="The coordinator's service file, with the key identities."
    ),
]


@app.command()
def token(
    service: ServiceFile,
    uses: Annotated[
        int, typer.Option(help="How many devices may enrol with it.", min=1, max=10**6)
    ] = 1,
    hours: Annotated[float, typer.Option(help="How long.", min=0.01, max=24 * 366.0)] = 24.0,
    tag: Annotated[
        list[str] | None, typer.Option(help="What its devices are tagged with; may be given again.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(help="The only run that its devices may serve; may be given again."),
    ] = None,
    link: Annotated[
        bool, typer.Option(help="As a link to the service's page, for browsers.")
    ] = False,
    qr: Annotated[bool, typer.Option(help="The link as a QR code too, for phones.")] = False,
) -> None:
    """Print a token that enrols devices: `fleetlearn-device run --token TOKEN`. It is shown this
    once. Where the service has signing keys, the token brings them along: its devices do only what
    is signed."""
    draw = _qr_code() if qr else None
    names = [*(tag or []), *(run or [])]
    if len(names) > MOST_TAGS or not all(map(NAME.fullmatch, names)):
        text = f"at most {MOST_TAGS} tags and runs, of letters, digits and ._- each"
        raise typer.BadParameter(text, param_hint="--tag, --run")
    tags = [*(tag or []), *(RUN + name for name in run or [])]
    with _service(service) as (settings, identities):
        now = time.time()
        if link or draw is not None:
            join_link(settings, "")  # before the token is made, if there is no page
        keys = public_keys(settings.signing_keys)
        text = ".".join([identities.make_token(uses, now + 3600 * hours, tags, now), *keys])
        if link or draw is not None:
            text = join_link(settings, text)
    print(text)
    if draw is not None:
        draw(text)


@app.command()
def devices(
    service: ServiceFile, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False
) -> None:
    """List the devices that are enrolled."""
    with _identities(service) as identities:
        found = identities.devices()
    if as_json:
        print(json.dumps([row._asdict() for row in found]))
        return
    table = plain_table("device", "tags", "enrolled")
    for row in found:
        table.add_row(row.device, " ".join(row.tags), date(row.enrolled))
    show_table(table)


@app.command()
def revoke(
    service: ServiceFile, device: Annotated[str, typer.Argument(help="The device's name.")]
) -> None:
    """End a device's credential, and the certificates that it has now. A running coordinator ends
    its connection within a second."""
    with _service(service) as (settings, identities):
        certified = settings.tls is not None and settings.tls.clients is not None
        found = identities.revoke(device, time.time(), certified=certified)
        if not found and not certified:
            names = len(identities.devices())
            text = (
                f"no device called {device} is enrolled; {names} are: `fleetlearn-coordinator "
                "devices` lists them"
            )
            raise FleetError(Code.UNKNOWN_CONTENT, text)
    if found:
        say(
            f"{device} is revoked; a new token{' or certificate' if certified else ''} would enrol "
            "it again"
        )
    else:
        say(f"no device called {device} is enrolled; if it has a certificate, that is revoked")


@app.command()
def audit(
    service: ServiceFile, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False
) -> None:
    """Show who was enrolled and revoked, and when the coordinator ran. Exit status 1 if a row was
    changed."""
    with _identities(service) as identities:
        broken = identities.broken_at()
        events = identities.events(broken)
    for row in events:
        about = ", ".join(f"{key} {_shown(key, value)}" for key, value in row.about.items())
        print(
            json.dumps(row._asdict())
            if as_json
            else f"{row.number:6d}  {date(row.at)}  {row.what}: {about}"
        )
    _refuse_broken(broken)
    _say_newest(events)


@app.command()
def verify(
    service: ServiceFile,
    newest: Annotated[
        str | None,
        typer.Option(
            "--hash",
            help="What `audit` named as the newest hash earlier: that row must still be there.",
        ),
    ] = None,
) -> None:
    """Check the audit log. Exit status 1 if a row was changed or removed."""
    with _identities(service) as identities:
        _refuse_broken(identities.broken_at())
        events = identities.events()
        if newest is not None and newest not in {row.hash for row in events}:
            text = (
                f"no row of the log has the hash {newest}: its last rows were removed, or the "
                "whole log replaced"
            )
            raise FleetError(Code.WRONG_HASH, text)
    _say_newest(events)


def _qr_code() -> Callable[[str], None]:
    """Return what draws a text as a QR code in the terminal. Ends the program where the extra is
    missing."""
    with needs("fleetlearn-coordinator token --qr", "qr"):
        import segno
    return lambda text: segno.make(text, error="l", micro=False).terminal(compact=True)


def _shown(key: str, value: Any) -> str:
    """Return a value of the audit log, for people."""
    if key in TIMES:
        return "no limit" if value is None else date(value)
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _refuse_broken(broken: int | None) -> None:
    if broken is not None:
        text = (
            f"row {broken} of the audit log was changed, or rows before it were removed; what "
            "follows is not shown"
        )
        fail("error", text)


def _say_newest(events: list[AuditEvent]) -> None:
    if events:
        say(f"{len(events)} rows, none changed; the newest has the hash {events[-1].hash}")


def identities_folder(service: Path) -> Path:
    """Return the folder of identities that a service file names. Raises FleetError."""
    return _folder(service, ServiceSettings.load(service))


def _folder(service: Path, settings: ServiceSettings) -> Path:
    if settings.identities is None:
        text = (
            f'{service} names no identities: write identities = "identities" there, a folder '
            "beside the file"
        )
        raise FleetError(Code.BAD_MESSAGE, text)
    return settings.identities


def date(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}Z"


@contextmanager
def _service(service: Path) -> Iterator[tuple[ServiceSettings, Identities]]:
    """Read a service file, once, and open its identities. Expected errors are one line and exit
    status 1."""
    with expected_errors():
        settings = ServiceSettings.load(service)
        with closing(open_identities(_folder(service, settings))) as found:
            yield settings, found


@contextmanager
def _identities(service: Path) -> Iterator[Identities]:
    """Open the identities that a service file names. Expected errors are one line and exit status
    1."""
    with _service(service) as (_, found):
        yield found
