"""What of a plan cannot be where devices compute sums in place of training, each with its reason.

Sums are exact: each row counts once, whole, and in a round whose devices all began from the same
state. Whatever weighs, rounds, compares or delays what a device sends would take that away; and
where there is no model, nothing measures one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.secure.fixed_point import PART_BITS

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out

NO_MODEL = "there is no model that could be measured"
WHOLE = "a device's sums count whole, so that the total is exact"


def _rule(breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]) -> PlanRule:
    """Return a rule that only plans of computations must keep."""

    def told(plan: PlanKeys) -> str:
        return f'local.algorithm = "{plan.local.algorithm}" computes sums: {text(plan)}'

    return PlanRule(lambda plan: plan.algorithm.computes and breaks(plan), told)


def _predicts(kind: str) -> bool:
    """Return whether a computation's state becomes a model."""
    # Late: it imports what the computations compute with.
    from fleetlearn_protocol.computations.kinds import KINDS

    return KINDS[kind].infer is not None


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
        lambda plan: f"{WHOLE}. Leave aggregation.normalise, q and max_norm out",
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
            or plan.local.mu is not None
            or plan.local.adaptive_mu
            or plan.local.hyper
            or plan.local.personal_epochs is not None
        ),
        lambda plan: (
            "it passes over the rows once, and makes no step. Leave local.epochs, lr, mu, "
            "adaptive_mu, hyper and personal_epochs out"
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
            and (plan.secure.clip is not None or plan.secure.bits != PART_BITS)
        ),
        lambda plan: (
            "sums are masked whole: nothing is clipped or rounded. Leave secure.clip and "
            "secure.bits out"
        ),
    ),
    _rule(
        lambda plan: plan.privacy is not None,
        lambda plan: (
            "[privacy] clips and noises the mean of updates of a model, and the total of sums is "
            "none. Leave [privacy] out"
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
        return None
    return (
        f"bundle {manifest.name} has the computation {kind_of(there)} in place of graphs, and "
        f'local.algorithm is "{algorithm}". Set recipe = "{kind_of(there)}"'
    )
