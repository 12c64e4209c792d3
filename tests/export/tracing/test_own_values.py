from __future__ import annotations

import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.tracing.own_values import refuse_own_values
from torch import Tensor, nn


def graph_with(value: Tensor) -> torch.fx.GraphModule:
    """A graph that adds a constant to its argument."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, graph.get_attr("constant"))))
    root = nn.Module()
    root.register_buffer("constant", value)
    return torch.fx.GraphModule(root, graph)


def test_memory_of_a_trained_parameter_is_found_whatever_its_form() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    names = ["0.weight", "1.running_mean"]
    weight = model[0].weight
    for value in (
        weight.detach(),
        weight.detach().t(),
        weight.detach()[1],
        torch.from_numpy(weight.detach().numpy()),
    ):
        with pytest.raises(ExportError, match=r"parameter 0\.weight is read from a list"):
            refuse_own_values(graph_with(value), model, names)
    with pytest.raises(ExportError, match=r"parameter 1\.running_mean is read"):
        refuse_own_values(graph_with(model[1].running_mean), model, names)


def test_copies_and_what_is_not_trained_are_constants() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for value in (
        model[0].weight.detach().clone(),
        model[1].weight.detach(),
        torch.ones(3),
        torch.ones(0),
    ):
        refuse_own_values(graph_with(value), model, ["0.weight"])
