"""Comparison of train_many.onnx with the same steps in PyTorch, device after device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from fleetlearn_protocol.manifest import TrainMany
from numpy.typing import NDArray

from fleetlearn_export.checks.compared_steps import inputs_to_widen, keep_larger
from fleetlearn_export.checks.comparison import (
    GraphSession,
    batches,
    compare,
    difference_of_each,
    first_inputs,
    first_passing,
    open_session,
)
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.train_many import is_of_steps, is_shared
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel


def check_many(
    user: UserModel,
    step: TrainStep,
    content: bytes,
    many: TrainMany,
    constants: Constants | None = None,
) -> float:
    """Return the largest difference from PyTorch. ``constants``: as for ``check_train``. Raises
    ExportError if it is too large."""
    session = open_session(content, constants=constants)
    return first_passing(partial(_check, user, step, session, many))


def _check(
    user: UserModel, step: TrainStep, session: GraphSession, many: TrainMany, seed: int
) -> float:
    hyper = {name: 0.05 if default is None else default for name, default in step.hyper.items()}
    inputs_of_step = first_inputs(step, hyper, seed)
    random = np.random.default_rng(seed)
    # Device -> its number of steps: all, some, one, none. Devices that are not compared do no step.
    compared = {
        0: many.steps,
        many.devices // 2: int(random.integers(many.steps + 1)),
        many.devices - 1: 1,
        1: 0,
    }
    steps = np.array([compared.get(device, 0) for device in range(many.devices)])
    rows = next(batches(user, seed))
    available = len(next(iter(rows.values())))
    order = random.integers(
        available, size=(many.devices, many.steps, many.batch or available + seed % 2)
    )

    feed: dict[str, NDArray[Any]] = {"steps": steps}
    for name, value in inputs_of_step.items():
        if name.startswith("batch."):
            feed[name] = rows[name.removeprefix("batch.")].numpy()[order]
        elif is_of_steps(name, many):  # the learning rate
            scale = random.uniform(0.5, 1.0, (many.devices, many.steps))
            feed[name] = (value.numpy() * scale).astype(np.float32)
        elif is_shared(name, many):
            feed[name] = value.numpy()
        else:
            feed[name] = np.broadcast_to(value.numpy(), (many.devices, *value.shape)).copy()
    if step.random:
        feed["seed"] = np.arange(many.devices, dtype=np.int64) * 1000
    got, got_all_steps = (
        session.run(feed),
        session.run(feed | {"steps": np.full_like(steps, many.steps)}),
    )

    worst = 0.0
    for device in compared:
        in_pytorch = partial(_in_pytorch, step, feed, many, device, int(steps[device]))
        expected = in_pytorch(inputs_of_step)
        pairs = {}
        for label, value in expected.items():
            name, _, number = label.partition(" of step ")
            pairs[label] = (got[name][device, int(number)] if number else got[name][device], value)
        last = {name: value for name, value in expected.items() if name.startswith("next.")}
        # it does all steps in both runs: alone in the first, as all devices do in the second
        if device == 0:
            pairs |= {
                f"{name} where all do": (got_all_steps[name][device], value)
                for name, value in last.items()
            }
        what = f"the block of devices, device {device},"
        try:
            worst = max(worst, compare(pairs, what))
        except ExportError:  # PyTorch in float64 tells whether float32 can do better
            effect: dict[str, float] = {}
            for inputs in inputs_to_widen(inputs_of_step):
                keep_larger(effect, difference_of_each(expected, in_pytorch(inputs, torch.float64)))
            effect |= {f"{name} where all do": effect[name] for name in last}
            worst = max(worst, compare(pairs, what, rounding=effect))
    return worst


def _in_pytorch(
    step: TrainStep,
    feed: Mapping[str, NDArray[Any]],
    many: TrainMany,
    device: int,
    steps: int,
    inputs: Tensors,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Do a device's steps on its batches in ``feed``.

    Returns the parameters and the state after the last one, by the names of the graph's outputs,
    and what each step measured, such as "loss of step 2".
    """
    now = {name: value.clone() for name, value in inputs.items()}
    measured: Tensors = {}
    for number in range(steps):
        now |= {
            name: torch.from_numpy(feed[name][device, number, ...])
            for name in feed
            if is_of_steps(name, many)
        }
        if step.random:
            now["seed"] = torch.from_numpy(feed["seed"])[device] + number
        if dtype == torch.float64:
            with DoublePrecision():
                outputs = step.run(as_double(now), dtype)
        else:
            outputs = step.run(now)
        now |= {
            name.removeprefix("next."): value
            for name, value in outputs.items()
            if name.startswith("next.")
        }
        measured |= {
            f"{name} of step {number}": v
            for name, v in outputs.items()
            if not name.startswith("next.")
        }
    after = [name for name in step.outputs() if name.startswith("next.")]
    return {name: now[name.removeprefix("next.")] for name in after} | measured
