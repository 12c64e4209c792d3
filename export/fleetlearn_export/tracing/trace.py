"""A model and its loss as programs over flat lists of tensors: one training step, evaluation, and use.

The training step is a function of tensors that calls PyTorch's automatic differentiation. Tracing it notes every
operator of the forward pass, the backward pass and the update; what comes of it is exported as one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.source_locations import (
    explained,
    fixed_size,
    own_frames_recorded,
    place_of_node,
    place_of_replacement,
)
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import EvalModule, InferModule, LossModule, Source
from fleetlearn_export.silence import quiet
from fleetlearn_export.tracing.decompositions import tracing_decompositions
from fleetlearn_export.tracing.missing_operators import refusal

ROWS = Dim("n", min=2)
"""Of a batch. PyTorch takes a size of 1 for a constant: traced with 2 or more; the graphs are checked with 1 later."""


class Program(NamedTuple):
    """An exported program and the names of what goes in and comes out, in order."""

    exported: ExportedProgram
    inputs: list[str]
    outputs: list[str]
    origin: torch.fx.Graph
    """A graph whose operators know their places in the user's code."""
    traced: torch.fx.Graph | None = None
    """Another one, with the step's own operators in it."""


class Called(nn.Module):
    """``inner``, with its model's parameters as the first arguments."""

    def __init__(self, inner: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        count = len(self.names)
        given = {f"model.{name}": value for name, value in zip(self.names, values[:count], strict=True)}
        result: tuple[Tensor, ...] = functional_call(self.inner, given, values[count:])
        return result


class Traced(nn.Module):
    """A traced graph with its arguments as one tuple."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.inner = graph

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.inner(*values))


def check_source(source: Source) -> torch.fx.Graph:
    """Export the loss alone: what keeps a model from being a graph shows best there. The model is in training mode.

    Returns a graph whose operators know their places in the user's code. Raises ExportError.
    """
    exported = _export(LossModule(source), 0, list(source.batch.values()))
    _check_operators(exported.graph)
    graph: torch.fx.Graph = exported.graph
    return graph


def trace(function: Callable[[Tensors], Tensors], arguments: Tensors, rows: Mapping[str, int]) -> torch.fx.GraphModule:
    """Run the function on stand-ins without values, and note each operator: the forward pass, and the backward pass
    that automatic differentiation makes of it. ``rows`` says of some arguments which axis is the examples', and free.
    Raises ExportError.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    stand_ins = []
    for name, value in arguments.items():
        axes = [DimDynamic.DUCK if rows.get(name) == axis else DimDynamic.STATIC for axis in range(value.dim())]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=axes)
        stand_ins.append(mode.from_tensor(value, source=ConstantSource(name), symbolic_context=context))

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(dict(zip(arguments, values, strict=True))).values())

    with explained("the training step cannot be traced"), quiet(), own_frames_recorded():
        graph: torch.fx.GraphModule = make_fx(
            flat,
            decomposition_table=tracing_decompositions(),
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
            record_stack_traces=True,
        )(*stand_ins)
    sizes: list[Any] = [
        value.shape[rows[name]] for name, value in zip(arguments, stand_ins, strict=True) if name in rows
    ]
    if any(size.node.expr.is_number for size in sizes if isinstance(size, torch.SymInt)):
        # Most of such a graph may be right, and only a division by the number of examples wrong.
        raise fixed_size("the training step cannot be traced", place_of_replacement(mode.shape_env))
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target), Tensor):
            # Plain attributes are not exported; a model's own parameters come here where they are frozen.
            delattr(graph, node.target)
            graph.register_buffer(node.target, value.detach().clone())
    return graph


def export_traced(graph: torch.fx.GraphModule, arguments: Tensors, rows: Mapping[str, int]) -> ExportedProgram:
    """A traced graph as an exported program, in which nothing is changed in place. Raises ExportError."""
    shapes = tuple({rows[name]: ROWS} if name in rows else None for name in arguments)
    with explained("the traced step cannot be exported"), quiet():
        exported = torch.export.export(Traced(graph), tuple(arguments.values()), dynamic_shapes=(shapes,), strict=False)
    _check_operators(exported.graph)
    return exported


def train_program(step: TrainStep, origin: torch.fx.Graph) -> Program:
    """One local step: forward, backward and update."""
    arguments = step.arguments()
    rows = {name: 0 for name in arguments if name.startswith("batch.")}
    graph = trace(step.function, arguments, rows)
    _check_operators(graph.graph)
    return Program(export_traced(graph, arguments, rows), list(arguments), step.outputs(), origin, graph.graph)


def eval_program(source: Source, values: dict[str, Tensor]) -> Program:
    """Sums over a batch. The model is in evaluation mode."""
    module = Called(EvalModule(source), list(values))
    exported = _export(module, len(values), [*(v.clone() for v in values.values()), *source.batch.values()])
    _check_repeatable(source, exported.graph)
    inputs = [*(f"param.{name}" for name in values), *(f"batch.{name}" for name in source.batch)]
    outputs = ["loss_sum", *(f"metric_sum.{name}" for name in source.metrics), "examples"]
    return Program(exported, inputs, outputs, exported.graph)


def infer_program(source: Source, values: dict[str, Tensor], outputs: list[str]) -> Program:
    """The model alone. The model is in evaluation mode."""
    module = Called(InferModule(source), list(values))
    inputs = source.inputs()
    exported = _export(module, len(values), [*(v.clone() for v in values.values()), *inputs.values()])
    return Program(exported, [*(f"param.{name}" for name in values), *inputs], outputs, exported.graph)


def _export(module: nn.Module, fixed: int, arguments: list[Tensor]) -> ExportedProgram:
    """Export with a dynamic first axis for the arguments after the ``fixed`` first ones."""
    shapes = [{0: ROWS} if place >= fixed else None for place in range(len(arguments))]
    name = "batch" if isinstance(module, LossModule) else "values"
    with explained("the model cannot be exported"), quiet(), own_frames_recorded():
        return torch.export.export(module, tuple(arguments), dynamic_shapes={name: tuple(shapes)}, strict=False)


def _check_operators(graph: torch.fx.Graph) -> None:
    """Refuse what no bundle can hold; the rest of what ONNX lacks shows when the graph is converted."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        reason = refusal(node)
        if reason:
            raise ExportError(f"operator {node.target}{place_of_node(node)} {reason}")
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_complex():
            raise ExportError(
                f"operator {node.target}{place_of_node(node)} gives complex numbers, which ONNX does not compute with"
            )


def _check_repeatable(source: Source, graph: torch.fx.Graph) -> None:
    """Refuse a model that is random in evaluation mode."""
    with explained("in evaluation mode the model fails in PyTorch itself"), Seeded(torch.tensor(0)) as seeded:
        LossModule(source)(*(value.clone() for value in source.batch.values()))
    if seeded.draws:
        # A dropout that is switched off is still there.
        random = [
            node
            for node in graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
            and False not in node.args
        ]
        place = f" in operator {random[0].target}{place_of_node(random[0])}" if random else ""
        raise ExportError(
            f"in evaluation mode the model draws random numbers{place}. Let it do so in training only: nn.Dropout, or "
            "functional.dropout(x, p, self.training)"
        )
