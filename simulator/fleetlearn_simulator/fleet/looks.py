"""Looks at devices' data in a simulation: the moments that devices answer with, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fleetlearn_coordinator.quality.look import look_at
from fleetlearn_device.training.data_quality import feature_moments
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.quality_messages import QualityAnswer

from fleetlearn_simulator.fleet import evaluations
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange
from fleetlearn_simulator.scenario.corruptions import damaged

DAMAGED = "damaged"
"""Key of a look's summary: which of the devices that answered have damaged data, as only a
simulation knows."""


def look(tasks: DeviceTasks, exchange: OpenExchange, devices: Sequence[int]) -> Answers:
    """Measure the exchange's model on the data of these devices, and their features."""
    measured = evaluations.measure(tasks, exchange, devices)
    contents: list[msgspec.Struct | None] = []
    for device, found in zip(devices, measured.contents, strict=True):
        evaluation = found if isinstance(found, Evaluation) else None
        contents.append(feature_moments([tasks.source.arrays(device)], evaluation))
    return measured._replace(contents=contents)


def summarise(tasks: DeviceTasks, exchange: OpenExchange) -> dict[str, Any]:
    """Return what the answers say together."""
    rule = tasks.scenario.plan.quality
    assert rule is not None  # without it there are no looks
    answers = {
        name_of(device): answer
        for device, answer in exchange.answers().items()
        if isinstance(answer, QualityAnswer)
    }
    found = damaged(tasks.scenario, [*exchange.answers()], of_data=True)
    named = {name_of(device): kind for device, kind in found.items()}
    return look_at(answers, rule.alarm, rule.classes) | {DAMAGED: named}


LOOKS = SimulatedExchange(look, summarise, events=("look", "looked", "data_quality"))
