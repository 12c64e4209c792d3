"""Comparison of train.onnx, eval.onnx and infer.onnx with the same computation in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fleetlearn_export.checks.comparison import (
    Array,
    Session,
    batches,
    call_in_pytorch,
    compare,
    first_inputs,
    first_passing,
    largest_difference,
    open_session,
)
from fleetlearn_export.checks.pytorch_training import PyTorchTraining
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import EvalModule, InferModule, UserModel

GRADIENT_TOLERANCE = 1e-3
"""Largest difference of a gradient that is allowed, relative to the tensor's largest gradient,"""
GRADIENT_FLOOR = 1e-5
"""and, added to it, relative to the model's: a bias before a normalisation has a gradient of rounding errors alone."""
PROBE = 2.0**20
"""A learning rate so large that the step's result shows the gradient, and hardly the parameter."""


class CheckedStep(NamedTuple):
    """What the check of train.onnx found."""

    difference: float
    """The largest difference from PyTorch."""
    values: Tensors
    """The parameters and buffers after the check's steps."""
    batch_of_one: bool
    """Whether the model can train on a single example (BatchNorm may not)."""


def check_train(user: UserModel, step: TrainStep, content: bytes, features: Function | None = None) -> CheckedStep:
    """Compare gradients and a few steps with PyTorch. The model is in training mode.

    Raises ExportError; the text names the tensor with the largest difference.
    """
    session = open_session(content)
    return first_passing(lambda seed: _check_steps(user, step, session, features, seed))


def _check_steps(
    user: UserModel, step: TrainStep, session: Session, features: Function | None, seed: int
) -> CheckedStep:
    rule = step.rule
    usual = {"mu": 0.25, "max_norm": 0.5, "weight_decay": 0.1, "temperature": 0.5, "momentum": 0.8}
    # A large epsilon: a gradient that is rounding errors alone would make a whole step of lr under Adam.
    usual |= {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-2}
    hyper = {name: 0.5 if default is None else default for name, default in step.hyper.items()}
    hyper |= {name: usual[name] for name in hyper if rule.optimizer != "custom" and name in usual}
    rate = 0.01
    if rule.optimizer != "custom":
        rate = _compare_gradients(user, step, session, features, seed)
    if "lr" in hyper:
        hyper["lr"] = rate

    reference = PyTorchTraining(user, step, features)
    given = first_inputs(step, hyper, seed)
    fed = dict(given)  # the graph's inputs: they go on from the graph's own results
    worst, batch_of_one = 0.0, True
    for number, batch in enumerate(batches(user, seed)):
        for row in (given, fed):
            row |= {f"batch.{name}": value for name, value in batch.items()}
            row |= {"seed": torch.tensor(seed + number)} if step.random else {}
        expected = call_in_pytorch(partial(reference, given), batch)
        if expected is None:
            batch_of_one = False
            continue
        got = session.run({name: value.numpy() for name, value in fed.items()})
        given = expected.given
        fed |= {name.removeprefix("next."): torch.from_numpy(v) for name, v in got.items() if name.startswith("next.")}
        rows = {_described(name): (got[name], value) for name, value in expected.results.items()}
        worst = max(worst, compare(rows, f"the exported step, on a batch of {len(next(iter(batch.values())))},"))
    return CheckedStep(worst, {name: given[f"param.{name}"] for name in step.values}, batch_of_one)


def _described(name: str) -> str:
    kind, _, rest = name.removeprefix("next.").partition(".")
    return {"param": "parameter", "loss": "the loss"}.get(kind, kind) + (f" {rest}" if rest else "")


def _compare_gradients(
    user: UserModel, step: TrainStep, session: Session, features: Function | None, seed: int
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
    got = session.run({name: value.numpy() for name, value in given.items()})
    gradients = PyTorchTraining(user, step, features)(given).gradients
    sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
    largest = max(sizes.values())
    excess = {}
    for name, gradient in gradients.items():
        slot = next((f"next.state.{row}.{name}" for row in ("momentum", "m") if f"state.{row}.{name}" in given), None)
        moved = given[f"param.{name}"].numpy().astype(np.float64) - got[f"next.param.{name}"]
        difference = largest_difference(got[slot] if slot else moved / PROBE, gradient.numpy())
        excess[name] = difference / (GRADIENT_TOLERANCE * sizes[name] + GRADIENT_FLOOR * largest + 1e-30)
    # NaN is neither above nor below: `not value <= 1` finds it too.
    bad = [name for name, value in excess.items() if not value <= 1]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(excess[row], nan=np.inf))
        raise ExportError(
            f"the exported step has another gradient than PyTorch for parameter {name} (and {len(bad) - 1} more): "
            f"a difference of {100 * excess[name] * GRADIENT_TOLERANCE:.3g} % of the largest"
        )
    return min(0.1, 0.1 / max(largest, 1e-30))


def check_eval(user: UserModel, content: bytes, values: Tensors) -> float:
    """Return the largest difference from PyTorch. The model is in evaluation mode. Raises ExportError."""
    names = ["loss_sum", *(f"metric_sum.{name}" for name in user.metrics), "examples"]
    feed = {f"param.{name}": value.numpy() for name, value in values.items()}
    return _check_outputs(user, EvalModule(user), list(user.batch), content, values, feed, "batch.", names)


def check_infer(user: UserModel, content: bytes, values: Tensors) -> float:
    """Return the largest difference from PyTorch. The model is in evaluation mode. Raises ExportError.

    values: the parameters that ``content`` holds.
    """
    inputs = list(user.inputs())
    return _check_outputs(user, InferModule(user), inputs, content, values, {}, "", None)


def _check_outputs(
    user: UserModel,
    module: nn.Module,
    inputs: list[str],
    content: bytes,
    values: Tensors,
    feed: Mapping[str, Array],
    prefix: str,
    names: list[str] | None,
) -> float:
    session = open_session(content)
    given = {f"model.{name}": value for name, value in values.items()}

    def check(seed: int) -> float:
        worst = 0.0
        for batch in batches(user, seed):
            arrays = tuple(batch[name].clone() for name in inputs)
            with torch.no_grad():
                expected = call_in_pytorch(partial(functional_call, module, given, arrays), batch)
            if expected is not None:
                got = session.run({**feed, **{prefix + name: batch[name].numpy() for name in inputs}})
                rows = {
                    name: (got[name], value) for name, value in zip(names or session.outputs, expected, strict=True)
                }
                worst = max(worst, compare(rows, f"the exported {'evaluation' if names else 'model'}"))
        return worst

    return first_passing(check)
