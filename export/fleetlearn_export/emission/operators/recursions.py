"""Sums over ways through time, one moment after the other: a Scan, whatever the length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from fleetlearn_export.emission.emitter import ELEMENT_TYPES, Emitter, Handler, Value
from fleetlearn_export.tracing.formulas.ctc import LOG_FORWARD


def log_forward(graph: Emitter, out: Tensor, scores: Value, starts: Value, jumps: Value) -> str:
    row = graph.filled(-math.inf, jumps.shape, out.dtype)
    body = _moment(ELEMENT_TYPES[out.dtype])
    # The jumps, which are the same at each moment, go in like what changes: who divides graphs, as micro-batches do,
    # sees no value that a body reads from outside.
    given = row, scores, starts, graph.expanded(jumps, scores.shape)
    ways = graph.nodes_outputs("Scan", 2, *given, body=body, num_scan_inputs=3)[1]
    return graph.node("Add", ways, scores)


def _moment(kind: int) -> onnx.GraphProto:
    """Return the graph of one moment: (row, score, start, jumps) -> (the next row, the same without the score).

    The cleaning would make one of two equal outputs, and of an output that is an input; runtimes do not take these.
    """
    nodes: list[onnx.NodeProto] = []

    def node(operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"moment.v{len(nodes)}"
        nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def constant(value: Any, dtype: Any) -> str:
        return node("Constant", value=numpy_helper.from_array(np.asarray(value, dtype=dtype)))

    def integers(*values: int) -> str:
        return constant(values, np.int64)

    row, score, start, jumps = given = [f"moment.{name}" for name in ("row", "score", "start", "jumps")]
    floating = helper.tensor_dtype_to_np_dtype(kind)
    before = node("Pad", row, integers(0, 2, 0, 0), constant(-math.inf, floating))
    one = node("Slice", before, integers(1), integers(-1), integers(1))
    two = node("Add", node("Slice", before, integers(0), integers(-2), integers(1)), jumps)
    ways = (start, row, one, two)
    # Where all are -inf their differences are not numbers.
    largest = node("Max", node("Max", *ways), constant(np.finfo(floating).min, floating))
    total = node("Sum", *(node("Exp", node("Sub", way, largest)) for way in ways))
    found = node("Add", node("Log", total), largest)
    outputs = [node("Add", found, score), found]

    def described(names: list[str]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, [None, None]) for name in names]

    return helper.make_graph(nodes, "moment", described(given), described(outputs))


OPERATORS: dict[torch._ops.OpOverload, Handler] = {LOG_FORWARD: log_forward}
