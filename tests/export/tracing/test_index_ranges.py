"""What the manifest says of integers: from the graph of the model and its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from fleetlearn_export.graphs.emitted import written
from fleetlearn_export.model.arguments import IndexRange
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import make_train_step
from fleetlearn_export.tracing.index_ranges import index_ranges
from fleetlearn_export.tracing.trace import trace_step
from fleetlearn_protocol.manifest import Input, LocalStep
from torch import Tensor, nn
from torch.nn import functional as F

X, Y = torch.randn(4, 8), torch.tensor([0, 1, 2, 1])
LINEAR = nn.Linear(8, 5)


class Tokens(nn.Module):
    def __init__(self, rows: int = 7, part: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.part = (
            nn.Embedding(rows, 6, padding_idx=0),
            nn.Linear(6, 9),
            part,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens[:, 1:] if self.part else tokens))


def picked(outputs: Tensor, y: Tensor) -> Tensor:
    return -outputs.log_softmax(1).gather(1, y[:, None]).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (F.cross_entropy, IndexRange(5, -100)),
        (lambda o, y: F.cross_entropy(o, y.reshape(-1).long(), ignore_index=-1), IndexRange(5, -1)),
        # a class, so it is within
        (lambda o, y: F.cross_entropy(o, y, ignore_index=3), IndexRange(5, None)),
        (
            lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1, weight=torch.ones(5)),
            IndexRange(5, -100),
        ),
        (lambda o, y: F.nll_loss(F.log_softmax(o, 1), y), IndexRange(5, -100)),
        # more than a manifest can say
        (lambda o, y: F.nll_loss(F.log_softmax(o, 1), y, ignore_index=2**60), None),
        (picked, IndexRange(5, None)),
        (lambda o, y: (F.one_hot(y, 4) * o[:, :4]).mean(), IndexRange(4, None)),
        (lambda o, y: F.cross_entropy(o, y) + picked(o[:, :3], y), IndexRange(3, None)),
        # the loss itself makes classes of them
        (lambda o, y: F.cross_entropy(o, torch.where(y < 0, 4, y)), None),
        (lambda o, y: F.cross_entropy(o, y % 5), None),
        (lambda o, y: (o.sum(1) - y).square().mean(), None),
        (lambda o, y: F.cross_entropy(o, F.softmax(y.float()[:, None].expand(-1, 5), 1)), None),
    ],
)
def test_the_loss_tells_the_labels_range(
    loss: Callable[..., Tensor], expected: IndexRange | None
) -> None:
    assert found(LINEAR, loss, (X, Y)) == [None, expected]


def test_a_loss_of_many_places() -> None:
    images, classes = torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
    assert found(nn.Conv2d(3, 6, 1), F.cross_entropy, (images, classes)) == [
        None,
        IndexRange(6, -100),
    ]


def test_an_embedding_tells_the_tokens_range() -> None:
    tokens = torch.zeros(4, 3, dtype=torch.int32)

    def loss(outputs: Tensor, after: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), after.flatten())

    assert found(Tokens(), loss, (tokens, tokens.long())) == [
        IndexRange(7, None),
        IndexRange(9, -100),
    ]


def test_a_part_that_is_not_used_is_not_bound() -> None:
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    assert found(Tokens(part=True), lambda o, y: o.mean() + 0 * y.sum(), (tokens, Y)) == [
        None,
        None,
    ]


def found(
    model: nn.Module, loss: Callable[..., Any], example: tuple[Tensor, ...]
) -> list[IndexRange | None]:
    user = make_user_model(model, loss, example, {}, None, 1)
    step = make_train_step(user, LocalStep())
    return index_ranges(written(partial(trace_step, step))[0].graph, step.inputs())


def test_a_row_without_a_range_is_written_as_before() -> None:
    assert (
        msgspec.json.encode(Input("x", "float32", (8,)))
        == b'{"name":"x","dtype":"float32","shape":[8]}'
    )
    assert msgspec.json.decode(b'{"name":"y","dtype":"int64","shape":[]}', type=Input) == Input(
        "y", "int64", ()
    )
