"""Lists of ranges between numbers have their values while a step is traced."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.tracing.trace import trace
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def axes_of_a_range(x: Tensor) -> Tensor:
    return x.sum(torch.arange(1, x.dim()).tolist())


def axes_of_a_range_written_into(x: Tensor) -> Tensor:
    axes = torch.arange(x.dim() - 1)
    axes += 1
    return x.sum(axes.tolist())


def test_a_range_between_numbers_names_axes() -> None:
    x, originals = torch.rand(3, 4, 5), (torch.arange, FakeTensor.tolist)
    graph = trace(lambda given: {"sum": axes_of_a_range(given["x"])}, {"x": x}, {"x": 0}, {})
    assert (torch.arange, FakeTensor.tolist) == originals
    more = torch.rand(7, 4, 5)
    torch.testing.assert_close(graph(more)[0], more.sum((1, 2)))


def test_a_range_that_was_written_into_is_not_taken_for_the_first_one() -> None:
    def function(given: Tensors) -> Tensors:
        return {"sum": axes_of_a_range_written_into(given["x"])}

    with pytest.raises(ExportError, match="depends on the values"):
        trace(function, {"x": torch.rand(3, 4, 5)}, {"x": 0}, {})
