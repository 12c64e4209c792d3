"""The values that ONNX Runtime has for the tensors of a traced graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, fx

from fleetlearn_export.checks.comparison import Array, open_session
from fleetlearn_export.emission.emit import Call, Emission
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import location_of_node
from fleetlearn_export.model.steps import Tensors

MAX_BYTES = 2**28
"""How many bytes of values are taken from one run of the graph."""
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
    emission: Emission, given: Tensors, numbers: Numbers
) -> Iterator[tuple[list[Call], Mapping[str, Array]]]:
    """Yield calls, one after the other, with the values that the runtime has for them."""
    graph = emission.model.graph
    known = {name: value.numpy() for name, value in given.items()}
    known |= {row.name: numpy_helper.to_array(row) for row in graph.initializer}
    part: list[Call] = []
    names: dict[str, None] = {}
    room = MAX_BYTES
    for call in emission.calls:
        wanted = {
            name: node.meta["val"]
            for node in call.node.all_input_nodes
            if (name := emission.values.get(node)) is not None and name not in known
        }
        made = call.node.meta["val"]
        made = made if isinstance(made, list | tuple) else [made]
        wanted |= {name: row for name, row in zip(call.results, made, strict=False) if name and name not in known}
        needed = sum(numbers.bytes_of(row) for name, row in wanted.items() if name not in names)
        if part and needed > room:
            yield part, {**known, **_run(emission, list(names), given)}
            part, names, room = [], {}, MAX_BYTES
            needed = sum(map(numbers.bytes_of, wanted.values()))
        part.append(call)
        names |= dict.fromkeys(wanted)
        room -= needed
    if part:
        yield part, {**known, **_run(emission, list(names), given)}


def _run(emission: Emission, names: list[str], given: Tensors) -> dict[str, Array]:
    """Run the graph, as it is written, with these values as its outputs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(emission.model)
    del changed.graph.output[:]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        session = open_session(changed.SerializeToString(), optimized=False)
        return session.run({name: value.numpy() for name, value in given.items()})
    except ExportError as error:
        failed = next((call for name in _NODE.findall(str(error)) if (call := _call_of_node(emission, name))), None)
        if failed is None:
            raise
        place = location_of_node(failed.node)
        raise ExportError(f"operator {failed.node.target} ({failed.node.name}){place}: {error}") from error


def _call_of_node(emission: Emission, name: str) -> Call | None:
    """Return the call that wrote an ONNX node: the first whose results are made by this node or a later one."""
    order = {node.name: place for place, node in enumerate(emission.model.graph.node)}
    makers = {output: place for place, node in enumerate(emission.model.graph.node) for output in node.output}
    return next(
        (
            call
            for call in emission.calls
            if name in order and max((makers.get(row or "", -1) for row in call.results), default=-1) >= order[name]
        ),
        None,
    )
