"""Checks of values: a graph takes the way on which they pass. Other conditions on values stay
errors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.tracing.value_checks import checks_passed, passing_value
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, emitted

X = torch.tensor([[0.5, 1.0], [2.0, 0.25], [3.0, 1.5]])


def asserted(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all(), "not finite"
    return x * 2


def raising(x: Tensor) -> Tensor:
    if x.dim() != 2 or not (x > 0).all() or x.max() > 100:
        message = "out of range"
        raise ValueError(message)
    return x * 2


def raising_at_the_end(x: Tensor) -> Tensor:
    if x.dim() == 1:
        x = x.unsqueeze(1)
    elif (x < 0).any().item() or x.min().item() > 50:
        raise ValueError
    return x * 2


def from_pytorch(x: Tensor) -> Tensor:
    torch._assert(x.min() > 0, "not positive")
    return functional.gaussian_nll_loss(x, x + 1, x)


@pytest.mark.parametrize("function", [asserted, raising, raising_at_the_end, from_pytorch])
def test_a_check_is_left_out(function: Callable[[Tensor], Tensor]) -> None:
    check_emission(None, function, X)


def choosing(x: Tensor) -> Tensor:
    if x.max() > 1:
        return x
    return x * 2


def choosing_without_an_error(x: Tensor) -> Tensor:
    if x.max() > 1:
        x = x * 2
    else:
        raise ValueError
    return x


@pytest.mark.parametrize("function", [choosing, choosing_without_an_error])
def test_a_choice_by_values_is_an_error(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        ExportError, match=r"depends on the values of tensors at .*test_value_checks\.py:\d+"
    ):
        emitted(function, [X], ["in0"])


class Truth:
    """Remembers what the check in which it stands needs it to be."""

    def __init__(self, value: bool) -> None:
        self.value = value
        self.needed: list[bool | None] = []

    def __bool__(self) -> bool:
        self.needed.append(passing_value(sys._getframe(1)))
        return self.value


def test_each_part_of_a_condition_has_the_value_that_lets_the_check_pass() -> None:
    yes, no = Truth(True), Truth(False)
    if not (yes or no):
        raise AssertionError
    if no or (not yes and no):
        raise AssertionError
    chosen = 1 if yes else 2
    assert chosen == 1
    assert yes.needed == [True, True, None]
    assert no.needed == [False]


def test_conditions_are_back_afterwards() -> None:
    with checks_passed():
        assert bool(torch.tensor(True))
    assert "__bool__" not in vars(Tensor)
    with pytest.raises(AssertionError, match="not finite"):
        asserted(X / 0)
