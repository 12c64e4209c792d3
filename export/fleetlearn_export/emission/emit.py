"""Writes a traced graph as an ONNX graph, node by node. Nothing is traced again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import getitem
from typing import Any, NamedTuple

import onnx
import torch
from onnx import helper
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.emission.emitter import (
    ELEMENT_TYPES,
    EmissionError,
    Emitter,
    Size,
    Value,
    fixed_size,
)
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.emission.table import OPERATORS, decompositions
from fleetlearn_export.model.source_locations import location_of_node
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.tracing.trace import trace

BACKWARD = torch.ops.aten.convolution_backward.default


class Call(NamedTuple):
    """One operator of the traced graph, and the ONNX values that it became."""

    node: fx.Node
    results: list[str | None]
    """Names in the ONNX graph, one for each result."""


class Emission(NamedTuple):
    """An ONNX graph, and what each operator of the traced graph became."""

    model: onnx.ModelProto
    calls: list[Call]
    values: dict[fx.Node, str]
    """A tensor of the traced graph -> its name in the ONNX graph."""
    constants: Constants | None = None
    """The graph's large constants, if they are kept apart."""


def emit(
    module: fx.GraphModule,
    inputs: Sequence[str],
    outputs: Sequence[str],
    examples: str,
    axis: int = 0,
    constants: Constants | None = None,
) -> Emission:
    """Write the traced graph as an ONNX graph with these names of inputs and outputs.

    module: a graph of ATen operators that write into no tensor. examples: the input whose ``axis``
    has the number of examples, if that is free. constants: gets the large constants; unless given
    the graph has them. Raises EmissionError if an operator is not in the table, or its use is not
    written.
    """
    backward = any(node.target is BACKWARD for node in module.graph.nodes)
    graph = Emitter(examples, backward, axis, constants, write=_written)
    values: dict[fx.Node, Any] = {}  # a name, or names where an operator has several results
    calls: list[Call] = []
    given, results = [], []
    names = iter(inputs)
    for node in module.graph.nodes:
        traced = node.meta.get("val")
        if node.op == "placeholder":
            values[node] = next(names)
            given.append(_description(values[node], traced))
        elif node.op == "get_attr":
            values[node] = graph.array(getattr(module, node.target).detach().contiguous().numpy())
        elif node.op == "output":
            results = [(name, source) for name, source in zip(outputs, node.args[0], strict=True)]
        elif node.target is getitem:
            values[node] = values[node.args[0]][node.args[1]]
        elif isinstance(node.target, torch._ops.OpOverload) and _makes_tensors(node.target, traced):
            values[node] = _call(graph, node, values)
            named = [values[node]] if isinstance(values[node], str) else list(values[node])
            calls.append(Call(node, named))
    for name, source in results:
        graph.nodes.append(helper.make_node("Identity", [values[source]], [name], name=name))
    found = {name: value.meta["val"] for value, name in values.items() if isinstance(name, str)}
    described = [
        _description(name, traced) for name, traced in found.items() if isinstance(traced, Tensor)
    ]
    returned = [_description(name, source.meta["val"]) for name, source in results]
    known = {row.name for row in (*given, *returned)} | graph.constants.keys()
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "main_graph",
            given,
            returned,
            list(graph.constants.values()),
            value_info=[row for row in described if row.name not in known],
        )
    )
    return Emission(
        model,
        calls,
        {node: name for node, name in values.items() if isinstance(name, str)},
        constants,
    )


def _written(
    function: Callable[[Tensors], Tensors],
    arguments: Tensors,
    rows: Mapping[str, int],
    outputs: Sequence[str],
) -> onnx.GraphProto:
    module = without_writes(trace(function, arguments, rows, decompositions()))
    examples, axis = next(iter(rows.items()), ("", 0))
    return emit(module, list(arguments), outputs, examples, axis).model.graph


def _call(graph: Emitter, node: fx.Node, values: dict[fx.Node, Any]) -> str | Sequence[str | None]:
    assert isinstance(node.target, torch._ops.OpOverload)
    handler = OPERATORS.get(node.target)
    if handler is None:
        raise EmissionError(f"operator {node.target}{location_of_node(node)}")

    def argument(row: Any) -> Any:
        if not isinstance(row, fx.Node):
            return row
        traced = row.meta["val"]
        return Value(values[row], traced) if isinstance(traced, Tensor) else traced

    args, kwargs = pytree.tree_map(
        argument, (node.args, node.kwargs), is_leaf=lambda row: isinstance(row, fx.Node)
    )
    try:
        result: str | Sequence[str | None] = handler(graph, node.meta["val"], *args, **kwargs)
    except EmissionError as reason:
        raise EmissionError(
            f"operator {node.target}{location_of_node(node)} with {reason}"
        ) from None
    return result


def _makes_tensors(operator: torch._ops.OpOverload, traced: Any) -> bool:
    """Whether the operator gives tensors: not a size, which handlers compute, nor nothing, as
    assertions do."""
    sizes = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    return len(operator._schema.returns) > 0 and not isinstance(traced, sizes)


def _description(name: str, traced: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        name, ELEMENT_TYPES[traced.dtype], [_axis(size) for size in traced.shape]
    )


def _axis(size: Size) -> int | str | None:
    """Return a size as ONNX has it: the number of examples is called n; a size computed from it has
    an expression."""
    size = fixed_size(size)
    if isinstance(size, int):
        return size
    return _in_n(size.node.expr)


@cache
def _in_n(expression: Any) -> str:
    """Return the expression with n in the place of its symbol. A graph has few, each thousands of
    times."""
    return str(expression.subs(dict.fromkeys(expression.free_symbols, "n")))
