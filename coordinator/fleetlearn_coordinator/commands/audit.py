"""The commands about the audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import fail, say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.local import LocalTarget, open_local
from fleetlearn_coordinator.commands.options import AsJson, Ca, Token, Words
from fleetlearn_coordinator.commands.show import date
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.service.views.records import AuditView
from fleetlearn_coordinator.storage.identities import AuditEvent, first_broken

if TYPE_CHECKING:
    from fleetlearn_coordinator.commands.remote import RemoteTarget

app = typer.Typer()
SHOWN = 100
"""Rows that are shown over the port where no number is given."""
TIMES = ("until", "certificate")
"""Values of the audit log that are Unix times: to when a token is good, from when a certificate
is."""


@app.command()
def audit(
    words: Words = None,
    last: Annotated[
        int | None, typer.Option(help="Only the newest rows, this many.", min=1, max=1000)
    ] = None,
    as_json: AsJson = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show who was enrolled and revoked, who changed what, and when the coordinator ran. Exit
    status 1 if a row was changed. Over the administrators' port the newest rows are shown and
    checked, and none before them."""
    where, _ = split(words, 0, 0, "")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        if not isinstance(target, LocalTarget):
            _show_newest(target, last or SHOWN, as_json=as_json)
            return
        broken = target.identities.broken_at()
        events = [AuditView(*row) for row in target.identities.events(broken)]
    _print(events[-(last or 0) :], as_json=as_json)
    _refuse_broken(broken)
    _say_newest(events)


def _show_newest(target: RemoteTarget, last: int, *, as_json: bool) -> None:
    """Show the newest rows, up to one that was changed. The row before the first is asked for too:
    the first one's hash covers it."""
    rows = target.audit(last + 1)
    broken = first_broken(AuditEvent(*msgspec.structs.astuple(row)) for row in rows)
    shown = [row for row in rows if broken is None or row.number < broken]
    _print(shown[-last:], as_json=as_json)
    _refuse_broken(broken)
    _say_newest(shown)


def _print(events: list[AuditView], *, as_json: bool) -> None:
    for row in events:
        if as_json:
            print(msgspec.json.encode(row).decode())
            continue
        about = ", ".join(f"{key} {_shown(key, value)}" for key, value in row.about.items())
        print(f"{row.number:6d}  {date(row.at)}  {row.what}: {about}")


@app.command()
def verify(
    words: Words = None,
    newest: Annotated[
        str | None,
        typer.Option(
            "--hash",
            help="What `audit` named as the newest hash earlier: that row must still be there.",
        ),
    ] = None,
) -> None:
    """Check the audit log, where it is. Exit status 1 if a row was changed or removed."""
    where, _ = split(words, 0, 0, "")
    with expected_errors(), open_local(where, None) as target:
        _refuse_broken(target.identities.broken_at())
        events = [AuditView(*row) for row in target.identities.events()]
        if newest is not None and newest not in {row.hash for row in events}:
            text = (
                f"no row of the log has the hash {newest}: its last rows were removed, or the "
                "whole log replaced"
            )
            raise FleetError(Code.WRONG_HASH, text)
    _say_newest(events)


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


def _say_newest(events: list[AuditView]) -> None:
    if events:
        number = events[0].number
        unseen = "" if number == 1 else f", those before row {number} not looked at"
        text = f"{len(events)} rows, none changed{unseen}; the newest has the hash"
        say(f"{text} {events[-1].hash}")
