"""``fleetlearn-simulate privacy``: what the privacy of a scenario's plan comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_coordinator.commands.privacy import show_statement, statement_of
from fleetlearn_protocol.errors import FleetError, in_words
from fleetlearn_protocol.typer_app import fail

from fleetlearn_simulator.scenario.scenario import Scenario

app = typer.Typer()


@app.command()
def privacy(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.toml", help="A scenario whose plan has [privacy].")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what the differential privacy of a scenario's plan comes to, before it is simulated."""
    try:
        found = statement_of(Scenario.load(scenario).plan)
    except (FleetError, OSError) as error:
        fail("fleetlearn-simulate", in_words(error, file=True))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        show_statement(found)
