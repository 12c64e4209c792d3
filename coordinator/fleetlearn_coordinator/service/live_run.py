"""One run of the live page: an observer (observers.py) that counts what happens into its history,
and what the page is told of the run now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetlearn_coordinator.dashboard.growing_list import GrowingList
from fleetlearn_coordinator.dashboard.live_records import PrivacySpent
from fleetlearn_coordinator.dashboard.run_history import (
    EVALUATIONS,
    ROUNDS,
    RunHistory,
    evaluation_row,
    round_row,
)
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.privacy.budget import PrivacyAccount
from fleetlearn_coordinator.rounds.commands import Ended, Revived, Unanswered
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.fleet_minutes import KEYS, read_minutes
from fleetlearn_coordinator.service.observers import (
    DeviceJoined,
    DeviceLeft,
    ExchangeSummarised,
    HeldOutMeasured,
    MessageRefused,
    RoundEnded,
    RunEvent,
    TaskFailed,
    UpdateSaved,
)
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.views.run_views import read_privacy
from fleetlearn_coordinator.storage.find_storage import find_storage

SPARK = 60
"""Rounds whose losses the list of runs shows."""


class LiveRun:
    """A run that is served."""

    def __init__(self, name: str, server: RunServer, now: Callable[[], float] = time.time) -> None:
        """``now``: returns the Unix time. Raises FleetError where the ledger cannot be read."""
        self.name, self.server, self._now = name, server, now
        self.history = read_history(server.run.plan.data_dir, server.minutes.rows)
        self.is_served = True
        self._tiers: dict[str, str] = {}
        """Connected device -> the tier that it names, of those that name one."""
        self._last: dict[str, Any] = {}
        self._ends: tuple[object, float | None] = (None, None)

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Count what happened."""
        history = self.history
        for event in events:
            match event:
                case UpdateSaved(device, _, _, staleness):
                    history.counted(staleness, self._tiers.get(device, ""))
                case Ended(_, _, _, cause) | Unanswered(_, _, cause):
                    history.ended(cause)
                case Revived():
                    history.revived()
                case DeviceJoined(check_in):
                    if check_in.tier is not None:
                        self._tiers[check_in.device] = check_in.tier
                case DeviceLeft(device):
                    self._tiers.pop(device, None)
                case TaskFailed(device, _, cause, text):
                    history.failed(self._now(), device, cause, text)
                case MessageRefused(device, code, text):
                    history.refused(self._now(), device, code.value, text)
                case RoundEnded():
                    self._close_round(event)
                case HeldOutMeasured(version, metrics):
                    history.held_out.add([version, dict(metrics)])
                case ExchangeSummarised(kind, number, _, version, valid, summary) if (
                    kind == EVALUATION
                ):
                    row = evaluation_row(number, version, valid, self._now(), summary)
                    history.evaluations.add(row)

    def _close_round(self, event: RoundEnded) -> None:
        number, outcome, version, summary, why = event
        now = self._now()
        opened = now - summary["seconds"]
        made = version if outcome == "committed" else None
        self.history.rounds.add(round_row(number, outcome, opened, now, summary, why, made))

    def sample(self) -> None:
        """Close a second of the history."""
        minutes, history = self.server.minutes, self.history
        history.moved(minutes.received - history.bytes_up, minutes.sent - history.bytes_down)
        history.sample(int(self._now()), self.server.fleet())

    def end(self) -> None:
        """The run is served no more: what was told last stays."""
        self._last = {**self.state(), "served": False, "paused": False, "waits_for": ""}
        self.is_served = False

    def state(self) -> dict[str, Any]:
        """Return what the page is told of the run now."""
        if not self.is_served:
            return self._last
        server, engine = self.server, self.server.engine
        live = server.live()
        for key in ("time", "deadline", "gateways"):  # they would differ each time
            live.pop(key, None)
        for region in live.get("regions", ()):
            del region["seconds"]
        return {
            "name": self.name,
            "served": True,
            "about": about_plan(server.run.plan),
            **live,
            **server.fleet()._asdict(),
            "paused": engine.paused,
            "draining": engine.draining,
            "finished": server.run.finished,
            "ends": self._round_ends(),
            "evaluation": live.pop("exchanges").get(EVALUATION),
            **self.history.totals(),
            **privacy_state(_spent(server.run.budget.account)),
        }

    def _round_ends(self) -> float | None:
        """Return the Unix time when the open round ends at the latest, or None."""
        engine = self.server.engine
        if engine.phase is not Phase.OPEN or engine.paused:
            return None
        when = self.server.clock.when(engine.deadline)
        if self._ends[0] != (engine.round, when):  # else a millisecond would differ each time
            left = when - self.server.loop.time()
            self._ends = (engine.round, when), round(self._now() + left, 1)
        return self._ends[1]

    def glance(self) -> dict[str, Any]:
        """Return what the list of runs shows."""
        state, rows = self.state(), self.history.rounds.rows
        losses = [row["metrics"].get("loss") for row in rows if row["outcome"] == "committed"]
        keys = ("served", "phase", "round", "version", "connected", "accepted", "finished")
        found = {key: state.get(key) for key in (*keys, "paused", "draining", "waits_for")}
        about = state.get("about", {})
        last = next((row for row in reversed(rows) if row["outcome"] == "committed"), None)
        return {
            **found,
            "goal": state.get("goal", about.get("goal")),
            "of": about.get("rounds"),
            "metrics": last["metrics"] if last else {},
            "spark": [loss for loss in losses[-SPARK:] if loss is not None],
            **({"privacy": state["privacy"]} if "privacy" in state else {}),
        }


def _spent(account: PrivacyAccount | None) -> PrivacySpent | None:
    return None if account is None else msgspec.convert(account, PrivacySpent, from_attributes=True)


def privacy_state(spent: PrivacySpent | None) -> dict[str, Any]:
    """Return what the page is told of a private run's budget; nothing of another run."""
    return {} if spent is None else {"privacy": msgspec.structs.asdict(spent)}


def about_plan(plan: Plan) -> dict[str, Any]:
    """Return what the page says of a run's plan."""
    rule, stop = plan.round, plan.stop
    return {
        "recipe": plan.recipe,
        "goal": rule.goal,
        **({} if rule.goal_share is None else {"goal_share": rule.goal_share}),
        "minimum": rule.minimum,
        "deadline": rule.deadline,
        # A computation ends when it is done: its stop.rounds is no number to look forward to.
        "rounds": None if plan.algorithm.computes else stop.rounds,
        "metric": stop.metric,
        "target": stop.target if stop.metric is not None else None,
        **({} if plan.hidden_metrics is None else {"private": plan.hidden_metrics}),
        **({"computes": plan.local.algorithm} if plan.algorithm.computes else {}),
    }


def read_history(data: Path, minutes: GrowingList | None = None) -> RunHistory:
    """Return a history with what a data directory has. ``minutes``: what the run's devices did in
    each minute, where a coordinator knows that. Raises FleetError."""
    history, storage = RunHistory(minutes), find_storage(data)
    with storage.read_ledger() as ledger:
        rounds = ledger.closed_rounds(max(0, ledger.last_round() - ROUNDS + 1))
        evaluations = ledger.exchanges(EVALUATION)[-EVALUATIONS:]
        versions = {made.round: made.version for made in ledger.known_models() if made.round}
        meta = ledger.metadata()
    history.rounds.extend(round_row(*row, version=versions.get(row[0])) for row in rounds)
    for each in evaluations:
        is_valid = each.outcome == "valid"
        row = evaluation_row(each.number, each.version, is_valid, each.closed, each.summary)
        history.evaluations.add(row)
    for version, result in storage.held_out.read_all().items():
        history.held_out.add([version, result["metrics"]])
    for row in history.rounds.rows:
        history.causes.update(row["dropped"])
    if minutes is None:
        history.minutes.extend(read_minutes(map(meta.get, KEYS)))
    return history


def stopped_state(name: str, plan: Plan) -> dict[str, Any]:
    """Return what the page is told of a run that nobody serves. Raises FleetError."""
    with find_storage(plan.data_dir).read_ledger() as ledger:
        meta, versions = ledger.metadata(), ledger.models()
    return {
        "name": name,
        "served": False,
        "about": about_plan(plan),
        "phase": "",
        "round": 0,
        "version": max(versions, default=0),
        "finished": meta.get("finished"),
        **privacy_state(read_privacy(meta)),
    }
