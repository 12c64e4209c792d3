"""Sparse tables of any number of rows: a device's sub-model has the rows that its data name."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper, numpy_helper

ROWS = "rows"
"""The name of the free size."""
SHAPED = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
"""Operator -> which of its inputs is a shape."""


def with_free_rows(content: bytes, tables: Collection[str], rows: int) -> bytes:
    """Return the graph with a free first axis in these parameters, and in what has their shape:
    their state, their anchor and their results. ``rows``: the first axis' size so far."""
    model = onnx.load_model_from_string(content)
    graph = model.graph
    shapes = {}
    for described in (*graph.input, *graph.output):
        dims = described.type.tensor_type.shape.dim
        if _of_table(described.name, tables) and dims and dims[0].dim_value == rows:
            if described.name.startswith("param."):
                shapes[(rows, *(size.dim_value for size in dims[1:]))] = described.name
            dims[0].dim_param = ROWS
    described_before = list(graph.value_info)
    del graph.value_info[:]  # ONNX Runtime infers the sizes that depend on the free one
    graph.value_info.extend(each for each in described_before if not _has_size(each, rows))
    _read_shapes(graph, shapes)
    made: bytes = model.SerializeToString()
    return made


def _of_table(name: str, tables: Collection[str]) -> bool:
    """Return whether a graph's input or output is a table, or has the shape of one: ``param.T``,
    ``anchor.T``, ``state.SLOT.T``, and ``next.`` of these."""
    kind, _, rest = name.removeprefix("next.").partition(".")
    if kind == "state":
        rest = rest.partition(".")[2]
    return kind in ("param", "anchor", "state") and rest in tables


def _has_size(described: onnx.ValueInfoProto, size: int) -> bool:
    return any(dim.dim_value == size for dim in described.type.tensor_type.shape.dim)


def _read_shapes(graph: onnx.GraphProto, shapes: dict[tuple[int, ...], str]) -> None:
    """Let what makes tensors of a table's shape, such as the zeros that its gradient is added to,
    read the table's own. ``shapes``: a shape -> a parameter that has it."""
    constants = {
        tensor.name: tuple(numpy_helper.to_array(tensor).tolist())
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.INT64
        and len(tensor.dims) == 1
        and not tensor.external_data
    }
    made = dict[str, str]()
    for node in graph.node:
        place = SHAPED.get(node.op_type)
        found = None if place is None else shapes.get(constants.get(node.input[place], ()))
        if place is not None and found is not None:
            node.input[place] = made.setdefault(found, f"{found}/shape")
    nodes = [helper.make_node("Shape", [name], [shape]) for name, shape in made.items()]
    nodes.extend(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)
