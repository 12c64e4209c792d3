"""What of a plan contradicts itself: keys that are right by themselves, and not together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fleetlearn_protocol.encodings import find_encoding, leaves_residual
from fleetlearn_protocol.errors import ProtocolError

from fleetlearn_coordinator.aggregation import aggregators
from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.plan.aggregation_rules import contradictions_of_aggregation
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.sections import PaceSection

if TYPE_CHECKING:
    from fleetlearn_coordinator.plan.plan import Plan


def contradictions(plan: Plan) -> Iterable[str]:
    """Yield what of the plan contradicts itself, each with what it takes."""
    round_, stop = plan.round, plan.stop
    if round_.minimum > round_.goal:
        yield f"round.minimum = {round_.minimum} is more than round.goal = {round_.goal}; it takes 1 to the goal"
    measuring = plan.evaluation
    if measuring.minimum > measuring.devices:
        yield (
            f"evaluation.minimum = {measuring.minimum} is more than evaluation.devices = {measuring.devices}; it takes "
            "1 to the devices"
        )
    if plan.models.best is not None and plan.models.metric is None:
        yield f"models.best = {plan.models.best} needs models.metric: what the best models are best by"
    if plan.models.best is not None and plan.models.measured_by == "held-out" and measuring.data is None:
        yield 'models.measured_by = "held-out" needs evaluation.data'
    if plan.server.mix and (round_.goal != 1 or not round_.asynchronous or plan.server.optimizer != "sgd"):
        yield (
            "server.mix = true mixes the model with one device's at a time: it needs round.participation = "
            f'"asynchronous", round.goal = 1 (it is {round_.goal}) and server.optimizer = "sgd"'
        )
    yield from contradictions_of_aggregation(
        plan.aggregation, round_, mix=plan.server.mix, evaluate=plan.local.evaluate
    )
    yield from _contradictions_of_algorithm(plan)
    if round_.weighting == "inverse-participation" and (not round_.asynchronous or round_.goal == 1):
        yield (
            'round.weighting = "inverse-participation" weighs the updates of one buffer against each other: it needs '
            f'round.participation = "asynchronous" and a round.goal above 1 (it is {round_.goal})'
        )
    if plan.most_updates_of_a_device == 0:
        yield (
            f"round.max_share = {round_.max_share} of round.goal = {round_.goal} is less than one update; it takes "
            f"{1 / round_.goal:.3g} to 1"
        )
    yield from plan.selection.contradictions(
        asynchronous=round_.asynchronous, tasks=round_.goal if round_.asynchronous else round_.cohort
    )
    if round_.cohort > MAX_UPDATES:
        yield f"round.goal * round.over_selection gives a cohort of {round_.cohort}; the limit is {MAX_UPDATES}"
    if plan.local.time_budget is not None and plan.local.time_budget > round_.deadline:
        yield f"local.time_budget = {plan.local.time_budget} s is more than round.deadline = {round_.deadline} s"
    if plan.recipe == "fedsgd" and (plan.local.epochs, plan.local.batch_size) != (1, 0):
        yield (
            f"local.epochs = {plan.local.epochs} and local.batch_size = {plan.local.batch_size}: recipe fedsgd is one "
            'step on all examples, epochs = 1 and batch_size = 0; more steps are recipe = "fedavg"'
        )
    if leaves_residual(plan.encoding.up) and plan.aggregation.aggregator != aggregators.MEAN.name:
        yield (
            f'encoding.up = "{plan.encoding.up}" leaves most elements of each update out: the aggregator '
            f"{plan.aggregation.aggregator} compares updates element by element, or by their distances"
        )
    if plan.server.mix and plan.encoding.down == "float16":
        yield 'encoding.down = "float16": server.mix = true moves the model towards what devices were sent exactly'
    try:
        find_encoding(plan.encoding.up)
    except ProtocolError as error:
        yield f'encoding.up = "{plan.encoding.up}": {error.text}'
    if plan.pace.connected is None and plan.pace != PaceSection():
        yield "pace.longest and pace.check_ins need pace.connected, how many devices stay connected"
    if plan.pace.connected is not None and plan.pace.connected < round_.cohort:
        what = "round.concurrency" if round_.asynchronous else "the cohort (round.goal * round.over_selection)"
        yield f"pace.connected = {plan.pace.connected} is less than {what}, {round_.cohort}: rounds could not be full"
    for key in {"lr", "mu"} & set(plan.local.hyper):
        yield f"local.hyper.{key} has its own key: local.{key}"
    if stop.target is not None and stop.metric is None:
        yield f'stop.target = {stop.target} needs stop.metric, the name of a metric of the bundle or "loss"'
    if stop.metric is not None and stop.target is None:
        yield f'stop.metric = "{stop.metric}" needs stop.target, the value to stop at'
    if stop.bounds is not None and stop.metric is None:
        yield f"stop.bounds = {list(stop.bounds)} needs stop.metric, the metric that can be no more and no less"
    for low, high in plan.bounds.values():
        if stop.target is None or (low < high and low <= stop.target <= high):
            continue
        if stop.bounds is not None:
            yield f"stop.bounds = {list(stop.bounds)} takes the least and the greatest value, with the target between"
        yield (
            f"stop.target = {stop.target} needs stop.bounds = [least, greatest], what {stop.metric} can be for one "
            "example: a device that reports more or less must not stop the run"
        )
    if stop.metric is not None and stop.measured_by == "round" and not plan.local.evaluate:
        yield f'stop.metric = "{stop.metric}" is measured by the devices: it needs local.evaluate = true'
    if stop.measured_by == "held-out" and plan.evaluation.data is None:
        yield 'stop.measured_by = "held-out" needs evaluation.data, an .npz file of held-out data'
    if stop.measured_by == "evaluation" and plan.evaluation.every is None:
        yield 'stop.measured_by = "evaluation" needs evaluation.every, the number of rounds between two evaluations'


def _contradictions_of_algorithm(plan: Plan) -> Iterable[str]:
    name, algorithm, server = plan.local.algorithm, plan.algorithm, plan.server
    if plan.local.personal_epochs is not None and not algorithm.personal_passes:
        with_passes = " and ".join(f'"{row}"' for row, each in ALGORITHMS.items() if each.personal_passes)
        yield (
            f"local.personal_epochs = {plan.local.personal_epochs} is for local.algorithm = {with_passes}; here it is "
            f'"{name}"'
        )
    if algorithm.tied and plan.aggregation.aggregator != aggregators.MEAN.name:
        yield (
            f'local.algorithm = "{name}" counts on what all devices that took part keep; the aggregator '
            f'{plan.aggregation.aggregator} leaves some of them out. It needs aggregation.aggregator = "mean"'
        )
    if plan.local.adaptive_mu and name != "plain":
        yield f'local.adaptive_mu = true is for local.algorithm = "plain"; mu of "{name}" is another number'
    if plan.local.adaptive_mu and plan.aggregation.normalise:
        yield "local.adaptive_mu = true changes mu from round to round; aggregation.normalise = true needs it to stay"
    bound = plan.aggregation.norm_bound
    if algorithm.tied and bound is not None and bound.action == "clip":
        yield (
            f'local.algorithm = "{name}": devices keep what their whole updates made, so these must count whole. It '
            'takes aggregation.norm_action = "refuse"'
        )
    if algorithm.tied and plan.aggregation.has_rule:
        yield f'local.algorithm = "{name}" works with the mean of whole updates, without normalise or q'
    if algorithm.tied and server.mix:
        yield f'local.algorithm = "{name}" works with the mean of several updates; server.mix = true has one at a time'
    if (server.optimizer == "feddyn") != (name == "feddyn"):
        yield (
            f'server.optimizer = "{server.optimizer}" and local.algorithm = "{name}": FedDyn needs "feddyn" for both, '
            'as recipe = "feddyn" has it'
        )
    if algorithm.whole_updates:
        yield from _contradictions_of_whole_updates(plan)
    if algorithm.counts_devices and server.devices is None:
        yield (
            f'local.algorithm = "{name}" needs server.devices, the number of all devices that may take part; an '
            "estimate will do, rather too high than too low"
        )
    if not algorithm.counts_devices and server.devices is not None:
        yield f'server.devices = {server.devices} is for local.algorithm = "scaffold" and "feddyn"; here it is "{name}"'


def _contradictions_of_whole_updates(plan: Plan) -> Iterable[str]:
    """What does not go with FedDyn: the server's h must be the mean of what all devices keep, and a device keeps what
    its whole update made, as its encoding sent it."""
    name, kept = plan.local.algorithm, "devices keep what their whole updates made"
    if plan.round.weighting != "uniform":
        yield (
            f'local.algorithm = "{name}": {kept}, so all of them must count the same. It needs '
            f'round.weighting = "uniform"; here it is "{plan.round.weighting}"'
        )
    if plan.round.asynchronous or plan.round.late == "carry":
        given = 'late = "carry"' if plan.round.late == "carry" else 'participation = "asynchronous"'
        yield (
            f'local.algorithm = "{name}" and round.{given}: {kept}, and stale ones count less. Whole ones would make '
            "the model swing ever further. It needs synchronous rounds that discard late updates"
        )
