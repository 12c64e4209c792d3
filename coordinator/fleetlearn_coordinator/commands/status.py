"""``fleetlearn-coordinator status``: how far the training is, once or as it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.typer_app import show_table

from fleetlearn_coordinator.commands.exits import ExitStatus, expected_errors
from fleetlearn_coordinator.commands.options import AsJson, Ca, Last, Token, WordsAndRun
from fleetlearn_coordinator.commands.show import (
    columns_here,
    evaluations_table,
    host_lines,
    listed,
    measured_line,
    member_lines,
    rounds_table,
    run_lines,
    runs_table,
    tell,
    trend_lines,
)
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.service.views.records import HostView, RunView

app = typer.Typer()


@app.command()
def status(
    words: WordsAndRun = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on, and show what changes, once a second.")
    ] = False,
    as_json: AsJson = False,
    last: Last = 10,
    run: Annotated[
        str | None, typer.Option(metavar="NAME", help="The run, of several.", hidden=True)
    ] = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Show how far a run is, when it will be through, and what it waits for; of a host with several
    runs, all of them.

    Exit status: 0 if the coordinator runs or the training is finished, 3 if neither is so, 1 for
    errors."""
    where, names = split(words, 0, 1, "RUN")
    name = names[0] if names else run
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        whole = name is None and len(target.runs()) != 1
        if watch:
            looks: Iterator[HostView | RunView] = (
                target.watch_host() if whole else target.watch_run(name, last)
            )
            _watch(looks, last, as_json=as_json)
            return
        found = target.host() if whole else target.run(name, last=None if as_json else last)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found, last)
    sys.exit(_status(found))


def _status(found: HostView | RunView) -> ExitStatus:
    done = isinstance(found, RunView) and found.finished is not None
    return ExitStatus.DONE if found.running or done else ExitStatus.NOT_RUNNING


def _print(found: HostView | RunView, last: int) -> None:
    now = time.time()
    if isinstance(found, HostView):
        show_table(runs_table(found.runs, now))
        for line in host_lines(found):
            tell(line)
        return
    pictures = sys.stdout.isatty()
    for line in (*run_lines(found, now), *trend_lines(found, pictures=pictures)):
        tell(line)
    if found.rounds:
        if text := measured_line(found.rounds):
            tell(text)
        for line in member_lines(found.rounds[-1]):
            tell(line)
        show_table(rounds_table(found.rounds[-last:], now, columns_here()))
    if found.evaluations:
        show_table(evaluations_table(found.evaluations[-last:]))
    for version in [*found.held_out][-last:]:
        print(f"version {version} on held-out data: {listed(found.held_out[version]['metrics'])}")


def _watch(looks: Iterator[HostView | RunView], last: int, *, as_json: bool) -> None:
    """Show what ``looks`` yields until Ctrl-C: live on a terminal; else a line when its words
    change, or JSON."""
    try:
        if as_json:
            for found in looks:
                print(msgspec.json.encode(found).decode(), flush=True)
        elif sys.stdout.isatty():
            from fleetlearn_coordinator.commands.live import show_live

            show_live(looks, last)
        else:
            before = ""
            for found in looks:
                if (line := _line(found)) != before:
                    before = line
                    print(line, flush=True)
    except KeyboardInterrupt:
        pass


def _line(found: HostView | RunView) -> str:
    runs = found.runs if isinstance(found, HostView) else [found]
    parts = []
    for run in runs:
        goal = "" if run.goal is None else f"/{run.goal}"
        own = f"{run.name}: {run.state}, version {run.version}, round {run.round}"
        own += f", {run.accepted}{goal} reports, {many(run.connected, 'device')}"
        parts.append(own + (f", {listed(run.metrics)}" if run.metrics else ""))
    return "; ".join(parts)
