"""Comparison of a graph's gradients with PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fleetlearn_export.checks.compared_steps import (
    ComparedSteps,
    Precision,
    compare_results,
    inputs_to_widen,
    keep_larger,
    other_batch,
)
from fleetlearn_export.checks.comparison import (
    TIMES_ROUNDING,
    difference_of_each,
    first_inputs,
    in_blocks,
    largest_difference,
)
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.on_disk import on_disk
from fleetlearn_export.model.steps import Tensors

PROBE = 2.0**20
"""A learning rate so large that the step's result shows the gradient, and hardly the parameter."""


def compare_gradients(compared: ComparedSteps) -> float:
    """Compare the gradients, loss, metrics and buffers of a first step. Returns a learning rate
    that suits them.

    A step returns no gradients. They are read from the parameters after a step with a huge learning
    rate, or from a state (momentum, Adam's m) that equals the gradient with these hyper-parameters.
    Raises ExportError.
    """
    precision = compared.precision
    inputs = _probing_inputs(compared)
    batch = other_batch(compared.user, compared.seed, precision)
    inputs |= {f"batch.{name}": value for name, value in batch.items()}
    training = compared.in_pytorch()
    differences: dict[str, float] = {}
    gradients: Tensors = {}
    effect: dict[str, float] = {}

    def keep_effect(name: str, gradient: Tensor) -> None:
        keep_larger(effect, difference_of_each({name: gradients[name]}, {name: gradient}))

    # The graph's results wait on disk while PyTorch computes: together they took 1.8 GiB for ViT-B
    # at 224 x 224, not 1.5.
    with on_disk() as got:
        outputs = compared.run(inputs, got.keep)
        while outputs:
            got.keep(*outputs.popitem())
        give_back_freed_memory()

        def receive(name: str, gradient: Tensor) -> None:
            if precision.widened:
                gradients[name] = gradient
            differences[name] = _difference_of_gradient(name, inputs, got, gradient)

        results = training.gradients(inputs, receive)
        measured = {name: got[name] for name in results}
    for nudged_inputs in inputs_to_widen(inputs, precision.nudge) if precision.widened else ():
        others = compared.in_pytorch(torch.float64).gradients(nudged_inputs, keep_effect)
        keep_larger(effect, difference_of_each(results, others))
    refuse_other_gradients(f"the {compared.what}", differences, training.sizes, precision, effect)
    compare_results(compared, batch, measured, results, effect)
    return suitable_rate(max(training.sizes.values()))


def suitable_rate(largest_gradient: float) -> float:
    """Return a learning rate with which no parameter moves by more than 0.1."""
    return min(0.1, 0.1 / max(largest_gradient, 1e-30))


def _probing_inputs(compared: ComparedSteps) -> Tensors:
    """Return the inputs, without the batch, of a step that shows its gradient."""
    step = compared.step
    # No momentum, decay or clipping: nothing that changes the gradient. With epsilon 1 and betas 0
    # Adam's m is the gradient itself.
    probing = {"lr": PROBE, "max_norm": 1e30, "temperature": 0.5, "mu": 0.25, "epsilon": 1.0}
    hyper = {name: probing.get(name, 0.0) for name in step.hyper}
    return {
        name: torch.zeros_like(value) if name.startswith("correction.") else value
        for name, value in first_inputs(step, hyper, compared.seed).items()
    }


def _difference_of_gradient(
    name: str, inputs: Tensors, got: Mapping[str, Tensor], gradient: Tensor
) -> float:
    """Return the largest difference between PyTorch's gradient and what the graph's results say
    that it is."""
    for slot in ("momentum", "m"):
        if f"state.{slot}.{name}" in inputs:
            return largest_difference(got[f"next.state.{slot}.{name}"], gradient)
    return _difference_of_move(inputs[f"param.{name}"], got[f"next.param.{name}"], gradient)


def refuse_other_gradients(
    what: str,
    differences: Mapping[str, float],
    sizes: Mapping[str, float],
    precision: Precision,
    effect: Mapping[str, float],
) -> None:
    """Raise ExportError if a difference is larger than allowed for a gradient of this size.

    sizes: the largest element of each parameter's gradient. effect: the effect of rounding on it.
    """
    largest = max(sizes.values())
    floor = precision.floor * largest + 1e-30
    allowed = {}
    for name, size in sizes.items():
        widest = 10 * precision.widest * size + precision.widest * largest
        rounding = min(TIMES_ROUNDING * effect.get(name, 0.0), widest)
        allowed[name] = precision.gradients * size + floor + rounding
    # NaN is neither above nor below: `not value <= ...` finds it too.
    bad = [name for name, value in differences.items() if not value <= allowed[name]]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(differences[row] / allowed[row], nan=np.inf))
        raise ExportError(
            f"{what} has another gradient than PyTorch for parameter {name} (and {len(bad) - 1} "
            f"more): a difference of {differences[name]:.3g}, where {allowed[name]:.3g} is allowed "
            f"and the largest gradient is {sizes[name]:.3g}"
        )


def _difference_of_move(before: Tensor, after: Tensor, gradient: Tensor) -> float:
    """Return the largest difference between the gradient and what a step with the rate PROBE says
    that it is."""
    pieces = in_blocks(before, after, gradient)
    return max(
        largest_difference((one.double() - other.double()) / PROBE, piece)
        for one, other, piece in pieces
    )
