"""Which part of a step each operator of its graph is in, and that the parts together give what the
graph gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from fleetlearn_export.graphs.split import Parts, Subgraph, remove_copies, result_bytes, split
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
ROOMY = 10**6
W, X, Y, LR = torch.randn(4, 3), torch.randn(5, 4), torch.randint(3, (5,)), torch.tensor(0.5)
Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def parts_of(
    step: Step, room: int = ROOMY, mode: Literal["real", "symbolic"] = "real"
) -> tuple[GraphModule, Parts]:
    module = make_fx(step, tracing_mode=mode)(W, X, Y, LR)
    remove_copies(module)
    _, x, y, lr = (node.name for node in module.graph.find_nodes(op="placeholder"))
    return module, split(module.graph, [lr], [x, y], 1, result_bytes(module, (W, X, Y, LR)), room)


def operators(part: Subgraph) -> list[str]:
    return [
        node.target.__name__.split(".")[0]
        for node in part.graph.nodes
        if node.op == "call_function"
    ]


def check(step: Step, parts: tuple[GraphModule, Parts]) -> None:
    """Bit for bit what the step itself gives."""
    module, (before, core, after) = parts
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    values: dict[str, Any] = dict(zip(names, (W, X, Y, LR), strict=True))
    for part in (before, core, after):
        found = Interpreter(module, graph=part.graph).run(*(values[name] for name in part.inputs))
        values |= dict(zip(part.outputs, found, strict=True))
    for name, value in zip([*core.outputs[:1], *after.outputs], step(W, X, Y, LR), strict=True):
        assert torch.equal(values[name], value)


def regression(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
    outputs = x @ w
    one_hot = (torch.arange(3) == y.unsqueeze(1)).float()
    error = outputs.softmax(1) - one_hot
    return (
        w - lr * (x.permute(1, 0) @ error),
        error.square().sum(),
        (outputs.argmax(1) == y).float().mean(),
    )


def test_only_what_the_next_step_needs_is_done_step_after_step() -> None:
    made = parts_of(regression)
    before, core, after = made[1]
    assert operators(before) == ["arange", "unsqueeze", "eq", "_to_copy"]
    assert operators(core) == ["mm", "_softmax", "sub", "permute", "mm", "mul", "sub"]
    assert operators(after) == ["pow", "sum", "argmax", "eq", "_to_copy", "mean"]
    assert core.outputs[1:] == ["mm", "sub"]
    check(regression, made)


@pytest.mark.parametrize(("room", "before", "after"), [(0, 0, 0), (60, 3, 2), (ROOMY, 4, 6)])
def test_what_is_large_stays_in_the_core(room: int, before: int, after: int) -> None:
    """The comparison has 15 bytes and what it takes 40; as numbers, and the outputs, 60 each."""
    made = parts_of(regression, room)
    assert (len(operators(made[1].before)), len(operators(made[1].after))) == (before, after)
    check(regression, made)


def test_of_a_measure_of_something_large_the_small_end_is_done_after() -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        outputs = x @ w
        return w - lr * outputs.sum(), (outputs.relu().mean() + w.square().sum()).sqrt()

    made = parts_of(step, 40)
    assert operators(made[1].after) == ["add", "sqrt"]
    check(step, made)


def test_where_one_value_is_too_large_all_that_goes_with_it_stays() -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        error = (x @ w).sum()
        return w - lr * error, error.square() * (x @ w)[0, 0].exp() + w.sum().exp()

    made = parts_of(step, 30)
    assert "pow" in operators(made[1].core)
    check(step, made)


def test_where_all_depends_on_the_step_before_all_is_done_step_after_step() -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        outputs = x @ w
        loss = outputs.square().mean()
        return w - lr * loss * w, loss

    made = parts_of(step)
    assert not made[1].before.outputs
    assert not operators(made[1].after)
    check(step, made)


def test_results_of_one_operator_stay_together() -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        values, places = (x @ w).max(1)
        highest, where = x.max(1)
        return w - lr * values.sum() - highest.sum(), places.float().mean(), where.float().mean()

    assert operators(parts_of(step)[1].before) == [
        "max",
        "getitem",
        "getitem",
        "sum",
        "_to_copy",
        "mean",
    ]
    for room in (ROOMY, 70, 0):
        check(step, parts_of(step, room))


def test_what_is_made_of_sizes_is_no_matter_of_steps() -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        ones = torch.full_like(x.permute(1, 0), 1.0).sum()
        return w - lr * ones * (x @ w).sum(), ones

    made = parts_of(step, mode="symbolic")
    assert operators(made[1].before) == ["permute"]
    assert "full_like" in operators(made[1].core)
    assert operators(made[1].after) == ["full_like", "sum"]
    check(step, made)


def test_measures_of_the_parameters_of_the_batch_and_of_constants() -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        return w + x.mean(), w.sum(), y.float().mean(), lr * 2, torch.ones(())

    made = parts_of(step)
    assert made[1].core.outputs == ["add", made[1].core.inputs[0]]
    check(step, made)
