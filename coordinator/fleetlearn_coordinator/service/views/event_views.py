"""What happens in a run, from its storage alone, so that it can be followed from any process: each
look returns what is new since the last one. Nothing is kept for it but what the ledger has anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fleetlearn_protocol.exchanges import EVALUATION

from fleetlearn_coordinator.aggregation.round_summary import describe
from fleetlearn_coordinator.service.views.records import EventView
from fleetlearn_coordinator.service.views.run_views import Found, RunPlace, is_running
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import DeviceActivity
from fleetlearn_coordinator.storage.ledger_reader import LedgerReader

BEFORE = 5
"""Rounds that are told of at the first look."""
MOST = 200
"""Events of tasks and devices that one look tells; further ones are only counted."""


class RunEvents:
    """Follows one run."""

    def __init__(self, place: RunPlace, clock: Callable[[], float] = time.time) -> None:
        """``clock``: returns the Unix time."""
        self._place, self._clock = place, clock
        self._began = clock()
        self._first = True
        self._closed = self._open = self._version = self._evaluations = 0
        self._tasks: dict[str, str] = {}
        """Task of the open round -> its state."""
        self._devices: dict[str, DeviceActivity] = {}
        """What was told of devices that were seen since ``_began``."""
        self._seen = self._began
        self._finished: str | None = None
        self._running: bool | None = None

    def look(self) -> list[EventView]:
        """Return what has happened since the last look, in the order of time. The first one tells
        the end of the last few rounds. Raises StoreError."""
        storage = find_storage(self._place.data)
        with storage.read_ledger() as ledger:
            if self._first:
                self._closed = max(0, ledger.last_round() - BEFORE)
            meta = ledger.metadata()
            found = [*self._rounds(ledger), *self._models(ledger), *self._evaluated(ledger)]
            devices = list(self._devices_of(ledger))
        found += devices[:MOST]
        if len(devices) > MOST:
            found.append(self._event("device-connected", f"and {len(devices) - MOST} more"))
        finished = meta.get("finished")
        if finished is not None and finished != self._finished:
            found.append(self._event("finished", f"finished: {finished}"))
        running = is_running(storage, meta)
        if running != self._running:
            text = "a coordinator serves the run" if running else "no coordinator serves the run"
            found.append(self._event("coordinator", text))
        self._finished, self._running, self._first = finished, running, False
        return sorted(found, key=lambda event: event.at)

    def _event(self, what: str, text: str, at: float | None = None, **about: Any) -> EventView:
        at = self._clock() if at is None else at
        return EventView(at=at, what=what, text=text, run=self._place.name, **about)

    def _rounds(self, ledger: LedgerReader) -> Iterator[EventView]:
        closed = ledger.closed_rounds(self._closed + 1)
        for row in closed:
            number, outcome, opened, ended, summary = row
            if number > self._open:
                yield self._event("round-opened", f"round {number} begins", opened, round=number)
            if not self._first:
                yield from self._turns(ledger, number, row)
            text = f"round {number} {outcome}: {describe(summary)}"
            yield self._event("round-closed", text, ended, round=number)
            self._closed, self._tasks = number, {}
        now = ledger.open_round()
        if now is not None:
            if now > self._open:
                opened_at = ledger.opened(now)
                yield self._event("round-opened", f"round {now} begins", opened_at, round=now)
            yield from self._turns(ledger, now, None)
        self._open = max(self._open, self._closed, now or 0)

    def _turns(self, ledger: LedgerReader, number: int, row: Found | None) -> Iterator[EventView]:
        """Yield what became of a round's tasks since the last look. ``row``: the round is over."""
        at = None if row is None else row[3]
        new = []
        for task, device, state, _ in ledger.tasks(number):
            if self._tasks.get(task) != state:
                self._tasks[task] = state
                new.append((device, state))
        for device, state in new[:MOST]:
            what, text = "task-ended", f"the task of {device} in round {number} ended: {state}"
            if state == "assigned":
                what, text = "task-given", f"{device} is given a task of round {number}"
            elif state == "accepted":
                what, text = "update-accepted", f"{device}'s update counts for round {number}"
            yield self._event(what, text, at, round=number, device=device)
        if len(new) > MOST:
            yield self._event("task-ended", f"and {len(new) - MOST} tasks more", at, round=number)

    def _models(self, ledger: LedgerReader) -> Sequence[EventView]:
        newest = ledger.newest_model()
        before, self._version = self._version, 0 if newest is None else newest.version
        if newest is None or self._first or newest.version == before:
            return ()
        text = f"version {newest.version} is the newest model"
        if newest.restores is not None:
            text += f": it is version {newest.restores}'s, by a roll back"
        return [self._event("model-made", text, newest.at)]

    def _evaluated(self, ledger: LedgerReader) -> Iterator[EventView]:
        rows = ledger.exchanges(EVALUATION)
        for number, version, outcome, closed, summary, *_ in rows[self._evaluations :]:
            if not self._first:
                text = (
                    f"evaluation {number} of version {version} is {outcome}: "
                    f"{summary['devices']} devices"
                )
                yield self._event("evaluation", text, closed)
        self._evaluations = len(rows)

    def _devices_of(self, ledger: LedgerReader) -> Iterator[EventView]:
        rows = ledger.device_activity(self._seen)
        self._seen = max((row.seen or 0.0 for row in rows), default=self._seen)
        for row in rows:
            before = self._devices.get(row.device)
            if before == row:
                continue
            self._devices[row.device] = row
            was = None if before is None else before.connected
            if row.connected is not None and row.connected != was:
                text = f"{row.device} is connected" + (f" ({row.runtime})" if row.runtime else "")
                yield self._event("device-connected", text, row.connected, device=row.device)
            elif row.connected is None and (before is None or was is not None):
                yield self._event("device-left", f"{row.device} left", row.seen, device=row.device)
            if (
                row.error_at is not None
                and row.error_at >= self._began
                and (before is None or before.error_at != row.error_at)
            ):
                text = f"{row.device} failed: {row.error}"
                yield self._event("device-failed", text, row.error_at, device=row.device)
