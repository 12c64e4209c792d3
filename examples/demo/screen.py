"""What the demo shows: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

EVENT_LINES = 9
"""Lines of the last events below the table, while the demo runs."""
OTHER_LINES = 7
"""The table's title, headings and edges, what goes on now, and the cursor's line."""
Row = TypeVar("Row")


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
        self._console = Console(highlight=False, markup=False)
        self._plain = not self._console.is_terminal
        self._target = rounds
        self._rounds: list[Round] = []
        self._events: list[tuple[float, str]] = []
        self._now = ""
        self._began = self._drawn = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if not self._plain:
            # No refreshing thread: the demo starts processes, and only a process with one thread
            # can do that safely.
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.vertical_overflow = "visible"
            self._live.update(self._draw(everything=True), refresh=True)
            self._live.stop()

    def event(self, text: str) -> None:
        """Something happened that is worth a line."""
        self._events.append((time.monotonic() - self._began, text))
        if self._plain:
            self._console.print(f"  {_event_line(self._events[-1])}", soft_wrap=True)
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

    def _height(self, text: str, width: int) -> int:
        """Return how many lines a text takes in this width."""
        return len(Text(text).wrap(self._console, width))

    def _last_events(self) -> list[tuple[float, str]]:
        return _last(
            self._events,
            EVENT_LINES,
            lambda event: self._height(_event_line(event), self._console.width),
        )

    def _last_rounds(self, lines: int) -> list[Round]:
        return _last(
            self._rounds, lines, lambda row: self._height(_dropped(row), WIDTHS["dropped"])
        )

    def _draw(self, *, everything: bool = False) -> Group:
        shown = self._events if everything else self._last_events()
        below = sum(self._height(_event_line(event), self._console.width) for event in shown)
        rounds = (
            self._rounds
            if everything
            else self._last_rounds(self._console.height - below - OTHER_LINES)
        )
        state = (
            f"round {len(self._rounds)} of {self._target}, {time.monotonic() - self._began:.0f} s"
        )
        title = f"{state}; loss and accuracy on held-out digits"
        table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
        table.padding = 0, 1, 0, 0
        for heading, width in WIDTHS.items():
            words = heading == "dropped"  # what does not fit takes another line; numbers stay whole
            table.add_column(
                heading, justify="left" if words else "right", min_width=width, no_wrap=not words
            )
        for round_ in rounds:
            table.add_row(*_cells(round_), style="" if round_.outcome == "committed" else "yellow")
        events = [Text(_event_line(event), style=_style(event[1])) for event in shown]
        return (
            Group(table, *events)
            if everything
            else Group(table, Text(self._now, style="dim"), *events)
        )


WIDTHS = {
    "round": 5,
    "reports": 8,
    "dropped": 15,
    "loss": 5,
    "accuracy": 8,
    "up": 7,
    "down": 7,
    "s": 5,
}
"""Heading -> the width of its column. All of them fit in a terminal of 80 columns."""
HEADINGS = list(WIDTHS)


def _cells(row: Round) -> list[str]:
    return [
        str(row.number),
        f"{row.reports} of {row.cohort}",
        _dropped(row),
        "" if row.loss is None else f"{row.loss:.3f}",
        "" if row.accuracy is None else f"{row.accuracy:.1%}",
        size(row.bytes_up),
        size(row.bytes_down),
        f"{row.seconds:.2f}",
    ]


def _dropped(row: Round) -> str:
    dropped = ", ".join(f"{count} {cause}" for cause, count in sorted(row.dropped.items()))
    return dropped if row.outcome == "committed" else f"{dropped} ({row.outcome})"


def _last(rows: Sequence[Row], lines: int, height: Callable[[Row], int]) -> list[Row]:
    """Return as many of the last rows as fit in these lines, and one at least."""
    shown = list[Row]()
    for row in reversed(rows):
        lines -= height(row)
        if lines < 0 and shown:
            break
        shown.insert(0, row)
    return shown


def _line(cells: list[str]) -> str:
    padded = (
        cell.ljust(width) if name == "dropped" else cell.rjust(width)
        for cell, (name, width) in zip(cells, WIDTHS.items(), strict=True)
    )
    return "  ".join(padded)


def _event_line(event: tuple[float, str]) -> str:
    return f"{event[0]:6.1f} s  {event[1]}"


def _style(text: str) -> str:
    if text.startswith("SIGKILL"):
        return "bold red"
    return "green" if "again" in text or "back" in text else ""


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
