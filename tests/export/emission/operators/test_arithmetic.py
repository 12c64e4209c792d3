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
POSITIVE = torch.tensor([[0.5, 1.0, 3.0], [0.125, 4.0, 0.25], [2.0, 1e-3, 7.0]])
HALVES = torch.tensor([[0.5, -0.5, 1.5], [-1.5, 2.5, -2.5], [0.0, 3.7, -3.7]])
WHOLE = torch.tensor([[7, -7, 0], [8, -1, 5], [3, 2, -9]])
DIVISOR = torch.tensor([[2, 2, -3], [-3, 4, 5], [-2, 7, 4]])

CASES: list[tuple[Any, Callable[..., Any]]] = [
    (aten.add.Tensor, lambda a, b: a + b),
    (aten.add.Tensor, lambda a, b: torch.add(a, b, alpha=3)),
    (aten.add.Tensor, lambda a, b: a + b.shape[0]),
    (aten.sub.Tensor, lambda a, b: a - b),
    (aten.mul.Tensor, lambda a, b: a * b),
    (aten.mul.Tensor, lambda a, b: a * 3),
    (aten.mul.Tensor, lambda a, b: a * (1 / b.shape[0])),
    (aten.mul.Tensor, lambda a, b: (a > 0) * b),
    (aten.div.Tensor, lambda a, b: a / b),
    (aten.div.Tensor, lambda a, b: a / b.shape[0]),
    (aten.div.Tensor_mode, lambda a, b: torch.div(a, b, rounding_mode="floor")),
    (aten.div.Tensor_mode, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    (aten.floor_divide.default, lambda a, b: torch.floor_divide(a, 0.1)),
    (aten.rsub.Scalar, lambda a, b: torch.rsub(a, 2.5, alpha=2)),
    (aten.remainder.Tensor, lambda a, b: a % b),
    (aten.remainder.Scalar, lambda a, b: a % -1.5),
    (aten.fmod.Tensor, torch.fmod),
    (aten.fmod.Scalar, lambda a, b: torch.fmod(a, 1.5)),
    (aten.neg.default, lambda a, b: -a),
    (aten.abs.default, lambda a, b: a.abs()),
    (aten.sign.default, lambda a, b: (a - 0.5).sign()),
    (aten.pow.Tensor_Tensor, lambda a, b: a.abs() ** b),
    (aten.pow.Scalar, lambda a, b: 2.5**a),
    *((aten.pow.Tensor_Scalar, lambda a, b, p=p: a**p) for p in (0, 1, 2, 3, 4, -1, -2)),
    *(
        (aten.pow.Tensor_Scalar, lambda a, b, p=p: a.abs() ** p)
        for p in (0.5, -0.5, 1.5, 2.5, 1 / 3)
    ),
    (aten.reciprocal.default, lambda a, b: a.reciprocal()),
    (aten.addcmul.default, lambda a, b: torch.addcmul(a, a, b, value=2)),
    (aten.addcdiv.default, lambda a, b: torch.addcdiv(a, a, b, value=-0.5)),
    (aten.lerp.Scalar, lambda a, b: torch.lerp(a, b, 0.25)),
    (aten.lerp.Tensor, lambda a, b: torch.lerp(a, b, a)),
    (aten.atan2.default, torch.atan2),
    (aten.atan2.default, lambda a, b: torch.atan2(torch.zeros_like(a), b)),
    (aten.atan2.default, lambda a, b: torch.atan2(a * 1e-4, b)),
    (None, lambda a, b: torch.sinc(a)),
    (None, lambda a, b: torch.hypot(a, b)),
    (None, lambda a, b: torch.heaviside(a, b)),
    (None, lambda a, b: a.square()),
]
POSITIVES = ["sqrt", "rsqrt", "log", "log1p", "log2", "log10"]
FUNCTIONS = [
    "exp",
    "exp2",
    "expm1",
    "erf",
    "erfc",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "atan",
    "asinh",
]
UNIT = ["asin", "acos", "atanh"]
ROUNDING = ["floor", "ceil", "round", "trunc", "frac"]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_arithmetic(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, A, B)


@pytest.mark.parametrize("name", FUNCTIONS + POSITIVES + UNIT + ["acosh"])
def test_functions_of_each_element(name: str) -> None:
    values = (
        A / 8
        if name in UNIT
        else POSITIVE + 1
        if name == "acosh"
        else POSITIVE
        if name in POSITIVES
        else A
    )
    check_emission(getattr(aten, name).default, getattr(torch, name), values)


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding(name: str) -> None:
    check_emission(getattr(aten, name).default, getattr(torch, name), HALVES)


def test_rounding_to_decimals() -> None:
    check_emission(aten.round.decimals, lambda a: torch.round(a, decimals=2), A / 7)
    check_emission(aten.round.decimals, lambda a: torch.round(a, decimals=-1), A * 7)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    a, b = WHOLE.to(dtype), (DIVISOR.abs() if dtype == torch.uint8 else DIVISOR).to(dtype)
    check_emission(aten.add.Tensor, lambda a, b: torch.add(a, b, alpha=2), a, b)
    check_emission(aten.mul.Tensor, lambda a, b: a * b * 3, a, b)
    check_emission(aten.div.Tensor, lambda a, b: a / b, a, b)
    check_emission(aten.remainder.Tensor, lambda a, b: a % b, a, b)
    check_emission(aten.fmod.Tensor, lambda a, b: torch.fmod(a, b), a, b)
    check_emission(aten.div.Tensor_mode, lambda a, b: torch.div(a, b, rounding_mode="trunc"), a, b)
    check_emission(aten.floor_divide.default, lambda a, b: a // b, a, b)
    check_emission(aten.pow.Tensor_Scalar, lambda a: a**2, a)
    check_emission(aten.mul.Tensor, lambda a: a * 0.5, a)
    check_emission(aten.sqrt.default, lambda a: torch.sqrt(a * a), a)


def test_booleans_are_numbers() -> None:
    check_emission(aten.add.Tensor, lambda a, b: (a > 0) + (b > 0), A, B)
    check_emission(aten.mul.Tensor, lambda a, b: (a > 0) * (b > 0), A, B)
    check_emission(aten.add.Tensor, lambda a, b: (a > 0) + 2, A, B)


def test_numbers_without_axes() -> None:
    check_emission(aten.add.Tensor, lambda a: a + torch.tensor(2.0, dtype=torch.float64), A)
    check_emission(aten.mul.Tensor, lambda a: a.sum() * torch.tensor(3), A)
