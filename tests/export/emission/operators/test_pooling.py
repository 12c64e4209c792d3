"""Average pooling as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten

AVERAGES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((6, 4), {"kernel_size": 2}),
    ((7, 5), {"kernel_size": 2}),
    ((7, 6), {"kernel_size": (3, 2), "stride": (2, 1)}),
    ((7, 6), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((7, 6), {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    ((8, 6), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    (
        (8, 6),
        {
            "kernel_size": 3,
            "stride": 2,
            "padding": 1,
            "ceil_mode": True,
            "count_include_pad": False,
        },
    ),
    ((8, 7), {"kernel_size": 3, "stride": 3, "ceil_mode": True}),
    ((8, 7), {"kernel_size": 2, "stride": 3}),
    ((6, 7), {"kernel_size": 3, "divisor_override": 5}),
    ((6, 7), {"kernel_size": 1, "stride": 2}),
    ((6, 7), {"kernel_size": 1, "stride": 3, "ceil_mode": True, "divisor_override": 2}),
    ((9,), {"kernel_size": 2}),
    ((9,), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    ((4, 6, 4), {"kernel_size": 2}),
    ((5, 6, 4), {"kernel_size": (2, 3, 2), "stride": 2, "padding": (1, 1, 0), "ceil_mode": True}),
    (
        (5, 6, 4),
        {
            "kernel_size": 3,
            "stride": 1,
            "padding": 1,
            "count_include_pad": False,
            "divisor_override": 2,
        },
    ),
]
ADAPTIVE: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((6, 4), (1, 1)),
    ((6, 4), (3, 2)),
    ((7, 5), (3, 4)),
    ((3, 5), (4, 7)),
    ((9,), (3,)),
    ((7,), (4,)),
    ((4, 6, 4), (1, 1, 1)),
    ((4, 6, 4), (2, 3, 1)),
    ((5, 6, 7), (2, 3, 4)),
]


def _check(
    forward: torch._ops.OpOverload,
    backward: torch._ops.OpOverload,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
) -> None:
    check_emission(forward, function, x, tolerance=2e-6)
    grad = torch.randn(function(x).shape, generator=torch.Generator().manual_seed(1))
    check_emission(backward, gradient_of(function), x, grad, tolerance=2e-6)


def _image(*sizes: int) -> Tensor:
    return torch.randn(3, 2, *sizes, generator=torch.Generator().manual_seed(0))


def test_average_of_one_padded_element() -> None:
    """ONNX Runtime fuses padding into a pooling."""
    check_emission(
        None, lambda x: functional.avg_pool2d(functional.pad(x, (1, 0, 1, 0)), 1, 2), _image(6, 7)
    )


@pytest.mark.parametrize(("sizes", "options"), AVERAGES)
def test_average(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    flat = len(sizes) < 3
    _check(
        aten.avg_pool2d.default if flat else aten.avg_pool3d.default,
        aten.avg_pool2d_backward.default if flat else aten.avg_pool3d_backward.default,
        lambda x: getattr(functional, f"avg_pool{len(sizes)}d")(x, **options),
        _image(*sizes),
    )


@pytest.mark.parametrize(("sizes", "outs"), ADAPTIVE)
def test_adaptive_average(sizes: tuple[int, ...], outs: tuple[int, ...]) -> None:
    if outs in ((1, 1), (1, 1, 1)):
        # PyTorch computes a mean itself; the operators are called all the same.
        operator = aten._adaptive_avg_pool2d if len(outs) == 2 else aten._adaptive_avg_pool3d
        backward = getattr(aten, f"_adaptive_avg_pool{len(outs)}d_backward")
        x = _image(*sizes)
        check_emission(operator.default, lambda x: operator(x, outs), x)
        check_emission(backward.default, lambda grad, x: backward(grad, x), operator(x, outs), x)
        return
    flat = len(sizes) < 3
    _check(
        aten._adaptive_avg_pool2d.default if flat else aten._adaptive_avg_pool3d.default,
        aten._adaptive_avg_pool2d_backward.default
        if flat
        else aten._adaptive_avg_pool3d_backward.default,
        lambda x: getattr(functional, f"adaptive_avg_pool{len(sizes)}d")(x, outs),
        _image(*sizes),
    )


def test_one_image_per_row() -> None:
    """A pool of (channels, height, width): here the channels are the examples."""
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    _check(
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        lambda x: functional.avg_pool2d(x, 2, padding=1),
        x,
    )
