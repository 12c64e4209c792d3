"""Operators that pick or place elements by index, as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.emission.emitter import EmissionError
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(5)
X = torch.randn(3, 4, 5, generator=RANDOM)
PLACES = torch.tensor([[1, 3, 0], [2, 2, -1], [0, -4, 3]])
POSITIVE = PLACES % 4
TABLE = torch.randn(4, 5, generator=RANDOM)
ROWS = torch.tensor([2, 0, 2])


def one_per_row(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


PICKED: list[tuple[Any, Callable[..., Any]]] = [
    (aten.embedding.default, lambda x, places: functional.embedding(places, TABLE)),
    (
        aten.embedding.default,
        lambda x, places: functional.embedding(places[:, 0], TABLE, padding_idx=1),
    ),
    (aten.index_select.default, lambda x, places: x.index_select(1, ROWS)),
    (aten.index_select.default, lambda x, places: x.index_select(-1, places[0])),
    (aten.index_select.default, lambda x, places: x[0, 0, 0].index_select(0, torch.tensor([0]))),
    (aten.take.default, lambda x, places: x.take(places)),
    (aten.gather.default, lambda x, places: x.gather(1, places.unsqueeze(-1))),
    (aten.gather.default, lambda x, places: x[:, 0].gather(-1, places)),
    (aten.gather.default, lambda x, places: x[0, 0, 0].gather(0, torch.tensor(0))),
    (aten.index.Tensor, lambda x, places: x[:, ROWS]),
    (aten.index.Tensor, lambda x, places: x[one_per_row(x), places[:, 0]]),
    (aten.index.Tensor, lambda x, places: x[one_per_row(x), :, places[:, 0]]),
    (aten.index.Tensor, lambda x, places: x[one_per_row(x)[:, None], places]),
    (aten.index.Tensor, lambda x, places: x[:, ROWS, ROWS + 1]),
    (aten.index.Tensor, lambda x, places: x[:, ROWS[:, None], torch.tensor([0, -1])]),
    (aten.index.Tensor, lambda x, places: TABLE[places.to(torch.int32)]),
    (
        aten.bucketize.Tensor,
        lambda x, places: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5, 0.5])),
    ),
    (
        aten.bucketize.Tensor,
        lambda x, places: torch.bucketize(places, torch.tensor([0, 2]), right=True),
    ),
    (None, lambda x, places: functional.one_hot(places, 4)),
    (
        aten.searchsorted.Tensor,
        lambda x, places: torch.searchsorted(x[:, :, :1].repeat(1, 1, 2), x, side="right"),
    ),
    (
        aten.searchsorted.Scalar,
        lambda x, places: torch.searchsorted(torch.tensor([1, 3, 5]), 4, out_int32=True),
    ),
]


@pytest.mark.parametrize(("operator", "function"), PICKED)
def test_picked(operator: Any, function: Callable[..., Any]) -> None:
    # PyTorch accepts negative numbers in x[index] alone.
    negative = operator is aten.index.Tensor
    check_emission(
        operator, lambda x, places: (function(x, places), x), X, PLACES if negative else POSITIVE
    )


PLACED: list[tuple[Any, Callable[..., Any]]] = [
    (aten.scatter.src, lambda x, places: x[:, :, 0].scatter(1, places[:, :1], x[:, 1])),
    (aten.scatter.value, lambda x, places: x[:, :, 0].scatter(-1, places, 7)),
    (aten.scatter.value, lambda x, places: x[0, 0, 0].scatter(0, torch.tensor(0), 7)),
    (
        aten.scatter.reduce,
        lambda x, places: aten.scatter.reduce(x[:, :, 0], 1, places, x[:, :, 1], reduce="multiply"),
    ),
    (aten.scatter.value_reduce, lambda x, places: x[:, :, 0].scatter(1, places, 2, reduce="add")),
    (aten.scatter_add.default, lambda x, places: x[:, :, 0].scatter_add(1, places, x[:, :, 1])),
    (
        aten.scatter_add.default,
        lambda x, places: torch.zeros(4).scatter_add(0, places[:, 0], x[:, 0, 0]),
    ),
    (aten.scatter_reduce.two, lambda x, places: x[:, 0].scatter_reduce(1, places, x[:, 1], "amax")),
    (
        aten.scatter_reduce.two,
        lambda x, places: x[:, 0].scatter_reduce(1, places, x[:, 1], "sum", include_self=False),
    ),
    (
        aten.scatter_reduce.two,
        lambda x, places: x[:, 0].scatter_reduce(1, places, x[:, 1], "amin", include_self=False),
    ),
    (aten.scatter_reduce.two, lambda x, places: x[:, 0].scatter_reduce(1, places, x[:, 1], "mean")),
    (
        aten.scatter_reduce.two,
        lambda x, places: x[:, 0].scatter_reduce(1, places, x[:, 1], "mean", include_self=False),
    ),
    (aten.index_add.default, lambda x, places: x.index_add(1, ROWS, x[:, :3], alpha=2)),
    (
        aten.index_add.default,
        lambda x, places: torch.zeros(4, 5).index_add(0, places[:, 0], x[:, 0]),
    ),
    (
        aten.index_copy.default,
        lambda x, places: x.index_copy(-1, torch.tensor([4, 0]), x[:, :, 1:3]),
    ),
    (aten.index_fill.int_Scalar, lambda x, places: x.index_fill(1, ROWS, 9)),
    (aten.index_fill.int_Tensor, lambda x, places: x.index_fill(1, ROWS, x[0, 0, 0])),
    (
        aten.index_put.default,
        lambda x, places: x.index_put((one_per_row(x), places[:, 0]), x[:, 0]),
    ),
    (
        aten.index_put.default,
        lambda x, places: x.index_put((one_per_row(x), places[:, 0]), torch.tensor(2.0)),
    ),
    (
        aten.index_put.default,
        lambda x, places: aten.index_put(x, [None, torch.tensor([0, -1])], x[:, :2] * 2),
    ),
    (aten.index_put.default, lambda x, places: aten.index_put(x, [None, ROWS], x[:, :3], True)),
    (
        aten.index_put.default,
        lambda x, places: aten.index_put(x, [None, ROWS, ROWS - 1], x[:, 0, :3], True),
    ),
    (
        aten.index_put.default,
        lambda x, places: aten.index_put(x, [one_per_row(x), None, places[:, 0]], x[:, :, 0], True),
    ),
    (
        aten.index_put.default,
        lambda x, places: torch.zeros(4, 5).index_put((places,), x[:, :3], accumulate=True),
    ),
    (
        aten.index_put.default,
        lambda x, places: x.index_put((x.to(torch.int64).to(torch.bool),), torch.tensor(-1.0)),
    ),
    (
        aten.index_put.default,
        lambda x, places: x.index_put(
            (x[:, :, 0].to(torch.int64).to(torch.bool),), torch.tensor([2.0]), accumulate=True
        ),
    ),
]


# since PyTorch 2.15
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
@pytest.mark.parametrize(("operator", "function"), PLACED)
def test_placed(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, lambda x, places: (function(x, places), x), X, POSITIVE)


GRADIENTS: list[tuple[Callable[..., Any], Tensor]] = [
    (lambda x, places: x[:, ROWS], torch.rand(3, 3, 5)),
    (lambda x, places: x[one_per_row(x), places[:, 0]], torch.rand(3, 5)),
    (lambda x, places: x.gather(1, places.unsqueeze(-1)), torch.rand(3, 3, 1)),
    (lambda x, places: x.index_select(1, ROWS), torch.rand(3, 3, 5)),
    (lambda x, places: x[:, 0].take(places), torch.rand(3, 3)),
    (lambda x, places: x[:, :, 0].scatter_add(1, places, x[:, :3, 1]), torch.rand(3, 4)),
    (lambda x, places: x.index_add(1, ROWS, x[:, :3]), torch.rand(3, 4, 5)),
]


@pytest.mark.parametrize(("function", "grad"), GRADIENTS)
def test_gradients(function: Callable[..., Any], grad: Tensor) -> None:
    check_emission(None, gradient_of(function), X, POSITIVE, grad)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_gradient_of_an_embedding(options: dict[str, Any]) -> None:
    def gradient(places: Tensor, grad: Tensor) -> Tensor:
        return gradient_of(lambda table: functional.embedding(places, table, **options))(
            TABLE, grad
        )

    check_emission(None, gradient, POSITIVE, torch.rand(3, 3, 5))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(mode: str) -> None:
    def bags(places: Tensor, table: Tensor = TABLE) -> Tensor:
        return functional.embedding_bag(places, table, mode=mode)

    check_emission(None, bags, POSITIVE)
    check_emission(
        None,
        lambda places, grad: gradient_of(lambda table: bags(places, table))(TABLE, grad),
        POSITIVE,
        torch.rand(3, 5),
    )


def test_a_mask_that_picks_elements_is_refused() -> None:
    with pytest.raises(EmissionError, match="more values than one"):
        check_emission(None, lambda x: aten.index_put(x, [x.to(torch.bool)], x[0, 0, :2]), X)
