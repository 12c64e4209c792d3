"""Hours of the day, in local time: ``22:00-06:00``, ``mon-fri@19:00-07:00``,
``sat,sun@00:00-24:00``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIMES = re.compile(r"([0-2]?\d):([0-5]\d)-([0-2]?\d):([0-5]\d)")


class HoursWindow(NamedTuple):
    """Part of the day on some days of the week."""

    days: frozenset[int]
    """Days on which it begins: 0 is Monday."""
    begin: int
    """Minutes since midnight."""
    end: int
    """The same; not above ``begin`` where it ends on the next day."""

    def contains(self, now: datetime) -> bool:
        """Return whether it is open."""
        minute, day = 60 * now.hour + now.minute, now.weekday()
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        began_today = day in self.days and minute >= self.begin
        began_yesterday = (day - 1) % 7 in self.days and minute < self.end
        return began_today or began_yesterday

    def next_opening(self, now: datetime) -> datetime:
        """Return when it begins next, after ``now``."""
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        openings = (midnight + timedelta(days=ahead, minutes=self.begin) for ahead in range(8))
        return next(each for each in openings if each > now and each.weekday() in self.days)


def read_window(text: str) -> HoursWindow:
    """Return the window that a text names. Raises ValueError."""
    words = text.lower().replace("@", " ").split()
    days, times = (words[0], words[-1]) if len(words) == 2 else ("mon-sun", text.strip())
    match, begins_on = _TIMES.fullmatch(times), _read_days(days)
    if match is None or begins_on is None or len(words) > 2:
        raise ValueError(
            f"hours are {text!r}; expected 22:00-06:00, or with days before them: "
            "mon-fri@19:00-07:00 or sat,sun@00:00-24:00 (a space does as well as @)"
        )
    hour, minute, end_hour, end_minute = map(int, match.groups())
    begin, end = 60 * hour + minute, 60 * end_hour + end_minute
    if begin >= 24 * 60 or end > 24 * 60 or begin == end:
        raise ValueError(
            f"hours are {text!r}; expected a begin from 00:00 to 23:59, and another end, up to "
            "24:00"
        )
    return HoursWindow(begins_on, begin, end)


def needs_hours(
    texts: Sequence[str], now: Callable[[], datetime] = datetime.now
) -> tuple[Callable[[bool], str | None], Callable[[], float]]:
    """Return the condition that one of the windows is open, and what says in how many seconds one
    opens. Raises ValueError.

    ``now``: returns the local time, without a time zone.
    """
    windows = [read_window(text) for text in texts]

    def why_not(held: bool) -> str | None:
        at = now()
        if any(window.contains(at) for window in windows):
            return None
        opens = min(window.next_opening(at) for window in windows)
        return (
            f"outside its hours ({'; '.join(texts)}), until {DAYS[opens.weekday()]} {opens:%H:%M}"
        )

    def opens_in() -> float:
        at = now()
        return (min(window.next_opening(at) for window in windows) - at).total_seconds()

    return why_not, opens_in


def _read_days(text: str) -> frozenset[int] | None:
    days: set[int] = set()
    for part in text.split(","):
        first, *more = part.split("-")
        last = more[-1] if more else first
        if len(more) > 1 or first not in DAYS or last not in DAYS:
            return None
        begin, end = DAYS.index(first), DAYS.index(last)
        days.update((begin + ahead) % 7 for ahead in range((end - begin) % 7 + 1))
    return frozenset(days)
