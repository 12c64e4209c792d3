"""Comparison of train_many.onnx with the same steps in PyTorch, device after device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from fleetlearn_protocol.manifest import TrainMany
from numpy.typing import NDArray

from fleetlearn_export.checks.comparison import Session, batches, compare, first_inputs, first_passing, open_session
from fleetlearn_export.graphs.train_many import SHARED
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel


def check_many(user: UserModel, step: TrainStep, content: bytes, many: TrainMany) -> float:
    """Return the largest difference from PyTorch. Raises ExportError if it is too large."""
    session = open_session(content)
    return first_passing(partial(_check, user, step, session, many))


def _check(user: UserModel, step: TrainStep, session: Session, many: TrainMany, seed: int) -> float:
    hyper = {name: 0.05 if default is None else default for name, default in step.hyper.items()}
    given = first_inputs(step, hyper, seed)
    random = np.random.default_rng(seed)
    # Device -> its number of steps: all, some, one, none. Devices that are not compared do no step.
    compared = {0: many.steps, many.devices // 2: int(random.integers(many.steps + 1)), many.devices - 1: 1, 1: 0}
    steps = np.array([compared.get(device, 0) for device in range(many.devices)])
    rows = next(batches(user, seed))
    available = len(next(iter(rows.values())))
    order = random.integers(available, size=(many.devices, many.steps, many.batch or available + seed % 2))

    feed: dict[str, NDArray[Any]] = {"steps": steps}
    for name, value in given.items():
        if name.startswith("batch."):
            feed[name] = rows[name.removeprefix("batch.")].numpy()[order]
        elif name.startswith(SHARED):
            feed[name] = value.numpy()
        else:
            feed[name] = np.broadcast_to(value.numpy(), (many.devices, *value.shape)).copy()
    if step.random:
        feed["seed"] = np.arange(many.devices, dtype=np.int64) * 1000
    got, got_all_steps = session.run(feed), session.run(feed | {"steps": np.full_like(steps, many.steps)})

    worst = 0.0
    for device in compared:
        now = {name: value.clone() for name, value in given.items()}
        expected: Tensors = {}
        for number in range(int(steps[device])):
            now |= {name: torch.from_numpy(feed[name][device, number]) for name in feed if name.startswith("batch.")}
            if step.random:
                now["seed"] = torch.tensor(device * 1000 + number)
            found = step.run(now)
            now |= {name.removeprefix("next."): value for name, value in found.items() if name.startswith("next.")}
            expected |= {f"{name} of step {number}": v for name, v in found.items() if not name.startswith("next.")}
        pairs = {name: (got[name][device], now[name.removeprefix("next.")]) for name in got if name.startswith("next.")}
        for label, value in expected.items():
            name, _, place = label.partition(" of step ")
            pairs[label] = (got[name][device, int(place)], value)
        if device == 0:  # it does all steps in both runs: alone in the first, as all devices do in the second
            last = {name: value for name, (_, value) in pairs.items() if name.startswith("next.")}
            pairs |= {f"{name} where all do": (got_all_steps[name][device], value) for name, value in last.items()}
        worst = max(worst, compare(pairs, f"the block of devices, device {device},"))
    return worst
