"""The check before publication finds graphs that compute something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from export_cases import DIGITS, Case
from fleetlearn_export import ExportError, export_bundle
from fleetlearn_export.checks.graph_checks import check_eval, check_infer, check_train
from fleetlearn_export.model.train_step import TrainStep, make_train_step
from fleetlearn_export.model.user_model import UserModel, evaluation_mode, training_mode
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN
from torch.nn import functional


@pytest.fixture
def case(cases: Callable[[str], Case]) -> Case:
    return cases("softmax")


def source_of(case: Case) -> UserModel:
    return UserModel(
        case.model,
        case.loss,
        {"accuracy": DIGITS["accuracy"]},
        {"x": case.x[:8], "y": case.y[:8]},
        1,
    )


def step_of(case: Case) -> TrainStep:
    return make_train_step(source_of(case), case.exported.bundle.manifest.step)


def values_of(case: Case) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in case.model.named_parameters()}


def tampered(content: bytes, output: str, operator: str) -> bytes:
    """The graph with another operator where ``output`` is made."""
    model = onnx.load_model_from_string(content)
    node = next(node for node in model.graph.node if output in node.output)
    assert node.op_type != operator
    node.op_type = operator
    changed: bytes = model.SerializeToString()
    return changed


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_wrong_gradient_is_found_and_its_parameter_named(case: Case, name: str) -> None:
    content = tampered(case.exported.bundle.read(TRAIN), f"next.param.{name}", "Add")
    with (
        training_mode(case.model),
        pytest.raises(ExportError, match=f"another gradient than PyTorch for parameter {name}"),
    ):
        check_train(source_of(case), step_of(case), content)


def test_a_wrong_loss_metric_sum_or_output_is_found(case: Case) -> None:
    user, values, bundle = source_of(case), values_of(case), case.exported.bundle
    with training_mode(case.model):
        content = tampered(bundle.read(TRAIN), "loss", "Mul")
        with pytest.raises(
            ExportError, match=r"on a batch of 7, differs from PyTorch in the loss by [\d.]+ "
        ):
            check_train(user, step_of(case), content)
    with evaluation_mode(case.model):
        content = tampered(bundle.read(EVAL), "metric_sum.accuracy", "Add")
        with pytest.raises(
            ExportError, match=r"evaluation differs from PyTorch in metric_sum\.accuracy"
        ):
            check_eval(user, content, values)
        with pytest.raises(ExportError, match="model differs from PyTorch in output"):
            check_infer(
                user, bundle.read(INFER), {name: value + 1e-3 for name, value in values.items()}
            )
        assert check_infer(user, bundle.read(INFER), values) < 1e-6


def test_what_a_single_example_is_nothing_for(tmp_path: Path) -> None:
    """The deviation over a batch of one is NaN, in PyTorch too: the bundle takes larger ones."""

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs / outputs.std(0), y)

    exported = export_bundle(
        torch.nn.Linear(3, 2), loss, (torch.randn(4, 3), torch.randn(4, 2)), tmp_path / "b"
    )
    assert not exported.batch_of_one
    assert exported.difference < 1e-5


class Product(torch.nn.Module):
    """The rows times the product of all parameters, which nothing holds back."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors.prod()


def test_a_model_whose_training_diverges_is_compared_at_its_first_parameters(
    tmp_path: Path,
) -> None:
    """After a few steps the product is infinite, and 0 times the product is NaN in PyTorch too."""
    x = torch.tensor([[0.0], [1.0]] * 4)
    exported = export_bundle(
        Product(), lambda outputs, y: -(outputs * y).mean(), (x, torch.ones(8, 1)), tmp_path / "b"
    )
    assert exported.difference < 1e-3
