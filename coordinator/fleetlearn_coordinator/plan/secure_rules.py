"""What of a plan cannot be where the coordinator knows the sum of updates alone: what contradicts
[secure], each with its reason.

Whatever looks at one update, weighs it by what its device measured, or takes it by itself, needs
what [secure] hides. The coordinator cannot check that updates are clipped either: a device that
does not clip can move each element of the mean by as much as the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.secure.fixed_point import SHORT_BITS, modulus_bits, most_updates

from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS
from fleetlearn_coordinator.plan.distributed_noise import DISTRIBUTED, device_noise
from fleetlearn_coordinator.plan.local_algorithms import untied
from fleetlearn_coordinator.plan.pairwise_rules import mode_contradictions
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, broken, leaves_updates_out
from fleetlearn_coordinator.plan.privacy_terms import noise_multiplier
from fleetlearn_coordinator.plan.secure_section import SecureSection

MEASURED = "devices send nothing that they measure, as it would tell about their data"


def _secure_rule(
    breaks: Callable[[PlanKeys, SecureSection], object],
    text: Callable[[PlanKeys, SecureSection], str],
) -> PlanRule:
    """Return a rule that only plans with [secure] must keep."""

    def told(plan: PlanKeys) -> str:
        assert plan.secure is not None
        return text(plan, plan.secure)

    return PlanRule(lambda plan: plan.secure is not None and breaks(plan, plan.secure), told)


SECURE_RULES = (
    _secure_rule(
        lambda plan, secure: secure.clip is None and not plan.algorithm.computes,
        lambda plan, secure: (
            "secure.clip is missing: an update is written in whole numbers, which need a largest "
            "one. Devices shorten longer updates to this L2 norm"
        ),
    ),
    _secure_rule(
        lambda plan, secure: leaves_updates_out(plan),
        lambda plan, secure: (
            f'aggregation.aggregator = "{plan.aggregation.aggregator}" with [secure]: it compares '
            "each update with the others, and the coordinator knows their sum alone. It needs "
            'aggregation.aggregator = "mean"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.aggregation.normalise,
        lambda plan, secure: (
            "aggregation.normalise = true with [secure]: FedNova multiplies each update by its "
            "device's number of steps, and the coordinator has no single update. Use another "
            'recipe, such as "fedavg"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.aggregation.weighing is not None,
        lambda plan, secure: (
            f'aggregation.weighing = "{plan.aggregation.weighing}" with [secure]: it multiplies '
            "each update by what its report says, and the coordinator has no single update. Leave "
            "it out"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.staleness.function not in (None, *FUNCTIONS),
        lambda plan, secure: (
            f'staleness.function = "{plan.staleness.function}" with [secure]: devices shorten '
            "their updates by what it may leave of them at least, which is known of our functions "
            f"alone. It takes {', '.join(FUNCTIONS)}"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.aggregation.q is not None,
        lambda plan, secure: (
            f"aggregation.q = {plan.aggregation.q} with [secure]: q-FedAvg multiplies each update "
            "by its device's loss and divides by their norms, and the coordinator knows neither. "
            'Use another recipe, such as "fedavg"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.aggregation.max_norm is not None,
        lambda plan, secure: (
            f"aggregation.max_norm = {plan.aggregation.max_norm:g} with [secure]: the coordinator "
            f"cannot measure a masked update. Leave it out: devices shorten their updates to "
            f"secure.clip = {_clip(secure):g}"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.algorithm.own,
        lambda plan, secure: (
            f'local.algorithm = "{plan.local.function}" with [secure]: nobody has shown what a '
            "function of the devices' owners tells beside the mask. Use one of ours"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.algorithm.tied,
        lambda plan, secure: (
            f'local.algorithm = "{plan.local.algorithm}" with [secure]: devices keep what their '
            "updates made before these were clipped, or send it beside them without a mask. It "
            f"needs local.algorithm = {untied()}"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.local.adaptive_mu,
        lambda plan, secure: (
            f"local.adaptive_mu = true with [secure]: mu follows the devices' losses, and "
            f"{MEASURED}. Set local.mu, which stays as it is"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.local.schedule is not None and secure.mode == "helper",
        lambda plan, secure: (
            '[local.schedule] with secure.mode = "helper": devices sign the learning rate that '
            "they trained with, and all of a sum the same. It takes a fixed local.lr, or "
            'secure.mode = "pairwise"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: (
            plan.local.step_schedule is not None
            and plan.local.step_schedule.steps_per_round is not None
            and secure.mode == "helper"
        ),
        lambda plan, secure: (
            'local.step_schedule.steps_per_round with secure.mode = "helper": devices sign the '
            "schedule that they trained with, and all of a run the same. Leave it out: then each "
            'task begins at step 0. secure.mode = "pairwise" takes it'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.selection.strategy != "uniform",
        lambda plan, secure: (
            f'selection.strategy = "{plan.selection.strategy}" with [secure]: it chooses devices '
            f'by their losses, and {MEASURED}. It needs selection.strategy = "uniform"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.round.weighting == "inverse-participation",
        lambda plan, secure: (
            'round.weighting = "inverse-participation" with [secure]: a device masks its weight, '
            "and does not know how many updates the others have. It needs round.weighting = "
            '"uniform" or "examples"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.server.mix,
        lambda plan, secure: (
            "server.mix = true with [secure]: the model moves by one device's update at a time, "
            'which the sum would not hide. It needs server.mix = false; recipe = "fedbuff" is '
            "asynchronous too, and adds several"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.round.max_share is not None,
        lambda plan, secure: (
            f"round.max_share = {plan.round.max_share} with [secure]: of each device one update "
            "counts in a round, as the helper counts devices and takes one of each from a model. "
            "Leave it out"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.encoding.up != FLOAT32.name,
        lambda plan, secure: (
            f'encoding.up = "{plan.encoding.up}" with [secure]: updates are words of secure.bits = '
            f"{secure.bits} with a mask, which no other encoding can make shorter. Leave it out"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.round.minimum < secure.minimum,
        lambda plan, secure: (
            f"round.minimum = {plan.round.minimum} is less than secure.minimum = {secure.minimum}: "
            "so few updates are not added up, and the round could not be committed. Raise "
            f"round.minimum to {secure.minimum}, or lower secure.minimum"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.round.goal > most_updates(secure.bits),
        lambda plan, secure: (
            f"round.goal = {plan.round.goal} with secure.bits = {secure.bits}: at most "
            f"{most_updates(secure.bits)} such updates can be added modulo "
            f"2^{modulus_bits(secure.bits)}"
        ),
    ),
    _secure_rule(
        lambda plan, secure: (
            secure.bits <= SHORT_BITS
            and plan.privacy is not None
            and plan.privacy.mechanism == DISTRIBUTED
        ),
        lambda plan, secure: (
            f'secure.bits = {secure.bits} with privacy.mechanism = "{DISTRIBUTED}": the noise that '
            "devices add needs room that sums modulo 2^24 do not have. Leave secure.bits out"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.privacy is not None and plan.privacy.metrics != "none",
        lambda plan, secure: (
            f'privacy.metrics = "noised" with [secure]: {MEASURED}, and so nothing is there that '
            'noise could be added to. It needs privacy.metrics = "none"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.local.evaluate,
        lambda plan, secure: (
            f"local.evaluate = true with [secure]: {MEASURED}, so that they would measure for "
            "nothing. Set local.evaluate = false"
        ),
    ),
    _secure_rule(
        lambda plan, secure: (
            plan.evaluation.every is not None
            or "evaluation" in (plan.stop.measured_by, plan.models.measured_by)
        ),
        lambda plan, secure: (
            f"evaluation.every = {plan.evaluation.every} with [secure]: {MEASURED}. Use held-out "
            'data of the coordinator\'s own: evaluation.data and measured_by = "held-out"'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.stop.metric is not None and plan.stop.measured_by == "round",
        lambda plan, secure: _of_round("stop.metric", plan.stop.metric),
    ),
    _secure_rule(
        lambda plan, secure: plan.models.best is not None and plan.models.measured_by == "round",
        lambda plan, secure: _of_round("models.metric", plan.models.metric),
    ),
    _secure_rule(
        lambda plan, secure: plan.privacy is not None and plan.privacy.mechanism == "local",
        lambda plan, secure: (
            'privacy.mechanism = "local" with [secure]: noise has no largest element, and words of '
            f"secure.bits = {secure.bits} have. It needs privacy.mechanism = "
            '"distributed": each device adds a part of the noise, and the sum has all of it; or '
            '"gaussian" or "dp-ftrl": the coordinator adds the noise to the sum'
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.privacy is not None and plan.privacy.clip_quantile is not None,
        lambda plan, secure: (
            "privacy.clip_quantile with [secure]: nobody counts how many updates were longer than "
            "the clip norm. Leave it out"
        ),
    ),
    _secure_rule(
        lambda plan, secure: plan.privacy is not None and plan.privacy.clip != secure.clip,
        lambda plan, secure: (
            f"secure.clip = {_clip(secure):g} is not privacy.clip = "
            f"{0 if plan.privacy is None else plan.privacy.clip:g}, which the noise is for. Leave "
            "secure.clip out"
        ),
    ),
)


def _clip(secure: SecureSection) -> float:
    return 0.0 if secure.clip is None else secure.clip


def _of_round(key: str, metric: str | None) -> str:
    return (
        f'{key} = "{metric}" with [secure] is measured by the devices of the round, and '
        f"{MEASURED}. Use held-out data of the coordinator's own: evaluation.data and measured_by "
        '= "held-out"'
    )


def secure_contradictions(plan: PlanKeys) -> Iterable[str]:
    """Yield what cannot be with masked updates, each with its reason and with what to do."""
    yield from broken(SECURE_RULES, plan)
    yield from mode_contradictions(plan)


def secure_misfit(plan: PlanKeys, manifest: Manifest) -> str | None:
    """Return why the plan's [secure] cannot run this bundle, and what to do. None: it can."""
    if plan.secure is None:
        return None
    most = (2**plan.secure.bits - 1) ** 2
    if manifest.size > most:
        # A word of 0 means half a step at least, whose square is that part of the bound's.
        return (
            f"secure.bits = {plan.secure.bits} and bundle {manifest.name} with {manifest.size} "
            f"elements: at most {most} fit. Even an update of zeros, rounded to so few bits, is "
            "longer than the clip norm. Use more bits"
        )
    if not manifest.buffers:
        return None
    return (
        f"[secure] and bundle {manifest.name}: its values, such as BatchNorm's running statistics, "
        "travel beside the update, without a mask. Use GroupNorm or LayerNorm, which have none, or "
        'keep them on the devices: export_bundle(..., personal="normalisation") and recipe = '
        '"fedbn"'
    )


def fixed_point(plan: PlanKeys) -> FixedPoint | None:
    """Return how the plan's updates are written before they are masked; None without [secure], and
    where devices compute sums. Raises PrivacyError where devices are to add noise that cannot
    be."""
    secure, privacy = plan.secure, plan.privacy
    if secure is None or plan.algorithm.computes:
        return None
    assert secure.clip is not None, "the plan's rules see to that"
    noise = 0.0
    if privacy is not None and privacy.mechanism == DISTRIBUTED:
        noise = device_noise(plan, noise_multiplier(plan))
    return FixedPoint(secure.clip, secure.bits, plan.round.weighting == "uniform", noise)


def secure_remarks(plan: PlanKeys) -> list[str]:
    """Say what the author of a plan with [secure] may not mean."""
    secure = plan.secure
    if secure is None:
        return []
    remarks = []
    if plan.algorithm.computes:
        remarks.append(
            "[secure] hides each round's sums by themselves. Rounds ask for much the same of the "
            "same rows: where a device is in one round's total and not in the next one's, the "
            "difference of the two tells of that device. Have many devices in each round"
        )
    if secure.bits <= SHORT_BITS:
        step = 2 * _clip(secure) / (2**secure.bits - 1)
        remarks.append(
            f"secure.bits = {secure.bits}: each element of an update is rounded up or down at "
            f"random to a multiple of {step:.3g} (2 * secure.clip / {2**secure.bits - 1}), which "
            f"adds noise of a standard deviation of at most {step / 2:.3g} to it, and of at most "
            f"{step / 2 / plan.round.goal**0.5:.3g} to the mean of {plan.round.goal} equal updates"
        )
    if plan.privacy is None:
        return remarks
    return [
        *remarks,
        "[privacy] with [secure]: devices clip their updates, and the coordinator cannot check it. "
        "The budget holds for devices that clip; one that does not is not protected, and can move "
        "the model further than others",
    ]
