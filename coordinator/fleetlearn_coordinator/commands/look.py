"""The commands that list what there is: runs, rounds, devices."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError, many
from fleetlearn_protocol.typer_app import plain_table, show_table

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import (
    AsJson,
    Ca,
    Last,
    Service,
    Token,
    Words,
    WordsAndRun,
)
from fleetlearn_coordinator.commands.show import (
    causes,
    clock,
    columns_here,
    date,
    devices_table,
    host_lines,
    rounds_table,
    runs_table,
    size,
    tell,
)
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.service.views.records import DeviceView, RoundView, TurnsView

app = typer.Typer()


@app.command()
def runs(words: Words = None, as_json: AsJson = False, token: Token = None, ca: Ca = None) -> None:
    """List the runs of a host, a line each, and what each waits for."""
    where, _ = split(words, 0, 0, "")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        host = target.host()
    if as_json:
        print(msgspec.json.encode(host.runs).decode())
        return
    show_table(runs_table(host.runs, time.time()))
    for line in host_lines(host):
        tell(line)


@app.command()
def rounds(
    words: WordsAndRun = None,
    number: Annotated[
        str | None,
        typer.Option(
            "--round", metavar="N|open", help="One round: which devices took part, and their ends."
        ),
    ] = None,
    last: Last = 20,
    as_json: AsJson = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """List the last rounds of a run: reports, devices lost and updates refused by cause, metrics.

    With --round: the devices of one round, and what became of each."""
    if number is not None and number != "open" and not number.isdecimal():
        raise typer.BadParameter(f"{number!r} was given; a number or open is expected")
    where, names = split(words, 0, 1, "RUN")
    name = names[0] if names else None
    found: TurnsView | list[RoundView]
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        if number is None:
            found = target.rounds(name, last=last)
        else:
            found = target.turns(name, None if number == "open" else int(number))
    if as_json:
        print(msgspec.json.encode(found).decode())
    elif isinstance(found, TurnsView):
        _print_turns(found)
    else:
        _print_rounds(found)


def _print_rounds(rows: list[RoundView]) -> None:
    if not rows:
        print("no round is over yet")
        return
    show_table(rounds_table(rows, time.time(), columns_here()))
    lost: dict[str, int] = {}
    for row in rows:
        for cause, count in row.summary.get("dropped", {}).items():
            lost[cause] = lost.get(cause, 0) + count
    reports = sum(row.reports for row in rows)
    up, down = sum(row.bytes_up for row in rows), sum(row.bytes_down for row in rows)
    print(
        f"{many(reports, 'report')} in {many(len(rows), 'round')}; without one: "
        f"{causes(lost) or 'none'}; "
        f"{size(up)} received, {size(down)} sent"
    )


def _print_turns(found: TurnsView) -> None:
    if not found.round:
        print("no round is open")
        return
    if not found.tasks:
        print(f"round {found.round}: its tasks are not known, or not known any more")
        return
    model = ["model"] * any(row.member is not None for row in found.tasks)
    table = plain_table("device", *model, "task", "state", wraps="state")
    for row in found.tasks:
        table.add_row(row.device, *(row.member or "" for _ in model), row.task, row.state)
    opened = clock(found.opened, time.time())
    print(f"round {found.round}, opened {opened}" if opened else f"round {found.round}")
    show_table(table)


@app.command()
def devices(
    words: Words = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show one device, with all that is known.")
    ] = None,
    connected: Annotated[
        bool, typer.Option("--connected", help="Only those that are connected.")
    ] = False,
    failing: Annotated[
        bool, typer.Option("--failing", help="Only those with an error, the last one first.")
    ] = False,
    as_json: AsJson = False,
    service: Service = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """List the devices that are enrolled or were seen: when last, what they did, their last error
    as they said it."""
    where, _ = split(words, 0, 0, "")
    with expected_errors(), reach(where, Access(service, token, ca)) as target:
        found = target.devices(device)
        if device is not None and not found:
            text = f"no device called {device} is enrolled, or was seen"
            raise FleetError(Code.UNKNOWN_CONTENT, text)
    if connected:
        found = [row for row in found if row.connected]
    if failing:
        failed = [row for row in found if row.error is not None]
        found = sorted(failed, key=lambda row: -(row.error_at or 0.0))
    if as_json:
        print(msgspec.json.encode(found).decode())
    elif device is not None:
        _print_device(found[0])
    else:
        show_table(devices_table(found, time.time(), columns_here()))


def _print_device(row: DeviceView) -> None:
    """Print all that is known of a device, a line each."""
    state = f"connected since {date(row.since)}" if row.connected else "not connected"
    enrolled = f"enrolled {date(row.enrolled)}" if row.enrolled is not None else "not enrolled"
    if row.revoked is not None:
        enrolled = f"revoked {date(row.revoked)}"
    print(f"{row.device}: {state}; {enrolled}")
    if row.seen is not None:
        print(f"last seen {date(row.seen)}, by the run {', '.join(row.runs)}")
    failed = f"{many(row.failed, 'task')} failed, {row.lost} lost"
    print(f"{many(row.done, 'report')} counted, {failed}")
    if row.error is not None:
        print(f"last error {date(row.error_at)}: {row.error}")
    about = {"runtime": row.runtime, "software": row.software, "tier": row.tier}
    known = [f"{name} {value}" for name, value in about.items() if value]
    known += [f"tags {' '.join(row.tags)}"] if row.tags else []
    if known:
        print(", ".join(known))
