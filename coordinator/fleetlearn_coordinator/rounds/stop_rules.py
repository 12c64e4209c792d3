"""When training is over."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.improvement import Improvement
from fleetlearn_coordinator.rounds.settings import Settings


def finish(
    rule: Settings,
    version: int,
    change: float,
    metrics: Mapping[str, float],
    measured: int | None = None,
    releases: int = 0,
    improvement: Improvement | None = None,
) -> Finish | None:
    """Return the stop rule that is met at this version, if one is.

    ``change`` is the L2 norm of the last committed round's change of the model. ``metrics`` are of
    the model of version ``measured``. ``releases``: how many rounds were committed. A roll back
    makes a version, and releases nothing. ``improvement``: of ``rule.metric``, these metrics
    included. None: nothing was measured.
    """
    if rule.rounds is not None and version >= rule.rounds:
        return Finish(f"{version} rounds done", "rounds", version, rule.rounds)
    if change < rule.epsilon:
        reason = f"the model's change, {change:.3g}, is below {rule.epsilon:.3g}"
        return Finish(reason, "epsilon", change, rule.epsilon)
    if rule.metric is not None and rule.target is not None and rule.metric in metrics:
        value = metrics[rule.metric]
        if value <= rule.target if rule.below else value >= rule.target:
            found = (
                f"{rule.metric} of model version {measured} is {value:.6g} on {rule.measured_on}"
            )
            reason = f"{found}; the target is {rule.target:.6g}"
            return Finish(reason, "metric", value, rule.target, rule.metric, measured)
    if improvement is not None and (met := _out_of_patience(rule, improvement)) is not None:
        return met
    if rule.budget is not None and releases >= rule.budget.releases:
        return rule.budget.spent
    return None


def _out_of_patience(rule: Settings, improvement: Improvement) -> Finish | None:
    if rule.patience is None or improvement.without < rule.patience:
        return None
    least = f" by more than {rule.least:.6g}" if rule.least else ""
    since = f"{improvement.without} measured models have not improved it{least}"
    best = improvement.best
    if best is None:
        reason = f"{rule.metric} was never finite on {rule.measured_on}: {since}"
        return Finish(reason, "patience", improvement.without, rule.patience, rule.metric)
    reason = (
        f"{rule.metric} on {rule.measured_on} is best, {best.value:.6g}, at model version "
        f"{best.version}: {since}"
    )
    return Finish(reason, "patience", best.value, rule.patience, rule.metric, best.version)
