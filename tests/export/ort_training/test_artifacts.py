from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from by_hand import largest_difference, pytorch_training
from export_cases import Case
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import make_train_step
from fleetlearn_export.model.user_model import UserModel, training_mode
from fleetlearn_export.ort_training.artifacts import Artifacts, make_artifacts
from fleetlearn_export.silence import silenced_process
from fleetlearn_protocol.manifest import LocalStep
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.ort_training
SIZES = [20, 7] * 10 + [1]


@pytest.mark.parametrize(
    "name", ["softmax", "mlp", "cnn", pytest.param("mcmahan", marks=pytest.mark.slow)]
)
def test_artifacts_train_as_pytorch(cases: Callable[[str], Case], name: str) -> None:
    case = cases(name)
    from onnxruntime.training import api

    assert case.exported.without_ort_training is None
    folder = case.exported.bundle.path / "ort_training"
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    with silenced_process():
        module = api.Module(
            str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx")
        )
        optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    assert module.input_names() == ["batch.x", "batch.y"]
    assert module.output_names() == ["loss", "metric.accuracy"]
    names = {row.name for row in case.exported.bundle.manifest.parameters}
    assert {name for name, _ in state.parameters} == names
    optimizer.set_learning_rate(0.1)
    sizes = SIZES[:5] if name == "mcmahan" else SIZES
    losses = []
    for x, y in case.batches(sizes):
        losses.append(float(module(x.numpy(), y.numpy())[0]))
        optimizer.step()
        module.lazy_reset_grad()
    expected, expected_losses = pytorch_training(case.model, case.loss, case.batches(sizes), 0.1)
    assert (
        largest_difference({name: state.parameters[name].data for name in names}, expected) < 1e-5
    )
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    for file in folder.glob("*.onnx"):
        assert onnx.load(file).ir_version <= 10


def artifacts_of(
    model: nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> tuple[UserModel, Artifacts]:
    user = make_user_model(model, loss, (x, y), {}, None, 1)
    with training_mode(model):
        return user, make_artifacts(user, make_train_step(user, LocalStep()))


def test_cross_entropy_as_the_only_output(capfd: pytest.CaptureFixture[str]) -> None:
    _, made = artifacts_of(
        nn.Linear(3, 2), functional.cross_entropy, torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    )
    assert made.reason is None
    assert set(made.files) == {
        f"ort_training/{name}"
        for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
    }
    assert capfd.readouterr() == ("", "")


class Cumulative(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cumsum(1)).cumsum(1)


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (Cumulative(3, 2), functional.mse_loss, "gradient builder has not been registered: CumSum"),
        (
            nn.Linear(3, 2),
            functional.multi_margin_loss,
            "'aten::multi_margin_loss' to ONNX opset version 17 is not",
        ),
    ],
)
def test_what_the_runtime_cannot_train_is_left_out_with_its_reason(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    text: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    y = torch.tensor([0, 1, 1, 0]) if loss is functional.multi_margin_loss else torch.randn(4, 2)
    _, made = artifacts_of(model, loss, torch.randn(4, 3), y)
    assert made.files == {}
    assert text in made.reason
    assert capfd.readouterr() == ("", "")


def test_artifacts_that_train_otherwise_are_left_out() -> None:
    """The old exporter writes the number that it saw for one that the data decide."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum().item())

    torch.manual_seed(0)
    _, made = artifacts_of(Scaled(3, 2), functional.mse_loss, torch.randn(4, 3), torch.randn(4, 2))
    assert made.files == {}
    assert "differs from PyTorch in" in made.reason


def test_changing_buffers_are_a_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    _, made = artifacts_of(model, functional.mse_loss, torch.randn(4, 3), torch.randn(4, 2))
    assert made.files == {}
    assert "1.running_mean" in (made.reason or "")


def test_the_checkpoint_holds_the_initial_model(cases: Callable[[str], Case]) -> None:
    from onnxruntime.training import api

    case = cases("softmax")
    path: Path = case.exported.bundle.path / "ort_training" / "checkpoint"
    state = api.CheckpointState.load_checkpoint(str(path))
    np.testing.assert_array_equal(state.parameters["weight"].data, case.model.weight.detach())
