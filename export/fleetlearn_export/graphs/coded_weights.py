"""Graphs that hold frozen weights in fewer bits, and decode them when they are needed.

A weight is decoded in each step, by DequantizeLinear (int8), or by Cast and Mul (float16). ONNX
Runtime must not do so once for all when it loads the graph, which would take the memory that the
codes save. Nor may it merge the decoding into its own kind of product (MatMulNBits), which rounds
activations too. It does either with constants alone; so codes are inputs of the graph with a
default value, which no caller gives.

ONNX Runtime orders operators depth first, and visits a node's producers from the last in the file
to the first. Nodes that decode come first in the file: so each weight is decoded just before the
operator that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fleetlearn_export.emission.constants import Constants, size_of
from fleetlearn_export.graphs.reading import reads
from fleetlearn_export.model.frozen_weights import Coded, Stored, find_codes, has_codes


def code_weights(
    model: onnx.ModelProto,
    stored: Stored,
    apart: Constants | None = None,
    *,
    for_people: bool = False,
) -> onnx.ModelProto:
    """Replace the weights that ``rounded`` has rounded by their codes. Changes the graph in place,
    and returns it.

    apart: the constants that the graph has kept apart. for_people: the codes are constants, and
    ONNX Runtime decodes them when it loads the graph.
    """
    if stored == "float32":
        return model
    graph = model.graph
    decoding: list[onnx.NodeProto] = []
    for tensor in list(graph.initializer):
        coded = _coded(tensor, stored, apart)
        if coded is None:
            continue
        graph.initializer.remove(tensor)
        codes = numpy_helper.from_array(coded.codes, f"{tensor.name}.codes")
        graph.initializer.append(codes)
        if not for_people:
            graph.input.append(
                helper.make_tensor_value_info(codes.name, codes.data_type, codes.dims)
            )
        gathers = [index for index, node in enumerate(graph.node) if tensor.name in reads(node)]
        if (
            coded.axis == 0
            and gathers
            and all(_takes_rows(graph.node[index], tensor.name) for index in gathers)
        ):
            graph.initializer.append(
                numpy_helper.from_array(coded.broadcast_scales, f"{tensor.name}.scales")
            )
            for index in reversed(gathers):
                gather = graph.node[index]
                graph.node.remove(gather)
                for node in reversed(list(_rows_decoded(gather, tensor.name))):
                    graph.node.insert(index, node)
        else:
            decoding += _decoded(graph, tensor.name, coded, for_people)
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*decoding, *nodes])
    return model


def _coded(row: onnx.TensorProto, stored: Stored, apart: Constants | None) -> Coded | None:
    if row.data_type != TensorProto.FLOAT or not has_codes(tuple(row.dims), size_of(row)):
        return None
    return find_codes(apart.array(row) if apart else numpy_helper.to_array(row), stored)


def _decoded(
    graph: onnx.GraphProto, name: str, coded: Coded, for_people: bool
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that make the weight ``name`` of its codes."""
    if coded.codes.dtype == np.int8 and not for_people:
        graph.initializer.append(numpy_helper.from_array(coded.scales, f"{name}.scales"))
        inputs = [f"{name}.codes", f"{name}.scales"]
        yield helper.make_node("DequantizeLinear", inputs, [name], axis=coded.axis)
    else:
        graph.initializer.append(numpy_helper.from_array(coded.broadcast_scales, f"{name}.scales"))
        yield helper.make_node(
            "Cast", [f"{name}.codes"], [f"{name}.unscaled"], to=TensorProto.FLOAT
        )
        yield helper.make_node("Mul", [f"{name}.unscaled", f"{name}.scales"], [name])


def _takes_rows(node: onnx.NodeProto, name: str) -> bool:
    """Whether the node looks up rows of the table ``name``."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    return node.op_type == "Gather" and node.input[0] == name and axis == 0


def _rows_decoded(gather: onnx.NodeProto, name: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that look up rows of a table's codes, and decode these rows alone."""
    indices, output = gather.input[1], gather.output[0]
    yield helper.make_node("Gather", [f"{name}.codes", indices], [f"{output}.codes"], axis=0)
    yield helper.make_node("Gather", [f"{name}.scales", indices], [f"{output}.scales"], axis=0)
    yield helper.make_node(
        "Cast", [f"{output}.codes"], [f"{output}.unscaled"], to=TensorProto.FLOAT
    )
    yield helper.make_node("Mul", [f"{output}.unscaled", f"{output}.scales"], [output])
