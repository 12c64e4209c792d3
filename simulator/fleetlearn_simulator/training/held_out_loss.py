"""The held-out data of a simulated coordinator, on which it measures what updates are worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.data import as_data, load_npz
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.scenario import Scenario


class HeldOutLoss(NamedTuple):
    """Measures models on held-out data."""

    loss: Callable[[Vector], float]
    """Returns a model's mean loss. Raises DivergedError where it is not finite."""
    data: str
    """Which data these are, for people."""


def held_out_loss(scenario: Scenario, bundle: Bundle, source: Source) -> HeldOutLoss | None:
    """Return what measures models as a coordinator's process does (``fleetlearn_device.measure``):
    on the plan's file ``evaluation.data``, or on the scenario's test examples where there is no
    such file yet. None: the plan does not ask what updates are worth. Raises SimulatorError."""
    quality, file = scenario.plan.quality, scenario.plan.evaluation.data
    if quality is None or quality.contributions is None or file is None:
        return None
    runtime = open_runtime(bundle, kind="onnx")
    if file.exists():
        data = as_data(load_npz(str(file), bundle.manifest))
        where = f"{file.name} (evaluation.data)"
    else:
        test = source.test()
        if test is None:
            raise SimulatorError(
                f"quality.contributions needs held-out data: {file} (evaluation.data) is not "
                "there, and the scenario's data have no test examples. Make the file, or set "
                "data.test"
            )
        data = as_data(test)
        where = f"the scenario's test examples; {file.name} (evaluation.data) is not there"

    def loss(model: Vector) -> float:
        runtime.load(model)
        found = evaluate_data(runtime, data)
        return found.loss_sum / found.examples

    return HeldOutLoss(loss, where)
