"""Gradients of embeddings, added to what they are subtracted from, without a tensor of zeros.

PyTorch adds the rows of an embedding's gradient to zeros as large as the embedding. ONNX Runtime
computes such zeros once, keeps them as long as the session, and copies them in each step. A step of
plain SGD can as well add the rows to the parameter: for BERT with 109 million parameters that takes
90 MiB less, and 9 % less time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import NodeProto, helper, numpy_helper

from fleetlearn_export.graphs.reading import ancestors, reads

Shapes = Mapping[str, list[int | str]]


class _Rows(NamedTuple):
    """A tensor of zeros, to which operators add rows."""

    scatters: list[NodeProto]
    factor: str = ""
    """A scalar by which all of them are multiplied afterwards."""


def scatter_into_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change the graph in place, and return it. Its results may have other last bits."""
    graph = model.graph
    zeros = set(_zeros(graph))
    if not any(zeros.intersection(node.input) for node in graph.node if _adds_rows(node)):
        return model
    shapes = _shapes(model)
    uses = Counter(name for node in graph.node for name in reads(node)) + Counter(
        output.name for output in graph.output
    )
    rows = {name: _Rows([]) for name in zeros}
    nodes: list[NodeProto] = []
    for node in graph.node:
        (out,) = node.output if len(node.output) == 1 else ("",)
        indices = _rows(node, rows, shapes) if uses[out] == 1 else None
        if indices is not None:
            rows[out] = indices
        written = _sum(node, rows, shapes)
        nodes.extend([node] if written is None else written)
    del graph.node[:]
    graph.node.extend(ancestors(nodes, [output.name for output in graph.output]))
    return model


def _zeros(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of tensors of zeros that the graph makes."""
    constants = {
        tensor.name for tensor in graph.initializer if not tensor.dims and not tensor.external_data
    }
    zero = {
        tensor.name
        for tensor in graph.initializer
        if tensor.name in constants and not numpy_helper.to_array(tensor)
    }
    for node in graph.node:
        if node.op_type == "Expand" and node.input[0] in zero:
            yield node.output[0]


def _adds_rows(node: NodeProto) -> bool:
    return node.op_type == "ScatterElements" and any(
        attribute.s == b"add" for attribute in node.attribute
    )


def _shapes(model: onnx.ModelProto) -> Shapes:
    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes: dict[str, list[int | str]] = {
        tensor.name: list(tensor.dims) for tensor in graph.initializer
    }
    for row in (*graph.input, *graph.value_info, *graph.output):
        if row.type.tensor_type.HasField("shape"):
            shapes[row.name] = [
                size.dim_param or size.dim_value for size in row.type.tensor_type.shape.dim
            ]
    return shapes


def _rows(node: NodeProto, rows: Mapping[str, _Rows], shapes: Shapes) -> _Rows | None:
    """Return what a node makes, if it is zeros to which rows are added."""
    if _adds_rows(node) and node.input[0] in rows and not rows[node.input[0]].factor:
        return _Rows([*rows[node.input[0]].scatters, node])
    if node.op_type == "Mul":
        for one, other in (node.input, node.input[::-1]):
            if (
                one in rows
                and rows[one].scatters
                and not rows[one].factor
                and shapes.get(other) == []
            ):
                return rows[one]._replace(factor=other)
    if node.op_type == "Add" and all(name in rows and not rows[name].factor for name in node.input):
        return _Rows([scatter for name in node.input for scatter in rows[name].scatters])
    return None


def _sum(node: NodeProto, rows: Mapping[str, _Rows], shapes: Shapes) -> list[NodeProto] | None:
    """Return operators that add the rows to the other tensor of an Add or a Sub, in its place."""
    if node.op_type not in ("Add", "Sub"):
        return None
    pairs = [node.input[::-1], node.input] if node.op_type == "Add" else [node.input[::-1]]
    for one, other in pairs:
        scatters = rows[one].scatters if one in rows and other not in rows else []
        if scatters and other in shapes and shapes[other] == shapes.get(scatters[0].output[0]):
            return list(_added(rows[one], other, node))
    return None


def _added(rows: _Rows, to: str, node: NodeProto) -> Iterator[NodeProto]:
    (out,) = node.output
    factor = rows.factor
    if factor and node.op_type == "Sub":
        yield helper.make_node("Neg", [factor], [f"{out}.factor"])
        factor = f"{out}.factor"
    for index, scatter in enumerate(rows.scatters):
        _, indices, updates = scatter.input
        if factor:
            yield helper.make_node("Mul", [updates, factor], [f"{out}.rows.{index}"])
            updates = f"{out}.rows.{index}"
        elif node.op_type == "Sub":
            yield helper.make_node("Neg", [updates], [f"{out}.rows.{index}"])
            updates = f"{out}.rows.{index}"
        result = out if scatter is rows.scatters[-1] else f"{out}.sum.{index}"
        copied = NodeProto()
        copied.CopyFrom(scatter)
        copied.input[:], copied.output[:] = [to, indices, updates], [result]
        yield copied
        to = result
