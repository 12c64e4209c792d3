"""The exchanges of pairwise masks in a simulation.

Devices take part, vanish, and are missing in the next exchange as real ones are; what they would
say is not worked out. The masks of a sum cancel each other out, so that the models are the same
without them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetlearn_coordinator.plan.pairwise_rules import graph_for
from fleetlearn_protocol.secure.pairwise_messages import KEYS, SHARES, PairwiseAnswer

from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.pairwise_circle import (
    KEYS_SAID,
    NAME_BYTES,
    SEALED_SAID,
    SHARE_SAID,
)
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange


def answer(tasks: DeviceTasks, exchange: OpenExchange, devices: Sequence[int]) -> Answers:
    """Return how many bytes these devices are asked and answer; the answers are empty."""
    coordinator, secure = tasks.coordinator, tasks.scenario.plan.secure
    assert secure is not None
    contents = [PairwiseAnswer()] * len(devices)
    if exchange.phase == KEYS:
        return Answers(contents, up=KEYS_SAID)
    if exchange.phase == SHARES:
        coordinator.circle = sorted(exchange.before)
    else:
        coordinator.sharers = sorted(exchange.before)
    near = graph_for(secure, len(coordinator.circle)).neighbours
    if exchange.phase == SHARES:
        return Answers(contents, down=near * (NAME_BYTES + KEYS_SAID), up=near * SEALED_SAID)
    return Answers(contents, down=near * NAME_BYTES, up=near * SHARE_SAID)


def summarise(tasks: DeviceTasks, exchange: OpenExchange) -> dict[str, Any]:
    """Return what is known of an exchange beside who answered: nothing."""
    return {}


PAIRWISE_MASKS = SimulatedExchange(answer, summarise)
