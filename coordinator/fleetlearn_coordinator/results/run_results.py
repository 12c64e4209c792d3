"""A run's rounds and evaluations as tables, whoever ran them.

A column that a row does not have is missing there (None, or null in a frame):

    round, outcome           number; ``committed`` or ``abandoned``
    version                  of the newest model after the round, where that is known
    time                     when the round ended, in seconds: Unix time, or a simulation's own
    seconds                  how long it was open
    reports, partial         reports that count; those of them whose device did not finish
    goal                     reports that were wanted, where each round has its own goal
    lost, refused, surplus   tasks without a report; updates refused; tasks cancelled for a full
                             round
    lost/CAUSE, refused/CODE the same by cause; 0 where another round has that cause
    change                   L2 norm of the model's change
    bytes_down, bytes_up     payload of the round's devices
    train/METRIC             the devices' training
    evaluation/METRIC        the round's first model on the devices' data, before they trained
    test/METRIC              a simulation's model on its test data, after the round
    held-out/METRIC          the coordinator's model on its held-out data, after the round
    privacy/epsilon          what a private run has spent with the round's release; and
    privacy/release          which release it is

Evaluations: ``evaluation``, ``outcome``, ``version``, ``time``, ``devices``, ``examples`` and
``evaluation/METRIC``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fleetlearn_coordinator.results.result_table import ResultRow, ResultTable
from fleetlearn_coordinator.service.views.records import RoundView
from fleetlearn_coordinator.service.views.run_views import RunPlace, causes_of, run_view
from fleetlearn_coordinator.storage.find_storage import find_storage

COUNTED = ("lost/", "refused/", "cause/")
"""Columns of counts: a row without such a column counted 0."""


class RunResults(NamedTuple):
    """What a run measured so far."""

    name: str
    settings: dict[str, Any]
    """The plan's or the scenario's tables."""
    round_rows: list[ResultRow]
    """The rounds that are over, the oldest first."""
    evaluation_rows: list[ResultRow]
    finished: bool
    """Whether no row will come any more."""

    @classmethod
    def load(cls, data: Path | str) -> RunResults:
        """Read a coordinator's data directory, while its coordinator runs or not. Raises
        StoreError."""
        return coordinator_results(RunPlace(Path(data).name, Path(data)))

    def rounds(self) -> ResultTable:
        """Return the rounds, a row for each."""
        return ResultTable(self.round_rows)

    def evaluations(self) -> ResultTable:
        """Return the evaluations on devices, a row for each."""
        return ResultTable(self.evaluation_rows)


def coordinator_results(place: RunPlace) -> RunResults:
    """Read what a coordinator's run measured. Raises StoreError where there is no run yet."""
    shown = run_view(place, last=None)
    with find_storage(place.data).read_ledger() as ledger:
        made_by = {model.round: model.version for model in ledger.known_models()}
        plan = msgspec.json.decode(ledger.metadata().get("plan") or "{}")
    rows, version = [], 0
    for view in shown.rounds:
        version = made_by.get(view.number, version)
        row = _round_row(view, version)
        measured = shown.held_out.get(version, {}).get("metrics", {})
        if view.outcome == "committed":
            row |= prefixed("held-out", measured)
        rows.append(row)
    evaluations = [
        evaluation_row(view.number, view.outcome, view.version, view.closed, view.summary)
        for view in shown.evaluations
    ]
    return RunResults(place.name, plan, with_zeros(rows), evaluations, shown.finished is not None)


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return found


def prefixed(prefix: str, values: Mapping[str, Any]) -> ResultRow:
    """Return the values as columns ``prefix/NAME``."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def dropped_columns(dropped: Mapping[str, int]) -> ResultRow:
    """Return the columns about a round's tasks without a report that counts. ``dropped``: cause ->
    tasks, as a round's summary has it."""
    lost, refused, surplus = causes_of(dropped)
    return {
        "lost": sum(lost.values()),
        "refused": sum(refused.values()),
        "surplus": surplus,
        **prefixed("lost", lost),
        **prefixed("refused", refused),
    }


def with_zeros(rows: list[ResultRow]) -> list[ResultRow]:
    """Return the rows with 0 for each cause that another round had: nothing was lost by it there,
    where a metric that is missing was not measured."""
    counted = dict.fromkeys(name for row in rows for name in row if name.startswith(COUNTED))
    return [row | {name: row.get(name, 0) for name in counted} for row in rows]


def _round_row(view: RoundView, version: int) -> ResultRow:
    train = view.summary.get("train")
    return {
        "round": view.number,
        "outcome": view.outcome,
        "version": version,
        "time": view.closed,
        "seconds": view.seconds,
        "reports": view.reports,
        "partial": view.partial,
        **({} if view.goal is None else {"goal": view.goal}),
        **dropped_columns(view.summary["dropped"]),
        "change": view.norm,
        "bytes_down": view.bytes_down,
        "bytes_up": view.bytes_up,
        # version 0.1's first ledgers have one kind of metrics, the training's as a rule
        **prefixed("train", view.metrics if train is None else train),
        **prefixed("evaluation", view.summary.get("evaluation", {})),
        **privacy_columns(view.summary),
    }


def privacy_columns(summary: Mapping[str, Any]) -> ResultRow:
    """Return the columns about what a private run has spent. ``summary``: a round's."""
    found = summary.get("privacy", {})
    return prefixed("privacy", {key: found[key] for key in ("epsilon", "release") if key in found})


def evaluation_row(
    number: int, outcome: str, version: int, time: float, summary: dict[str, Any]
) -> ResultRow:
    """Return an evaluation's row. ``summary``: ``aggregation.evaluation_summary``'s."""
    return {
        "evaluation": number,
        "outcome": outcome,
        "version": version,
        "time": time,
        "devices": summary.get("devices", 0),
        "examples": summary.get("examples", 0),
        **prefixed("evaluation", summary.get("metrics", {})),
    }
