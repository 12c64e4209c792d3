"""The exchanges in which simulated devices measure all models of a clustered run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.clusters import summarise_fit
from fleetlearn_device.training.train import LARGEST
from fleetlearn_protocol.exchanges import FitAnswer
from fleetlearn_protocol.messages import Evaluation

from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.kept_by_devices import rows_of
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange
from fleetlearn_simulator.population.failures import EVALUATION_COST
from fleetlearn_simulator.training.backend import Job, RoundInputs, steps_of


def measure(tasks: DeviceTasks, exchange: OpenExchange, devices: Sequence[int]) -> Answers:
    """Measure each of the run's models on the data of these devices, with what they keep."""
    coordinator, local = tasks.coordinator, tasks.local
    assert exchange.inputs is not None  # the question sends the models
    coordinator.training.keep_finished()
    kept = coordinator.kept
    rows = rows_of(None if kept is None else kept.states, devices)
    jobs = [Job(device, kept=row) for device, row in zip(devices, rows, strict=True)]
    models = coordinator.family.models_of(exchange.inputs.model).values()
    found = [coordinator.backend.evaluate(RoundInputs(model), jobs) for model in models]
    batches = steps_of(local, tasks.source.examples(np.array(devices, np.int64))) // local.passes
    work = np.multiply(EVALUATION_COST * len(models), batches, dtype=np.float64)
    return Answers([answer_of(row) for row in zip(*found, strict=True)], work=work)


def answer_of(measured: Sequence[Evaluation | None]) -> FitAnswer | None:
    """Return what a device answers that measured each model. None: none of their losses is
    finite."""
    examples = next((each.examples for each in measured if each is not None), None)
    if examples is None:
        return None
    losses = (LARGEST if each is None else each.loss_sum / each.examples for each in measured)
    return FitAnswer(examples, tuple(losses))


def summarise(tasks: DeviceTasks, exchange: OpenExchange) -> dict[str, Any]:
    """Return what the devices answered, put together."""
    answers = exchange.answers().values()
    losses = [answer.losses for answer in answers if isinstance(answer, FitAnswer)]
    return summarise_fit([*tasks.scenario.plan.members], losses)


FITS = SimulatedExchange(measure, summarise, events=("fit", "fitted", "fits"))
