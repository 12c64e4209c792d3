"""The gradients that are written here, operator by operator, against PyTorch's: check_train
compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from fleetlearn_export import LocalStep, export_bundle
from fleetlearn_export.checks.graph_checks import CheckedStep, check_train
from fleetlearn_export.graphs.conversion import serialised, to_onnx
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import make_train_step
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.tracing.decompositions import training_decompositions
from fleetlearn_export.tracing.trace import export_loss, train_program
from torch import nn


class Unpooling(nn.Module):
    """Uses max-pooling's indices, so they must be counted as PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = nn.functional.max_pool2d(self.first(x), 2, return_indices=True)
        return values + places.float() / 100


class Ties(nn.Module):
    """Of equal elements the first is a window's maximum; the map's gradient shows which was
    taken."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Parameter(torch.ones(2, 10, 11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (x.round().clamp(-1, 1) + self.map)[..., :9]
        return nn.functional.max_pool2d(places, (5, 3))


STACKS = {
    "convolutions": nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 2)),  # a stride that leaves rows over
        nn.Conv2d(4, 6, 3, dilation=2, padding=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 6, (3, 1), stride=2, groups=6, bias=False),
        nn.Conv2d(6, 3, 1),
    ),
    "one dimension": nn.Sequential(
        nn.Flatten(2),
        nn.Conv1d(2, 4, 5, stride=2, dilation=3),
        nn.MaxPool1d(2),
        nn.Conv1d(4, 2, 3, bias=False),
    ),
    "transposed": nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 3, groups=2),
    ),
    "pools": nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.MaxPool2d(2, stride=1, dilation=2),
        nn.Conv2d(3, 3, 2, padding=1),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(3, 3, 2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, 3, ceil_mode=True),
    ),
    "pools that cover the image": nn.Sequential(
        nn.Conv2d(2, 16, (3, 4)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(2),
        nn.MaxPool1d(4),
        nn.Conv1d(16, 3, 2),
    ),
    "ties": Ties(),
    "indices in use": nn.Sequential(nn.Conv2d(2, 1, 2), Unpooling()),
}


def converted(
    model: nn.Module, loss: Any, x: torch.Tensor, y: torch.Tensor
) -> tuple[onnx.ModelProto, CheckedStep]:
    """The training step's graph, and what it did against PyTorch."""
    model(x)
    user = make_user_model(model, loss, (x, y), {}, None, 1)
    with training_mode(model):
        step = make_train_step(user, LocalStep())
        program = train_program(step, export_loss(user))
        graph = to_onnx(program, training_decompositions(program.exported.graph))
        return graph, check_train(user, step, serialised(graph))


SLOW = ("convolutions", "one dimension", "transposed", "pools", "ties")
"""Each takes seconds; the other stacks go through most of the same code."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in STACKS],
)
def test_gradients_match_pytorch(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(STACKS[name], nn.Flatten(), nn.LazyLinear(3))
    _, found = converted(
        model, nn.functional.cross_entropy, torch.randn(3, 2, 10, 11), torch.tensor([0, 1, 2])
    )
    assert found.difference < 1e-5
    assert found.batch_of_one
    before = dict(model.named_parameters())
    assert all(not torch.equal(value, before[name]) for name, value in found.values.items())


def test_pools_that_cover_the_image_have_no_indices() -> None:
    """Indices cost ten times as much as the maxima."""
    model = nn.Sequential(nn.Conv2d(2, 3, (3, 4)), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3))
    graph, _ = converted(
        model, nn.functional.mse_loss, torch.randn(3, 2, 10, 11), torch.randn(3, 3)
    )
    pools = [node for node in graph.graph.node if node.op_type == "MaxPool"]
    assert [len(node.output) for node in pools] == [1, 1]


@pytest.mark.slow
def test_pools_whose_windows_do_not_overlap_scatter_nothing() -> None:
    """MaxUnpool costs less than ScatterElements."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3))
    graph, _ = converted(
        model, nn.functional.mse_loss, torch.randn(3, 2, 10, 11), torch.randn(3, 3)
    )
    operators = [node.op_type for node in graph.graph.node]
    assert "MaxUnpool" in operators
    assert "ScatterElements" not in operators
    assert operators.count("MaxPool") == 1


def test_pools_that_round_up_outside_training(tmp_path: Path) -> None:
    """Of 3 columns, windows of 2 at every third: PyTorch leaves out the second, which would begin
    behind them."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2, 3, ceil_mode=True), nn.Flatten())
    x = torch.randn(4, 1, 3, 5)
    assert model(x).shape == (4, 4)
    exported = export_bundle(model, nn.functional.mse_loss, (x, torch.randn(4, 4)), tmp_path / "b")
    assert exported.difference < 1e-5
