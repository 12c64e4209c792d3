"""What the demo shows: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

EVENTS_SHOWN = 9


@dataclass(frozen=True)
class Round:
    """A round that is over, and what its model is worth on the held-out test set."""

    number: int
    outcome: str
    reports: int
    dropped: Mapping[str, int]
    """Tasks that ended without an accepted report, by cause."""
    loss: float | None
    accuracy: float | None
    """None: the round was abandoned, or its model was replaced before it could be measured."""
    bytes_up: int
    bytes_down: int
    seconds: float
    ended: float
    """Seconds since the coordinator's first start."""

    @property
    def cohort(self) -> int:
        return self.reports + sum(self.dropped.values())


class Screen:
    """Use it as a context; what it shows stays when it is left."""

    def __init__(self, rounds: int) -> None:
        self._console = Console(highlight=False)
        self._plain = not self._console.is_terminal
        self._target = rounds
        self._rounds: list[Round] = []
        self._events: list[tuple[float, str]] = []
        self._now = ""
        self._began = self._drawn = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if not self._plain:
            # No refreshing thread: the demo starts processes, and only a process with one thread can do that safely.
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.vertical_overflow = "visible"
            self._live.update(self._draw(everything=True), refresh=True)
            self._live.stop()

    def event(self, text: str) -> None:
        """Something happened that is worth a line."""
        self._events.append((time.monotonic() - self._began, text))
        if self._plain:
            self._console.print(f"  {self._events[-1][0]:6.1f} s  {text}", soft_wrap=True)
        self._refresh()

    def round(self, row: Round) -> None:
        """A round is over."""
        if self._plain:
            if not self._rounds:
                self._console.print(_line(HEADINGS), soft_wrap=True)
            self._console.print(_line(_cells(row)), soft_wrap=True)
        self._rounds.append(row)
        self._refresh()

    def now(self, text: str) -> None:
        """What is going on, shown in a terminal only; ten times a second at most."""
        self._now = text
        if time.monotonic() - self._drawn > 0.1:
            self._refresh()

    def _refresh(self) -> None:
        self._drawn = time.monotonic()
        if self._live is not None:
            self._live.update(self._draw(), refresh=True)

    def _draw(self, *, everything: bool = False) -> Group:
        lines = len(self._rounds) if everything else max(3, self._console.height - EVENTS_SHOWN - 8)
        shown = self._events if everything else self._events[-EVENTS_SHOWN:]
        title = f"round {len(self._rounds)} of {self._target}, {time.monotonic() - self._began:.0f} s"
        table = Table(title=title, title_justify="left", header_style="bold", expand=False)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "dropped" else "right", min_width=WIDTHS[heading])
        for row in self._rounds[-lines:] if lines else ():
            table.add_row(*_cells(row), style="" if row.outcome == "committed" else "yellow")
        events = [Text(f"{second:6.1f} s  {text}", style=_style(text)) for second, text in shown]
        return Group(table, *events) if everything else Group(table, Text(self._now, style="dim"), *events)


WIDTHS = {"round": 5, "cohort": 6, "reports": 7, "dropped": 20, "loss": 6, "accuracy": 8, "up": 8, "down": 8, "s": 5}
HEADINGS = list(WIDTHS)


def _cells(row: Round) -> list[str]:
    dropped = ", ".join(f"{count} {cause}" for cause, count in sorted(row.dropped.items()))
    return [
        str(row.number),
        str(row.cohort),
        str(row.reports),
        dropped if row.outcome == "committed" else f"{dropped} ({row.outcome})",
        "" if row.loss is None else f"{row.loss:.3f}",
        "" if row.accuracy is None else f"{row.accuracy:.1%}",
        size(row.bytes_up),
        size(row.bytes_down),
        f"{row.seconds:.2f}",
    ]


def _line(cells: list[str]) -> str:
    padded = (
        cell.ljust(width) if name == "dropped" else cell.rjust(width)
        for cell, (name, width) in zip(cells, WIDTHS.items(), strict=True)
    )
    return "  ".join(padded)


def _style(text: str) -> str:
    if text.startswith("SIGKILL"):
        return "bold red"
    return "green" if "again" in text or "back" in text else ""


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
