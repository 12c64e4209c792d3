"""The arguments and options that many commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetlearn_coordinator.commands.completion import complete_device, complete_run

PLACE = "WHERE"
ABOUT_PLACE = (
    "PLAN.toml, SERVICE.toml, a data directory, or the URL of an administrators' port. "
    "Default: FLEETLEARN_ADMIN, else service.toml or plan.toml in this folder."
)
Words = Annotated[
    list[str] | None, typer.Argument(metavar=f"[{PLACE}]", help=ABOUT_PLACE, show_default=False)
]
WordsAndRun = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=f"[{PLACE}] [RUN]",
        help=ABOUT_PLACE,
        show_default=False,
        autocompletion=complete_run,
    ),
]
WordsAndName = Annotated[
    list[str],
    typer.Argument(
        metavar=f"[{PLACE}] RUN",
        help=ABOUT_PLACE,
        show_default=False,
        autocompletion=complete_run,
    ),
]
WordsAndDevice = Annotated[
    list[str],
    typer.Argument(
        metavar=f"[{PLACE}] DEVICE",
        help=ABOUT_PLACE,
        show_default=False,
        autocompletion=complete_device,
    ),
]
Service = Annotated[
    Path | None,
    typer.Option(metavar="SERVICE.toml", help="With PLAN.toml: the service file it is served by."),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="FLEETLEARN_TOKEN",
        show_envvar=False,
        metavar="TOKEN",
        help="An administrator's token. Default: FLEETLEARN_TOKEN, which others cannot see.",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        envvar="FLEETLEARN_CA",
        show_envvar=False,
        metavar="FILE",
        help="PEM: the CA of the port's certificate. Default: FLEETLEARN_CA, else the system's.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Last = Annotated[int, typer.Option(help="How many rows to show, the newest.", min=1, max=1000)]
ServiceFile = Annotated[
    Path,
    typer.Argument(
        metavar="SERVICE.toml", help="The coordinator's service file, with the key identities."
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan of the run.")]
