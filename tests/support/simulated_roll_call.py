"""Roll calls (roll_call.py) in a simulation: the one row that they are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.exchanges import EXCHANGES
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange
from roll_call import ROLL_CALL, RollCall, Sent, register

BYTES = 8
"""Of a number, and of each number that a device is told."""


def count(tasks: DeviceTasks, exchange: OpenExchange, devices: Sequence[int]) -> Answers:
    """Each sends its own number first, then the sum of those that it was told."""
    told = [content.number for content in exchange.before.values() if isinstance(content, Sent)]
    numbers = devices if exchange.phase == 1 else [sum(told)] * len(devices)
    return Answers([*map(Sent, numbers)], down=BYTES * len(told), up=BYTES)


def who(tasks: DeviceTasks, exchange: OpenExchange) -> dict[str, Any]:
    found = exchange.answers().items()
    numbers = {name_of(row): sent.number for row, sent in found if isinstance(sent, Sent)}
    return {"who": dict(sorted(numbers.items()))}


def has_roll_calls(monkeypatch: pytest.MonkeyPatch, rules: RollCall) -> None:
    """Let coordinators and the simulator know roll calls."""
    register(monkeypatch.setitem, rules)
    monkeypatch.setitem(EXCHANGES, ROLL_CALL, SimulatedExchange(count, who))


def simulated_phases(
    summaries: Sequence[dict[str, Any]],
) -> list[tuple[int, bool, dict[str, int], dict[str, int]]]:
    """Return what ``closed_phases`` returns of a real run."""
    return [
        (row.get("phase", 1), row["outcome"] == "valid", row["who"], row["dropped"])
        for row in summaries
    ]
