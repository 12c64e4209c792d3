"""The commands that change what a run does."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import (
    ABOUT_PLACE,
    PLACE,
    AsJson,
    Ca,
    Token,
    WordsAndName,
    WordsAndRun,
)
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.service.several.operations import Verb
from fleetlearn_coordinator.service.views.records import OperationView

app = typer.Typer()
SAID: dict[Verb, str] = {
    "paused": "is to be paused; it is",
    "resumed": "is to be running; it is",
    "drained": "is to be stopped after its open round; that begins",
    "stopped": "is to be stopped; it is",
}


@app.command()
def pause(words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None) -> None:
    """Give no more tasks of a run, and open no round. What devices have may still be reported, and
    no deadline passes meanwhile."""
    _change(words, "paused", Access(token=token, ca=ca), as_json=as_json)


@app.command()
def resume(
    words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None
) -> None:
    """Let a run go on that was paused, drained or stopped, or failed."""
    _change(words, "resumed", Access(token=token, ca=ca), as_json=as_json)


@app.command()
def drain(words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None) -> None:
    """Stop a run when its open round is over."""
    _change(words, "drained", Access(token=token, ca=ca), as_json=as_json)


@app.command()
def stop(words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None) -> None:
    """Stop a run at once. Its tasks are cancelled, its devices serve other runs; it goes on with
    `resume`."""
    _change(words, "stopped", Access(token=token, ca=ca), as_json=as_json)


@app.command()
def rollback(
    words: Annotated[
        list[str],
        typer.Argument(metavar=f"[{PLACE}] [RUN] VERSION", help=ABOUT_PLACE, show_default=False),
    ],
    as_json: AsJson = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Go on from an earlier version of the model. The open round is given up, and the earlier model
    becomes the next version: within a second, or at the next start."""
    where, rest = split(words, 1, 2, "[RUN] VERSION")
    *names, version = rest
    if not version.isdecimal():
        raise typer.BadParameter(f"{version} was given; the number of a version is expected")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        done = target.roll_back(names[0] if names else None, int(version))
    text = f"version {version}'s model becomes the newest {done.when}; `models` then lists it"
    _tell(done, text, as_json=as_json)


@app.command()
def evaluate(
    words: WordsAndRun = None, as_json: AsJson = False, token: Token = None, ca: Ca = None
) -> None:
    """Ask for an evaluation of the newest model on devices' own data. The coordinator begins it
    within a second, or at its next start."""
    where, names = split(words, 0, 1, "RUN")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        done = target.evaluate(names[0] if names else None)
    text = f"an evaluation begins {done.when}; `fleetlearn-coordinator status` shows its result"
    _tell(done, text, as_json=as_json)


def _change(words: list[str], verb: Verb, access: Access, *, as_json: bool) -> None:
    where, (name,) = split(words, 1, 1, "RUN")
    with expected_errors(), reach(where, access) as target:
        done = target.change(name, verb)
    _tell(done, f"{name} {SAID[verb]} {done.when}", as_json=as_json)


def _tell(done: OperationView, text: str, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(done).decode())
    else:
        say(text)
