"""Convolutions as ONNX, against PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission

aten = torch.ops.aten
TOLERANCE = 3e-6


class Case(NamedTuple):
    image: tuple[int, ...]
    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    transposed: bool = False

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x, weight, bias and a gradient of the result."""
        random = torch.Generator().manual_seed(0)
        groups = self.options.get("groups", 1)
        x = torch.randn(3, self.inputs, *self.image, generator=random)
        shape = (
            (self.inputs, self.outputs // groups)
            if self.transposed
            else (self.outputs, self.inputs // groups)
        )
        weight = torch.randn(*shape, *self.kernel, generator=random)
        bias = torch.randn(self.outputs, generator=random)
        grad = torch.randn(self(x, weight, bias).shape, generator=random)
        return x, weight, bias, grad

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        name = f"conv{'_transpose' if self.transposed else ''}{len(self.kernel)}d"
        result: Tensor = getattr(functional, name)(x, weight, bias, **self.options)
        return result


CASES = {
    "one element": Case((5, 7), 6, 4, (1, 1)),
    "one element, strides": Case((6, 7), 6, 4, (1, 1), {"stride": 2}),
    "one element, padding": Case((4, 5), 3, 4, (1, 1), {"padding": 1}),
    "one place": Case((3, 3), 5, 4, (3, 3)),
    "one element and place": Case((1, 1), 16, 24, (1, 1)),
    "large products": Case((2, 2), 40, 50, (1, 1)),
    "one element, larger image": Case((9, 8), 6, 4, (1, 1)),
    "larger image": Case((8, 9), 9, 5, (3, 3), {"padding": 1}),
    "larger image, strides": Case((12, 11), 9, 5, (3, 2), {"padding": 1, "stride": 2}),
    "dense": Case((7, 6), 9, 5, (3, 3), {"padding": 1}),
    "dense, strides that do not divide": Case((8, 7), 9, 5, (3, 3), {"padding": 1, "stride": 2}),
    "dense, dilation": Case((9, 8), 8, 5, (3, 2), {"padding": (2, 1), "dilation": (2, 3)}),
    "even kernel": Case((7, 7), 8, 5, (4, 2), {"stride": (3, 2)}),
    "few channels": Case((8, 8), 3, 16, (3, 3), {"stride": 2, "padding": 1}),
    "one channel": Case((10, 4), 1, 8, (10, 4), {"stride": 2, "padding": (5, 1)}),
    "side by side": Case((9, 8), 3, 6, (4, 4), {"stride": 4}),
    "large kernel": Case((12, 11), 3, 4, (9, 8), {"padding": 3, "stride": 2}),
    "large kernel, groups": Case((12, 11), 4, 6, (9, 8), {"padding": 3, "groups": 2}),
    "groups": Case((6, 5), 8, 12, (3, 3), {"padding": 1, "groups": 4}),
    "groups, one element": Case((6, 5), 8, 12, (1, 1), {"groups": 4}),
    "groups, strides": Case((7, 5), 4, 4, (3, 3), {"padding": 1, "stride": 2, "groups": 2}),
    "depthwise": Case((6, 5), 8, 8, (3, 3), {"padding": 1, "groups": 8}),
    "depthwise, strides": Case((7, 9), 8, 8, (5, 5), {"padding": 2, "stride": 2, "groups": 8}),
    "depthwise, dilation": Case((9, 9), 4, 4, (3, 3), {"padding": 2, "dilation": 2, "groups": 4}),
    "depthwise, long rows": Case((2, 50), 4, 4, (3, 3), {"padding": 1, "groups": 4}),
    "depthwise, narrow": Case((25, 5), 4, 4, (3, 3), {"padding": 1, "groups": 4}),
    "depthwise, narrow, strides": Case(
        (25, 8), 4, 4, (4, 3), {"padding": 1, "stride": (2, 1), "groups": 4}
    ),
    "depthwise, narrow, dilation": Case(
        (24, 6),
        4,
        4,
        (3, 2),
        {"padding": (1, 2), "dilation": (2, 3), "stride": (1, 2), "groups": 4},
    ),
    "depthwise, larger than small": Case(
        (14, 13), 4, 4, (3, 3), {"padding": 1, "stride": (2, 1), "groups": 4}
    ),
    "depthwise, multiplier": Case((6, 6), 4, 12, (3, 3), {"padding": 1, "groups": 4}),
    "one axis": Case((11,), 9, 4, (3,), {"padding": 1, "stride": 2}),
    "one axis, small, dilation": Case((25,), 8, 8, (3,), {"stride": 2, "dilation": 4}),
    "one axis, depthwise": Case((11,), 6, 6, (4,), {"padding": 3, "groups": 6}),
    "one axis, few channels": Case((40,), 2, 4, (5,), {"stride": 3}),
    "three axes": Case((4, 5, 4), 3, 4, (2, 3, 2), {"padding": (0, 1, 1), "stride": (1, 2, 1)}),
    "three axes, small": Case((3, 4, 3), 5, 4, (2, 2, 2), {"padding": 1, "stride": 2}),
    "three axes, depthwise": Case((4, 5, 4), 3, 3, (3, 3, 3), {"padding": 1, "groups": 3}),
    "same": Case((6, 7), 8, 4, (5, 3), {"padding": "same"}),
    "transposed": Case(
        (4, 5), 6, 4, (3, 3), {"padding": 1, "stride": 2, "output_padding": 1}, transposed=True
    ),
    "transposed, even kernel": Case((4, 5), 9, 8, (2, 2), {"stride": 2}, transposed=True),
    "transposed, groups": Case((4, 5), 6, 4, (3, 2), {"dilation": 2, "groups": 2}, transposed=True),
    "transposed, one axis": Case(
        (6,), 3, 4, (4,), {"stride": 3, "output_padding": 1}, transposed=True
    ),
    "transposed, three axes": Case(
        (3, 2, 3), 4, 3, (3, 2, 3), {"stride": 2, "padding": 1}, transposed=True
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward(case: Case) -> None:
    x, weight, bias, _ = case.tensors()
    check_emission(aten.convolution.default, case, x, fixed=(weight, bias), tolerance=TOLERANCE)


def test_forward_without_bias() -> None:
    x, weight, _, _ = CASES["dense"].tensors()
    check_emission(
        aten.convolution.default,
        lambda x, weight: CASES["dense"](x, weight, None),
        x,
        fixed=(weight,),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_backward(case: Case) -> None:
    x, weight, bias, grad = case.tensors()

    def gradients(x: Tensor, grad: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().clone().requires_grad_() for value in (x, *values)]
        return torch.autograd.grad(case(*leaves), leaves, grad)

    operator = aten.convolution_backward.default
    check_emission(operator, gradients, x, grad, fixed=(weight, bias), tolerance=TOLERANCE)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_backward_of_one(wanted: int) -> None:
    case = CASES["dense"]
    x, weight, bias, grad = case.tensors()

    def gradient(x: Tensor, grad: Tensor, *values: Tensor) -> Tensor:
        leaves = [value.detach().clone() for value in (x, *values)]
        leaves[wanted].requires_grad_()
        return torch.autograd.grad(case(*leaves), leaves[wanted], grad)[0]

    operator = aten.convolution_backward.default
    check_emission(operator, gradient, x, grad, fixed=(weight, bias), tolerance=TOLERANCE)
