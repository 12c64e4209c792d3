"""``fleetlearn-coordinator tail``: what happens in a run, as it happens."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import msgspec
import typer

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import AsJson, Ca, Token, WordsAndRun
from fleetlearn_coordinator.commands.show import date
from fleetlearn_coordinator.commands.target import Access, reach, split

app = typer.Typer()


@app.command()
def tail(
    words: WordsAndRun = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show the last few rounds, and end.")
    ] = False,
    as_json: AsJson = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show what happens in a run, as it happens: rounds, tasks and their ends, devices that come,
    go and fail. Ctrl-C ends it. A look takes place once a second."""
    where, names = split(words, 0, 1, "RUN")
    with (
        expected_errors(),
        reach(where, Access(token=token, ca=ca)) as target,
        suppress(KeyboardInterrupt),
    ):
        for events in target.events(names[0] if names else None):
            for event in events:
                if as_json:
                    print(msgspec.json.encode(event).decode(), flush=True)
                else:
                    print(f"{date(event.at)}  {event.text}", flush=True)
            if once:
                return
