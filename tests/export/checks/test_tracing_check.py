"""The traced step against autograd, both in PyTorch: errors of decompositions are found, float32's
own are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from fleetlearn_export import ExportError
from fleetlearn_export.checks import tracing_check
from fleetlearn_export.checks.compared_steps import (
    FLOAT32,
    FLOAT64,
    SAME_ROUNDING,
    Precision,
    inputs_without_ties,
)
from fleetlearn_export.checks.comparison import SEEDS
from fleetlearn_export.checks.double_precision import Doubled
from fleetlearn_export.checks.pytorch_training import ReceiveTensor
from fleetlearn_export.checks.tracing_check import check_tracing, run_traced
from fleetlearn_export.checks.training_comparison import compare_training
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.tracing.decompositions import BACKWARD
from mutants import TracedStep, traced_step
from torch import Tensor, nn
from torch._decomp import decomposition_table

aten = torch.ops.aten
NAMES = [
    "mlp",
    "lenet",
    "resnet8-batchnorm",
    "inverted-residual",
    "embedding-bag",
    "two-heads",
    "tied",
    "own-loss",
]


def checked(step: TracedStep) -> float:
    with training_mode(step.user.model):
        return check_tracing(step.user, step.step, step.module).difference


@pytest.mark.parametrize(
    "name",
    [row if row in NAMES else pytest.param(row, marks=pytest.mark.slow) for row in zoo.NAMES],
)
def test_a_traced_step_is_autograds_in_float64(name: str) -> None:
    """A tenth of what is allowed: no float32 is left on the way, nor is the seed's randomness
    another."""
    step = traced_step(zoo.make(name))
    with training_mode(step.user.model):

        def run(given: dict[str, Tensor], take: ReceiveTensor) -> dict[str, Tensor]:
            return run_traced(step.step, step.module, given, torch.float64, take)

        found = compare_training(step.user, step.step, run, None, 1, FLOAT64)
    assert found.difference < 0.1 * FLOAT64.values
    assert found.batch_of_one


def batch_norm_without_mean(
    grad: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    right = decomposition_table[aten.native_batch_norm_backward.default](grad, x, weight, *rest)
    term = weight * rest[3] * right[2] / (x.numel() / x.shape[1])
    return right[0] + term.reshape(-1, 1, 1), right[1], right[2]


def scaled(function: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


def relu_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    return grad * (x > threshold).to(grad.dtype)


WRONG: list[tuple[str, Any, Callable[..., Any]]] = [
    ("lenet", aten.tanh_backward.default, scaled(lambda grad, y: grad * (1 - y * y), 1.01)),
    ("mlp", aten.threshold_backward.default, scaled(relu_backward, 1.01)),
    ("mlp", aten.threshold_backward.default, scaled(relu_backward, 0.99)),
    ("mlp", aten.threshold_backward.default, lambda grad, x, threshold: grad),
    ("resnet8-batchnorm", aten.native_batch_norm_backward.default, batch_norm_without_mean),
    (
        "embedding-bag",
        aten._embedding_bag_backward.default,
        scaled(BACKWARD[aten._embedding_bag_backward.default], 1.01),
    ),
    ("own-loss", aten.mish_backward.default, scaled(lambda grad, x: grad * torch.tanh(x), 1.0)),
]


@pytest.mark.parametrize(("name", "operator", "wrong"), WRONG)
def test_a_wrong_decomposition_is_found(
    name: str, operator: Any, wrong: Callable[..., Any]
) -> None:
    step = traced_step(zoo.make(name), table={operator: wrong})
    assert not step.module.graph.find_nodes(op="call_function", target=operator)
    with pytest.raises(
        ExportError, match="the traced step has another gradient than PyTorch for parameter"
    ):
        checked(step)


def test_a_model_that_asks_for_one_example_is_told_so() -> None:
    class OtherWithOne(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if x.shape[0] == 1 else 2)

    step = traced_step(zoo.classifier(OtherWithOne(6, 4), zoo.numbers(6), 4))
    with pytest.raises(
        ExportError, match=r"on a batch of 1 example \(if your model asks .*, has another gradient"
    ):
        checked(step)


def test_code_that_depends_on_its_tensors_dtype_is_compared_in_float32() -> None:
    """In float64 this model is another one."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x) * (1 + 1e4 * torch.finfo(x.dtype).eps)

    torch.manual_seed(0)
    step = traced_step(zoo.classifier(Rounded(), zoo.numbers(6), 4))
    with training_mode(step.user.model):

        def run(given: dict[str, Tensor], take: ReceiveTensor) -> dict[str, Tensor]:
            return run_traced(step.step, step.module, given, torch.float64, take)

        with pytest.raises(ExportError, match=r"differs|another gradient"):
            compare_training(step.user, step.step, run, None, 1, FLOAT64)
    assert 0 < checked(step) < FLOAT32.values


def test_a_tensor_may_lie_in_memory_otherwise_than_when_it_was_traced() -> None:
    """Batch norm keeps the strides of its stand-in and not those of a tensor, so that the linear
    layer's view fails."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(x.transpose(1, 2)).transpose(1, 2)).mean(1)

    assert (
        checked(traced_step(zoo.classifier(Transposed(), zoo.numbers(5, 6), 4)))
        < SAME_ROUNDING.values
    )


def test_group_norm_takes_a_tensor_however_it_lies_in_memory() -> None:
    """Attention over an image's pixels leaves its channels last; PyTorch's ``native_group_norm``
    refuses that."""

    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            pixels = self.first(x.flatten(2).transpose(1, 2))
            image = pixels.transpose(1, 2).reshape(x.shape) + x
            return self.last(self.norm(image).mean((2, 3)))

    assert (
        checked(traced_step(zoo.classifier(Attended(), zoo.numbers(6, 3, 3), 4)))
        < SAME_ROUNDING.values
    )


def linear_layers_dtypes(step: TracedStep) -> set[tuple[type, torch.dtype]]:
    """Return the weights' kinds and dtypes in PyTorch's side of the comparison."""
    kinds: set[tuple[type, torch.dtype]] = set()
    linear = next(part for part in step.user.model.modules() if isinstance(part, nn.Linear))
    linear.register_forward_pre_hook(
        lambda layer, _: kinds.add((type(layer.weight), layer.weight.dtype))
    )
    checked(step)
    return kinds


def test_where_both_round_alike_float32_does() -> None:
    step = traced_step(
        zoo.classifier(
            nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4)), zoo.numbers(6), 4
        )
    )
    assert {dtype for _, dtype in linear_layers_dtypes(step)} == {torch.float32}


def test_a_step_that_rounds_otherwise_is_compared_in_float64() -> None:
    def coarse(grad: Tensor, y: Tensor) -> Tensor:
        return (grad * (1 - y * y) + 1e4 * grad) - 1e4 * grad

    step = traced_step(zoo.make("lenet"), table={aten.tanh_backward.default: coarse})
    assert {dtype for _, dtype in linear_layers_dtypes(step)} == {torch.float32, torch.float64}


def test_parameters_have_no_copies_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's side of the comparison: a copy of each parameter would be the largest part of an
    export's memory."""
    monkeypatch.setattr(tracing_check, "SAME_ROUNDING", FLOAT64)
    step = traced_step(zoo.classifier(nn.Linear(6, 4), zoo.numbers(6), 4))
    assert linear_layers_dtypes(step) == {(Doubled, torch.float64)}


def test_a_tie_of_the_first_parameters_is_tried_without_it() -> None:
    """The mean of one example behind a batch norm is its bias, 0 at first: rounding decides which
    way a ReLU behind it sends the gradient."""
    step = traced_step(
        zoo.classifier(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4)), zoo.numbers(6), 4)
    ).step

    def zeros(seed: int, precision: Precision) -> int:
        given = inputs_without_ties(step, {}, seed, precision)
        return int((given["param.0.bias"] == 0).sum()) + int((given["param.0.weight"] == 1).sum())

    assert [zeros(seed, FLOAT64) for seed in SEEDS] == [12, 0, 0]
    assert [zeros(seed, FLOAT32) for seed in SEEDS] == [12, 12, 12]
