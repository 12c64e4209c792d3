"""What of a plan cannot be where devices tell class scores of public examples (FedMD), each with
its reason.

The run's vector is the consensus, the mean of all devices' scores, and no model. Its updates are
differences from the consensus, so that whatever a mean of updates can do is there: encodings,
bounds of the norm, robust aggregators, [privacy] and [secure].
"""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_protocol.manifest import Manifest
from msgspec import UNSET

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule

NO_MODEL = "the coordinator has no model: each device keeps its own"


def _rule(breaks: Callable[[PlanKeys], object], text: str) -> PlanRule:
    """Return a rule that only plans whose devices tell scores must keep."""
    return PlanRule(
        lambda plan: plan.algorithm.scores and breaks(plan),
        lambda plan: f'local.algorithm = "{plan.local.algorithm}": {text}',
    )


SCORES_RULES = (
    _rule(
        lambda plan: plan.round.asynchronous or plan.round.late == "carry",
        "a late device digested an older consensus, and the mean would hold what all have left "
        "since. It needs synchronous rounds that discard late reports",
    ),
    _rule(
        lambda plan: (
            plan.server.optimizer != "sgd" or plan.server.lr not in (None, 1.0) or plan.server.mix
        ),
        "the consensus is the mean of the devices' scores. Leave [server] out",
    ),
    _rule(
        lambda plan: plan.round.weighting == "inverse-participation",
        "devices that come seldom would be most of the consensus. It needs round.weighting = "
        '"uniform", or "examples"',
    ),
    _rule(
        lambda plan: plan.evaluation.every is not None or plan.evaluation.data is not None,
        f"{NO_MODEL}. Leave evaluation.every and evaluation.data out; local.evaluate = true has "
        "each device measure its own model",
    ),
    _rule(
        lambda plan: plan.models.give,
        f"{NO_MODEL}, which `predict` and own_model use. Leave models.give out",
    ),
    _rule(
        lambda plan: plan.is_family,
        "devices choose their models by themselves, and the bundle has none. Leave [family] and "
        "[clusters] out",
    ),
    _rule(
        lambda plan: plan.distil is not None,
        "the devices distil by themselves, and the coordinator has no model. Leave [distil] out",
    ),
    _rule(
        lambda plan: plan.quality is not None,
        f"{NO_MODEL} that devices could be compared by. Leave [quality] out",
    ),
)


def scores_misfit(plan: PlanKeys, manifest: Manifest) -> str | None:
    """Return why the plan and the bundle do not fit together, and what to do. None: they do."""
    has_public = manifest.public is not UNSET
    if plan.algorithm.scores and not has_public:
        return (
            f'local.algorithm = "{plan.local.algorithm}" needs a bundle of public examples, and '
            f"bundle {manifest.name} has none. `fleetlearn-coordinator public-bundle` writes one; "
            "the bundles of models stay on the devices"
        )
    if has_public and not plan.algorithm.scores:
        return (
            f"bundle {manifest.name} has public examples in place of graphs, and local.algorithm "
            f'is "{plan.local.algorithm}". Set recipe = "fedmd"'
        )
    return None
