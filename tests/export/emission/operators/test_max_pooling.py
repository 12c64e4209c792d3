"""Max pooling as ONNX, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten

POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((6, 4), {"kernel_size": 2}),
    ((7, 5), {"kernel_size": 2}),
    ((9, 6), {"kernel_size": (3, 2)}),
    ((7, 6), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((8, 6), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    ((8, 7), {"kernel_size": 2, "stride": 3, "ceil_mode": True}),
    ((8, 7), {"kernel_size": 2, "stride": 2, "ceil_mode": True}),
    ((8, 7), {"kernel_size": 3, "stride": 1, "dilation": 2, "padding": 1}),
    ((8, 7), {"kernel_size": 1, "stride": 2}),
    ((9, 9), {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": 1}),
    ((11, 9), {"kernel_size": (5, 4), "stride": (2, 3), "padding": (2, 1)}),
    ((8,), {"kernel_size": 2}),
    ((70,), {"kernel_size": 66, "stride": 2, "padding": 1}),
    ((9,), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((4, 6, 4), {"kernel_size": 2}),
    ((5, 6, 4), {"kernel_size": (2, 3, 2), "stride": 2, "padding": (1, 1, 0), "ceil_mode": True}),
    ((5, 6, 5), {"kernel_size": 2}),
]


def _images(sizes: tuple[int, ...]) -> Tensor:
    """Return images in which each window has several largest elements."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(-2, 3, (3, 2, *sizes), generator=random).to(torch.float32)


@pytest.mark.parametrize(("sizes", "options"), POOLS)
def test_max_pool(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    def pool(x: Tensor) -> Tensor:
        result: Tensor = getattr(functional, f"max_pool{len(sizes)}d")(x, **options)
        return result

    x = _images(sizes)
    operator = aten.max_pool3d_with_indices if len(sizes) == 3 else aten.max_pool2d_with_indices
    check_emission(operator.default, lambda x: gradient_of(pool)(x, torch.ones_like(pool(x))), x)
    x = x + torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) / 2
    grad = torch.randn(pool(x).shape, generator=torch.Generator().manual_seed(1))
    backward = (
        aten.max_pool3d_with_indices_backward
        if len(sizes) == 3
        else aten.max_pool2d_with_indices_backward
    )
    check_emission(backward.default, gradient_of(pool), x, grad)


@pytest.mark.parametrize(("sizes", "options"), POOLS)
def test_indices(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """PyTorch numbers the elements of one image's channel, ONNX those of the whole array."""
    operator = aten.max_pool3d_with_indices if len(sizes) == 3 else aten.max_pool2d_with_indices
    check_emission(
        operator.default,
        lambda x: getattr(functional, f"max_pool{len(sizes)}d")(x, **options, return_indices=True),
        _images(sizes)
        + torch.arange(24).reshape(3, 2, 4)[..., :1].reshape(3, 2, *[1] * len(sizes)),
    )


@pytest.mark.parametrize(("sizes", "options"), POOLS)
def test_one_image_without_an_axis_of_examples(
    sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    def pool(x: Tensor) -> Tensor:
        result: Tensor = getattr(functional, f"max_pool{len(sizes)}d")(x, **options)
        return result

    x = _images(sizes)[0]
    backward = (
        aten.max_pool3d_with_indices_backward
        if len(sizes) == 3
        else aten.max_pool2d_with_indices_backward
    )
    check_emission(backward.default, gradient_of(pool), x, torch.randn(pool(x).shape))


def test_a_large_image_does_not_make_the_graph_large() -> None:
    """Windows side by side compare each element with its rank in the window, which the graph holds
    for one window."""

    def pool(x: Tensor) -> Tensor:
        return functional.max_pool2d(x, 2)

    model = check_emission(
        aten.max_pool2d_with_indices_backward.default,
        gradient_of(pool),
        _images((64, 64)),
        torch.randn(3, 2, 32, 32),
    )
    assert model.ByteSize() < 8192
