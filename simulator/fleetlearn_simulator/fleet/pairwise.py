"""The exchanges of pairwise masks in a simulation.

Devices take part, vanish, and are missing in the next exchange as real ones are; what they would
say is not worked out. The masks of a sum cancel each other out, so that the models are the same
without them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetlearn_coordinator.plan.pairwise_rules import graph_for
from fleetlearn_protocol.secure.pairwise_messages import (
    KEYS,
    SEALED_BYTES,
    SHARE_BYTES,
    SHARES,
    PairwiseAnswer,
)

from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange

NAME_BYTES = 16
"""What a name takes beside the bytes in hexadecimal digits."""
KEYS_BYTES = 128
"""Two keys and a signature."""


def answer(tasks: DeviceTasks, exchange: OpenExchange, devices: Sequence[int]) -> Answers:
    """Return how many bytes these devices are asked and answer; the answers are empty."""
    contents = [PairwiseAnswer()] * len(devices)
    if exchange.phase == KEYS:
        return Answers(contents, up=2 * KEYS_BYTES)
    near = _neighbours(tasks)
    if exchange.phase == SHARES:
        down, up = 2 * KEYS_BYTES + NAME_BYTES, 2 * SEALED_BYTES + NAME_BYTES
        return Answers(contents, down=near * down, up=near * up)
    return Answers(contents, down=near * NAME_BYTES, up=near * (2 * SHARE_BYTES + NAME_BYTES))


def _neighbours(tasks: DeviceTasks) -> int:
    """Return how many neighbours a device has in a round with all its devices."""
    plan = tasks.scenario.plan
    assert plan.secure is not None
    return graph_for(plan.secure, plan.round.cohort).neighbours


def summarise(tasks: DeviceTasks, exchange: OpenExchange) -> dict[str, Any]:
    """Return what is known of an exchange beside who answered: nothing."""
    return {}


PAIRWISE_MASKS = SimulatedExchange(answer, summarise)
