"""Comparison of a graph's gradients, and of a few of its steps, with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fleetlearn_export.checks.comparison import (
    NUDGE,
    ROUNDING,
    TOLERANCE,
    batches,
    call_in_pytorch,
    compare,
    first_inputs,
    largest_difference,
    rounding,
)
from fleetlearn_export.checks.pytorch_training import PyTorchTraining
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel

PROBE = 2.0**20
"""A learning rate so large that the step's result shows the gradient, and hardly the parameter."""
USUAL = {"mu": 0.25, "max_norm": 0.5, "weight_decay": 0.1, "temperature": 0.5, "momentum": 0.8}
# A large epsilon: a gradient that is rounding errors alone would make a whole step of lr under Adam.
USUAL |= {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-2}
"""The hyper-parameters of the compared steps."""
Run = Callable[[Tensors], Tensors]
"""A graph: named inputs -> named outputs."""


class Precision(NamedTuple):
    """How exactly a graph is compared with PyTorch."""

    dtype: torch.dtype
    """What PyTorch computes with."""
    values: float
    """Largest difference of parameters, state and metrics that is allowed; see ``comparison.TOLERANCE``."""
    gradients: float
    """Largest difference of a gradient that is allowed, relative to the tensor's largest gradient,"""
    floor: float
    """and, added to it, relative to the model's: a bias before a normalisation has a gradient of rounding errors
    alone."""
    on_own_results: bool = False
    """Whether each step of the graph starts from the graph's own results. In a deep network with BatchNorm an error of
    rounding grows some 100 times in each step, so there a step starts from PyTorch's results."""
    widened: bool = False
    """Whether ``ROUNDING`` times the effect of rounding in PyTorch itself is allowed besides."""


FLOAT32 = Precision(torch.float32, TOLERANCE, 1e-3, 1e-5, on_own_results=True)
WIDENED = FLOAT32._replace(on_own_results=False, widened=True)
"""For deep networks with ReLU or BatchNorm: one sign that flips in float32 changes gradients by percents."""
FLOAT64 = Precision(torch.float64, 1e-9, 1e-6, 1e-9)


class CheckedStep(NamedTuple):
    """What the check of train.onnx found."""

    difference: float
    """The largest difference from PyTorch."""
    values: Tensors
    """The parameters and buffers after the check's steps."""
    batch_of_one: bool
    """Whether the model can train on a single example (BatchNorm may not)."""


def compare_training(
    user: UserModel,
    step: TrainStep,
    run: Run,
    features: Function | None,
    seed: int,
    precision: Precision,
    what: str = "exported step",
) -> CheckedStep:
    """Compare gradients, and steps on batches of several sizes. Raises ExportError; the text names the tensor."""
    rule = step.rule
    hyper = {name: 0.5 if default is None else default for name, default in step.hyper.items()}
    hyper |= {name: USUAL[name] for name in hyper if rule.optimizer != "custom" and name in USUAL}
    rate = 0.01
    if rule.optimizer != "custom":
        rate = _compare_gradients(user, step, run, features, seed, precision, what)
    if "lr" in hyper:
        hyper["lr"] = rate

    reference = PyTorchTraining(user, step, features, precision.dtype)
    precise = [PyTorchTraining(user, step, features, torch.float64) for _ in range(2)] if precision.widened else []
    given = first_inputs(step, hyper, seed)
    fed = dict(given)
    worst, batch_of_one = 0.0, True
    for number, batch in enumerate(batches(user, seed)):
        for row in (given, fed):
            row |= {f"batch.{name}": value for name, value in batch.items()}
            row |= {"seed": torch.tensor(seed + number)} if step.random else {}
        expected = call_in_pytorch(partial(reference, given), batch)
        if expected is None:
            batch_of_one = False
            continue
        got = run(fed)
        rows = {_described(name): (got[name].numpy(), value) for name, value in expected.results.items()}
        others = []
        for training, inputs in zip(precise, _inputs_to_widen(given, precision), strict=True):
            found = training(inputs)
            others.append({_described(name): value for name, value in found.results.items()})
        given = expected.given
        if precision.on_own_results:
            fed |= {name.removeprefix("next."): value for name, value in got.items() if name.startswith("next.")}
        else:
            fed = dict(given)
        where = f"the {what}, on a batch of {len(next(iter(batch.values())))},"
        worst = max(worst, compare(rows, where, precision.values, others))
        del expected, got, rows, others  # before the next step: each is as large as the model
    return CheckedStep(worst, {name: given[f"param.{name}"] for name in step.values}, batch_of_one)


def _inputs_to_widen(given: Tensors, precision: Precision) -> list[Tensors]:
    """Return the inputs with which PyTorch in float64 shows the effect of rounding, if the comparison is widened by it:
    those that are given, and the same with parameters that differ by NUDGE."""
    return [given, nudged(given)] if precision.widened else []


def nudged(given: Tensors) -> Tensors:
    """Return the inputs with parameters that differ by NUDGE."""
    random = torch.Generator().manual_seed(0)
    return {
        name: value * (1 + NUDGE * torch.randn(value.shape, generator=random)) if name.startswith("param.") else value
        for name, value in given.items()
    }


def _described(name: str) -> str:
    kind, _, rest = name.removeprefix("next.").partition(".")
    return {"param": "parameter", "loss": "the loss"}.get(kind, kind) + (f" {rest}" if rest else "")


def _compare_gradients(
    user: UserModel,
    step: TrainStep,
    run: Run,
    features: Function | None,
    seed: int,
    precision: Precision,
    what: str,
) -> float:
    """Compare the gradients of a first step. Returns a learning rate that suits them. Raises ExportError.

    A step returns no gradients. They are read from the parameters after a step with a huge learning rate, or from a
    state (momentum, Adam's m) that equals the gradient with these hyper-parameters.
    """
    hyper = dict.fromkeys(step.hyper, 0.0) | {"lr": PROBE, "max_norm": 1e30, "temperature": 0.5, "mu": 0.25}
    hyper = {name: value for name, value in hyper.items() if name in step.hyper}
    given = first_inputs(step, hyper | ({"epsilon": 1.0} if "epsilon" in hyper else {}), seed)
    given = {name: torch.zeros_like(v) if name.startswith("correction.") else v for name, v in given.items()}
    given |= {f"batch.{name}": value for name, value in next(batches(user, seed)).items()}
    got = run(given)
    gradients = PyTorchTraining(user, step, features, precision.dtype)(given).gradients
    others = [
        PyTorchTraining(user, step, features, torch.float64)(inputs).gradients
        for inputs in _inputs_to_widen(given, precision)
    ]
    sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
    largest = max(sizes.values())
    differences, allowed = {}, {}
    for name, gradient in gradients.items():
        slot = next((f"next.state.{row}.{name}" for row in ("momentum", "m") if f"state.{row}.{name}" in given), None)
        moved = given[f"param.{name}"].numpy().astype(np.float64) - got[f"next.param.{name}"].numpy()
        differences[name] = largest_difference(got[slot].numpy() if slot else moved / PROBE, gradient.numpy())
        effect = rounding(gradient, [other[name] for other in others])
        allowed[name] = precision.gradients * sizes[name] + precision.floor * largest + ROUNDING * effect + 1e-30
    # NaN is neither above nor below: `not value <= ...` finds it too.
    bad = [name for name, value in differences.items() if not value <= allowed[name]]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(differences[row] / allowed[row], nan=np.inf))
        raise ExportError(
            f"the {what} has another gradient than PyTorch for parameter {name} (and {len(bad) - 1} more): a "
            f"difference of {differences[name]:.3g}, where {allowed[name]:.3g} is allowed and the largest gradient is "
            f"{sizes[name]:.3g}"
        )
    return min(0.1, 0.1 / max(largest, 1e-30))
