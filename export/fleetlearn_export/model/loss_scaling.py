"""Loss scaling: keeps gradients that pass through float16 away from 0 and from infinity.

The loss is multiplied by a scale before it is differentiated, and the gradients of the parameters,
float32, are divided by it. If one of them is infinite or NaN the step changes nothing but the
scale, which halves; after ``PATIENCE`` steps without that the scale doubles. Micikevicius et al.
2018, "Mixed Precision Training", arXiv 1710.03740, section 3.2. The scale is a power of two, so
without an overflow it changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.model.steps import BatchEvaluation, Function, Objective, Tensors

SCALE, STEPS = "loss_scale", "loss_scale_steps"
"""The state: the scale, and the steps since it last changed. A task begins with the initial
ones."""
FIRST = 1024.0
"""The first scale. A task has few steps, so it may not lose some of them, as PyTorch's first scale
of 65536 does. The paper trained its networks with constants from 8 to 32768."""
PATIENCE = 100
SMALLEST, LARGEST = 1.0, 2.0**24
"""The scale stays between these."""


def initial_scale() -> Tensors:
    return {SCALE: torch.tensor(FIRST), STEPS: torch.tensor(0.0)}


def with_loss_scaling(step: Function) -> Function:
    """Return the step, which asks ``objective`` for gradients, with loss scaling. Its state has two
    numbers more."""

    def scaled(
        params: Tensors,
        state: Tensors,
        batch: Tensors,
        hyper: Mapping[str, Tensor],
        *,
        objective: Objective,
        **references: Tensors,
    ) -> tuple[Tensors, Tensors, Tensors]:
        scale, with_scale = state[SCALE], _ScaledObjective(objective, state[SCALE])
        own = {name: value for name, value in state.items() if name not in (SCALE, STEPS)}
        moved, after, metrics = step(params, own, batch, hyper, objective=with_scale, **references)
        finite = torch.stack(with_scale.sums).sum() < torch.inf  # false for NaN too
        steps = torch.where(finite, state[STEPS] + 1, 0.0)
        grown = torch.where(steps >= PATIENCE, scale * 2, scale)
        changed = {
            SCALE: torch.where(finite, grown, scale / 2).clamp(SMALLEST, LARGEST),
            STEPS: torch.where(steps >= PATIENCE, 0.0, steps),
        }
        return _chosen(finite, moved, params), _chosen(finite, after, own) | changed, metrics

    return scaled


class _ScaledObjective(Objective):
    """An objective that differentiates the loss times a scale."""

    def __init__(self, inner: Objective, scale: Tensor) -> None:
        vars(self).update(vars(inner))
        self._inner, self._scale = inner, scale
        self.sums: list[Tensor] = []
        """The sum of each gradient's absolute values: infinite or NaN where an element is."""

    def __call__(self, *args: Any, **kwargs: Any) -> BatchEvaluation:
        found = self._inner(*args, **kwargs, scale=self._scale)
        self.sums += [
            torch.linalg.vector_norm(gradient, 1) for gradient in found.gradients.values()
        ]
        return found


def _chosen(finite: Tensor, new: Tensors, old: Tensors) -> Tensors:
    return {name: torch.where(finite, value, old[name]) for name, value in new.items()}
