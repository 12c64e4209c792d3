"""Conditions on the number of examples: those that change no result are allowed, all others are
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from fleetlearn_export.emission.table import decompositions
from fleetlearn_export.tracing.trace import trace
from torch import Tensor, fx, nn
from torch.nn import functional

BATCH = torch.randn(4, 5), torch.tensor([0, 1, 2, 1])
Middle = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 6), middle, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x)))
        return result


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.shape[0] >= 64 else x,
        lambda x: torch.cat([x[:1], x[1:]]) if 16 <= len(x) < 128 else x,
        lambda x: x * 2 if x.numel() > 2**31 else x,  # a batch that no device holds
        lambda x: x[: max(len(x), 2)],
    ],
)
def test_conditions_that_change_no_result_are_allowed(middle: Middle, tmp_path: Path) -> None:
    assert (
        export_bundle(Net(middle), functional.cross_entropy, BATCH, tmp_path / "b").difference
        < 1e-6
    )


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x * 2 if x.shape[0] >= 64 else x,
        lambda x: x * 2 if 16 <= len(x) < 17 else x,
        lambda x: x * 2 if len(x) > 1000 else x,
        # too many cases to record each
        lambda x: x * (1 + sum(len(x) > size for size in (4, 8, 16, 32, 64, 128))),
    ],
)
def test_conditions_that_change_results_are_refused(middle: Middle, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=rf"the number n of examples decides what is computed at {__file__}:"
    ):
        export_bundle(Net(middle), functional.cross_entropy, BATCH, tmp_path / "b")


def test_so_are_those_of_evaluation(tmp_path: Path) -> None:
    class Evaluated(Net):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(
                self.first(x) if self.training else self.middle(self.first(x))
            )
            return result

    def export(middle: Middle, name: str) -> float:
        return export_bundle(
            Evaluated(middle), functional.cross_entropy, BATCH, tmp_path / name
        ).difference

    assert export(lambda x: x.relu().abs() if len(x) >= 64 else x.relu(), "same") < 1e-6
    with pytest.raises(
        ExportError, match=rf"the number n of examples decides what is computed at {__file__}:"
    ):
        export(lambda x: x * 2 if len(x) >= 64 else x, "other")


def test_each_case_is_recorded_once() -> None:
    found: list[list[fx.GraphModule] | None] = []

    def function(given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = given["x"]
        return {"out": x + 1 if len(x) < 8 else x + 2 if x.shape[0] < 64 else x + 3}

    graph = trace(
        function, {"x": torch.randn(2, 3)}, {"x": 0}, decompositions(), take_cases=found.append
    )
    (others,) = found
    assert others is not None
    graphs = [graph, *others]
    numbers = [
        [node.args[1] for node in row.graph.nodes if "add" in str(node.target)] for row in graphs
    ]
    assert numbers == [[1], [2], [3]]


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 4, 1), nn.Conv1d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3)]
)
def test_the_kernel_that_pytorch_chooses_is_no_case(layer: nn.Module) -> None:
    """From 16 examples on PyTorch computes some convolutions by another kernel."""
    found: list[list[fx.GraphModule] | None] = []
    x = torch.randn(2, 3, *(5 for _ in range(layer.weight.dim() - 2)))

    def function(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"out": layer(given["x"])}

    trace(function, {"x": x}, {"x": 0}, decompositions(), take_cases=found.append)
    assert found == [[]]
