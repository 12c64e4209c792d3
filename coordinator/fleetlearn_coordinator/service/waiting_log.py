"""What a run waits for, said in the log while nothing happens: after a minute, then less and less
often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetlearn_coordinator.rounds import waiting_words
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.json_log import said

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.server import RunServer

FIRST, LONGEST = 60.0, 3600.0
"""Seconds without news before the first line, and between two lines at most. Each wait is twice the
one before."""


class WaitingLog:
    """Looks at a run each second."""

    def __init__(self) -> None:
        self._news: object = None
        """What would have changed if anything had happened."""
        self._since = self._due = self._wait = 0.0

    def look(self, server: RunServer, now: float) -> None:
        """Say what the run waits for, if it is time to. ``now``: seconds on any clock."""
        engine = server.engine
        news = (
            engine.phase,
            engine.round,
            engine.version,
            len(engine.accepted),
            engine.tasks.given,
            engine.paused,
        )
        if news != self._news:
            self._news, self._since, self._wait, self._due = news, now, FIRST, now + FIRST
        elif now >= self._due:
            self._wait = min(2 * self._wait, LONGEST)
            self._due = now + self._wait
            if text := _what_is_missing(server):
                seconds = now - self._since
                server.run.log.info(
                    "nothing has happened for %s: %s",
                    span(seconds),
                    text,
                    extra=said("waiting", seconds=round(seconds), why=text),
                )


def _what_is_missing(server: RunServer) -> str:
    """Return what the run waits for, in sentences; empty if it is paused, drained, finished or
    makes a model."""
    engine = server.engine
    if engine.phase not in (Phase.GATHERING, Phase.OPEN) or engine.paused or engine.draining:
        return ""
    return f"{waiting_words.waits_for(engine, server.clock.now())}. {_connected(server)}"


def _connected(server: RunServer) -> str:
    """Return how many devices are connected, and what keeps some from tasks."""
    live, count = server.live(), server.connected
    if not count:
        return "No device is connected"
    parts = [f"{count} {'device is' if count == 1 else 'devices are'} connected"]
    if server.name:
        parts.append("some may be at work for other runs")
    if server.unable:
        parts.append(f"{server.unable} cannot do this run's tasks, as their own logs say")
    if live.get("ineligible"):
        causes = ", ".join(
            f"{number} by {key}" for key, number in sorted(live["ineligible_by"].items())
        )
        parts.append(f"{live['ineligible']} may not take part ({causes})")
    if live.get("barred"):
        parts.append(f"{live['barred']} took part lately")
    if live.get("away"):
        parts.append(f"{live['away']} are away and told to come back")
    return "; ".join(parts)


def span(seconds: float) -> str:
    """Return a length of time in words."""
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.3g} hours"
