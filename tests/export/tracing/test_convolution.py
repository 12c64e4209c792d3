"""Each arrangement of the weight gradient against PyTorch's own, in float64. All but one are plain
PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleetlearn_export.tracing import convolution
from torch import nn

CASES: dict[str, tuple[int, Any, tuple[int, ...]]] = {
    "tap by tap": (2, nn.Conv2d(16, 8, (3, 2), (2, 1), (1, 0), (1, 2)), (7, 9)),
    "few channels": (3, nn.Conv2d(2, 4, (3, 2), (2, 3), (1, 2)), (7, 9)),
    "one tap": (3, nn.Conv2d(8, 4, 1), (7, 9)),
    "one tap, of every second place": (3, nn.Conv2d(8, 4, 1, 2), (7, 9)),
    "one tap, padded": (3, nn.Conv2d(8, 4, 1, padding=1), (4, 4)),
    "one tap and many channels": (2, nn.Conv2d(32, 32, 1), (4, 4)),
    "one place": (3, nn.Conv2d(8, 4, 1), (1, 1)),
    "one example": (1, nn.Conv2d(8, 4, 3), (5, 5)),
    "windows beside each other": (3, nn.Conv2d(8, 4, (2, 3), (2, 3)), (5, 7)),
    "a window as large as the image": (3, nn.Conv2d(8, 4, (5, 4)), (5, 4)),
    "groups": (3, nn.Conv2d(6, 9, 3, padding=1, groups=3), (7, 8)),
    "two outputs a channel": (3, nn.Conv2d(6, 12, 3, (2, 1), (1, 2), (1, 2), groups=6), (7, 8)),
    "depthwise": (3, nn.Conv2d(6, 6, 3, (2, 1), (1, 2), (1, 2), groups=6), (7, 8)),
    "depthwise, long rows": (3, nn.Conv2d(6, 6, 3, (2, 1), (1, 2), (1, 2), groups=6), (7, 80)),
    "signal": (3, nn.Conv1d(8, 6, 5, 2, 2, 3), (40,)),
    "signal, depthwise": (3, nn.Conv1d(6, 6, 5, 2, 2, 3, groups=6), (20,)),
    "volume": (2, nn.Conv3d(9, 4, (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2)), (5, 6, 7)),
    "volume, groups": (
        2,
        nn.Conv3d(4, 4, (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2), groups=2),
        (5, 6, 7),
    ),
    "volume, depthwise": (
        2,
        nn.Conv3d(4, 4, (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2), groups=4),
        (5, 6, 7),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weight_gradient(name: str) -> None:
    examples, layer, size = CASES[name]
    layer = layer.double()
    x = torch.randn(examples, layer.in_channels, *size, dtype=torch.float64)
    y = layer(x)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, layer.weight, grad)
    _, found, bias = convolution.convolution_backward(
        grad,
        x,
        layer.weight,
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0],
        layer.groups,
        [False, True, True],
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(bias, grad.flatten(2).sum((0, 2)))
