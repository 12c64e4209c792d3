"""Batch and instance normalisation as ONNX, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission

aten = torch.ops.aten
TOLERANCE = 3e-6
SHAPES = [(4, 5, 6), (4, 7), (4, 2, 3, 2)]
LARGE_SHAPES = [(4, 28, 28), (4, 800)]


def _tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, a gradient of the result, weight, bias, running mean and variance."""
    random = torch.Generator().manual_seed(0)
    channels = shape[0]
    x = 3 * torch.randn(3, *shape, generator=random) + 2
    vectors = torch.rand(4, channels, generator=random) + 0.5
    return x, torch.randn(3, *shape, generator=random), *vectors.unbind()  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES)
def test_training(shape: tuple[int, ...]) -> None:
    x, _, *vectors = _tensors(*shape)

    def norm(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, ...]:
        mean, var = mean.clone(), var.clone()
        return functional.batch_norm(x, mean, var, weight, bias, True, 0.2, 1e-3), mean, var

    operator = aten._native_batch_norm_legit_functional.default
    check_emission(operator, norm, x, fixed=tuple(vectors), tolerance=TOLERANCE)


@pytest.mark.parametrize("given", [True, False])
def test_two_calls_from_the_same_statistics(given: bool) -> None:
    """As in a step that runs the model twice. ONNX Runtime writes over the statistics that it
    gets."""
    x, other, weight, bias, mean, var = _tensors(4, 5, 6)

    def norms(x: Tensor, other: Tensor, *statistics: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for values in (x, other):
            running = [value.clone() for value in (statistics or (mean, var))]
            results += [functional.batch_norm(values, *running, weight, bias, True, 0.2), *running]
        return tuple(results)

    operator = aten._native_batch_norm_legit_functional.default
    model = check_emission(
        operator, norms, x, other, fixed=(mean, var) if given else (), tolerance=TOLERANCE
    )
    written = [
        name
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:]
    ]
    assert len(written) == len(set(written)) == 4


@pytest.mark.parametrize("affine", [True, False])
def test_without_statistics(affine: bool) -> None:
    x, _, weight, bias, *_ = _tensors(4, 5, 6)
    fixed = (weight, bias) if affine else ()
    check_emission(
        None,
        lambda x, *affine: functional.batch_norm(x, None, None, *affine, training=True),
        x,
        fixed=fixed,
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize("affine", [True, False])
def test_evaluation(affine: bool) -> None:
    x, _, weight, bias, mean, var = _tensors(4, 5, 6)
    check_emission(
        None,
        lambda x, mean, var, *affine: functional.batch_norm(x, mean, var, *affine),
        x,
        fixed=(mean, var, weight, bias) if affine else (mean, var),
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES])
def test_backward(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    x, grad, weight, bias, *statistics = _tensors(*shape)

    def gradients(
        x: Tensor, grad: Tensor, mean: Tensor, var: Tensor, *affine: Tensor
    ) -> tuple[Tensor, ...]:
        leaves = [value.detach().clone().requires_grad_() for value in (x, *affine)]
        result = functional.batch_norm(
            leaves[0], mean.clone(), var.clone(), *leaves[1:], training=training
        )
        return torch.autograd.grad(result, leaves, grad)

    fixed: Any = (*statistics, weight, bias) if affine else tuple(statistics)
    model = check_emission(
        aten.native_batch_norm_backward.default, gradients, x, grad, fixed=fixed, tolerance=1e-5
    )
    assert any(node.op_type == "MatMul" for node in model.graph.node) == (
        shape in LARGE_SHAPES and (affine or training)
    )


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(affine: bool) -> None:
    x, grad, weight, bias, *_ = _tensors(4, 5, 6)

    def gradients(x: Tensor, grad: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().clone().requires_grad_() for value in (x, *affine)]
        result = functional.instance_norm(leaves[0], None, None, *leaves[1:])
        return result.detach(), *torch.autograd.grad(result, leaves, grad)

    fixed = (weight, bias) if affine else ()
    check_emission(
        aten.native_batch_norm_backward.default, gradients, x, grad, fixed=fixed, tolerance=1e-5
    )
