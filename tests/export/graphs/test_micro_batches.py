from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zoo
from fleetlearn_export import ExportError, LocalStep
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.graphs.conversion import check_standard
from fleetlearn_export.graphs.emitted import emitted
from fleetlearn_export.graphs.micro_batches import SEED, SEED_STEP, joined, split_batch
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import MEAN, TrainStep, make_train_step
from fleetlearn_export.model.user_model import training_mode
from fleetlearn_export.tracing.trace import trace_step
from torch import nn

ROWS = 7


def step_of(case: zoo.Case, step: Any) -> TrainStep:
    user = make_user_model(
        case.module, case.loss, case.batch(ROWS), case.metrics, None, case.targets
    )
    with training_mode(case.module):
        return make_train_step(user, step)


def with_means(step: TrainStep) -> onnx.ModelProto:
    with training_mode(step.objective.model):
        return emitted(partial(trace_step, step, with_means=True)).model


def attention(dropout: float = 0.0) -> zoo.Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
    return zoo.classifier(
        nn.Sequential(layer, nn.Flatten(), nn.Linear(6 * 16, 4)), zoo.numbers(6, 16), 4
    )


def dense() -> zoo.Case:
    """What is traced more quickly, where any model will do."""
    torch.manual_seed(0)
    return zoo.classifier(nn.Sequential(nn.Flatten(), nn.Linear(6 * 16, 4)), zoo.numbers(6, 16), 4)


def run(model: onnx.ModelProto, given: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feed = {row.name: given[row.name] for row in session.get_inputs()}
    names = [row.name for row in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def inputs(step: TrainStep, rows: int = ROWS) -> dict[str, Any]:
    """Return the step's inputs with as many examples: those that it has, and some of them again."""
    again = np.arange(rows) % len(next(iter(step.batch.values())))
    given = {name: value.numpy() for name, value in step.arguments().items()}
    return {
        name: value[again] if name.startswith("batch.") else value for name, value in given.items()
    }


@cache
def whole_batch() -> tuple[TrainStep, onnx.ModelProto]:
    step = step_of(attention(), LocalStep("momentum", proximal=True, clip=True))
    return step, with_means(step)


@pytest.mark.parametrize("size", [1, 2, 3, ROWS, 10])
def test_the_step_is_that_of_the_whole_batch(size: int) -> None:
    step, model = whole_batch()
    given = inputs(step)
    divided = split_batch(model, size)
    check_standard(divided)
    expected, found = run(model, given), run(divided, given)
    assert list(found) == step.outputs()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    moved = max(
        float(np.abs(found[f"next.{name}"] - given[name]).max())
        for name in given
        if f"next.{name}" in found
    )
    assert moved > 1e-3, "nothing was trained"


def test_each_part_weighs_as_many_as_it_has_examples() -> None:
    """By hand: the loss w * x has the gradient mean(x), and a part of one counts half of a part of
    two."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * x

    x, y = torch.tensor([[1.0], [3.0], [11.0]]), torch.zeros(3)
    user = make_user_model(Line(), lambda out, y: out.mean() + 0 * y.sum(), (x, y), {}, None, 1)
    with training_mode(user.model):
        step = make_train_step(user, LocalStep())
    divided = split_batch(with_means(step), 2)
    found = run(divided, inputs(step, 3) | {"hyper.lr": np.array(0.1, np.float32)})
    assert found["loss"] == pytest.approx(2.0 * 5.0)
    assert found["next.param.w"] == pytest.approx(2.0 - 0.1 * 5.0)


def test_each_part_draws_its_own_random_numbers() -> None:
    step = step_of(attention(0.5), LocalStep())
    model, given = with_means(step), inputs(step)
    divided = split_batch(model, 4)
    rows = slice(0, 4), slice(4, ROWS)
    parts = [
        run(
            model,
            given
            | {name: value[row] for name, value in given.items() if name.startswith("batch.")}
            | {SEED: np.array(given[SEED] + number * SEED_STEP)},
        )
        for number, row in enumerate(rows)
    ]
    expected = (4 * parts[0]["loss"] + 3 * parts[1]["loss"]) / ROWS
    assert run(divided, given)["loss"] == pytest.approx(expected, rel=1e-5)


def test_joined_is_what_was_split() -> None:
    step, model = whole_batch()
    given = inputs(step)
    assert joined(model) is None
    found = joined(split_batch(model, 2))
    assert found is not None
    assert found.size == 2
    onnx.checker.check_model(found.model)
    expected, again = run(model, given), run(found.model, given)
    assert list(again) == list(expected)
    assert any(name.startswith(MEAN) for name in again)
    for name in expected:
        np.testing.assert_array_equal(again[name], expected[name], err_msg=name)


def own_step(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
    found = objective(params, batch)
    rate = 0.1 / batch["x"].shape[0]
    moved = {name: params[name] - rate * gradient for name, gradient in found.gradients.items()}
    return {**params, **moved}, state, {"loss": found.loss, **found.metrics}


def own_step_by_data(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
    found = objective(params, batch)
    moved = {
        name: params[name] - batch["x"].var() * gradient
        for name, gradient in found.gradients.items()
    }
    return {**params, **moved}, state, {"loss": found.loss, **found.metrics}


def test_a_step_that_reads_the_examples_again_is_refused() -> None:
    with pytest.raises(
        ExportError, match=r"besides loss, metrics and gradients, .* reads all of batch\.x"
    ):
        split_batch(with_means(step_of(dense(), own_step_by_data)), 2)


def test_a_step_of_the_users_own_may_read_the_number_of_examples() -> None:
    step = step_of(dense(), own_step)
    model, given = with_means(step), inputs(step)
    expected, found = run(model, given), run(split_batch(model, 2), given)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_step_that_asks_for_gradients_twice_is_refused() -> None:
    def twice(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
        found, other = objective(params, batch), objective(params, batch)
        moved = {name: params[name] - gradient for name, gradient in other.gradients.items()}
        return {**params, **moved}, state, {"loss": found.loss, **found.metrics}

    with pytest.raises(EmissionError, match="the step asks for gradients 2 times"):
        with_means(step_of(dense(), twice))
