"""Padding as ONNX, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(4)


@pytest.mark.parametrize(
    ("padding", "value"),
    [((1, 2), 0), ((0, 1, 2, 0), 1.5), ((-1, 2, 0, -1), -3), ((0, 0, 0, 0, 1, 0), 0)],
)
def test_constant_padding(padding: tuple[int, ...], value: float) -> None:
    x = torch.randn(3, 4, 5, generator=RANDOM)
    check_emission(
        aten.constant_pad_nd.default, lambda x: functional.pad(x, padding, value=value), x
    )
    grad = torch.randn(functional.pad(x, padding).shape, generator=RANDOM)
    if padding[4:] != (1, 0):
        check_emission(
            None, gradient_of(lambda x: functional.pad(x, padding, value=value)), x, grad
        )


def test_padding_of_flags() -> None:
    check_emission(
        aten.constant_pad_nd.default,
        lambda x: functional.pad(x.to(torch.bool), (1, 1), value=True),
        torch.randn(3, 2),
    )


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(
    ("axes", "padding"),
    [(1, (2, 1)), (1, (0, 3)), (2, (1, 2, 3, 0)), (2, (3, 3, 1, 1)), (3, (1, 2, 0, 1, 2, 1))],
)
def test_mirrored_and_repeated_edges(mode: str, axes: int, padding: tuple[int, ...]) -> None:
    x = torch.randn(3, 2, *(4, 5, 6)[:axes], generator=RANDOM)
    name = {"reflect": "reflection", "replicate": "replication"}[mode]
    forward: Any = getattr(aten, f"{name}_pad{axes}d").default
    backward: Any = getattr(aten, f"{name}_pad{axes}d_backward").default
    check_emission(forward, lambda x: functional.pad(x, padding, mode=mode), x)
    grad = torch.randn(functional.pad(x, padding).shape, generator=RANDOM)
    check_emission(backward, gradient_of(lambda x: functional.pad(x, padding, mode=mode)), x, grad)
