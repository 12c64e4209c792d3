"""Errors of PyTorch whose text does not say what to do: the refusal says it, with the user's
line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from torch import Tensor, nn
from torch.nn import functional

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])


class Of(nn.Module):
    """A model whose forward is a function of the module."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *arrays: Tensor) -> Any:
        return self.function(self, *arrays)


def export(
    model: nn.Module, folder: Path, loss: Any = functional.cross_entropy, example: Any = (X, Y)
) -> Any:
    return export_bundle(model, loss, example, folder / "bundle")


def two_ways(self: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.mean() > 0, self.one, self.other, (x,))
    return result


def by_data(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
        target.data = 0.9 * target.data + 0.1 * online.data
    return self.online(x), self.target(x).detach()


def slope(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_(True)
    value = self.net(x)
    return value[:, 0], torch.autograd.grad(value.sum(), x, create_graph=True)[0][:, 1]


def slope_in_evaluation(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        return slope(self, x)


def adapted(self: Any, known: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
    """One gradient step on examples of a task, then its prediction: MAML, arXiv 1703.03400."""
    with torch.enable_grad():
        loss = (self.net(known)[..., 0] - labels).pow(2).mean()
        gradient = torch.autograd.grad(loss, self.net.weight, create_graph=True)[0]
    return functional.linear(asked, self.net.weight - 0.1 * gradient)[..., 0]


def physics(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return functional.mse_loss(outputs[0], y) + outputs[1].pow(2).mean()


def loss_of_rows(outputs: Tensor, y: Tensor) -> Tensor:
    def of_row(row: Tensor, label: Tensor) -> Tensor:
        return -functional.log_softmax(row, 0).gather(0, label[None])

    rows: Tensor = torch.vmap(of_row)(outputs, y)
    return rows.mean()


def indexed_loss_of_rows(outputs: Tensor, y: Tensor) -> Tensor:
    rows: Tensor = torch.vmap(lambda row, label: -functional.log_softmax(row, 0)[label])(outputs, y)
    return rows.mean()


def two_kinds(self: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.mean() > 0, self.one, lambda x: [x, "text"], (x,))
    return result


def test_a_torch_cond_that_pytorch_itself_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=rf"exported at {__file__}:\d+ in two_kinds: torch\.cond .*where.*says: "
    ):
        export(Of(two_kinds, one=nn.Linear(6, 3)), tmp_path)


def test_torch_cond(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=rf"cannot be exported at {__file__}:\d+ in two_ways: torch\.cond .*where"
    ):
        export(Of(two_ways, one=nn.Linear(6, 3), other=nn.Linear(6, 3)), tmp_path)


def test_a_target_network_that_follows_by_data(tmp_path: Path) -> None:
    model = Of(by_data, online=nn.Linear(6, 4), target=nn.Linear(6, 4).requires_grad_(False))
    with pytest.raises(
        ExportError, match=rf"at {__file__}:\d+ in by_data: .*\.data.*buffers instead"
    ):
        export(model, tmp_path, lambda outputs, y: (outputs[0] - outputs[1]).pow(2).mean())


def test_a_derivative_in_forward_needs_gradients_in_evaluation_too(tmp_path: Path) -> None:
    net, example = (
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
        (torch.rand(4, 2), torch.rand(4)),
    )
    with pytest.raises(ExportError, match=rf"at {__file__}:\d+ in slope: .*enable_grad"):
        export(Of(slope, net=net), tmp_path, physics, example)
    export(Of(slope_in_evaluation, net=net), tmp_path, physics, example)


def test_a_gradient_of_parameters_in_forward_is_exported(tmp_path: Path) -> None:
    tasks = (torch.randn(4, 5, 6), torch.randn(4, 5), torch.randn(4, 3, 6), torch.randn(4, 3))
    exported = export(
        Of(adapted, net=nn.Linear(6, 1, bias=False)), tmp_path, functional.mse_loss, tasks
    )
    assert exported.without_gradient == ()


def test_float64_arrays(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError,
        match=r"array of the example is float64, NumPy's default.*astype\(numpy\.float32",
    ):
        export(nn.Linear(6, 3), tmp_path, example=(X.double().numpy(), Y))


def test_gather_inside_vmap(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"number of examples is fixed.*torch\.vmap fixes it.*index instead"
    ):
        export(nn.Linear(6, 3), tmp_path, loss_of_rows)
    export(nn.Linear(6, 3), tmp_path, indexed_loss_of_rows)


@pytest.mark.parametrize("loss", [functional.binary_cross_entropy_with_logits, functional.mse_loss])
def test_squeeze_at_the_end_keeps_the_examples_axis(tmp_path: Path, loss: Any) -> None:
    """PyTorch's own result for one example has no axis: the graph's has one, as for any other
    number."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    exported = export(
        Of(lambda self, x: self.net(x).squeeze(), net=model), tmp_path, loss, (X, (Y > 0).float())
    )
    (row,) = exported.bundle.manifest.outputs
    assert row.shape == ()
