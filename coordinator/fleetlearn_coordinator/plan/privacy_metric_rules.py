"""What of a plan contradicts its [privacy] about metrics: what devices measure is released with
noise, or not at all."""

from __future__ import annotations

from fleetlearn_coordinator.plan.plan_rule import private_rule
from fleetlearn_coordinator.plan.privacy_section import PrivacySection

MEASURED = "what devices measure tells about their data, and is not released"


def _measures_by_round(measured_by: str, privacy: PrivacySection, metric: str | None) -> bool:
    """Whether a metric of the round's devices, which is not released, would decide something."""
    unreleased = privacy.metrics == "none" or metric not in privacy.metrics_bounds
    return metric is not None and measured_by == "round" and unreleased


def _released(key: str, metric: str | None) -> str:
    return (
        f'{key} = "{metric}" is measured by the devices of the round, and {MEASURED}. It needs '
        f'privacy.metrics = "noised" with privacy.metrics_bounds = {{{metric} = [least, '
        "greatest]}, or held-out data of the coordinator's own: evaluation.data and measured_by = "
        '"held-out"'
    )


def _bad_bounds(privacy: PrivacySection) -> str | None:
    """Return the first released value whose least value is not below its greatest."""
    bounds = privacy.metrics_bounds.items()
    return next((name for name, (low, high) in bounds if low >= high), None)


METRIC_RULES = (
    private_rule(
        lambda plan, privacy: (
            plan.evaluation.every is not None
            or "evaluation" in (plan.stop.measured_by, plan.models.measured_by)
        ),
        lambda plan, privacy: (
            f"evaluation.every = {plan.evaluation.every} with [privacy]: the devices of an "
            f"evaluation measure on their own data, and {MEASURED}. Use held-out data of the "
            'coordinator\'s own (evaluation.data, measured_by = "held-out"), or the devices of the '
            'rounds with privacy.metrics = "noised"'
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.mechanism == "local" and privacy.metrics == "noised",
        lambda plan, privacy: (
            'privacy.metrics = "noised" with privacy.mechanism = "local": devices send nothing '
            'that they measure. It needs privacy.metrics = "none"'
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.local.evaluate and privacy.metrics == "none",
        lambda plan, privacy: (
            f'local.evaluate = true with privacy.metrics = "none": {MEASURED}, so that devices '
            'would measure for nothing. Set local.evaluate = false, or privacy.metrics = "noised"'
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.metrics == "noised" and not plan.local.evaluate,
        lambda plan, privacy: (
            'privacy.metrics = "noised" needs local.evaluate = true: devices measure nothing'
        ),
    ),
    private_rule(
        lambda plan, privacy: (
            privacy.metrics == "none"
            and (privacy.metrics_noise is not None or privacy.metrics_bounds)
        ),
        lambda plan, privacy: (
            "privacy.metrics_noise and privacy.metrics_bounds need privacy.metrics = "
            '"noised"; it is "none"'
        ),
    ),
    private_rule(
        lambda plan, privacy: _measures_by_round(plan.stop.measured_by, privacy, plan.stop.metric),
        lambda plan, privacy: _released("stop.metric", plan.stop.metric),
    ),
    private_rule(
        lambda plan, privacy: (
            plan.models.best is not None
            and _measures_by_round(plan.models.measured_by, privacy, plan.models.metric)
        ),
        lambda plan, privacy: _released("models.metric", plan.models.metric),
    ),
    private_rule(
        lambda plan, privacy: privacy.metrics == "noised" and not privacy.metrics_bounds,
        lambda plan, privacy: (
            'privacy.metrics = "noised" needs privacy.metrics_bounds, the values that are released '
            "and what a device's mean of them can be, such as {accuracy = [0, 1], loss = [0, 5]}: "
            "the noise is in proportion to the difference"
        ),
    ),
    private_rule(
        lambda plan, privacy: _bad_bounds(privacy),
        lambda plan, privacy: (
            f"privacy.metrics_bounds.{_bad_bounds(privacy)} = "
            f"{list(privacy.metrics_bounds[_bad_bounds(privacy) or ''])} takes two "
            "different numbers, the least and then the greatest that a device's mean counts as"
        ),
    ),
)
