"""``fleetlearn-coordinator init``: the first files of a fleet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.addresses import is_loopback
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.initial_files import plan_text, service_text
from fleetlearn_coordinator.commands.options import AsJson
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.views.records import FilesView

app = typer.Typer()
PLAN, SERVICE = "plan.toml", "service.toml"


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where the files are written.")
    ] = Path(),
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The training bundle. Default: the only one in the folder.",
        ),
    ] = None,
    goal: Annotated[
        int, typer.Option(help="Devices whose reports a round wants.", min=1, max=10**6)
    ] = 8,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all, which needs TLS.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Write a commented plan.toml and service.toml, ready to be served. Nothing that is there is
    overwritten."""
    with expected_errors():
        there = [name for name in (PLAN, SERVICE) if (folder / name).exists()]
        if there:
            text = f"{' and '.join(str(folder / name) for name in there)} exist already"
            raise FleetError(Code.DUPLICATE, f"{text}; `init` overwrites nothing")
        found = _bundle(folder, bundle)
        path = os.path.relpath(str(found.path), str(folder))
        texts = {
            PLAN: plan_text(path, found.manifest, goal),
            SERVICE: service_text(host, tls=not is_loopback(host)),
        }
        # what is wrong with them is found before they are there
        plan = Plan.parse(texts[PLAN], folder.absolute(), file=str(folder / PLAN))
        plan.check_against(found.manifest)
        plan.hyper(found.manifest)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        ServiceSettings.load(folder / SERVICE)
    if as_json:
        written = FilesView([str(folder / name) for name in texts])
        print(msgspec.json.encode(written).decode())
        return
    _say_next(folder, plan, host)


def _bundle(folder: Path, given: Path | None) -> Bundle:
    """Return the bundle that is meant. Raises FleetError."""
    if given is not None:
        return open_bundle(given)
    found = sorted(folder.glob("*.bundle")) if folder.is_dir() else []
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        text = (
            f"{folder} has {len(found)} bundles ({names}); --bundle PATH says which. "
            "`fleetlearn-export` writes one"
        )
        raise FleetError(Code.UNKNOWN_CONTENT, text)
    return open_bundle(found[0])


def _say_next(folder: Path, plan: Plan, host: str) -> None:
    """Say what was written, and what to type next."""
    own = Path(os.path.normpath(folder))
    files = [str(own / name) for name in (PLAN, SERVICE)]
    say(f"wrote {files[0]} (the run {plan.name}) and {files[1]}")
    if not is_loopback(host):
        tls = own / "tls"
        say(f"fleetlearn-coordinator certificate NAME... --folder {tls}   # how devices call it")
    say(f"fleetlearn-coordinator doctor {files[0]} --service {files[1]}")
    say(f"fleetlearn-coordinator enrol {files[1]} --uses 8   # a token for 8 devices")
    say(f"fleetlearn-coordinator serve {files[0]} --service {files[1]}")
