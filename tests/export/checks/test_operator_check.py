"""Each operator against PyTorch on the runtime's own inputs: healthy graphs, and graphs with a
wrong operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mutants
import pytest
import torch
import zoo
from fleetlearn_export import ExportError
from fleetlearn_export.checks import runtime_values
from fleetlearn_export.checks.operator_check import (
    UNINITIALISED,
    check_operators,
    compare_operators,
)
from fleetlearn_export.checks.runtime_values import Numbers
from fleetlearn_export.emission.table import OPERATORS
from mutants import TracedStep, mutate, traced_step

aten = torch.ops.aten
SLOW = ["gru", "lstm", "dropout", "pools", "transformer", "resnet8-groupnorm", "mcmahan"]
"""Those whose tracing takes seconds."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in zoo.NAMES]
HEALTHY = 0.1
"""A graph without an error is below this part of what is allowed."""

Steps = Callable[[str], TracedStep]


@pytest.fixture(scope="module")
def steps() -> Steps:
    """Each model's step traced once."""
    return cache(lambda name: traced_step(zoo.make(name)))


def calls_of(step: TracedStep, operator: Any) -> int:
    return len(step.module.graph.find_nodes(op="call_function", target=operator))


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_graph_is_far_below_what_is_allowed(steps: Steps, name: str) -> None:
    step = steps(name)
    found = check_operators(step.module, step.emitted(), step.inputs())
    assert found.worst.excess < HEALTHY, found.described()
    assert found.compared >= len(step.emitted().calls) - 5
    assert set(found.skipped) <= {str(operator) for operator in UNINITIALISED}


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_times_1_01_is_found(
    steps: Steps, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once: each is compared on the inputs that it had, so that no error hides another."""
    step = steps(name)
    for operator in {call.node.target for call in step.emitted().calls} - UNINITIALISED:
        mutate(monkeypatch, operator, mutants.all_scaled)
    found, _ = compare_operators(step.module, step.emitted(), step.inputs())
    rows = [
        row
        for row in found
        if any(value.is_floating_point() for value in traced_results(row.call.node))
    ]
    assert not [row.name() for row in rows if 0 < row.excess < 10]
    # Zeros are the same times 1.01: constants, and the accuracy where no example is right.
    same = [row.name() for row in rows if row.excess == 0]
    assert len(same) <= 4 + len(rows) // 8, same


def traced_results(node: torch.fx.Node) -> list[torch.Tensor]:
    made = node.meta["val"]
    return [row for row in (made if isinstance(made, list | tuple) else [made]) if row is not None]


CONVOLUTION, BATCH_NORM = aten.convolution_backward.default, aten.native_batch_norm_backward.default
WRONG = [
    ("lenet", CONVOLUTION, mutants.scaled(1), "result 1"),
    ("lenet", CONVOLUTION, mutants.scaled(0), "result 0"),
    ("lenet", CONVOLUTION, mutants.scaled(2, 0.0), "result 2"),
    ("lenet", CONVOLUTION, mutants.swapped_taps, "result 1"),
    ("resnet8-batchnorm", CONVOLUTION, mutants.scaled(1), "result 1"),
    ("resnet8-batchnorm", CONVOLUTION, mutants.swapped_taps, "result 1"),
    ("resnet8-batchnorm", BATCH_NORM, mutants.scaled(0), "result 0"),
    ("resnet8-batchnorm", BATCH_NORM, mutants.scaled(2, 0.0), "result 2"),
    ("resnet8-batchnorm", BATCH_NORM, mutants.without_mean, "result 0"),
    ("resnet8-batchnorm", aten.threshold_backward.default, mutants.scaled(0), "result 0"),
    ("inverted-residual", CONVOLUTION, mutants.scaled(1), "result 1"),
    ("inverted-residual", BATCH_NORM, mutants.without_mean, "result 0"),
    ("unet", CONVOLUTION, mutants.swapped_taps, "result 1"),
    ("two-heads", CONVOLUTION, mutants.scaled(2, 0.0), "result 2"),
]


@pytest.mark.parametrize(("name", "operator", "wrong", "place"), WRONG)
def test_one_wrong_operator_is_named(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, name: str, operator: Any, wrong: Any, place: str
) -> None:
    """One call of many is wrong, the one in the middle of the backward pass."""
    step = steps(name)
    number = (calls_of(step, operator) - 1) // 2
    mutate(monkeypatch, operator, wrong, number)
    wrong_node = step.module.graph.find_nodes(op="call_function", target=operator)[number]
    with pytest.raises(ExportError, match=r"was exported as something else") as error:
        check_operators(step.module, step.emitted(), step.inputs())
    assert f"operator {operator} ({wrong_node.name})" in str(error.value)
    assert place in str(error.value)
    assert "and 0 more operators" in str(error.value)


def test_swapped_strides_are_named(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime cannot run such a graph: the shapes do not fit."""
    step = steps("convolutions")
    mutate(monkeypatch, CONVOLUTION, mutants.swapped_strides)
    with pytest.raises(ExportError, match=r"operator aten\.convolution_backward\.default"):
        check_operators(step.module, step.emitted(), step.inputs())


@pytest.mark.parametrize(
    ("operator", "place"), [(aten.convolution.default, 0), (aten.convolution_backward.default, 1)]
)
def test_the_line_of_the_users_model_is_named(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, operator: Any, place: int
) -> None:
    """An operator of the backward pass has the line of what it differentiates."""
    step = steps("two-heads")
    mutate(monkeypatch, operator, mutants.scaled(place))
    with pytest.raises(
        ExportError, match=rf"operator {operator} \(\w+\) at .*zoo\.py:\d+ in forward was exported"
    ):
        check_operators(step.module, step.emitted(), step.inputs())


def test_other_integers_are_found(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(right: Any, graph: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        return graph.node("Add", right(graph, out, *args, **kwargs), graph.constant(1, out.dtype))

    step = steps("softmax")
    operator = aten.argmax.default
    mutate(monkeypatch, operator, more)
    with pytest.raises(
        ExportError, match=rf"operator {operator} .*has 3 other elements, inf times"
    ):
        check_operators(step.module, step.emitted(), step.inputs())


def test_values_in_many_parts_give_the_same(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    step = steps("mlp")
    whole, _ = compare_operators(step.module, step.emitted(), step.inputs())
    monkeypatch.setattr(runtime_values, "MAX_BYTES", 2**20)
    parts, _ = compare_operators(step.module, step.emitted(), step.inputs())
    assert [row.name() for row in parts] == [row.name() for row in whole]
    assert [row.excess for row in parts] == [row.excess for row in whole]


def test_transposed_weights_take_no_memory_of_their_own(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the runtime's are equal: a wrong one stays as the runtime made it, and is found."""
    step = steps("mlp")
    monkeypatch.setattr(runtime_values, "MAX_BYTES", 1)  # each operator is a part
    emission, given = step.emitted(), step.inputs()
    parts = runtime_values.values_by_part(
        step.module, emission, given, Numbers(step.module, emission, given)
    )
    weights = {
        value.data_ptr()
        for name, value in given.items()
        if name.startswith("param.") and value.dim() == 2
    }
    read = 0
    for calls, values in parts:
        for node in calls[0].node.all_input_nodes:
            if node.target is aten.t.default and emission.values[
                node.all_input_nodes[0]
            ].startswith("param."):
                assert values[emission.values[node]].data_ptr() in weights
                read += 1
    assert read >= len(weights)

    mutate(monkeypatch, aten.t.default, mutants.all_scaled)
    with pytest.raises(
        ExportError, match=r"operator aten\.t\.default .* was exported as something else"
    ):
        check_operators(step.module, step.emitted(), step.inputs())


def test_an_operator_that_is_not_compared_is_said(
    monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    step = steps("softmax")
    monkeypatch.setattr(
        "fleetlearn_export.checks.operator_check.UNINITIALISED", {aten.addmm.default}
    )
    found = check_operators(step.module, step.emitted(), step.inputs())
    assert found.described().endswith(
        "; aten.addmm.default was not compared: its result is uninitialised"
    )
    assert aten.addmm.default in OPERATORS


def test_results_that_only_pytorchs_backward_pass_reads_are_there() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LogSigmoid())
    step = traced_step(zoo.classifier(layers, zoo.numbers(5), 3))
    assert check_operators(step.module, step.emitted(), step.inputs()).worst.excess < HEALTHY


class Sorting(torch.nn.Module):
    """Sorts the middle of each row, all of whose elements occur several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 12), torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, order = torch.sort(torch.round(x.repeat(1, 3)), dim=1)
        _, largest = torch.topk(torch.round(x.repeat(1, 3)), 12, dim=1)
        whole = torch.sort(100 * torch.round(x).to(torch.int64), dim=1).values
        middle = self.first(x + 0.001 * whole)
        scores: torch.Tensor = self.last(middle + 0.01 * (order[:, :12] + largest))
        return scores


class TopInAnyOrder(torch.nn.Linear):
    """Reads all of some largest elements, in whatever order they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        values, places = torch.topk(x, 12, dim=1, sorted=False)
        scores: torch.Tensor = outputs + (values * outputs.repeat(1, 7).gather(1, places)).sum(
            1, keepdim=True
        )
        return scores


def test_the_largest_may_be_in_any_order_if_they_need_not_be_sorted() -> None:
    step = traced_step(zoo.classifier(TopInAnyOrder(20, 3), zoo.numbers(20), 3))
    assert check_operators(step.module, step.emitted(), step.inputs()).worst.excess < HEALTHY


def test_equal_elements_may_be_sorted_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    step = traced_step(zoo.classifier(Sorting(), zoo.numbers(5), 3))
    assert check_operators(step.module, step.emitted(), step.inputs()).worst.excess < HEALTHY

    def smallest(
        right: Any, graph: Any, out: Any, x: Any, k: Any, axis: int = -1, *more: Any
    ) -> Any:
        return right(graph, out, x, k, axis, False)

    mutate(monkeypatch, aten.topk.default, smallest)
    with pytest.raises(
        ExportError, match=r"operator aten\.topk\.default .* was exported as something else"
    ):
        check_operators(step.module, step.emitted(), step.inputs())


def test_what_reads_no_batch_is_compared_once(steps: Steps) -> None:
    """A transposed weight is the same with another batch."""
    step = steps("mlp")
    whole, _ = compare_operators(step.module, step.emitted(), step.inputs())
    again, _ = compare_operators(step.module, step.emitted(), step.inputs(), of_the_batch=True)
    left_out = {row.call.node for row in whole} - {row.call.node for row in again}
    assert {str(node.target) for node in left_out} == {"aten.t.default", "aten.detach.default"}
    assert {str(row.call.node.target) for row in again} >= {
        "aten.addmm.default",
        "aten.mm.default",
        "aten.sub.Tensor",
    }
