"""Emitted training steps of the zoo's models, and wrong functions in the place of the emitter's
right ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from fleetlearn_export.checks.comparison import batches
from fleetlearn_export.checks.emission_check import operator_inputs
from fleetlearn_export.emission.emit import Emission, emit
from fleetlearn_export.emission.emitter import Emitter, Handler
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.emission.table import OPERATORS, decompositions
from fleetlearn_export.graphs.conversion import IR_VERSION, OPSET
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.steps import BatchEvaluation, Objective, Tensors
from fleetlearn_export.model.train_step import TrainStep, make_train_step
from fleetlearn_export.model.user_model import UserModel, training_mode
from fleetlearn_export.tracing.decompositions import Decompositions
from fleetlearn_export.tracing.fused_operators import fuse_operators
from fleetlearn_export.tracing.trace import Traced, trace_step
from fleetlearn_protocol.manifest import LocalStep
from torch import fx
from zoo import Case

aten = torch.ops.aten
Wrong = Callable[..., Any]
"""``wrong(right, graph, out, *args, **kwargs)`` writes an operator, with ``right`` the emitter's
own function."""


class TracedStep(NamedTuple):
    """A model's training step in PyTorch, and traced."""

    user: UserModel
    step: TrainStep
    traced: Traced
    module: fx.GraphModule
    """The traced graph as it is emitted."""

    def inputs(self, seed: int = 1) -> Tensors:
        """Return inputs of the graph, with a batch of another size than it was traced with."""
        _, batch, *_ = batches(self.user, seed)
        return operator_inputs(self.step, batch, seed)

    def emitted(self) -> Emission:
        emission = emit(
            self.module,
            list(self.traced.arguments),
            self.traced.outputs,
            next(iter(self.traced.rows)),
        )
        emission.model.ir_version = IR_VERSION
        emission.model.opset_import[0].version = OPSET
        return emission


def traced_step(case: Case, examples: int = 4, table: Decompositions | None = None) -> TracedStep:
    """Trace a step of plain SGD. ``table``: operator -> a function that is traced in its place,
    besides the usual."""
    user = make_user_model(
        case.module, case.loss, case.batch(examples), case.metrics, None, case.targets
    )
    with training_mode(case.module):
        step = make_train_step(user, LocalStep())
        traced = trace_step(step, {**decompositions(), **(table or {})})
    fuse_operators(traced.module.graph)
    module = without_writes(traced.module)
    module.graph.eliminate_dead_code()
    return TracedStep(user, step, traced, module)


def scaled(place: int, factor: float = 1.01) -> Wrong:
    """Multiply a result by a number."""

    def wrong(right: Handler, graph: Emitter, out: Any, *args: Any, **kwargs: Any) -> Any:
        found = right(graph, out, *args, **kwargs)
        if isinstance(found, str):
            return graph.node("Mul", found, graph.constant(factor, out.dtype))
        rows = list(found)
        name = rows[place]
        assert name is not None
        rows[place] = graph.node("Mul", name, graph.constant(factor, out[place].dtype))
        return rows

    return wrong


def all_scaled(right: Handler, graph: Emitter, out: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply all results that are floating-point numbers by 1.01."""
    found = right(graph, out, *args, **kwargs)
    if isinstance(found, str):
        return (
            graph.node("Mul", found, graph.constant(1.01, out.dtype))
            if out.is_floating_point()
            else found
        )
    return [
        graph.node("Mul", name, graph.constant(1.01, value.dtype))
        if name and value.is_floating_point()
        else name
        for name, value in zip(found, out, strict=True)
    ]


def swapped_taps(right: Handler, graph: Emitter, out: Any, *args: Any) -> Any:
    """Give the weight's gradient with its last two axes swapped."""
    rows = list(right(graph, out, *args))
    order = [*range(len(out[1].shape) - 2), len(out[1].shape) - 1, len(out[1].shape) - 2]
    rows[1] = graph.node("Transpose", rows[1], perm=order)
    return rows


def swapped_strides(right: Handler, graph: Emitter, out: Any, *args: Any) -> Any:
    """Take the strides of the axes for one another."""
    changed = list(args)
    changed[4] = list(reversed(args[4]))
    return right(graph, out, *changed)


def without_mean(right: Handler, graph: Emitter, out: Any, *args: Any) -> Any:
    """Leave a term of BatchNorm's backward pass out: weight / deviation times the mean of the
    gradient."""
    rows = list(right(graph, out, *args))
    x, weight, inverse = args[1], args[2], args[6]
    total = rows[2] or graph.node(
        "ReduceSum", args[0], graph.integers([0, *range(2, x.rank)]), keepdims=0
    )
    mean = graph.node("Div", total, graph.count([x.shape[0], *x.shape[2:]]))
    term = graph.node("Mul", graph.node("Mul", weight, inverse), mean)
    rows[0] = graph.node("Add", rows[0], graph.reshaped(term, [x.shape[1], *[1] * (x.rank - 2)]))
    return rows


def mutate(monkeypatch: Any, operator: Any, wrong: Wrong, number: int | None = None) -> None:
    """Put a wrong function into the emitter's table. ``number``: for that call only, counted from
    0."""
    right = OPERATORS[operator]
    calls = 0

    def handler(graph: Emitter, out: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if number is not None and calls - 1 != number:
            return right(graph, out, *args, **kwargs)
        return wrong(right, graph, out, *args, **kwargs)

    monkeypatch.setitem(OPERATORS, operator, handler)


def blind_objective(
    objective: Objective,
    params: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    extra: Callable[[Any], torch.Tensor] | None = None,
    *,
    scale: torch.Tensor | None = None,
) -> BatchEvaluation:
    """Do what ``Objective`` does, with the model's own tensors in the loss and the backward pass,
    and without hooks."""
    leaves = {name: params[name].detach().requires_grad_() for name in objective.trained}
    arrays = {name: value.clone() for name, value in batch.items()}
    with torch.enable_grad():
        outputs = torch.func.functional_call(
            objective.model, leaves, tuple(arrays[row] for row in objective.inputs)
        )
        loss = objective.loss(outputs, *(arrays[row] for row in objective.targets))
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    rows = zip(leaves.items(), found, strict=True)
    gradients = {name: torch.zeros_like(leaf) if row is None else row for (name, leaf), row in rows}
    return BatchEvaluation(loss.detach(), {}, gradients, {}, {})
