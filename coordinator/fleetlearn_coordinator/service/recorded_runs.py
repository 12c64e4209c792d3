"""What the live page shows of runs whose coordinator is down, from their records alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fleetlearn_protocol.computations.settings import KIND_NAMES

from fleetlearn_coordinator.dashboard.replay import ReplayedRun
from fleetlearn_coordinator.network.http_port import RefusedError
from fleetlearn_coordinator.service.live_run import SPARK, privacy_state, read_history
from fleetlearn_coordinator.service.training_run.plan_changes import PLAN, WHAT
from fleetlearn_coordinator.service.views.device_search import FITS, DeviceSearch
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.service.views.records import RunView
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.stored_json import decode

MOST_LAST = 1000
MOST_VERSIONS = 1000


def recorded_runs(views: LocalViews) -> dict[str, ReplayedRun]:
    """Return the runs that have begun, by name. Raises FleetError."""
    found = {}
    for glance in views.runs():
        if glance.state in ("new", "broken") or glance.error:
            continue
        run = views.run(glance.name, last=SPARK)
        found[run.name] = _recorded(views, run)
    return found


def _recorded(views: LocalViews, run: RunView) -> ReplayedRun:
    data = views.place(run.name).data
    history, kind = read_history(data), _computation_of(data)
    about = {
        "goal": run.goal,
        "rounds": None if kind else run.stop.get("rounds"),
        "metric": run.stop.get("metric"),
        "target": run.stop.get("target"),
        **_privacy_of_metrics(run),
        **({"computes": kind} if kind else {}),
    }
    values = {
        "name": run.name,
        "served": False,
        "recorded": True,
        "about": about,
        "version": run.version,
        "round": run.round,
        "finished": run.finished,
        **history.totals(),
        **privacy_state(run.privacy),
    }
    glance = {
        "served": False,
        "recorded": True,
        "version": run.version,
        "of": about["rounds"],
        "finished": run.finished,
        "failed": run.failed,
        "metrics": run.metrics,
        "spark": [row.loss for row in run.rounds if row.loss is not None],
        **privacy_state(run.privacy),
    }
    return ReplayedRun(values, history, glance)


def _computation_of(data: Path) -> str | None:
    """Return the kind of computation of a run without a model; None: the run has one. ``data``: as
    for ``find_storage``. Raises StoreError."""
    with find_storage(data).read_ledger() as ledger:
        plan = decode(ledger.metadata().get(PLAN) or "{}", dict[str, Any], WHAT)
    algorithm = plan.get("local", {}).get("algorithm")
    return algorithm if algorithm in KIND_NAMES else None


def _privacy_of_metrics(run: RunView) -> dict[str, str]:
    """Return what the page is told of what a private run's devices measure; nothing of another
    run."""
    if run.privacy is None:
        return {}
    noised = any("metrics_noise" in row.summary.get("privacy", {}) for row in run.rounds)
    return {"private": "noised" if noised else "none"}


def read_records(views: LocalViews, path: tuple[str, ...], query: Mapping[str, str]) -> Any:
    """Return what a GET of the administrators' endpoints is answered, from records alone. Raises
    RefusedError, FleetError."""
    last = min(_number(query, "last", 20), MOST_LAST)
    match path:
        case ("runs",):
            return views.runs()
        case ("runs", name):
            return views.run(name, last=last)
        case ("runs", name, "rounds"):
            return views.rounds(name, last=last)
        case ("runs", name, "models"):
            return views.models(name, most=MOST_VERSIONS)
        case ("devices",):
            offset, state = _number(query, "offset", 0), query.get("state", "")
            if state not in FITS:
                text = f"state = {state!r} was given; it takes one of: {', '.join(FITS)}"
                raise RefusedError(HTTPStatus.BAD_REQUEST, text)
            return views.device_page(
                DeviceSearch(),
                search=query.get("search", ""), state=state, offset=offset, most=last,
            )  # fmt: skip
        case ("devices", name):
            return views.device(name)
        case ("audit",):
            return views.audit(last)
    raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no /v1/{'/'.join(path)} here")


def _number(query: Mapping[str, str], key: str, default: int) -> int:
    given = query.get(key, str(default))
    if not re.fullmatch("[0-9]{1,9}", given):
        text = f"{key} = {given!r} was given; it takes a number"
        raise RefusedError(HTTPStatus.BAD_REQUEST, text)
    return int(given)
