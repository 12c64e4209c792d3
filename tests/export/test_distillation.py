"""Distillation bundles: their step against PyTorch, and the models that have none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from distilling import distillation_bundle
from fleetlearn_device import open_runtime
from fleetlearn_export import ExportError, distillation_loss, export_distillation
from fleetlearn_protocol.distillation import TEACHER, TEMPERATURE
from fleetlearn_protocol.vector import views
from torch import nn
from torch.nn import functional


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def test_the_loss_is_the_divergence_from_the_teachers() -> None:
    torch.manual_seed(0)
    outputs, teacher = torch.randn(6, 4), torch.randn(6, 4)
    for t in (1.0, 3.0):
        expected = functional.kl_div(
            functional.log_softmax(outputs / t, 1),
            functional.softmax(teacher / t, 1),
            reduction="batchmean",
        )
        found = distillation_loss(outputs, teacher, torch.full((6,), t))
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    by_hand = torch.tensor([[0.0, 0.0]]), torch.tensor([[np.log(3.0), 0.0]], dtype=torch.float32)
    expected_by_hand = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    found = distillation_loss(*by_hand, torch.ones(1))
    assert found.item() == pytest.approx(expected_by_hand, rel=1e-6)


def test_a_student_that_says_what_the_teachers_say_has_no_loss_and_no_gradient() -> None:
    outputs = torch.randn(6, 4, requires_grad=True)
    loss = distillation_loss(outputs, outputs.detach(), torch.ones(6))
    loss.backward()
    assert loss.item() == 0
    assert outputs.grad is not None
    assert outputs.grad.abs().max() < 1e-7


@pytest.mark.slow
def test_the_bundle_trains_as_pytorch_does(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(8, 5)
    exported = export_distillation(model, (x,), tmp_path / "d.bundle")
    manifest = exported.bundle.manifest
    assert [row.name for row in manifest.batch] == ["x", TEACHER, TEMPERATURE]
    cached = distillation_bundle(mlp(), x, tmp_path / "cached.bundle").manifest
    assert (cached.parameters, cached.batch, cached.step) == (
        manifest.parameters, manifest.batch, manifest.step
    )  # fmt: skip
    runtime = open_runtime(exported.bundle, kind="onnx")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    teacher, temperature = torch.randn(8, 3), torch.full((8,), 2.0)
    for _ in range(5):
        loss = distillation_loss(model(x), teacher, temperature)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch = {"x": x.numpy(), TEACHER: teacher.numpy(), TEMPERATURE: temperature.numpy()}
        assert runtime.step(batch, lr=0.01) == pytest.approx(loss.item(), rel=1e-5)
    for name, value in views(runtime.parameters, manifest.parameters).items():
        expected = model.get_parameter(name).detach().numpy()
        assert np.abs(value - expected).max() < 1e-5


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Two(), "the model returns tuple; distillation takes one tensor of logits"),
        (
            nn.Sequential(nn.Linear(5, 4), nn.Unflatten(1, (2, 2))),
            r"the model returns torch.float32 \(4, 2, 2\)",
        ),
    ],
)
def test_a_model_without_logits_is_refused(tmp_path: Path, model: nn.Module, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        export_distillation(model, (torch.randn(4, 5),), tmp_path / "d.bundle")


def test_names_are_as_many_as_arrays(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="2 names= are given for 1 arrays of example="):
        export_distillation(mlp(), (torch.randn(4, 5),), tmp_path / "d.bundle", names=["a", "b"])
