"""Layer and group normalisation as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission

aten = torch.ops.aten
Norm = Callable[..., Tensor]

CASES: dict[str, tuple[Any, Any, Norm, tuple[int, ...], tuple[int, ...]]] = {
    "layer": (
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        lambda x, *affine: functional.layer_norm(x, (6,), *affine, eps=1e-3),
        (4, 6),
        (6,),
    ),
    "layer, two axes": (
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        lambda x, *affine: functional.layer_norm(x, (4, 6), *affine),
        (4, 6),
        (4, 6),
    ),
    "layer, no inner axis": (
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        lambda x, *affine: functional.layer_norm(x, (6,), *affine),
        (6,),
        (6,),
    ),
    "group": (
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        lambda x, *affine: functional.group_norm(x, 3, *affine),
        (6, 5, 4),
        (6,),
    ),
    "group, no image": (
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        lambda x, *affine: functional.group_norm(x, 2, *affine),
        (6,),
        (6,),
    ),
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_layer_and_group_norm(name: str, affine: bool) -> None:
    forward, backward, norm, shape, parameters = CASES[name]
    _check(forward, backward, norm, shape, parameters, 2 if affine else 0)


def _check(
    forward: Any,
    backward: Any,
    norm: Norm,
    shape: tuple[int, ...],
    parameters: tuple[int, ...],
    count: int,
) -> None:
    random = torch.Generator().manual_seed(0)
    x, grad = 2 * torch.randn(2, 3, *shape, generator=random) + 1
    grad = grad - 1
    affine = tuple(torch.rand(count, *parameters, generator=random) + 0.5)

    def gradients(x: Tensor, grad: Tensor, *affine: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().clone().requires_grad_() for value in (x, *affine)]
        return torch.autograd.grad(norm(*leaves), leaves, grad)

    check_emission(forward, norm, x, fixed=affine, tolerance=3e-6)
    check_emission(backward, gradients, x, grad, fixed=affine, tolerance=1e-5)
