"""The values that ONNX Runtime has for the tensors of a traced graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fleetlearn_export.checks.comparison import open_session
from fleetlearn_export.checks.early_results import early_results
from fleetlearn_export.checks.memory import give_back_freed_memory
from fleetlearn_export.emission.constants import key_of
from fleetlearn_export.emission.emit import Call, Emission
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.reading import reads
from fleetlearn_export.model.source_locations import location_of_node
from fleetlearn_export.model.steps import Tensors

MAX_BYTES = 2**26
"""How many bytes of operators' results are taken from one run of a part of the graph."""
PARTS_BETWEEN = 4
"""After how many parts memory that was freed goes back: later tensors hardly fit between those that
are left. Giving it back after each part took 5 of 100 CPU-seconds for ViT-B at 224 x 224."""
_NODE = re.compile(r"\bv\d+\b")
"""A node's name in an error of ONNX Runtime."""


class Numbers:
    """Sizes and numbers of the traced graph, for the number of examples in ``given``."""

    def __init__(self, module: fx.GraphModule, emission: Emission, given: Tensors) -> None:
        self._sizes: dict[Any, int] = {}
        self._known: dict[Any, Any] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            traced = node.meta["val"]
            for size, real in zip(traced.shape, given[emission.values[node]].shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._sizes[size.node.expr] = real

    def value(self, traced: Any) -> Any:
        """Return a traced size or number as Python's."""
        if not isinstance(traced, torch.SymInt | torch.SymFloat | torch.SymBool):
            return traced
        expression = traced.node.expr
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(traced)]
        if (kind, expression) not in self._known:
            self._known[kind, expression] = kind(expression.subs(self._sizes))
        return self._known[kind, expression]

    def bytes_of(self, traced: Tensor) -> int:
        count = traced.element_size()
        for size in traced.shape:
            count *= self.value(size)
        return count


def values_by_part(
    module: fx.GraphModule, emission: Emission, inputs: Tensors, numbers: Numbers
) -> Iterator[tuple[list[Call], Mapping[str, Tensor]]]:
    """Yield calls, one after the other, with the values that the runtime has for them.

    The graph runs in parts, one after the other. Each gets the values that earlier parts made, as
    inputs. A value is dropped after the last part that reads it, so that never all of them are in
    memory.
    """
    graph = emission.model.graph
    parts = list(_parts(_calls_with_nodes(emission), emission, numbers))
    last = {name: index for index, part in enumerate(parts) for name in part.reads(emission)}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    known = dict(inputs)
    known |= {
        emission.values[node]: getattr(module, str(node.target)).detach()
        for node in module.graph.find_nodes(op="get_attr")
        if emission.values.get(node) in last
    }
    known |= {
        name: torch.from_numpy(np.array(numpy_helper.to_array(tensor)))
        for name, tensor in constants.items()
        if name in last
        and name not in known
        and not key_of(tensor)
        and any(name in part.results for part in parts)
    }
    if emission.constants is not None:
        apart = emission.constants.named(graph.initializer)
        known |= {
            name: torch.from_numpy(value) for name, value in apart.items() if name not in known
        }
    # The graph's inputs and their views lie in memory as they did while tracing, so operators can
    # have them as views.
    shared = set(known)
    for index, part in enumerate(parts):
        made = sorted(name for name in part.made if last.get(name, -1) >= index)
        known |= _run(emission, part, made, known, constants)
        yield part.calls, known
        views = _views(part, emission, known, numbers, shared)
        shared |= views.keys()
        known = {
            name: value for name, value in (known | views).items() if last.get(name, -1) > index
        }
        del views
        if index % PARTS_BETWEEN == 0:
            give_back_freed_memory()


def arguments(
    call: Call, emission: Emission, values: Mapping[str, Tensor], numbers: Numbers
) -> tuple[Any, Any]:
    """Return the call's arguments and keyword arguments, the tensors among them as ``values`` has
    them."""

    def argument(row: Any) -> Any:
        if not isinstance(row, fx.Node):
            return numbers.value(row)
        traced = row.meta["val"]
        return values[emission.values[row]] if isinstance(traced, Tensor) else numbers.value(traced)

    node = call.node
    replaced: tuple[Any, Any] = pytree.tree_map(
        argument, (node.args, node.kwargs), is_leaf=lambda row: isinstance(row, fx.Node)
    )
    return replaced


def _views(
    part: _Part, emission: Emission, values: Tensors, numbers: Numbers, shared: Set[str]
) -> Tensors:
    """Return those of the part's results that are equal to views of values in ``shared``, as these
    views.

    The backward pass reads the transposed weights again. As the runtime makes them they are the
    whole model once more.
    """
    views: Tensors = {}
    for call in part.calls:
        operator, name = call.node.target, call.results[0] or ""
        sources = {emission.values.get(source, "") for source in call.node.all_input_nodes}
        assert isinstance(operator, torch._ops.OpOverload)
        if operator.is_view and name in values and sources <= shared | views.keys():
            args, kwargs = arguments(call, emission, {**values, **views}, numbers)
            view = operator(*args, **kwargs)
            if isinstance(view, Tensor) and torch.equal(view, values[name]):
                views[name] = view
    return views


class _Part(NamedTuple):
    """Calls that follow each other, and the nodes of the graph that they became."""

    calls: list[Call]
    nodes: list[onnx.NodeProto]

    @property
    def made(self) -> set[str]:
        return {name for node in self.nodes for name in node.output}

    @property
    def results(self) -> set[str]:
        return {name for call in self.calls for name in call.results if name}

    def reads(self, emission: Emission) -> set[str]:
        """Return the names of all values that the nodes read, and that the calls are compared
        by."""
        arguments = {
            emission.values.get(node, "")
            for call in self.calls
            for node in call.node.all_input_nodes
        }
        return self.results | arguments | {name for node in self.nodes for name in reads(node)}


def _calls_with_nodes(emission: Emission) -> list[_Part]:
    """Return each call with its nodes, in an order in which gradients need not all be in memory at
    once."""
    nodes = emission.model.graph.node
    makers = {name: index for index, node in enumerate(nodes) for name in node.output}
    parts = []
    begin = end = 0
    for call in emission.calls:
        end = max([end, *(makers.get(name or "", -1) + 1 for name in call.results)])
        parts.append(_Part([call], nodes[begin:end]))
        begin = end
    made = [part.made for part in parts]
    reads = [part.reads(emission) - own for part, own in zip(parts, made, strict=True)]
    return [parts[index] for index in early_results(reads, made)]


def _parts(calls: list[_Part], emission: Emission, numbers: Numbers) -> Iterator[_Part]:
    """Join calls to parts that make at most MAX_BYTES, or of one call."""
    joined = _Part([], [])
    room = MAX_BYTES
    for part in calls:
        (call,) = part.calls
        made = call.node.meta["val"]
        made = made if isinstance(made, list | tuple) else [made]
        needed = sum(
            numbers.bytes_of(value) for name, value in zip(call.results, made, strict=False) if name
        )
        if joined.calls and needed > room:
            yield joined
            joined, room = _Part([], []), MAX_BYTES
        joined.calls.append(call)
        joined.nodes.extend(part.nodes)
        room -= needed
    if joined.calls:
        yield joined


def _run(
    emission: Emission,
    part: _Part,
    names: list[str],
    known: Tensors,
    constants: Mapping[str, onnx.TensorProto],
) -> Tensors:
    """Run a part of the graph, as it is written. Returns the values of these names."""
    if not names:
        return {}
    read = {name for node in part.nodes for name in reads(node)} - part.made
    # Large constants are given like inputs: an initializer would be copied several times.
    feed = {name: known[name].numpy() for name in sorted(read) if name in known}
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in feed.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    rows = [constants[name] for name in sorted(read - feed.keys())]
    changed = onnx.ModelProto(
        ir_version=emission.model.ir_version, opset_import=emission.model.opset_import
    )
    changed.graph.CopyFrom(onnx.helper.make_graph(part.nodes, "part", inputs, outputs, rows))
    try:
        found = open_session(changed.SerializeToString(), optimized=False).run(feed)
    except ExportError as error:
        failed = next(
            (call for name in _NODE.findall(str(error)) if (call := _call_of_node(emission, name))),
            None,
        )
        if failed is None:
            raise
        where = location_of_node(failed.node)
        raise ExportError(
            f"operator {failed.node.target} ({failed.node.name}){where}: {error}"
        ) from error
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _call_of_node(emission: Emission, name: str) -> Call | None:
    """Return the call that wrote an ONNX node: the first whose results are made by this node or a
    later one."""
    order = {node.name: index for index, node in enumerate(emission.model.graph.node)}
    makers = {
        output: index
        for index, node in enumerate(emission.model.graph.node)
        for output in node.output
    }
    return next(
        (
            call
            for call in emission.calls
            if name in order
            and max((makers.get(result or "", -1) for result in call.results), default=-1)
            >= order[name]
        ),
        None,
    )
