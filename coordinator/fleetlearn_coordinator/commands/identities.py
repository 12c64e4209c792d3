"""The commands that let devices in and keep them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.command_line import needs
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.local import LocalTarget
from fleetlearn_coordinator.commands.options import AsJson, Ca, Token, Words, WordsAndDevice
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.network.gate import MOST_TAGS, NAME
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.views.records import TokenView

app = typer.Typer()


@app.command()
def enrol(
    words: Words = None,
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
        bool, typer.Option("--link", help="As a link to the service's page, for browsers.")
    ] = False,
    qr: Annotated[
        bool, typer.Option("--qr", help="The link as a QR code too, for phones.")
    ] = False,
    as_json: AsJson = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Print a token that enrols devices: `fleetlearn-device run --token TOKEN`. It is shown this
    once. Where the service has signing keys, the token brings them along: its devices do only what
    is signed."""
    draw = _qr_code() if qr else None
    names = [*(tag or []), *(run or [])]
    if len(names) > MOST_TAGS or not all(map(NAME.fullmatch, names)):
        text = f"at most {MOST_TAGS} tags and runs, of letters, digits and ._- each"
        raise typer.BadParameter(text, param_hint="--tag, --run")
    where, _ = split(words, 0, 0, "")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        page = target if isinstance(target, LocalTarget) else None
        if link or qr:
            if page is None:
                text = "--link and --qr need the service file, which says where the page is"
                raise FleetError(Code.BAD_MESSAGE, text)
            page.join_link("")  # before the token is made, if there is no page
        made = target.enrol(uses, hours, tuple(tag or ()), tuple(run or ()))
        if page is not None and (link or qr):
            made = TokenView(made.token, made.until, page.join_link(made.token))
    if as_json:
        print(msgspec.json.encode(made).decode())
        return
    print(made.link or made.token)
    if draw is not None and made.link is not None:
        draw(made.link)


@app.command()
def revoke(
    words: WordsAndDevice, as_json: AsJson = False, token: Token = None, ca: Ca = None
) -> None:
    """End a device's credential, and the certificates that it has now. A running coordinator ends
    its connection within a second."""
    where, (device,) = split(words, 1, 1, "DEVICE")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        done = target.revoke(device)
    if as_json:
        print(msgspec.json.encode(done).decode())
    elif done.what == "revoked":
        say(f"{device} is revoked; a new token or certificate would enrol it again")
    else:
        say(f"no device called {device} is enrolled; if it has a certificate, that is revoked")


def _qr_code() -> Callable[[str], None]:
    """Return what draws a text as a QR code in the terminal. Ends the program where the extra is
    missing."""
    with needs("fleetlearn-coordinator enrol --qr", "qr"):
        import segno
    return lambda text: segno.make(text, error="l", micro=False).terminal(compact=True)


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
