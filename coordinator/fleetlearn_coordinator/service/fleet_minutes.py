"""What a run's devices did in each minute of the last day: an observer (observers.py), with what a
second's look adds. The page, the alert about missing devices, and the next process read it.

A minute's row is written with the run's state (live_state.py), which is recorded every ten seconds
at least. So the rows cost no write of their own. They are kept as one small value of the ledger for
each of the last HOURS hours.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from fleetlearn_coordinator.dashboard.growing_list import GrowingList
from fleetlearn_coordinator.dashboard.live_records import Minute
from fleetlearn_coordinator.dashboard.run_history import MINUTES, FleetNow, count_name
from fleetlearn_coordinator.rounds.commands import Ended, Unanswered
from fleetlearn_coordinator.service.observers import RoundEnded, RunEvent, UpdateSaved
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_coordinator.storage.stored_json import decode

HOURS = 25
"""A day, and the hour that goes on."""
PEAK = 3600.0
"""Seconds in which the most devices were present that there are compared with."""


def key_of(hour: int) -> str:
    """Return under which key the ledger has an hour's minutes, of the hours since 1970."""
    return f"minutes/{hour % HOURS:02d}"


KEYS = tuple(key_of(hour) for hour in range(HOURS))


class FleetMinutes:
    """An observer that counts what happens in each minute."""

    def __init__(self, rows: Iterable[Minute] = (), now: Callable[[], float] = time.time) -> None:
        """``rows``: of earlier processes, the oldest first. ``now``: returns the Unix time."""
        self._now = now
        self.rows = GrowingList(MINUTES)
        """The minutes that are over, the oldest first."""
        self.rows.extend(rows)
        self.received = self.sent = 0
        """Payload of updates received and of content sent, in bytes, since the process began."""
        self._closed = [0, 0]
        """Bytes received and sent in the rounds that are over."""
        self._reports = 0
        self._ended: Counter[str] = Counter()
        self._minute: list[Any] | None = None
        """What is known of the minute that goes on, in the order of ``Minute``."""
        self._unwritten: set[int] = set()
        """Hours with a minute that is not written yet."""

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Count what happened."""
        for event in events:
            match event:
                case UpdateSaved():
                    self._reports += 1
                case Ended(_, _, _, cause) | Unanswered(_, _, cause):
                    count_name(self._ended, cause)
                case RoundEnded(_, _, _, summary):
                    self._closed[0] += summary["bytes_up"]
                    self._closed[1] += summary["bytes_down"]

    def sample(self, fleet: FleetNow, present: int, received: int, sent: int) -> None:
        """Add a second.

        Args:
            fleet: What devices do at its end.
            present: Devices that are connected, or away because they were told to be.
            received: Bytes of the round that is not over.
            sent: The same.
        """
        now = self._now()
        # A round's bytes begin at 0 when it closes, and are told when its model is made.
        up = max(self.received, self._closed[0] + received)
        down = max(self.sent, self._closed[1] + sent)
        end = int(now) // 60 * 60 + 60
        minute = self._minute
        if minute is None or minute[0] != end:
            self._close()
            self._minute = minute = [end, 0, 0, 0, 0, 0, 0, 0, {}, 0]
        minute[1:5] = fleet
        minute[5] += self._reports
        minute[6] += up - self.received
        minute[7] += down - self.sent
        for cause, count in self._ended.items():
            minute[8][cause] = minute[8].get(cause, 0) + count
        minute[9] = max(minute[9], present)
        self.received, self.sent, self._reports = up, down, 0
        self._ended.clear()

    def _close(self) -> None:
        if self._minute is not None:
            row = Minute(*self._minute)
            self.rows.add(row)
            self._unwritten.add(row.hour)
            self._minute = None

    def take_rows(self, *, ended: bool = False) -> list[Row]:
        """Return what is to be written; the caller writes it. Empty: no minute is over since the
        last call. ``ended``: the run is not served any more, so its last minute is over, too."""
        if ended:
            self._close()
        hours, self._unwritten = sorted(self._unwritten), set()
        return [Metadata(key_of(hour), self._encode(hour)) for hour in hours]

    def _encode(self, hour: int) -> str:
        own = [row for row in self.rows.rows if row.hour == hour]
        return msgspec.json.encode(own).decode()

    def most_present(self) -> int:
        """Return the most devices that were present in the last hour."""
        now = self._now()
        found = [row.present for row in self.rows.rows if now - PEAK < row.end <= now + 60]
        if self._minute is not None:
            found.append(self._minute[-1])
        return max(found, default=0)


def read_minutes(values: Iterable[str | None], now: float | None = None) -> list[Minute]:
    """Return the minutes of the last day, the oldest first.

    Args:
        values: What a ledger has under ``KEYS``.
        now: When the day ends, in Unix time. None: with the last minute.

    Raises StoreError (damaged).
    """
    what = "what the database says of devices over time"
    hours = [decode(value, list[Minute], what) for value in values if value is not None]
    rows = sorted((row for hour in hours for row in hour), key=lambda row: row.end)
    until = now + 60 if now is not None else rows[-1].end if rows else 0
    return [row for row in rows if until - 60 * MINUTES < row.end <= until]
