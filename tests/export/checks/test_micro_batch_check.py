from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx
import pytest
import torch
import zoo
from fleetlearn_export import ExportError, LocalStep
from fleetlearn_export.checked_graphs import step_with_means
from fleetlearn_export.checks import micro_batch_check
from fleetlearn_export.checks.micro_batch_check import check_micro_batches
from fleetlearn_export.graphs.emitted import emitted
from fleetlearn_export.graphs.micro_batches import split_batch
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import TrainStep, make_train_step
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.tracing.trace import trace_step
from onnx import numpy_helper
from torch import Tensor, nn


def small(
    *inner: nn.Module, loss: Callable[..., Tensor] = nn.functional.cross_entropy
) -> TrainStep:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), *inner, nn.Tanh(), nn.Linear(8, 3))
    batch = zoo.classifier(module, zoo.numbers(5), 3).batch(6)
    user = make_user_model(module, loss, batch, {}, None, 1)
    with training_mode(module):
        return make_train_step(user, LocalStep())


def with_means(step: TrainStep) -> onnx.ModelProto:
    with training_mode(step.objective.model):
        return emitted(partial(trace_step, step, with_means=True)).model


def test_a_mean_over_examples_passes() -> None:
    for step in (small(), small(nn.LayerNorm(8)), small(nn.Dropout(0.5))):
        check_micro_batches(step, with_means(step))


def test_gradients_that_are_equal() -> None:
    """Those of an LSTM's two biases, which are added."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(5, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.layer(x.unsqueeze(1))[0]
            return outputs[:, -1]

    torch.manual_seed(0)
    module = Last()
    batch = zoo.classifier(module, zoo.numbers(5), 8).batch(6)
    user = make_user_model(module, nn.functional.cross_entropy, batch, {}, None, 1)
    with training_mode(module):
        step = make_train_step(user, LocalStep())
    check_micro_batches(step, with_means(step))


def pairs(outputs: Tensor, y: Tensor) -> Tensor:
    """A contrastive loss: each example is compared with all others of the batch."""
    return (
        nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(outputs.shape[0]))
        + 0.0 * y.sum()
    )


@pytest.mark.parametrize(
    "step",
    [
        lambda: small(loss=pairs),
        lambda: small(nn.BatchNorm1d(8, track_running_stats=False)),
    ],
)
def test_what_depends_on_the_whole_batch_is_refused(step: Callable[[], TrainStep]) -> None:
    made = step()
    with pytest.raises(ExportError, match=r"the step is no mean over its examples: .* differs by"):
        check_micro_batches(made, with_means(made))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_batch_norm_is_refused_by_name(norm: nn.Module) -> None:
    step = small(norm, nn.Dropout(0.5))
    with (
        training_mode(step.objective.model),
        pytest.raises(ExportError, match=r"1 takes its statistics of the whole"),
    ):
        step_with_means(step, "float32")


def test_a_wrong_weight_of_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: each part counts as if it had as many examples as the others."""

    def wrong(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
        divided = split_batch(model, size)
        (loop,) = (node for node in divided.graph.node if node.op_type == "Loop")
        for node in loop.attribute[0].g.node:
            if node.output[0] == "loop.taken_examples":
                node.op_type, node.input[:] = "Identity", ["loop.usual"]
                del node.attribute[:]
        constant = numpy_helper.from_array(
            numpy_helper.to_array(numpy_helper.from_array(torch.tensor(3.0).numpy()))
        )
        constant.name = "loop.usual"
        divided.graph.initializer.append(constant)
        return divided

    step = small()
    monkeypatch.setattr(micro_batch_check, "split_batch", wrong)
    with pytest.raises(ExportError, match="the sums over the micro-batches differ"):
        check_micro_batches(step, with_means(step))
