"""Loss scaling on a step that multiplies its one parameter by the batch: loss = w * x, so the
gradient is x."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from fleetlearn_export.model.loss_scaling import (
    FIRST,
    LARGEST,
    PATIENCE,
    SCALE,
    STEPS,
    initial_scale,
    with_loss_scaling,
)
from fleetlearn_export.model.steps import Objective, Tensors, built_in, initial_state
from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor, nn


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def run(
    state: Tensors, x: float, optimizer: Literal["sgd", "momentum"] = "sgd"
) -> tuple[float, Tensors]:
    """Do one step from w = 3 with lr 0.5. Returns the new w and the state."""
    objective = Objective(Product(), lambda outputs, y: outputs.sum(), {}, ["x"], ["y"], ["w"], [])
    batch = {"x": torch.tensor([x]), "y": torch.tensor([0.0])}
    hyper = {"lr": torch.tensor(0.5), "momentum": torch.tensor(0.5)}
    empty: Tensors = {}
    moved, after, metrics = with_loss_scaling(built_in(LocalStep(optimizer), None))(
        {"w": torch.tensor(3.0)},
        state,
        batch,
        hyper,
        objective=objective,
        anchor=empty,
        correction=empty,
        previous=empty,
    )
    assert metrics["loss"] == 3.0 * x or not math.isfinite(x)
    return float(moved["w"]), after


def numbers(state: Tensors) -> tuple[float, float]:
    return float(state[SCALE]), float(state[STEPS])


def test_a_good_step_is_that_of_the_unscaled_loss_and_counts() -> None:
    """3 - 0.5 * 2 = 2."""
    moved, state = run(initial_scale(), 2.0)
    assert moved == 2.0
    assert numbers(state) == (FIRST, 1.0)


@pytest.mark.parametrize("x", [math.inf, math.nan])
def test_an_overflow_is_skipped_and_halves_the_scale(x: float) -> None:
    begun = initial_scale() | {"momentum.w": torch.tensor(7.0), STEPS: torch.tensor(5.0)}
    moved, state = run(begun, x, "momentum")
    assert moved == 3.0
    assert float(state["momentum.w"]) == 7.0, "the optimizer's state is that before the step"
    assert numbers(state) == (FIRST / 2, 0.0)


def test_the_scale_doubles_after_enough_good_steps() -> None:
    state = initial_scale()
    for _ in range(PATIENCE):
        assert numbers(state)[0] == FIRST
        _, state = run(state, 2.0)
    assert numbers(state) == (2 * FIRST, 0.0)


def test_the_scale_has_bounds() -> None:
    almost = torch.tensor(PATIENCE - 1.0)
    assert numbers(run({SCALE: torch.tensor(LARGEST), STEPS: almost}, 2.0)[1])[0] == LARGEST
    assert numbers(run({SCALE: torch.tensor(1.0), STEPS: almost}, math.inf)[1])[0] == 1.0


def test_a_gradient_that_float16_would_round_to_zero_arrives() -> None:
    """The loss's own gradient, 2**-26, is below float16's least number, 2**-24; times 1024 it is
    not."""

    class Small(Product):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).half().float() * 2.0**-26

    state = initial_scale()
    objective = Objective(Small(), lambda outputs, y: outputs.sum(), {}, ["x"], ["y"], ["w"], [])
    batch = {"x": torch.tensor([1.0]), "y": torch.tensor([0.0])}
    plain, scaled = (
        objective({"w": torch.tensor(3.0)}, batch, scale=scale) for scale in (None, state[SCALE])
    )
    assert float(plain.gradients["w"]) == 0.0
    assert float(scaled.gradients["w"]) == 2.0**-26


def test_the_state_is_beside_the_optimizers() -> None:
    state = initial_state(LocalStep("adam"), {"w": torch.tensor(3.0)}) | initial_scale()
    assert list(state) == ["m.w", "v.w", "t", SCALE, STEPS]
