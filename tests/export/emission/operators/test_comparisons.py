"""Comparisons, logic, bits and limits as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.model.seeded_random import Seeded

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
A = torch.tensor([[0.0, -2.0, 3.0], [1.0, 4.0, -0.25], [2.0, 0.0, -7.0]])
B = torch.tensor([[0.0, 0.5, -1.5], [1.0, 1.0, 8.0], [0.25, 2.0, -7.0]])
SPECIAL = torch.tensor(
    [[0.0, torch.inf, -torch.inf], [torch.nan, 1.0, -1.0], [3.0, torch.inf, torch.nan]]
)
WORDS = torch.tensor([[0, -1, 5], [2**32 - 1, 2**40 + 3, -(2**35)], [7, -8, 2**31]])
MASKS = torch.tensor([[1, 3, -4], [2**31 + 5, -1, 2**33 - 1], [12, 9, 2**32 - 1]])

CASES: list[tuple[Any, Callable[..., Any]]] = [
    *(
        (getattr(aten, name).Tensor, getattr(torch, name))
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    *(
        (getattr(aten, name).Scalar, lambda a, b, name=name: getattr(torch, name)(a, 1))
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    (aten.gt.Tensor, lambda a, b: a.to(torch.int64) > b),
    (aten.gt.Scalar, lambda a, b: a.to(torch.int64) > 0.5),
    (aten.lt.Tensor, lambda a, b: (a > 0) < (b > 0)),
    (aten.eq.Tensor, lambda a, b: (a > 0) == (b > 0)),
    (aten.eq.Tensor, lambda a, b: a.to(torch.uint8) == b.to(torch.int32)),
    (aten.lt.Scalar, lambda a, b: a < b.shape[0]),
    (aten.logical_and.default, torch.logical_and),
    (aten.logical_or.default, torch.logical_or),
    (aten.logical_xor.default, torch.logical_xor),
    (aten.logical_not.default, lambda a, b: torch.logical_not(a)),
    (aten.bitwise_and.Tensor, lambda a, b: (a > 0) & (b > 0)),
    (aten.bitwise_or.Tensor, lambda a, b: (a > 0) | (b > 0)),
    (aten.bitwise_xor.Tensor, lambda a, b: (a > 0) ^ (b > 0)),
    (aten.bitwise_not.default, lambda a, b: ~(a > 0)),
    (aten.where.self, lambda a, b: torch.where(a > b, a, b)),
    (aten.where.self, lambda a, b: torch.where(a > b, a, 2)),
    (aten.where.self, lambda a, b: torch.where(a > b, 1.0, b)),
    (aten.where.self, lambda a, b: torch.where(a > b, a.to(torch.int64), b)),
    (aten.where.self, lambda a, b: torch.where(a > b, a > 0, b > 0)),
    (aten.masked_fill.Scalar, lambda a, b: a.masked_fill(b > 0, -torch.inf)),
    (aten.masked_fill.Tensor, lambda a, b: a.masked_fill(b > 0, b.sum())),
    (aten.minimum.default, torch.minimum),
    (aten.maximum.default, torch.maximum),
    (aten.maximum.default, lambda a, b: torch.maximum(a > 0, b > 0)),
    (aten.minimum.default, lambda a, b: torch.minimum(a.to(torch.int64), b.to(torch.int64))),
    (aten.clamp.default, lambda a, b: a.clamp(-1, 2)),
    (aten.clamp.default, lambda a, b: a.clamp(max=2)),
    (aten.clamp.default, lambda a, b: a.clamp(2, -1)),
    (aten.clamp.default, lambda a, b: a.to(torch.int64).clamp(min=1)),
    (aten.clamp.default, lambda a, b: a.to(torch.int64).clamp(0, 2)),
    (aten.clamp.default, lambda a, b: a.to(torch.int64).clamp(0.5, 2.5)),
    (aten.clamp.Tensor, lambda a, b: a.clamp(min=b, max=b + 1)),
    (aten.clamp_min.default, lambda a, b: torch.clamp_min(a, 0.5)),
    (aten.clamp_max.default, lambda a, b: torch.clamp_max(a, 0.5)),
    (aten.fill.Scalar, lambda a, b: aten.fill(a, 2.5)),
    (aten.fill.Tensor, lambda a, b: aten.fill(a, b.sum())),
    (aten.copy.default, lambda a, b: aten.copy(a.to(torch.int64), b)),
    (aten.copy.default, lambda a, b: aten.copy(a, b[:, :1])),
    (None, lambda a, b: torch.isclose(a, b)),
]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_comparisons(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, A, B)


def test_infinite_numbers_and_nan() -> None:
    check_emission(aten.isnan.default, torch.isnan, SPECIAL)
    check_emission(aten.isinf.default, torch.isinf, SPECIAL)
    check_emission(None, torch.isfinite, SPECIAL)
    check_emission(None, lambda a: torch.nan_to_num(a, 1.0, 2.0, -3.0), SPECIAL)
    check_emission(aten.isnan.default, lambda a: aten.isnan.default(a), WORDS)
    for limit in (torch.maximum, torch.minimum):
        check_emission(None, limit, SPECIAL, A)
        check_emission(None, limit, A, SPECIAL)
    check_emission(aten.clamp.default, lambda a: a.clamp(-2, 2), SPECIAL)
    check_emission(aten.clamp.Tensor, lambda a, b: a.clamp(min=b), SPECIAL, A)
    check_emission(aten.gt.Scalar, lambda a: a > 0, SPECIAL)
    check_emission(aten.ne.Tensor, lambda a: a != a, SPECIAL)
    check_emission(aten.logical_not.default, torch.logical_not, SPECIAL)
    check_emission(aten.where.self, lambda a: torch.where(a.isfinite(), a, 0.0), SPECIAL)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_bits_of_integers(dtype: torch.dtype) -> None:
    words, masks = WORDS.to(dtype), MASKS.to(dtype)
    check_emission(aten.bitwise_and.Tensor, lambda a, b: a & b, words, masks)
    check_emission(aten.bitwise_or.Tensor, lambda a, b: a | b, words, masks)
    check_emission(aten.bitwise_xor.Tensor, lambda a, b: a ^ b, words, masks)
    check_emission(aten.bitwise_not.default, lambda a: ~a, words)
    check_emission(aten.bitwise_and.Scalar, lambda a: a & 6, words)


def test_shifts() -> None:
    check_emission(None, lambda a: a << 3, WORDS)
    check_emission(None, lambda a: a >> 3, WORDS)
    check_emission(
        aten.bitwise_left_shift.Tensor_Scalar, lambda a: torch.bitwise_left_shift(a, 2), WORDS
    )
    check_emission(
        aten.bitwise_right_shift.Tensor_Scalar, lambda a: torch.bitwise_right_shift(a, 2), WORDS
    )
    check_emission(
        aten.bitwise_right_shift.Tensor,
        lambda a, b: torch.bitwise_right_shift(a, b),
        WORDS,
        MASKS.clamp(0, 9),
    )
    check_emission(
        aten.bitwise_left_shift.Tensor,
        lambda a, b: torch.bitwise_left_shift(a, b),
        WORDS,
        MASKS.clamp(0, 9),
    )


def test_random_numbers_from_a_seed() -> None:
    def drawn(values: torch.Tensor) -> torch.Tensor:
        with Seeded(torch.tensor(2**40 + 17)):
            return (
                torch.nn.functional.dropout(values, 0.3)
                + torch.rand_like(values)
                + torch.randn_like(values)
            )

    check_emission(aten.bitwise_xor.Tensor, drawn, A)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.clamp(-1, 2),
        lambda a: torch.maximum(a, B.new_tensor(0.0)),
        lambda a: a.abs(),
        lambda a: torch.where(a > 0, a, a * a),
        lambda a: a.masked_fill(a > 2, 0.0),
    ],
)
def test_gradients(function: Callable[..., Any]) -> None:
    check_emission(None, gradient_of(function), A, B)
