"""A model that is divided at a layer."""

from __future__ import annotations

import re

import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.model.cut import cut_model
from torch import Tensor, nn

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def chain() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


class Skips(nn.Module):
    """Its head reads the input too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x) + x)
        return result


class Tied(nn.Module):
    """One layer's weight is read on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(self.middle(self.first(x)))
        return result


class Twice(nn.Module):
    """Calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.same(self.same(x))
        return result


def trained(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters() if value.requires_grad]


def test_the_two_parts_together_are_the_model_and_each_has_its_own_parameters() -> None:
    model = chain().eval()
    cut = cut_model(model, "1", [X])
    assert trained(cut.bottom) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert trained(cut.top) == ["3.weight", "3.bias"]
    with torch.no_grad():
        activations = cut.bottom.eval()(X)
        assert torch.equal(cut.top.eval()(activations), model(X))
        assert torch.equal(activations, cut.activations)


def test_the_model_itself_stays_as_it_was() -> None:
    model = chain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cut_model(model, "1", [X])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trained(model) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert not any(module._forward_hooks for module in model.modules())


def test_what_lies_below_the_cut_changes_no_statistics_in_the_top() -> None:
    top = cut_model(chain(), "2", [X]).top.train()
    before = top.get_buffer("1.running_mean").clone()
    top(torch.ones(4, 5))
    assert torch.equal(top.get_buffer("1.running_mean"), before)


@pytest.mark.parametrize(
    ("model", "layer", "said"),
    [
        (chain(), "4", "'4' is the name of no layer; of 4 the nearest are "),
        (chain(), "", "'' is the name of no layer"),
        (Skips(), "body", "reads more from below than its output, as a skip connection does"),
        (Tied(), "middle", "parameter first.bias is read below and above the cut"),
        (Twice(), "same", "the model calls that layer 2 times; expected once"),
    ],
)
def test_a_model_that_cannot_be_divided_there_is_refused(
    model: nn.Module, layer: str, said: str
) -> None:
    with pytest.raises(ExportError, match=re.escape(said)):
        cut_model(model, layer, [X])


def test_a_layer_whose_output_is_no_row_for_each_example_is_refused() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.mean = nn.Linear(6, 6), nn.Flatten(0)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.mean(self.scale(x))
            return result

    with pytest.raises(ExportError, match=r"gives torch.float32 \(24,\) for 4 examples"):
        cut_model(Sums(), "mean", [X])
