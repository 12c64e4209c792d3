"""Activations and their backward passes as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
X = torch.tensor(
    [
        [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, -6.0],
        [1e-7, -1e-7, 1e-30, -1e-30, 2.999999, -2.999999, 3.000001, -3.0000002, 5.9999995, 7.0],
        [100.0, -100.0, 20.5, -20.5, 0.7, -1.3, 2.2, -2.7, 4.0, -4.5],
    ]
)
GRAD = torch.linspace(-2, 3, 30).reshape(3, 10)

ACTIVATIONS: list[tuple[Any, Any, Callable[..., Any]]] = [
    (aten.relu.default, aten.threshold_backward.default, functional.relu),
    (
        aten.threshold.default,
        aten.threshold_backward.default,
        lambda x: functional.threshold(x, 0.5, 0.0),
    ),
    (
        aten.threshold.default,
        aten.threshold_backward.default,
        lambda x: functional.threshold(x, 0.5, 2.0),
    ),
    (aten.hardtanh.default, aten.hardtanh_backward.default, functional.relu6),
    (aten.hardtanh.default, aten.hardtanh_backward.default, functional.hardtanh),
    (
        aten.hardtanh.default,
        aten.hardtanh_backward.default,
        lambda x: functional.hardtanh(x, -3.0, 3.0),
    ),
    (
        aten.hardtanh.default,
        aten.hardtanh_backward.default,
        lambda x: functional.hardtanh(x, -0.5, 6.0),
    ),
    (aten.hardsigmoid.default, aten.hardsigmoid_backward.default, functional.hardsigmoid),
    (aten.hardswish.default, aten.hardswish_backward.default, functional.hardswish),
    (aten.silu.default, aten.silu_backward.default, functional.silu),
    (aten.gelu.default, aten.gelu_backward.default, functional.gelu),
    (
        aten.gelu.default,
        aten.gelu_backward.default,
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    (aten.mish.default, aten.mish_backward.default, functional.mish),
    (aten.elu.default, aten.elu_backward.default, functional.elu),
    (aten.elu.default, aten.elu_backward.default, lambda x: functional.elu(x, 0.3)),
    (aten.elu.default, aten.elu_backward.default, functional.selu),
    (aten.celu.default, aten.elu_backward.default, lambda x: functional.celu(x, 0.7)),
    (aten.leaky_relu.default, aten.leaky_relu_backward.default, functional.leaky_relu),
    (
        aten.leaky_relu.default,
        aten.leaky_relu_backward.default,
        lambda x: functional.leaky_relu(x, 1.5),
    ),
    (aten.softplus.default, aten.softplus_backward.default, functional.softplus),
    (
        aten.softplus.default,
        aten.softplus_backward.default,
        lambda x: functional.softplus(x, 2.5, 3),
    ),
    (None, None, functional.softshrink),
    (None, None, functional.hardshrink),
    (None, None, lambda x: functional.hardshrink(x, 0.0)),
    (aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default, functional.logsigmoid),
    (aten.sigmoid.default, aten.sigmoid_backward.default, torch.sigmoid),
    (aten.tanh.default, aten.tanh_backward.default, torch.tanh),
    (None, None, functional.tanhshrink),
    (None, None, functional.softsign),
]


@pytest.mark.parametrize(("operator", "_backward", "function"), ACTIVATIONS)
def test_activations(operator: Any, _backward: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, X)


@pytest.mark.parametrize(("_forward", "operator", "function"), ACTIVATIONS)
def test_backward_passes(_forward: Any, operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, gradient_of(function), X, GRAD, tolerance=2e-6)


def test_elu_that_writes_into_its_input() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.elu(x * 1, 0.3, inplace=True)

    check_emission(aten.elu_backward.default, gradient_of(function), X, GRAD)


def test_gated_linear_unit() -> None:
    check_emission(None, functional.glu, X)
    check_emission(None, gradient_of(functional.glu), X, GRAD[:, :5])


def test_prelu() -> None:
    x, slope = X[:, :4, None].repeat(1, 1, 2), torch.tensor([0.25, -0.5, 0.0, 2.0])
    grad = torch.arange(24.0).reshape(3, 4, 2)
    check_emission(aten._prelu_kernel.default, functional.prelu, x, fixed=(slope,))
    for argument in (0, 1):

        def gradient(x: torch.Tensor, grad: torch.Tensor, argument: int = argument) -> torch.Tensor:
            return gradient_of(functional.prelu, argument)(x, slope, grad)

        check_emission(aten._prelu_kernel_backward.default, gradient, x, grad)


def test_float64() -> None:
    x, grad = X.to(torch.float64), GRAD.to(torch.float64)
    check_emission(
        aten.threshold_backward.default, gradient_of(functional.relu), x, grad, tolerance=1e-12
    )
    check_emission(
        aten.hardtanh_backward.default, gradient_of(functional.hardtanh), x, grad, tolerance=1e-12
    )


@pytest.mark.parametrize(
    "function", [functional.relu, functional.relu6, functional.hardtanh, functional.hardswish]
)
def test_infinite_inputs_have_a_gradient(function: Callable[..., Any]) -> None:
    x = torch.tensor([[torch.inf], [-torch.inf], [3e38]])
    check_emission(None, gradient_of(function), x, torch.ones(3, 1))
