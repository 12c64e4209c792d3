"""What of a plan cannot be where devices compute sums in place of training, each with its reason.

Sums are exact: each row counts once, whole, and in a round whose devices all began from the same
state. Whatever weighs, rounds, compares or delays what a device sends would take that away; and
where there is no model, nothing measures one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fleetlearn_protocol.computations.settings import ComputationSettings, kind_of
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.secure.fixed_point import PART_BITS

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out, private_rule
from fleetlearn_coordinator.plan.privacy_section import PrivacySection

NO_MODEL = "there is no model that could be measured"
WHOLE = "a device's sums count whole, so that the total is exact"


_UNBOUNDED = {
    "boosted-components": ('base learners. Leave [privacy] out, or take recipe = "boosted-trees"'),
    "function": (
        "own functions. Leave [privacy] out; with [secure] the coordinator learns the total of all "
        "devices alone"
    ),
}
"""Kind whose sums have no bound -> which that is, and what to do."""


def _rule(breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]) -> PlanRule:
    """Return a rule that only plans of computations must keep."""

    def told(plan: PlanKeys) -> str:
        return f'local.algorithm = "{plan.local.algorithm}" computes sums: {text(plan)}'

    return PlanRule(lambda plan: plan.algorithm.computes and breaks(plan), told)


def _private_rule(
    breaks: Callable[[PlanKeys, PrivacySection], object],
    text: Callable[[PlanKeys, PrivacySection], str],
) -> PlanRule:
    """Return a rule that only plans of computations with [privacy] must keep."""
    inner = private_rule(breaks, text)
    return _rule(inner.breaks, inner.text)


def _predicts(kind: str) -> bool:
    """Return whether a computation's state becomes a model."""
    # Late: it imports what the computations compute with.
    from fleetlearn_protocol.computations.kinds import KINDS

    return KINDS[kind].infer is not None


def _has_bounds(kind: str) -> bool:
    """Return whether a kind's sums can be clipped."""
    from fleetlearn_protocol.computations.kinds import KINDS

    return KINDS[kind].groups is not None


COMPUTATION_RULES = (
    _rule(
        lambda plan: plan.round.asynchronous or plan.round.late == "carry",
        lambda plan: (
            "all devices of a round begin from the same state, and what they compute of an earlier "
            "one is no part of its total. It needs synchronous rounds that discard late reports"
        ),
    ),
    _rule(
        leaves_updates_out,
        lambda plan: (
            f'aggregation.aggregator = "{plan.aggregation.aggregator}" leaves devices out, and '
            f'{WHOLE}. It needs "mean", which here is the exact total'
        ),
    ),
    _rule(
        lambda plan: plan.aggregation.has_rule or plan.aggregation.max_norm is not None,
        lambda plan: f"{WHOLE}. Leave aggregation.normalise, q, weighing and max_norm out",
    ),
    _rule(
        lambda plan: plan.round.weighting != "uniform",
        lambda plan: f'{WHOLE}. It needs round.weighting = "uniform"; each row counts once',
    ),
    _rule(
        lambda plan: (
            plan.server.optimizer != "sgd" or plan.server.lr not in (None, 1.0) or plan.server.mix
        ),
        lambda plan: "the next state follows from the total alone. Leave [server] out",
    ),
    _rule(
        lambda plan: plan.server.devices is not None,
        lambda plan: "no share of devices moves a model. Leave server.devices out",
    ),
    _rule(
        lambda plan: (
            plan.local.epochs != 1
            or plan.local.lr is not None
            or plan.local.schedule is not None
            or plan.local.step_schedule is not None
            or plan.local.mu is not None
            or plan.local.adaptive_mu
            or plan.local.hyper
            or plan.local.personal_epochs is not None
        ),
        lambda plan: (
            "it passes over the rows once, and makes no step. Leave local.epochs, lr, "
            "schedule, step_schedule, mu, adaptive_mu, hyper and personal_epochs out"
        ),
    ),
    _rule(
        lambda plan: plan.local.time_budget is not None,
        lambda plan: (
            "sums of a part of the rows would be wrong. Leave local.time_budget out; "
            "round.deadline is the time that a device has"
        ),
    ),
    _rule(
        lambda plan: plan.encoding.up != FLOAT32.name or plan.encoding.down == "float16",
        lambda plan: (
            "whole numbers travel as they are, and so does the state. Leave encoding.up out; "
            'encoding.down takes "float32" or "delta"'
        ),
    ),
    _rule(
        lambda plan: (
            plan.local.evaluate
            or plan.evaluation.every is not None
            or plan.evaluation.data is not None
        ),
        lambda plan: f"{NO_MODEL}. Leave local.evaluate, evaluation.every and evaluation.data out",
    ),
    _rule(
        lambda plan: plan.stop.metric is not None or plan.models.metric is not None,
        lambda plan: f"{NO_MODEL}. Leave stop.metric and models.metric out",
    ),
    _rule(
        lambda plan: plan.stop.epsilon is not None,
        lambda plan: "its state does not converge: it ends when it is done. Leave stop.epsilon out",
    ),
    _rule(
        lambda plan: plan.selection.strategy != "uniform",
        lambda plan: (
            f'selection.strategy = "{plan.selection.strategy}" chooses devices by losses and '
            'speeds, so that some rows would count more often. It needs "uniform"'
        ),
    ),
    _rule(
        lambda plan: plan.models.give and not _predicts(plan.local.algorithm),
        lambda plan: (
            "models.give lets devices predict with the newest model, and there is none. "
            "`fleetlearn-coordinator result` shows what came out"
        ),
    ),
    _rule(
        lambda plan: (
            plan.secure is not None
            and (
                plan.secure.bits != PART_BITS
                or (plan.secure.clip is not None and plan.privacy is None)  # else it is privacy's
            )
        ),
        lambda plan: (
            "sums are masked whole: nothing is clipped or rounded. Leave secure.clip and "
            "secure.bits out"
        ),
    ),
    _private_rule(
        lambda plan, privacy: not _has_bounds(plan.local.algorithm),
        lambda plan, privacy: (
            "[privacy] needs a bound on what one row adds to the sums, which is not worked out for "
            f"{_UNBOUNDED.get(plan.local.algorithm, plan.local.algorithm)}"
        ),
    ),
    _private_rule(
        lambda plan, privacy: privacy.mechanism != "gaussian",
        lambda plan, privacy: (
            f'privacy.mechanism = "{privacy.mechanism}" is for rounds that '
            "change one model; here each round asks something else, and the coordinator adds noise "
            'to its total. It needs "gaussian"'
        ),
    ),
    _private_rule(
        lambda plan, privacy: privacy.clip_quantile is not None,
        lambda plan, privacy: (
            "a computation is done before a clip norm could follow what devices send. Leave "
            "privacy.clip_quantile out; privacy.clip is the number of rows that a device counts as "
            "without being shortened"
        ),
    ),
)


def computation_misfit(plan: PlanKeys, manifest: Manifest) -> str | None:
    """Return why the plan and the bundle do not fit together, and what to do. None: they do."""
    there, algorithm = manifest.computation, plan.local.algorithm
    if there is msgspec.UNSET:
        if not plan.algorithm.computes:
            return None
        return (
            f'local.algorithm = "{algorithm}" needs a bundle with such a computation, and bundle '
            f"{manifest.name} has graphs, which train. `fleetlearn-coordinator make-bundle` writes "
            "one"
        )
    if kind_of(there) == algorithm:
        return _without_sense(plan, there)
    return (
        f"bundle {manifest.name} has the computation {kind_of(there)} in place of graphs, and "
        f'local.algorithm is "{algorithm}". Set recipe = "{kind_of(there)}"'
    )


def _without_sense(plan: PlanKeys, settings: ComputationSettings) -> str | None:
    """Return what of the bundle's questions [privacy] would answer with noise alone, or plans noise
    for that never comes; None: nothing."""
    from fleetlearn_protocol.computations.kinds import KINDS

    if plan.privacy is None:
        return None
    kind = KINDS[kind_of(settings)]
    if (problem := kind.no_sense_with_noise(settings)) is not None:
        return f"the questions do not go with [privacy]: {problem}"
    if kind.releases is None or plan.privacy.noise is not None:
        return None
    most = kind.releases(settings)
    if plan.stop.rounds <= most:
        return None
    return (
        f"stop.rounds = {plan.stop.rounds} with [privacy]: the noise is computed for that many "
        f"releases, and this computation has {most}. Set stop.rounds = {most}"
    )
