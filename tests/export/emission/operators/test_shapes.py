"""Operators that move elements, as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.emission.emitter import EmissionError

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
X = torch.arange(72.0).reshape(3, 4, 6) - 30

CASES: list[tuple[Any, Callable[..., Any]]] = [
    (aten.view.default, lambda x: x.reshape(-1, 6)),
    (aten.view.default, lambda x: x.view(x.shape[0] * 2, 12)),
    (aten.view.default, lambda x: x.flatten(1).unflatten(1, (3, -1))),
    (aten.view.default, lambda x: x.reshape(x.shape[0], 2, x.numel() // x.shape[0] // 2)),
    (aten._unsafe_view.default, lambda x: x.transpose(0, 1).reshape(4, -1)),
    (aten.squeeze.dims, lambda x: x[0, :, :1].squeeze()),
    (aten.squeeze.dim, lambda x: x[:, :1].squeeze(-2)),
    (aten.squeeze.dims, lambda x: x[:, :1, :1].squeeze((1, 2))),
    (aten.unsqueeze.default, lambda x: x.unsqueeze(-1)),
    (aten.expand.default, lambda x: x[:, :1].expand(-1, 5, -1)),
    (aten.expand.default, lambda x: x[0, 0, 0].expand(x.shape[0], 2)),
    (aten.expand.default, lambda x: x[0].expand_as(x)),
    (aten.expand.default, lambda x: x[:, :1, :1].expand(2, x.shape[0], 3, 2)),
    (aten.repeat.default, lambda x: x.repeat(2, 1, 3)),
    (aten.repeat.default, lambda x: x[0].repeat(x.shape[0], 1, 2)),
    (aten.repeat.default, lambda x: x[0, 1, 1].repeat(3, 2)),
    (aten.permute.default, lambda x: x.permute(1, -1, 0)),
    (aten.permute.default, lambda x: x.movedim(-1, 0)),
    (aten.t.default, lambda x: x[:, 0].t()),
    (aten.t.default, lambda x: x[:, 0, 0].t()),
    (aten.transpose.int, lambda x: x.transpose(-1, 1)),
    (aten.cat.default, lambda x: torch.cat([x, x + 1], dim=-2)),
    (aten.cat.default, lambda x: torch.cat([torch.empty(0), x[:, 0], x[:, 1, :3]], dim=1)),
    (aten.cat.default, lambda x: torch.cat([x, x.to(torch.int64)])),
    (aten.stack.default, lambda x: torch.stack([x, x * 2, x - 1], dim=-1)),
    (aten.stack.default, lambda x: torch.stack([x[0, 1, 2], x[0, 2, 2]])),
    (aten.flip.default, lambda x: x.flip(0, -1)),
    (aten.roll.default, lambda x: x.roll(2, -1)),
    (aten.roll.default, lambda x: x.roll((-5, 7), (1, 0))),
    (aten.roll.default, lambda x: x.roll(4)),
    (aten.tril.default, lambda x: x.tril()),
    (aten.tril.default, lambda x: x.to(torch.bool).tril(-1)),
    (aten.triu.default, lambda x: torch.full((5, 5), -torch.inf).triu(1) + x[:, :1, :5]),
    (aten.triu.default, lambda x: x.to(torch.int32).triu(2)),
    (aten.unfold.default, lambda x: x.unfold(-1, 3, 2)),
    (aten.unfold.default, lambda x: x.unfold(1, 2, 1)),
    (aten.as_strided.default, lambda x: x[0].clone().as_strided((8, 3), (3, 1))),
    (aten._to_copy.default, lambda x: x.to(torch.int64)),
    (aten._to_copy.default, lambda x: x.to(torch.bool)),
    (None, lambda x: torch.nn.functional.pixel_shuffle(x.reshape(-1, 4, 2, 3), 2)),
    (None, lambda x: torch.nn.functional.pixel_unshuffle(x.reshape(-1, 1, 4, 6), 2)),
    (None, lambda x: torch.nn.functional.channel_shuffle(x.reshape(-1, 4, 2, 3), 2)),
]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_shapes(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, X)


@pytest.mark.parametrize(
    ("function", "grad"),
    [
        (lambda x: x.unfold(-1, 3, 2), torch.rand(3, 4, 2, 3)),
        (lambda x: x.roll(1, 1), torch.rand(3, 4, 6)),
        (lambda x: torch.cat([x, x * 2], 1), torch.rand(3, 8, 6)),
        (lambda x: x.tril(), torch.rand(3, 4, 6)),
    ],
)
def test_gradients(function: Callable[..., Any], grad: torch.Tensor) -> None:
    check_emission(None, gradient_of(lambda x: function(x)), X, grad)


def test_only_as_strided_that_is_a_reshape_is_written() -> None:
    with pytest.raises(EmissionError, match="with other strides"):
        check_emission(None, lambda x: x[0].clone().as_strided((4, 3), (6, 2)), X)
