"""Tensors that are filled with another tensor's element."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.tracing.filled_tensors import numbers_from_tensors
from torch import Tensor

from tests.support.emission_cases import check_emission

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(6))

FILLED: list[Callable[[Tensor], Any]] = [
    lambda x: torch.full((x.shape[0], 2), x.max()),
    lambda x: torch.full((2,), x.argmax(), dtype=torch.float32),
    lambda x: torch.full((2,), x.argmax()),
    lambda x: torch.full_like(x, x.sum() > 0),
    lambda x: x.new_full((2, 3), x.min()),
    lambda x: x.new_full((2, 3), 2.5) + torch.full((2, 3), 1) + torch.full_like(x[:1, :1], 3),
]


@pytest.mark.parametrize("function", FILLED)
def test_an_element_of_a_tensor_is_the_number(function: Callable[[Tensor], Any]) -> None:
    check_emission(None, function, X)


def test_functions_are_back_even_after_an_error() -> None:
    before = torch.full, torch.full_like
    with contextlib.suppress(ZeroDivisionError), numbers_from_tensors():
        raise ZeroDivisionError
    assert (torch.full, torch.full_like) == before
    assert "new_full" not in vars(Tensor)
