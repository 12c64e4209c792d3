"""The part of a checkpoint for tasks that go on when a round ends, and what they train from.

A task that had begun to train when the checkpoint was written trains again: its result is not in
the checkpoint. It is the same to the last bit, whichever other tasks train together with it.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.running_tasks import RunningTasks

Tensors = dict[str, NDArray[Any]]


def snapshot(tasks: DeviceTasks) -> tuple[Tensors, dict[str, Any]]:
    """Return the tasks that devices have, as tensors and plain values."""
    rows = sorted(
        (held.row(row) for held, row in tasks.running.values()),
        key=lambda row: (row.ends, row.serial),
    )
    running, kept = RunningTasks.from_rows(rows), tasks.coordinator.kept
    tensors, training = tasks.coordinator.training.snapshot(running)
    state = {
        "running": running._replace(ends=[], trained=[])._asdict(),
        "training": training,
        "downloads": None if tasks.downloads is None else tasks.downloads.snapshot(),
        "uploads": None if tasks.uploads is None else tasks.uploads.snapshot(),
    }
    tensors["ends"] = np.array(running.ends, np.float64)  # infinite ones are no JSON
    tensors["trained"] = np.array(running.trained, np.float64)
    if kept is not None:
        tensors["finished_at"] = np.array(
            [kept.finished_at.get(task, inf) for task in running.task], np.float64
        )
    return tensors, state


def restore(tasks: DeviceTasks, tensors: Tensors, state: dict[str, Any]) -> None:
    """Let devices that have no tasks go on with those of a checkpoint."""
    ends = tensors["ends"].tolist()
    # An earlier version did not write when training is finished, which only [secure] asks.
    trained = tensors["trained"].tolist() if "trained" in tensors else ends
    running = RunningTasks(**{**state["running"], "ends": ends, "trained": trained})
    uploads = state["uploads"] or {"waiting": ()}
    waiting = {task for task, _ in uploads["waiting"]}
    expected = running.select([row for row, task in enumerate(running.task) if task not in waiting])
    tasks.running = {device: (expected, row) for row, device in enumerate(expected.device)}
    tasks.expect_next(expected, 0)
    alone = {
        task: (running.select([row]), 0) for row, task in enumerate(running.task) if task in waiting
    }
    tasks.running |= {held.device[0]: (held, row) for held, row in alone.values()}
    if tasks.downloads is not None and tasks.uploads is not None:
        tasks.downloads.take_up(state["downloads"])
        tasks.uploads.take_up(uploads, alone.__getitem__)
    if tasks.coordinator.kept is not None:
        tasks.coordinator.kept.expect(running.task, tensors["finished_at"].tolist())
    tasks.coordinator.training.take_up(tensors, state["training"], running)
