"""What of a plan has no proof of differential privacy, or contradicts its [privacy].

What is proved is the Gaussian noise on a sum of clipped updates, each of which is at most the clip
norm long, whatever the other devices sent. A rule that looks at several updates, or lets what
devices measure decide about anything, is another mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.plan.distributed_noise import DISTRIBUTED_RULES
from fleetlearn_coordinator.plan.local_algorithms import untied
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import broken, leaves_updates_out, private_rule
from fleetlearn_coordinator.plan.privacy_metric_rules import MEASURED, METRIC_RULES
from fleetlearn_coordinator.plan.privacy_release_rules import RELEASE_RULES

UPDATE_RULES = (
    private_rule(
        lambda plan, privacy: privacy.epsilon is None and privacy.noise is None,
        lambda plan, privacy: (
            "[privacy] needs epsilon, the budget for which noise is computed, or noise, of which "
            "epsilon is computed; or both"
        ),
    ),
    private_rule(
        lambda plan, privacy: leaves_updates_out(plan),
        lambda plan, privacy: (
            f'aggregation.aggregator = "{plan.aggregation.aggregator}" with [privacy]: it looks at '
            "each update and compares it with the others, so that one device can change the result "
            "by more than its own clipped update, and no noise is known that hides this. It needs "
            'aggregation.aggregator = "mean"; privacy.clip bounds what one device can do'
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.aggregation.normalise,
        lambda plan, privacy: (
            "aggregation.normalise = true with [privacy]: FedNova multiplies the sum by a mean of "
            "the devices' numbers of steps, which tells how many examples each of them has. Leave "
            'it out; a device that did less work counts less with recipe = "dp-fedavg"'
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.aggregation.weighing is not None,
        lambda plan, privacy: (
            f'aggregation.weighing = "{plan.aggregation.weighing}" with [privacy]: what one '
            "device can change by its report is not bounded, and no noise is known that hides it. "
            "Leave it out"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.aggregation.q is not None,
        lambda plan, privacy: (
            f"aggregation.q = {plan.aggregation.q} with [privacy]: q-FedAvg multiplies updates by "
            "the devices' losses and divides by their sum, and neither is clipped or noised. Leave "
            "it out"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.algorithm.own,
        lambda plan, privacy: (
            f'local.algorithm = "{plan.local.function}" with [privacy]: nobody has shown what a '
            "function of the devices' owners tells beside the noise. Use one of ours"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.encoding.own is not None,
        lambda plan, privacy: (
            f'encoding.up = "{plan.encoding.up}" with [privacy]: nobody has shown that an own '
            "encoding keeps the bound of an update's norm, or what it tells beside the noise. Use "
            "one of ours"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.algorithm.tied,
        lambda plan, privacy: (
            f'local.algorithm = "{plan.local.algorithm}" with [privacy]: devices keep what their '
            "earlier updates made and send it, or let it change what they send, outside of the "
            f"clip norm; there is no proof for that. It needs local.algorithm = {untied()}"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.local.adaptive_mu,
        lambda plan, privacy: (
            f"local.adaptive_mu = true with [privacy]: mu follows the devices' losses, and "
            f"{MEASURED}. Set local.mu, which stays as it is"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.selection.strategy != "uniform",
        lambda plan, privacy: (
            f'selection.strategy = "{plan.selection.strategy}" with [privacy]: it chooses devices '
            "by their losses, so that who takes part tells about their data, and who takes part is "
            'not hidden. It needs selection.strategy = "uniform"'
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.round.weighting == "inverse-participation",
        lambda plan, privacy: (
            'round.weighting = "inverse-participation" with [privacy]: an update\'s weight depends '
            "on the others of its buffer, so that one device changes what all of them count. It "
            'needs round.weighting = "uniform"; privacy.separation and privacy.participations keep '
            "fast devices back"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.server.mix,
        lambda plan, privacy: (
            "server.mix = true with [privacy]: the model moves towards one device's whole model, "
            'and no clip norm bounds it. It needs server.mix = false; recipe = "fedbuff" is '
            "asynchronous too, and adds clipped updates"
        ),
    ),
    private_rule(
        lambda plan, privacy: plan.aggregation.max_norm is not None,
        lambda plan, privacy: (
            f"aggregation.max_norm = {plan.aggregation.max_norm:g} with [privacy]: privacy.clip = "
            f"{privacy.clip:g} is the bound of every update. Leave aggregation.max_norm out, and "
            "use privacy.clip_quantile where the bound is to follow the updates"
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.clip_quantile is not None and privacy.mechanism != "gaussian",
        lambda plan, privacy: (
            f"privacy.clip_quantile = {privacy.clip_quantile} is for privacy.mechanism = "
            f'"gaussian"; here it is "{privacy.mechanism}". '
            + (
                "Correlated noise of one release must cancel in later ones, which it does with one "
                "clip norm for the whole run"
                if privacy.mechanism == "dp-ftrl"
                else "Nobody but the device sees its update without noise, and can say whether it "
                "was longer"
            )
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.clip_rate is not None and privacy.clip_quantile is None,
        lambda plan, privacy: (
            f"privacy.clip_rate = {privacy.clip_rate} needs privacy.clip_quantile: without it the "
            "clip norm stays as it is"
        ),
    ),
    private_rule(
        lambda plan, privacy: (
            privacy.mechanism == "local" and (plan.round.asynchronous or plan.round.late == "carry")
        ),
        lambda plan, privacy: (
            (
                'round.participation = "asynchronous"'
                if plan.round.asynchronous
                else 'round.late = "carry"'
            )
            + ' with privacy.mechanism = "local": a device could send several updates between two '
            "releases, each of which the coordinator sees, whether it counts or not. It needs "
            "synchronous rounds that discard late updates"
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.mechanism == "local" and plan.round.weighting != "uniform",
        lambda plan, privacy: (
            f'round.weighting = "{plan.round.weighting}" with privacy.mechanism = "local": devices '
            "do not tell how many examples they have. It needs "
            'round.weighting = "uniform"'
        ),
    ),
)

BUFFERS = (
    "values, such as BatchNorm's running statistics, travel beside the update: nothing clips them, "
    "and they tell about a device's data directly. Use GroupNorm or LayerNorm, which have none, or "
    'keep the normalisation layers on the devices: export_bundle(..., personal="normalisation") '
    'and recipe = "fedbn" with this [privacy]'
)


def privacy_contradictions(plan: PlanKeys) -> Iterable[str]:
    """Yield what has no proof, each with its reason and with what to do."""
    for rules in (UPDATE_RULES, METRIC_RULES, RELEASE_RULES, DISTRIBUTED_RULES):
        yield from broken(rules, plan)


def privacy_misfit(plan: PlanKeys, manifest: Manifest) -> str | None:
    """Return why the plan's [privacy] cannot run this bundle, and what to do. None: it can."""
    privacy = plan.privacy
    if privacy is None:
        return None
    if manifest.buffers:
        return f"[privacy] and bundle {manifest.name}: its {BUFFERS}"
    known = ("loss", *manifest.metrics)
    for name in privacy.metrics_bounds:
        if name not in known:
            return (
                f"privacy.metrics_bounds.{name} is not measured by bundle {manifest.name}; its "
                f"metrics are {', '.join(known)}"
            )
    return None


def privacy_remarks(plan: PlanKeys) -> list[str]:
    """Say what the author of a private plan may not mean."""
    privacy = plan.privacy
    if privacy is None:
        return []
    texts = []
    if plan.durable == "process":
        texts.append(
            'durable = "process" with [privacy]: where the power fails, releases of the last '
            "seconds may be forgotten that were seen already, and epsilon is then more than what "
            'the run says. durable = "power", the default with [privacy], forgets none'
        )
    if privacy.delta >= 1 / privacy.population:
        texts.append(
            f"privacy.delta = {privacy.delta:g} is not below 1 / privacy.population = "
            f"{1 / privacy.population:g}: that would allow the whole data of one device to be shown"
        )
    goal, separation = plan.round.goal, privacy.separation
    if privacy.mechanism == "dp-ftrl" and privacy.most_of(plan.stop.rounds) == plan.stop.rounds:
        texts.append(
            f'privacy.mechanism = "dp-ftrl" with privacy.separation = {separation} and '
            f"privacy.participations = {privacy.participations}: a device may take part in each of "
            'the releases, and the noise is the same as with "gaussian". A larger separation makes '
            "it less; it needs privacy.population of at least separation x round.goal"
        )
    if separation * goal > privacy.population:
        texts.append(
            f"privacy.separation = {separation} releases of round.goal = {goal} devices need "
            f"{separation * goal} devices, and privacy.population is {privacy.population}: rounds "
            "will commit with fewer updates, and as much noise"
        )
    return texts
