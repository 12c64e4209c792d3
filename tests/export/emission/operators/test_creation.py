"""Tensors made from numbers, as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.emission_cases import check_emission

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)

CASES: list[tuple[Any, Callable[..., Any]]] = [
    (aten.full.default, lambda x: torch.full((2, 3), 1.5)),
    (aten.full.default, lambda x: torch.full((x.shape[0], 4), x.shape[0] * 2)),
    (aten.full.default, lambda x: torch.full((2,), True)),
    (aten.full_like.default, lambda x: torch.full_like(x, -2)),
    (aten.full_like.default, lambda x: torch.full_like(x, 3, dtype=torch.int64)),
    (aten.new_full.default, lambda x: x.new_full((x.shape[0], 2), 7)),
    (aten.zeros.default, lambda x: torch.zeros(x.shape[0], 2, dtype=torch.bool)),
    (aten.zeros_like.default, lambda x: torch.zeros_like(x) + torch.zeros_like(x[0, 0])),
    (aten.new_zeros.default, lambda x: x.new_zeros(3)),
    (aten.ones.default, lambda x: torch.ones(x.shape[0] * 2, dtype=torch.int32)),
    (aten.ones_like.default, lambda x: torch.ones_like(x, memory_format=torch.preserve_format)),
    (aten.new_ones.default, lambda x: x.new_ones((2, x.shape[0]))),
    (aten.scalar_tensor.default, lambda x: torch.scalar_tensor(x.shape[0], dtype=torch.float32)),
    (aten.arange.default, lambda x: torch.arange(x.shape[0])),
    (aten.arange.default, lambda x: torch.arange(5.0)),
    (aten.arange.start, lambda x: torch.arange(2, x.shape[0] + 2, dtype=torch.float32)),
    (aten.arange.start_step, lambda x: torch.arange(0, x.shape[0] * 3, 3)),
    (aten.arange.start_step, lambda x: torch.arange(1.0, 200.0, 0.25)),
    (aten.arange.start_step, lambda x: torch.arange(10, 2, -3)),
    (aten.eye.default, lambda x: torch.eye(5)),
    (aten.eye.m, lambda x: torch.eye(3, x.shape[0], dtype=torch.int64)),
    (aten.linspace.default, lambda x: torch.linspace(-1, 1, 7)),
    (aten.tril_indices.default, lambda x: torch.tril_indices(4, 3, -1)),
    (aten.triu_indices.default, lambda x: torch.triu_indices(4, 3)),
    (aten.fill.Scalar, lambda x: aten.fill(x, 3)),
    (aten.fill.Tensor, lambda x: aten.fill(x, x[0, 0])),
    (None, lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) + x),
]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_creation(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, lambda x: (function(x), x), X)


EMPTY: list[tuple[Any, Callable[..., torch.Tensor]]] = [
    (aten.empty.memory_format, lambda x: torch.empty(x.shape[0], 4)),
    (aten.empty_like.default, torch.empty_like),
    (aten.new_empty.default, lambda x: x.new_empty((x.shape[0], 4))),
    (aten.empty_strided.default, lambda x: torch.empty_strided((x.shape[0], 4), (4, 1))),
    (aten.new_empty_strided.default, lambda x: x.new_empty_strided((x.shape[0], 4), (4, 1))),
    (aten.empty_permuted.default, lambda x: torch.empty_permuted((x.shape[0], 4), (0, 1))),
]


@pytest.mark.parametrize(("operator", "function"), EMPTY)
def test_an_empty_tensor_is_overwritten(
    operator: Any, function: Callable[..., torch.Tensor]
) -> None:
    check_emission(operator, lambda x: torch.slice_scatter(function(x), x * 2), X)


def test_a_long_range_takes_little_room_in_the_graph() -> None:
    model = check_emission(
        aten.arange.default, lambda x: torch.arange(100_000) + x[0, 0].to(torch.int64), X
    )
    assert len(model.SerializeToString()) < 2000
