"""For tests of a round's parts: running tasks, and what the training of devices gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fleetlearn_simulator.fleet.running_tasks import RunningTask
from fleetlearn_simulator.training.trained_devices import TrainedDevice, TrainedDevices, from_rows


def running_task(
    device: int, ends: float, cause: str = "", corrupt: str = "", factor: float = 1.0
) -> RunningTask:
    name = f"d{device:08d}"
    return RunningTask(
        ends,
        device,
        device,
        name,
        f"s-1-{device}",
        3,
        100 + device,
        0.0,
        cause,
        None,
        corrupt,
        factor,
        0,
        ends,
    )


def trained_device(update: Sequence[float], examples: int = 10, **more: Any) -> TrainedDevice:
    vector = np.array(update, np.float32)
    largest = float(np.abs(vector).max(initial=0.0))
    usual: dict[str, Any] = {"metrics": {}, "complete": True, "loss": 0.5}
    return TrainedDevice(
        update=vector, examples=examples, steps=1, seen=examples, largest=largest, **(usual | more)
    )


def trained_devices(*rows: TrainedDevice) -> TrainedDevices:
    return from_rows(rows, len(rows[0].update), ["accuracy"])
