"""The local step's update rule, on one parameter tensor; compiled into train.onnx."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor


def hyper_names(step: LocalStep) -> list[str]:
    """The scalar inputs of the step, in order."""
    return ["lr", "mu"] if step.proximal else ["lr"]


def update(
    step: LocalStep, parameter: Tensor, gradient: Tensor, anchor: Tensor | None, hyper: Mapping[str, Tensor]
) -> Tensor:
    """w - lr * (g + mu * (w - anchor)); without the proximal term w - lr * g.

    mu * (w - anchor) is the gradient of the penalty mu/2 * ||w - anchor||^2: with the factor 1/2, as in Li, Sahu,
    Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127,
    equation 2. ``anchor`` is the round's global model w^t.
    """
    if anchor is not None:
        gradient = gradient + hyper["mu"] * (parameter - anchor)
    return parameter - hyper["lr"] * gradient
