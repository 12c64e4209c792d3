"""The live view of ``status --watch``, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleetlearn_coordinator.commands.show import (
    ago,
    date,
    host_lines,
    rounds_table,
    run_lines,
    runs_table,
    trend_lines,
)
from fleetlearn_coordinator.service.views.records import HostView, RunView


def show_live(looks: Iterator[HostView | RunView], last: int) -> None:
    """Show each thing that ``looks`` yields in place of the one before. The last one stays when it
    ends."""
    console = Console(markup=False, highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        for found in looks:
            live.update(
                picture(found, last, time.time(), console.width, console.height), refresh=True
            )
            if isinstance(found, RunView) and found.finished is not None:
                return


def picture(
    found: HostView | RunView, last: int, now: float, width: int, height: int
) -> RenderableType:
    """Return what is shown of a run or a host. ``width``, ``height``: of the terminal."""
    parts: list[RenderableType] = [Text(f"{date(now)}  (Ctrl-C ends this view)", "dim")]
    if isinstance(found, HostView):
        parts.append(runs_table(found.runs, now))
        return Group(*parts, *map(Text, host_lines(found)))
    parts += map(Text, run_lines(found, now))
    if found.opened is not None and found.goal:
        parts.append(_bars(found, now))
    parts += (Text(line, "cyan") for line in trend_lines(found, pictures=True))
    room = max(1, min(last, height - len(parts) - 5))
    console = Console(width=width, markup=False)
    while found.rounds:
        whole = Group(*parts, rounds_table(found.rounds[-room:], now, width))
        # Causes may take several lines of a row.
        if room == 1 or len(console.render_lines(whole)) < height:
            return whole
        room = room * 2 // 3
    return Group(*parts)


def _bars(run: RunView, now: float) -> RenderableType:
    """Return the open round as bars: its reports, and its time."""
    table = Table.grid(padding=(0, 1))
    goal = run.goal or 1
    reports = ProgressBar(total=goal, completed=min(run.accepted, goal), width=40)
    table.add_row("reports", reports, f"{run.accepted} of {goal}, {run.leases} out")
    if run.deadline is not None and run.opened is not None:
        length = max(1.0, run.deadline - run.opened)
        gone = min(length, max(0.0, now - run.opened))
        spent = ProgressBar(total=length, completed=gone, width=40)
        table.add_row("time", spent, f"deadline {ago(run.deadline, now)}")
    return table
