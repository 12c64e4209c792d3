"""A simulation's folder as the live page shows it: in virtual time, which begins at 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_coordinator.dashboard.replay import ReplayedRun
from fleetlearn_coordinator.dashboard.run_history import (
    ROUNDS,
    SECONDS,
    FleetNow,
    RunHistory,
    round_row,
)
from fleetlearn_protocol.computations.settings import KIND_NAMES

from fleetlearn_simulator.results.loaded_run import LoadedRun, Round, find_runs, read_run
from fleetlearn_simulator.results.run_folder import EVENTS

SPARK = 60
CHUNK = 2**22
"""Bytes of the event log that are read at a time."""


class EventLine(msgspec.Struct):
    """What is read of a line of ``events.jsonl``."""

    time: float
    event: str
    task: str = ""
    cause: str = ""


def replayed_runs(folder: Path) -> dict[str, ReplayedRun]:
    """Return the runs in a folder, or in folders below it, by name: a run's own, or where there are
    several that of its folder. Raises SimulatorError where there is none."""
    folders = find_runs(folder)
    if len(folders) == 1:
        run = replayed_run(folders[0])
        return {run.values["name"]: run}
    return {str(each.relative_to(folder)): replayed_run(each) for each in folders}


def replayed_run(folder: Path) -> ReplayedRun:
    """Return a run's folder as the page shows it. Raises SimulatorError if a file is missing or
    damaged."""
    run = read_run(folder)
    history = RunHistory()
    history.rounds.extend(map(_round, _thinned(run.rows)))
    if run.rows:
        _sample(history, run)
    tiers = list(run.scenario.get("tiers", {}))
    for number, count in run.total(lambda row: row.accepted).items():
        name = tiers[number] if number < len(tiers) else str(number)
        history.tiers[name] += count
    for row in run.rows:
        history.moved(row.bytes.get("up", 0), row.bytes.get("down", 0))
    plan = run.scenario.get("plan", {})
    stop = plan.get("stop", {})
    # The recipe of a computation has the name of its kind.
    algorithm = plan.get("local", {}).get("algorithm", plan.get("recipe"))
    computes = algorithm if algorithm in KIND_NAMES else None
    spent, share = _spent(run), plan.get("round", {}).get("goal_share")
    values = {
        "name": run.name,
        "served": False,
        "recorded": True,
        "about": {
            "goal": plan.get("round", {}).get("goal"),
            **({"goal_share": share} if share is not None else {}),
            "rounds": None if computes else stop.get("rounds"),
            "metric": stop.get("metric"),
            "target": stop.get("target"),
            **({"private": plan["privacy"].get("metrics", "none")} if "privacy" in plan else {}),
            **({"computes": computes} if computes else {}),
        },
        "version": len(run.committed),
        "round": len(run.rows),
        "finished": run.summary.get("reason"),
        **history.totals(),
        **spent,
    }
    losses = [row.train.get("loss") for row in run.committed[-SPARK:]]
    glance = {
        "served": False,
        "recorded": True,
        "version": len(run.committed),
        "of": None if computes else stop.get("rounds"),
        "finished": run.summary.get("reason"),
        "metrics": _metrics(run.committed[-1]) if run.committed else {},
        "spark": [loss for loss in losses if loss is not None],
        **spent,
    }
    return ReplayedRun(values, history, glance)


def _spent(run: LoadedRun) -> dict[str, Any]:
    """Return what the page is told of a private run's budget at its end; nothing of another run."""
    privacy = run.scenario.get("plan", {}).get("privacy")
    if privacy is None:
        return {}
    none: dict[str, Any] = {"epsilon": 0.0, "of": privacy.get("epsilon"), "release": 0}
    last = run.private[-1].privacy if run.private else none
    left = last.get("left")
    spent = {  # all numbers of a run's file are floats
        "epsilon": last["epsilon"],
        "budget": last.get("of"),
        "delta": privacy["delta"],
        "releases": int(last["release"] or 0),
        "left": None if left is None else int(left),
    }
    return {"privacy": spent}


def _thinned(rows: list[Round]) -> list[Round]:
    """Return at most ROUNDS rounds, evenly spread, with the last one."""
    step = -(-len(rows) // ROUNDS) or 1
    return rows[(len(rows) - 1) % step :: step] if rows else []


def _metrics(row: Round) -> dict[str, float]:
    metrics = row.train | row.evaluation | {f"test.{key}": row.test[key] for key in row.test}
    return {key: value for key, value in metrics.items() if value is not None}


def _round(row: Round) -> dict[str, Any]:
    summary = {
        "seconds": row.seconds,
        "reports": row.reports,
        "partial": row.partial,
        # The engine sees devices vanish; the simulator knows why.
        "dropped": row.causes or row.dropped,
        "metrics": _metrics(row),
        "evaluation": row.evaluation,
        "change": row.change or 0.0,
        "bytes_up": row.bytes.get("up", 0),
        "bytes_down": row.bytes.get("down", 0),
        **({} if row.goal is None else {"goal": row.goal}),
    }
    return round_row(row.round, row.how, row.time - row.seconds, row.time, summary)


def _sample(history: RunHistory, run: LoadedRun) -> None:
    """Fill the samples: SECONDS stretches of the run's time, with how many devices trained at the
    end of each."""
    end = run.rows[-1].time
    width = max(end / SECONDS, 1e-9)
    running: set[str] = set()
    rounds, connected, stretches = iter(run.rows), run.rows[0].connected, 1
    following = next(rounds, None)
    for event in _events(run.folder / EVENTS):
        while event.time > stretches * width and stretches <= SECONDS:
            due = stretches * width
            while following is not None and following.time <= due:
                connected, following = following.connected, next(rounds, None)
            history.sample(due, FleetNow(connected, len(running), 0, 0))
            stretches += 1
        if event.event == "assigned":
            running.add(event.task)
        elif event.task in running:
            running.discard(event.task)
            if event.event == "accepted":
                history.counted(0, "")
            else:
                history.ended(event.cause or event.event)
    # What was counted here is told by the rounds: only the samples are wanted.
    history.causes, history.staleness, history.tiers = Counter(), Counter(), Counter()


def _events(file: Path) -> Iterator[EventLine]:
    """Yield the lines of the event log, if there is one. Half of a last line is left out."""
    if not file.is_file():
        return
    decoder, rest = msgspec.json.Decoder(EventLine), b""
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            head, _, rest = (rest + chunk).rpartition(b"\n")
            yield from decoder.decode_lines(head)
