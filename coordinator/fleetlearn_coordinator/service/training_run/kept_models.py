"""Which versions of a run's model are kept: the plan's [models]."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import Any

from fleetlearn_coordinator.aggregation.round_summary import deciding
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.sections import Models
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.improvement import MeasuredModel
from fleetlearn_coordinator.storage.find_storage import find_storage


def why_kept(rule: Models, version: int, newest: int, best: Iterable[int]) -> str | None:
    """Return why the rule keeps a version: ``initial``, ``newest``, ``last``, ``every`` or
    ``best``. None: it does not, and the version is there only while something needs it."""
    if version in (0, newest):
        return "newest" if version == newest else "initial"
    if version > newest - rule.last:
        return "last"
    if rule.every is not None and version % rule.every == 0:
        return "every"
    return "best" if version in best else None


def versions_to_drop(
    rule: Models, there: Iterable[int], newest: int, needed: int, best: Iterable[int]
) -> list[int]:
    """Return which of the versions that are ``there`` are not kept any more, now that ``newest`` is
    made. Those from ``needed`` on are still in use."""
    best = {*best}
    return [
        version
        for version in there
        if version < needed and why_kept(rule, version, newest, best) is None
    ]


class KeptModels:
    """Which models a run keeps. Knows what rounds and evaluations measured, since the rows that say
    so may not be safe yet, and a slow ledger is not read while the run is served."""

    def __init__(self, plan: Plan, there: Iterable[int]) -> None:
        """``there``: the versions that are kept so far. Raises StoreError (damaged)."""
        self._plan, self._rule = plan, plan.models
        self._values = {} if self._rule.best is None else measured(plan, there)
        """Version -> the metric by which the best are kept."""

    def note(self, source: str, version: int, summary: Mapping[str, Any]) -> None:
        """A version was measured. ``source``: ``round``, or a kind of exchange. ``summary``: of the
        committed round, or of the valid exchange."""
        if source == self._rule.measured_by and self._rule.metric is not None:
            metrics = deciding(summary, minimum_of(self._plan, source))
            self._values.pop(version, None)
            if self._rule.metric in metrics:
                self._values[version] = metrics[self._rule.metric]

    def dropped_after(
        self,
        there: Collection[int],
        newest: int,
        needed: int,
        summary: Mapping[str, Any],
        improved: MeasuredModel | None = None,
    ) -> list[int]:
        """Return which of the versions that are ``there`` are not kept any more when a round, of
        this summary, has made the one after ``newest``. Those from ``needed`` on are still in use.
        ``improved``: the best one so far, where the plan has patience; it is kept. Raises
        StoreError (damaged)."""
        rule, best = self._rule, set[int]()
        if rule.best is not None and rule.metric is not None:
            if rule.measured_by == "held-out":  # results are no rows, and others may write them
                self._values = measured(self._plan, there)
            self._values = {key: self._values[key] for key in {*there} & self._values.keys()}
            values = dict(self._values)
            if rule.measured_by == "round":
                found = deciding(summary, self._plan.round.minimum)
                values |= {newest: found[rule.metric]} if rule.metric in found else {}
            best = best_versions(rule, values)
        if self._plan.stop.patience is not None:
            # The round may have measured ``newest``, which may now be the best.
            best = best | {newest} | ({improved.version} if improved is not None else set())
        return versions_to_drop(rule, there, newest + 1, needed, best)


def minimum_of(plan: Plan, source: str) -> int:
    """Return how many devices must have measured a metric so that it decides."""
    return plan.round.minimum if source == "round" else plan.evaluation.minimum


def best_versions(rule: Models, measured: Mapping[int, float]) -> set[int]:
    """Return the best of the versions whose metric is known. Of equals the newer one is better."""
    sign = 1 if rule.direction == "above" else -1
    ranked = sorted(
        (sign * value, version) for version, value in measured.items() if isfinite(value)
    )
    return {version for _, version in ranked[len(ranked) - min(rule.best or 0, len(ranked)) :]}


def measured(plan: Plan, versions: Iterable[int]) -> dict[int, float]:
    """Return the value of the metric by which models are kept, for those of these versions that
    were measured. Raises StoreError (damaged)."""
    found = metrics_of(plan, versions, plan.models.measured_by)
    metric = plan.models.metric or ""
    return {version: metrics[metric] for version, metrics in found.items() if metric in metrics}


def metrics_of(plan: Plan, versions: Iterable[int], source: str) -> dict[int, dict[str, float]]:
    """Return version -> what was measured of it. ``source``: ``round`` (by the devices of the round
    that began from it), ``evaluation`` (the last one of it) or ``held-out``. Raises StoreError
    (damaged)."""
    storage = find_storage(plan.data_dir)
    if source == "held-out":
        results = {version: storage.held_out.read(version) for version in versions}
        return {
            version: result["metrics"] for version, result in results.items() if result is not None
        }
    minimum = minimum_of(plan, source)
    with storage.read_ledger() as ledger:
        rows = (
            ledger.measured_in_rounds(versions)
            if source == "round"
            else ledger.valid_exchanges(EVALUATION, versions)
        )
    return {version: deciding(summary, minimum) for version, summary in rows.items()}
