"""Deep networks with BatchNorm pass, where float32 itself is percents off; a wrong operator in them
does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mutants
import pytest
import torch
import zoo
from fleetlearn_export import ExportError
from fleetlearn_export.checks.compared_steps import (
    FLOAT32,
    WIDENED,
    Precision,
)
from fleetlearn_export.checks.comparison import nudged
from fleetlearn_export.checks.emission_check import check_emission, check_evaluation
from fleetlearn_export.checks.graph_checks import check_train
from fleetlearn_export.checks.operator_check import OperatorsChecked
from fleetlearn_export.checks.pytorch_training import ReceiveTensor
from fleetlearn_export.checks.tracing_check import run_traced
from fleetlearn_export.checks.training_comparison import compare_training
from fleetlearn_export.graphs.emitted import emitted
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.train_step import make_train_step
from fleetlearn_export.model.user_model import evaluation_mode, training_mode
from fleetlearn_export.tracing.trace import trace_evaluation
from fleetlearn_protocol.manifest import LocalStep
from mutants import TracedStep, mutate, traced_step
from torch import Tensor, nn

aten = torch.ops.aten


def resnet18() -> zoo.Case:
    """ResNet-18 (He et al. 2015, arXiv 1512.03385, table 1) of an eighth of the width: its last
    images are 1 x 1."""
    blocks: list[nn.Module] = []
    inputs = 8
    for outputs, stride in ((8, 1), (16, 2), (32, 2), (64, 2)):
        blocks += [
            zoo.Residual(inputs, outputs, stride, nn.BatchNorm2d),
            zoo.Residual(outputs, outputs, 1, nn.BatchNorm2d),
        ]
        inputs = outputs
    module = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return zoo.classifier(module, zoo.numbers(3, 32, 32))


def depthwise(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, inputs, kernel, stride, kernel // 2, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.Hardswish(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.Hardswish(),
    ]


def lcnet() -> zoo.Case:
    """PP-LCNet's blocks (Cui et al. 2021, arXiv 2109.15099, table 1), narrow, without
    squeeze-and-excite."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
    ]
    inputs = 8
    for outputs, kernel, stride in (
        [(16, 3, 1), (16, 3, 2), (16, 3, 1), (32, 3, 2), (32, 3, 1), (64, 3, 2)]
        + [(64, 5, 1)] * 5
        + [(128, 5, 2)]
    ):
        layers += depthwise(inputs, outputs, kernel, stride)
        inputs = outputs
    return zoo.classifier(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
        zoo.numbers(3, 32, 32),
    )


NETS = {"resnet18": resnet18, "lcnet": lcnet}


@pytest.fixture(scope="module")
def steps() -> Callable[[str], TracedStep]:
    @cache
    def step(name: str) -> TracedStep:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return traced_step(NETS[name]())

    return step


def checked(step: TracedStep) -> OperatorsChecked:
    with training_mode(step.user.model):
        return check_emission(step.user, step.step, step.module, step.emitted()).operators


@pytest.mark.parametrize("name", NETS)
def test_deep_networks_pass(steps: Callable[[str], TracedStep], name: str) -> None:
    step = steps(name)
    assert checked(step).worst.excess < 0.1
    with training_mode(step.user.model):
        found = check_train(step.user, step.step, step.emitted().model.SerializeToString())
    assert not found.batch_of_one


def test_the_effect_of_rounding_is_allowed_in_deep_networks(
    steps: Callable[[str], TracedStep],
) -> None:
    """The traced step from weights that differ by rounding errors: refused, unless the errors that
    PyTorch makes of such are allowed."""
    step = steps("resnet18")

    def run(given: dict[str, Tensor], take: ReceiveTensor) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(5)
        near = {
            name: nudged(value, random)
            for name, value in given.items()
            if name.startswith("param.")
        }
        return run_traced(step.step, step.module, given | near, torch.float32, take)

    def compared(precision: Precision) -> float:
        return compare_training(step.user, step.step, run, None, 1, precision).difference

    with training_mode(step.user.model):
        with pytest.raises(ExportError):
            compared(FLOAT32)
        assert compared(WIDENED) > FLOAT32.values


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        (aten.convolution_backward.default, mutants.scaled(1)),
        (aten.native_batch_norm_backward.default, mutants.without_mean),
        (aten.threshold_backward.default, mutants.scaled(0)),
    ],
)
def test_a_wrong_operator_in_a_deep_network_is_named(
    steps: Callable[[str], TracedStep], monkeypatch: pytest.MonkeyPatch, operator: Any, wrong: Any
) -> None:
    mutate(monkeypatch, operator, wrong, 7)
    with pytest.raises(
        ExportError, match=rf"operator {operator} \(\w+\).* was exported as something else"
    ):
        checked(steps("resnet18"))


def test_a_wrong_operator_in_evaluation_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = zoo.make("lenet")
    user = make_user_model(case.module, case.loss, case.batch(4), case.metrics, None, case.targets)
    with training_mode(case.module):
        values = make_train_step(user, LocalStep()).values

    def checked() -> OperatorsChecked:
        with evaluation_mode(case.module):
            written = emitted(partial(trace_evaluation, user, values, ["output"]))
            return check_evaluation(user, values, written.traced, written.emission)

    assert checked().worst.excess < 0.1
    mutate(monkeypatch, aten.convolution.default, mutants.scaled(0), 1)
    with pytest.raises(
        ExportError,
        match=r"convolution\.default \(convolution_1\).* was exported as something else",
    ):
        checked()
