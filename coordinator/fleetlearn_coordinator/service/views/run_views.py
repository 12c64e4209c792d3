"""What is known of one run, from its storage alone: while its coordinator runs or not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fleetlearn_protocol.exchanges import EVALUATION

from fleetlearn_coordinator.dashboard.live_records import PrivacySpent
from fleetlearn_coordinator.rounds.commands import REJECTED, SURPLUS
from fleetlearn_coordinator.service.views.records import (
    EvaluationView,
    RoundView,
    RunGlance,
    RunView,
    Trend,
    TurnsView,
    TurnView,
)
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import PRIVACY
from fleetlearn_coordinator.storage.ledger_reader import LedgerReader
from fleetlearn_coordinator.storage.run_storage import RunStorage
from fleetlearn_coordinator.storage.stored_json import decode

RECENT = 20
"""Rounds by which the trend and the rate are told."""
Found = tuple[int, str, float, float, dict[str, Any]]
"""A round as the ledger's reader returns it."""


class RunPlace(NamedTuple):
    """A run, and what is known of it without its storage."""

    name: str
    data: Path
    """Its data directory, or the URL of its store."""
    plan: str = ""
    wanted: str | None = None
    failed: str = ""
    population: str = "all"


def glance(place: RunPlace) -> RunGlance:
    """Return the run in a few words. Raises StoreError where there is no run yet."""
    storage = find_storage(place.data)
    with storage.read_ledger() as ledger:
        recent = ledger.closed_rounds(ledger.last_round() - RECENT)
        return RunGlance(**_glance(place, storage, ledger, recent))


def run_view(place: RunPlace, *, last: int | None = RECENT) -> RunView:
    """Return the run. ``last``: how many rounds and evaluations to have; None: all. Raises
    StoreError where there is no run yet."""
    storage = find_storage(place.data)
    with storage.read_ledger() as ledger:
        newest = ledger.last_round()
        closed = ledger.closed_rounds(0 if last is None else newest - max(last, 2 * RECENT))
        found = _glance(place, storage, ledger, closed)
        evaluations = ledger.exchanges(EVALUATION)
        outcomes = ledger.round_outcomes()
        meta = ledger.metadata()
    live, stop = _json(meta, "live", {}), _json(meta, "plan", {}).get("stop", {})
    rate = _rate(closed)
    rounds = [_round(row) for row in (closed if last is None else closed[-last:])]
    # A computation ends when it is done; its stop.rounds only ends one that never would.
    most = None if any("computation" in row.summary for row in rounds) else stop.get("rounds")
    return RunView(
        **found,
        data=storage.where,
        seen=live.get("time"),
        began=live.get("began"),
        committed=outcomes.get("committed", 0),
        abandoned=outcomes.get("abandoned", 0),
        trend=_trend(closed),
        rounds_per_hour=rate,
        stop=stop,
        eta=_eta(found, most, rate),
        finished_by=_json(meta, "finished_by", None),
        live=live,
        rounds=rounds,
        evaluations=[
            EvaluationView(*row[:5])
            for row in (evaluations if last is None else evaluations[-last:])
        ],
        held_out=storage.held_out.read_all(),
    )


def rounds(place: RunPlace, *, last: int | None = None) -> list[RoundView]:
    """Return the last rounds that are over, the oldest first; None: all. Raises StoreError."""
    with find_storage(place.data).read_ledger() as ledger:
        found = ledger.closed_rounds(0 if last is None else ledger.last_round() - last)
    return [_round(row) for row in (found if last is None else found[-last:])]


def turns(place: RunPlace, number: int | None = None) -> TurnsView:
    """Return who took part in a round; None: the open one. Raises StoreError."""
    with find_storage(place.data).read_ledger() as ledger:
        number = (ledger.open_round() or 0) if number is None else number
        tasks = [TurnView(*row) for row in ledger.tasks(number)]
        return TurnsView(number, ledger.opened(number), tasks)


def is_running(storage: RunStorage, meta: Mapping[str, Any]) -> bool:
    """Return whether a coordinator serves the run. ``meta``: the ledger's small values."""
    # Its process id says nothing: in a container it is often 1, and elsewhere another process may
    # have it by now. But where there is none, the coordinator has not begun, or it has ended.
    return _json(meta, "live", {}).get("pid") is not None and storage.is_locked()


def _glance(
    place: RunPlace, storage: RunStorage, ledger: LedgerReader, recent: Sequence[Found]
) -> dict[str, Any]:
    meta, newest = ledger.metadata(), ledger.newest_model()
    live, finished = _json(meta, "live", {}), meta.get("finished")
    running = is_running(storage, meta)
    # The coordinator's last look may be of a round before the one that its database has by now.
    current = running and live.get("round", ledger.last_round()) >= ledger.last_round()
    number, accepted, leases, dropped = ledger.open_round(), 0, 0, dict[str, int]()
    if current:
        accepted, leases = live["accepted"], live["leases"]
        dropped = live.get("dropped", {})
    elif number is not None:
        states = ledger.task_states(number)
        accepted, leases = states.pop("accepted", 0), states.pop("assigned", 0)
        dropped = states
    measured = [row[4]["metrics"] for row in _recent(recent) if row[4].get("metrics")]
    if place.failed:
        state = "failed"
    elif finished is not None:
        state = "finished"
    elif place.wanted is not None:
        state = place.wanted
    else:
        died = not running and live.get("pid") is not None
        state = "died" if died else "running" if running else "stopped"
    return {
        "name": place.name,
        "state": state,
        "running": running,
        "plan": place.plan,
        "wanted": place.wanted,
        "failed": place.failed,
        "population": place.population,
        "address": meta.get("address"),
        "version": 0 if newest is None else newest.version,
        "last_model": None if newest is None else newest.at,
        "finished": finished,
        "phase": live.get("phase") if current else None,
        "round": ledger.last_round(),
        "opened": None if number is None else ledger.opened(number),
        "deadline": live.get("deadline") if current else None,
        "goal": _goal(meta, ledger, number),
        "accepted": accepted,
        "leases": leases,
        "dropped": dropped,
        "connected": live["connected"] if running else 0,
        "waits_for": live.get("waits_for", "") if current else "",
        "metrics": measured[-1] if measured else {},
        "privacy": read_privacy(meta),
    }


def _goal(meta: Mapping[str, Any], ledger: LedgerReader, open_round: int | None) -> int | None:
    """Return what the open round wants, or what rounds want by the plan."""
    own = None if open_round is None else ledger.goal(open_round)
    rule = _json(meta, "plan", {}).get("round", {})
    return rule.get("goal", _json(meta, "live", {}).get("goal")) if own is None else own


def read_privacy(meta: Mapping[str, Any]) -> PrivacySpent | None:
    """Return what a private run has spent. ``meta``: the ledger's small values. None: the run is
    not private. Raises StoreError (damaged)."""
    found = meta.get(PRIVACY)
    return (
        None if found is None else decode(found, PrivacySpent, "what the database says of privacy")
    )


def _round(row: Found) -> RoundView:
    number, outcome, opened, closed, summary = row
    # earlier versions: fewer keys
    lost, refused, surplus = causes_of(summary.get("dropped", {}))
    return RoundView(
        number=number,
        outcome=outcome,
        opened=opened,
        closed=closed,
        seconds=summary.get("seconds", closed - opened),
        reports=summary.get("reports", 0),
        partial=summary.get("partial", 0),
        goal=summary.get("goal"),
        lost=lost,
        refused=refused,
        surplus=surplus,
        loss=summary.get("metrics", {}).get("loss"),
        metrics=summary.get("metrics", {}),
        norm=summary.get("change", 0.0),
        bytes_up=summary.get("bytes_up", 0),
        bytes_down=summary.get("bytes_down", 0),
        summary=summary,
    )


def causes_of(dropped: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int], int]:
    """Return what became of a round's tasks without a report that counts: cause -> tasks that were
    lost, code -> updates that were refused, and how many were cancelled for a full round.
    ``dropped``: cause -> tasks, as a round's summary has it."""
    found = sorted(dropped.items())
    refused = {
        cause.removeprefix(REJECTED): count for cause, count in found if cause.startswith(REJECTED)
    }
    lost = {
        cause: count
        for cause, count in found
        if cause != SURPLUS and not cause.startswith(REJECTED)
    }
    return lost, refused, dropped.get(SURPLUS, 0)


def _recent(closed: Sequence[Found]) -> list[Found]:
    return [row for row in closed if row[1] == "committed"][-RECENT:]


def _trend(closed: Sequence[Found]) -> dict[str, Trend]:
    values: dict[str, list[float]] = {}
    for row in _recent(closed):
        for name, value in row[4].get("metrics", {}).items():
            values.setdefault(name, []).append(value)
    return {name: Trend(found, found[-1] - found[0]) for name, found in values.items()}


def _rate(closed: Sequence[Found]) -> float | None:
    """Return how many rounds were committed an hour, from the first recent one's begin on."""
    recent = _recent(closed)
    if len(recent) < 2 or recent[-1][3] <= recent[0][2]:
        return None
    return 3600 * len(recent) / (recent[-1][3] - recent[0][2])


def _eta(found: Mapping[str, Any], most: int | None, rate: float | None) -> float | None:
    """Return when the version ``most`` is made at this rate, but not before now."""
    if not found["running"] or found["finished"] is not None or rate is None or most is None:
        return None
    left = max(0, most - found["version"])
    return float(max(time.time(), found["last_model"] + left * 3600 / rate))


def _json(meta: Mapping[str, Any], key: str, default: Any) -> Any:
    text = meta.get(key)
    return default if text is None else msgspec.json.decode(text)
