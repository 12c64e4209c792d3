"""Evaluations in a simulation: what devices measure, and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.evaluation_summary import (
    summarise_evaluation,
    summarise_members,
)
from fleetlearn_coordinator.aggregation.round_summary import MEMBERS, deciding
from fleetlearn_protocol.messages import Evaluation

from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.kept_by_devices import rows_of
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange
from fleetlearn_simulator.population.failures import EVALUATION_COST
from fleetlearn_simulator.population.traits import traits
from fleetlearn_simulator.training.backend import Job, steps_of


def measure(tasks: DeviceTasks, exchange: OpenExchange, devices: Sequence[int]) -> Answers:
    """Measure the exchange's model on the data of these devices, with what they keep."""
    coordinator, local = tasks.coordinator, tasks.local
    assert exchange.inputs is not None  # evaluations send the model
    coordinator.training.keep_finished()
    kept = coordinator.kept
    rows = rows_of(None if kept is None else kept.states, devices)
    jobs = [Job(device, kept=row) for device, row in zip(devices, rows, strict=True)]
    found: list[Evaluation | None] = [None] * len(jobs)
    for inputs, places in coordinator.by_bundle(exchange.inputs, devices):
        measured = coordinator.backend.evaluate(inputs, [jobs[at] for at in places])
        for at, evaluation in zip(places, measured, strict=True):
            found[at] = evaluation
    batches = steps_of(local, tasks.source.examples(np.array(devices, np.int64))) // local.passes
    return Answers(found, work=np.multiply(EVALUATION_COST, batches, dtype=np.float64))


def summarise(tasks: DeviceTasks, exchange: OpenExchange) -> dict[str, Any]:
    """Return what the devices measured, put together."""
    plan, answers = tasks.scenario.plan, exchange.answers()
    results = [result for result in answers.values() if isinstance(result, Evaluation)]
    names, ids = [*tasks.scenario.tiers], np.array([*answers], np.int64)
    tiers = [names[tier] for tier in traits(tasks.scenario, ids).tier.tolist()]
    given = ("loss", *tasks.coordinator.metrics), plan.round.max_weight, plan.bounds
    summary = summarise_evaluation(results, tiers, *given)
    if plan.family:
        members = [*plan.family]
        own = [members[number] for number in tasks.coordinator.members_of([*answers])]
        summary[MEMBERS] = summarise_members(results, own, *given)
    return summary


def stopping(tasks: DeviceTasks, summary: dict[str, Any]) -> Mapping[str, float] | None:
    """Return the metrics that may stop the run, if the plan stops it by evaluations."""
    plan = tasks.scenario.plan
    if plan.stop.measured_by != "evaluation":
        return None
    return deciding(summary, plan.evaluation.minimum)


EVALUATIONS = SimulatedExchange(
    measure, summarise, stopping, events=("measure", "measured", "evaluated")
)
