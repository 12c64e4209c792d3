"""``fleetlearn-coordinator view``: the live page over records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.local import LocalTarget, open_local
from fleetlearn_coordinator.commands.options import Service, Words
from fleetlearn_coordinator.commands.target import refuse_url, split
from fleetlearn_coordinator.dashboard.replay import serve_replay
from fleetlearn_coordinator.service.admin_api import refusals
from fleetlearn_coordinator.service.recorded_runs import read_records, recorded_runs

app = typer.Typer()


@app.command()
def view(
    words: Words = None,
    service: Service = None,
    port: Annotated[
        int, typer.Option(help="TCP port of the page; 0: any that is free.", min=0, max=65535)
    ] = 0,
) -> None:
    """Show the live page over a run's records, while nobody serves it: until Ctrl-C, on this
    machine alone. Nothing is changed. While a coordinator runs, its own page has more."""
    where, _ = split(words, 0, 0, "")
    with expected_errors():
        refuse_url(where, "A coordinator that runs shows its own page at its administrators' port")
        with suppress(KeyboardInterrupt):
            _show(where, service, port)


def _show(where: str, service: Path | None, port: int) -> None:
    def read(path: tuple[str, ...], query: Mapping[str, str]) -> Any:
        with refusals(), open_local(where, service, make=False) as local:
            return read_records(local, path, query)

    with open_local(where, service, make=False) as local:
        runs = recorded_runs(local)
        if not runs:
            raise FleetError(Code.UNKNOWN_CONTENT, f"{where} has no run that has begun")
        has_plans = _has_plans(local, next(iter(runs)))
    page = serve_replay(
        f"the records of {where}",
        runs,
        read,
        port=port,
        announce=lambda link: print(f"open this link; Ctrl-C ends it:\n  {link}", flush=True),
        devices=True,
        models=has_plans,
    )
    asyncio.run(page)


def _has_plans(local: LocalTarget, name: str) -> bool:
    """Return whether the versions of the model can be listed, which needs the plan's file."""
    try:
        local.plan(name)
    except FleetError:
        return False
    return True
