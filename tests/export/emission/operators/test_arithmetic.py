"""Arithmetic operators as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.emission_cases import check_emission

aten = torch.ops.aten
A = torch.tensor([[0.5, -2.0, 3.0], [1.0, 4.0, -0.25], [2.0, 0.125, -7.0]])
B = torch.tensor([[2.0, 0.5, -1.5], [-3.0, 1.0, 8.0], [0.25, 2.0, 4.0]])

CASES: list[tuple[Any, Callable[..., Any]]] = [
    (aten.add.Tensor, lambda a, b: a + b),
    (aten.add.Tensor, lambda a, b: torch.add(a, b, alpha=3)),
    (aten.sub.Tensor, lambda a, b: a - b),
    (aten.mul.Tensor, lambda a, b: a * b),
    (aten.mul.Tensor, lambda a, b: a * 3),
    (aten.div.Tensor, lambda a, b: a / b),
    (aten.rsub.Scalar, lambda a, b: torch.rsub(a, 2.5, alpha=2)),
    (aten.pow.Tensor_Scalar, lambda a, b: a**3),
    (aten.pow.Tensor_Scalar, lambda a, b: a**2),
    (aten.sqrt.default, lambda a, b: (a * a).sqrt()),
]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_arithmetic(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, A, B)
