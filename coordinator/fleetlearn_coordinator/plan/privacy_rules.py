"""What of a plan has no proof of differential privacy, or contradicts its [privacy].

What is proved is the Gaussian noise on a sum of clipped updates, each of which is at most the clip
norm long, whatever the other devices sent. A rule that looks at several updates, or lets what
devices measure decide about anything, is another mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, broken, leaves_updates_out
from fleetlearn_coordinator.plan.privacy_section import PrivacySection

MOST_CORRELATED = 100_000
"""Most releases that correlated noise is made for: its search takes a second for so many."""
MEASURED = "what devices measure tells about their data, and is not released"


def _rule(
    breaks: Callable[[PlanKeys, PrivacySection], object],
    text: Callable[[PlanKeys, PrivacySection], str],
) -> PlanRule:
    """Return a rule that only plans with [privacy] must keep."""

    def told(plan: PlanKeys) -> str:
        assert plan.privacy is not None
        return text(plan, plan.privacy)

    return PlanRule(lambda plan: plan.privacy is not None and breaks(plan, plan.privacy), told)


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


UPDATE_RULES = (
    _rule(
        lambda plan, privacy: privacy.epsilon is None and privacy.noise is None,
        lambda plan, privacy: (
            "[privacy] needs epsilon, the budget for which noise is computed, or noise, of which "
            "epsilon is computed; or both"
        ),
    ),
    _rule(
        lambda plan, privacy: leaves_updates_out(plan),
        lambda plan, privacy: (
            f'aggregation.aggregator = "{plan.aggregation.aggregator}" with [privacy]: it looks at '
            "each update and compares it with the others, so that one device can change the result "
            "by more than its own clipped update, and no noise is known that hides this. It needs "
            'aggregation.aggregator = "mean"; privacy.clip bounds what one device can do'
        ),
    ),
    _rule(
        lambda plan, privacy: plan.aggregation.normalise,
        lambda plan, privacy: (
            "aggregation.normalise = true with [privacy]: FedNova multiplies the sum by a mean of "
            "the devices' numbers of steps, which tells how many examples each of them has. Leave "
            'it out; a device that did less work counts less with recipe = "dp-fedavg"'
        ),
    ),
    _rule(
        lambda plan, privacy: plan.aggregation.q is not None,
        lambda plan, privacy: (
            f"aggregation.q = {plan.aggregation.q} with [privacy]: q-FedAvg multiplies updates by "
            "the devices' losses and divides by their sum, and neither is clipped or noised. Leave "
            "it out"
        ),
    ),
    _rule(
        lambda plan, privacy: plan.algorithm.tied,
        lambda plan, privacy: (
            f'local.algorithm = "{plan.local.algorithm}" with [privacy]: devices keep what their '
            "earlier updates made and send it, or let it change what they send, outside of the "
            'clip norm; there is no proof for that. It needs local.algorithm = "plain", "fedrep" '
            'or "ditto"'
        ),
    ),
    _rule(
        lambda plan, privacy: plan.local.adaptive_mu,
        lambda plan, privacy: (
            f"local.adaptive_mu = true with [privacy]: mu follows the devices' losses, and "
            f"{MEASURED}. Set local.mu, which stays as it is"
        ),
    ),
    _rule(
        lambda plan, privacy: plan.selection.strategy != "uniform",
        lambda plan, privacy: (
            f'selection.strategy = "{plan.selection.strategy}" with [privacy]: it chooses devices '
            "by their losses, so that who takes part tells about their data, and who takes part is "
            'not hidden. It needs selection.strategy = "uniform"'
        ),
    ),
    _rule(
        lambda plan, privacy: plan.round.weighting == "inverse-participation",
        lambda plan, privacy: (
            'round.weighting = "inverse-participation" with [privacy]: an update\'s weight depends '
            "on the others of its buffer, so that one device changes what all of them count. It "
            'needs round.weighting = "uniform"; privacy.separation and privacy.participations keep '
            "fast devices back"
        ),
    ),
    _rule(
        lambda plan, privacy: plan.server.mix,
        lambda plan, privacy: (
            "server.mix = true with [privacy]: the model moves towards one device's whole model, "
            'and no clip norm bounds it. It needs server.mix = false; recipe = "fedbuff" is '
            "asynchronous too, and adds clipped updates"
        ),
    ),
    _rule(
        lambda plan, privacy: plan.aggregation.max_norm is not None,
        lambda plan, privacy: (
            f"aggregation.max_norm = {plan.aggregation.max_norm:g} with [privacy]: privacy.clip = "
            f"{privacy.clip:g} is the bound of every update. Leave aggregation.max_norm out, and "
            "use privacy.clip_quantile where the bound is to follow the updates"
        ),
    ),
    _rule(
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
    _rule(
        lambda plan, privacy: privacy.clip_rate is not None and privacy.clip_quantile is None,
        lambda plan, privacy: (
            f"privacy.clip_rate = {privacy.clip_rate} needs privacy.clip_quantile: without it the "
            "clip norm stays as it is"
        ),
    ),
    _rule(
        lambda plan, privacy: privacy.mechanism == "local" and plan.round.weighting != "uniform",
        lambda plan, privacy: (
            f'round.weighting = "{plan.round.weighting}" with privacy.mechanism = "local": devices '
            "do not tell how many examples they have. It needs "
            'round.weighting = "uniform"'
        ),
    ),
)

METRIC_RULES = (
    _rule(
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
    _rule(
        lambda plan, privacy: privacy.mechanism == "local" and privacy.metrics == "noised",
        lambda plan, privacy: (
            'privacy.metrics = "noised" with privacy.mechanism = "local": devices send nothing '
            'that they measure. It needs privacy.metrics = "none"'
        ),
    ),
    _rule(
        lambda plan, privacy: plan.local.evaluate and privacy.metrics == "none",
        lambda plan, privacy: (
            f'local.evaluate = true with privacy.metrics = "none": {MEASURED}, so that devices '
            'would measure for nothing. Set local.evaluate = false, or privacy.metrics = "noised"'
        ),
    ),
    _rule(
        lambda plan, privacy: privacy.metrics == "noised" and not plan.local.evaluate,
        lambda plan, privacy: (
            'privacy.metrics = "noised" needs local.evaluate = true: devices measure nothing'
        ),
    ),
    _rule(
        lambda plan, privacy: (
            privacy.metrics == "none"
            and (privacy.metrics_noise is not None or privacy.metrics_bounds)
        ),
        lambda plan, privacy: (
            "privacy.metrics_noise and privacy.metrics_bounds need privacy.metrics = "
            '"noised"; it is "none"'
        ),
    ),
    _rule(
        lambda plan, privacy: _measures_by_round(plan.stop.measured_by, privacy, plan.stop.metric),
        lambda plan, privacy: _released("stop.metric", plan.stop.metric),
    ),
    _rule(
        lambda plan, privacy: (
            plan.models.best is not None
            and _measures_by_round(plan.models.measured_by, privacy, plan.models.metric)
        ),
        lambda plan, privacy: _released("models.metric", plan.models.metric),
    ),
    _rule(
        lambda plan, privacy: privacy.metrics == "noised" and not privacy.metrics_bounds,
        lambda plan, privacy: (
            'privacy.metrics = "noised" needs privacy.metrics_bounds, the values that are released '
            "and what a device's mean of them can be, such as {accuracy = [0, 1], loss = [0, 5]}: "
            "the noise is in proportion to the difference"
        ),
    ),
    _rule(
        lambda plan, privacy: _bad_bounds(privacy),
        lambda plan, privacy: (
            f"privacy.metrics_bounds.{_bad_bounds(privacy)} = "
            f"{list(privacy.metrics_bounds[_bad_bounds(privacy) or ''])} takes two "
            "different numbers, the least and then the greatest that a device's mean counts as"
        ),
    ),
)


def _fixed_size(plan: PlanKeys) -> str:
    """Return what of the plan is no round of independent coins."""
    privacy = plan.privacy
    assert privacy is not None
    if privacy.mechanism != "gaussian":
        return f'privacy.mechanism = "{privacy.mechanism}"'
    if plan.round.asynchronous:
        return 'round.participation = "asynchronous"'
    if plan.round.late == "carry":
        return 'round.late = "carry"'
    return f"privacy.separation = {privacy.separation}"


POPULATION_RULES = (
    _rule(
        lambda plan, privacy: privacy.mechanism == "dp-ftrl" and plan.stop.rounds > MOST_CORRELATED,
        lambda plan, privacy: (
            f'stop.rounds = {plan.stop.rounds} with privacy.mechanism = "dp-ftrl": the noise is '
            "made for the rounds that are planned, and the more there are the larger it is. State "
            f"how many rounds there will be, up to {MOST_CORRELATED}"
        ),
    ),
    _rule(
        lambda plan, privacy: (
            privacy.sampling == "poisson"
            and (
                privacy.mechanism != "gaussian"
                or plan.round.asynchronous
                or plan.round.late == "carry"
                or privacy.separation > 1
            )
        ),
        lambda plan, privacy: (
            f'privacy.sampling = "poisson" with {_fixed_size(plan)}: the smaller epsilon holds '
            "where each device takes part in each release by a coin of its own, whatever it did "
            "before, and with noise of its own for each release. It needs mechanism = "
            '"gaussian", synchronous rounds that discard late updates, and separation = 1'
        ),
    ),
    _rule(
        lambda plan, privacy: privacy.population < plan.round.goal,
        lambda plan, privacy: (
            f"privacy.population = {privacy.population} is less than round.goal = "
            f"{plan.round.goal}: no round could be full"
        ),
    ),
    _rule(
        lambda plan, privacy: privacy.separation * plan.round.minimum > privacy.population,
        lambda plan, privacy: (
            f"privacy.separation = {privacy.separation} releases of at least round.minimum = "
            f"{plan.round.minimum} devices need {privacy.separation * plan.round.minimum} devices, "
            f"and privacy.population is {privacy.population}: the run would come to a round for "
            "which no device may take part yet, and wait for ever. It takes a separation of at "
            f"most {privacy.population // plan.round.minimum}"
        ),
    ),
    _rule(
        lambda plan, privacy: (
            plan.stop.rounds * plan.round.minimum
            > privacy.population * privacy.most_of(plan.stop.rounds)
        ),
        lambda plan, privacy: (
            f"stop.rounds = {plan.stop.rounds} releases of at least round.minimum = "
            f"{plan.round.minimum} devices need {plan.stop.rounds * plan.round.minimum} "
            f"participations, and privacy.population = {privacy.population} devices have "
            f"{privacy.population * privacy.most_of(plan.stop.rounds)} of them, at most "
            f"{privacy.most_of(plan.stop.rounds)} each: the run could never end. It takes "
            "more privacy.participations, or fewer rounds"
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
    for rules in (UPDATE_RULES, METRIC_RULES, POPULATION_RULES):
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
