"""Comparison of the traced graph with autograd, both in PyTorch.

They run the same operators in another form. Where they round alike, float32 shows any difference.
Else float64 does: it is far from float32's own errors, which deep networks with ReLU or BatchNorm
make to percents of a gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, fx

from fleetlearn_export.checks.compared_steps import (
    FLOAT32,
    FLOAT64,
    SAME_ROUNDING,
    CheckedStep,
    Precision,
)
from fleetlearn_export.checks.comparison import compare, first_passing
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.checks.early_results import early_results
from fleetlearn_export.checks.memory import LARGE, give_back_freed_memory
from fleetlearn_export.checks.one_example import right_for_one_example
from fleetlearn_export.checks.pytorch_training import ReceiveTensor
from fleetlearn_export.checks.training_comparison import compare_training
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep, plain_kernels
from fleetlearn_export.model.user_model import UserModel

aten = torch.ops.aten
CONTIGUOUS = {aten.native_group_norm.default, aten.native_group_norm_backward.default}
"""Operators that PyTorch refuses unless their tensors' elements lie in memory in order."""


def check_tracing(
    user: UserModel, step: TrainStep, module: fx.GraphModule, features: Function | None = None
) -> CheckedStep:
    """Compare the traced step with ``PyTorchTraining``. The model is in training mode.

    module: takes the step's arguments in order, returns its outputs in order, and writes into no
    tensor. Raises ExportError; the text names the tensor with the largest difference.
    """
    return first_passing(lambda seed: _check(user, step, module, features, seed))


def _check(
    user: UserModel, step: TrainStep, module: fx.GraphModule, features: Function | None, seed: int
) -> CheckedStep:
    def compared(precision: Precision) -> CheckedStep:
        def run(inputs: Tensors, receive: ReceiveTensor) -> Tensors:
            with as_export_error("the traced step fails in PyTorch"):
                return run_traced(step, module, inputs, precision.dtype, receive)

        return compare_training(user, step, run, features, seed, precision, "traced step")

    with suppress(Exception):  # float64 takes three times as long, and twice the memory
        return compared(SAME_ROUNDING)
    try:
        return compared(FLOAT64)
    except Exception as error:
        # code that asks for its tensors' dtype, or for the smallest number of it, may be another in
        # float64
        try:
            return compared(FLOAT32)
        except ExportError as other:
            raise (error if isinstance(error, ExportError) else other) from None


def run_traced(
    step: TrainStep,
    module: fx.GraphModule,
    inputs: Tensors,
    dtype: torch.dtype,
    receive: ReceiveTensor | None = None,
) -> Tensors:
    """Run the traced step, which writes into no tensor, in PyTorch. Returns the graph's named
    outputs.

    receive: gets each output as soon as it is computed. What it takes is not returned, and so not
    kept.
    """
    rows = [inputs[name] for name in step.inputs()]
    double = dtype == torch.float64
    precision = DoublePrecision(views_stay=True) if double else nullcontext()
    interpreter = _Interpreter(module, step.outputs(), receive)
    with torch.no_grad(), plain_kernels(), precision, right_for_one_example(inputs):
        results = interpreter.run(*rows)
    named = zip(step.outputs(), as_double(results) if double else results, strict=True)
    return {name: value for name, value in named if name not in interpreter.taken}


def check_cases(
    module: fx.GraphModule, cases: Sequence[fx.GraphModule], inputs: Sequence[Tensor]
) -> None:
    """Compare a traced evaluation with what was traced for other numbers of examples, in float64.

    module, cases: take ``inputs`` in order, and write into no tensor. Raises ExportError if a case
    has other results.
    """

    def results(graph: fx.GraphModule) -> list[Tensor]:
        with torch.no_grad(), plain_kernels(), DoublePrecision(views_stay=True):
            found: list[Tensor] = as_double(_AnyLayout(graph).run(*inputs))
            return found

    for case in cases:
        named = {
            f"result {index}": pair
            for index, pair in enumerate(zip(results(case), results(module), strict=True))
        }
        compare(
            {name: (pair.numpy(), first) for name, (pair, first) in named.items()},
            "another number of examples",
        )


class _AnyLayout(fx.Interpreter):
    """Runs a graph on tensors that may lie in memory otherwise than their stand-ins did while
    tracing."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.view.default:
            target = aten.reshape.default  # which copies where a view is impossible
        if target in CONTIGUOUS:
            args = tuple(
                value.contiguous() if isinstance(value, Tensor) else value for value in args
            )
        return super().call_function(target, args, kwargs)


class _Interpreter(_AnyLayout):
    """Runs a graph that writes into no tensor: the copies that a step makes of its arguments are
    not needed."""

    def __init__(
        self, module: fx.GraphModule, outputs: list[str], receive: ReceiveTensor | None
    ) -> None:
        super().__init__(module, graph=_with_early_results(module.graph))
        self._receive, self.taken = receive, set[str]()
        self._names: dict[fx.Node, list[str]] = defaultdict(list)
        returned: Any = self.graph.output_node().args[0]
        for node, name in zip(returned, outputs, strict=True):
            self._names[node].append(name)

    def run_node(self, n: fx.Node) -> Any:
        copied = (
            n.target is torch.ops.aten.clone.default and n.all_input_nodes[0].op == "placeholder"
        )
        if copied and all(user.op != "output" for user in n.users):
            return self.fetch_args_kwargs_from_env(n)[0][0]
        if _is_large(n.meta.get("val")):
            give_back_freed_memory()
        value = super().run_node(n)
        if self._receive is None or n not in self._names or len(n.users) > 1:
            return value
        for name in self._names[n]:
            self._receive(name, value)
            self.taken.add(name)
        return None


def _is_large(traced: Any) -> bool:
    """Whether a traced result, of a size that does not depend on the number of examples, is large
    in float64."""
    count = traced.numel() if isinstance(traced, Tensor) else 0
    return isinstance(count, int) and count * torch.float64.itemsize >= LARGE


def _with_early_results(graph: fx.Graph) -> fx.Graph:
    """Return a copy in which each new parameter is computed as soon as its gradient is there."""
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    order = early_results([node.all_input_nodes for node in inner], [[node] for node in inner])
    reordered, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = list(graph.find_nodes(op="placeholder"))
    for node in [*placeholders, *(inner[index] for index in order), graph.output_node()]:
        copies[node] = reordered.node_copy(node, copies.__getitem__)
    return reordered
