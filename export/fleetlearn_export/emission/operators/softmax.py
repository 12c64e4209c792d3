"""Softmax, its logarithm, and their backward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value, axis_of

aten = torch.ops.aten
FINITE = {"MatMul", "Gemm", "Softmax", "Sigmoid", "Tanh"}
"""Operators of finite numbers that give no infinity, unless they overflow."""
SAME_NUMBERS = {"Reshape", "Transpose", "Identity"}


def softmax(operator: str) -> Handler:
    def handler(graph: Emitter, out: Tensor, x: Value, dim: int, half_to_float: bool) -> str:
        value = graph.cast(x, out.dtype)
        if not x.rank:
            return graph.node("Squeeze", graph.node(operator, graph.reshaped(value, [1]), axis=0))
        return graph.node(operator, value, axis=axis_of(dim, x.rank))

    return handler


def safe_softmax(
    graph: Emitter, out: Tensor, x: Value, dim: int, dtype: torch.dtype | None = None
) -> str:
    """Write the softmax that is 0 where all elements along the axis are -inf, as an attention mask
    may leave them.

    Scores that nothing masked need no such care.
    """
    value, axis = graph.cast(x, out.dtype), axis_of(dim, x.rank)
    if not _may_be_infinite(graph, value):
        return graph.node("Softmax", value, axis=axis)
    lowest = graph.number(torch.finfo(out.dtype).min, out.dtype)
    peak = graph.node(
        "Max", graph.node("ReduceMax", value, graph.integers([axis]), keepdims=1), lowest
    )
    power = graph.node("Exp", graph.node("Sub", value, peak))
    total = graph.node("ReduceSum", power, graph.integers([axis]), keepdims=1)
    # A sum is at least 1, or it is 0.
    share = graph.node("Reciprocal", graph.node("Max", total, graph.number(0.5, out.dtype)))
    return graph.node("Mul", power, share)


def _may_be_infinite(graph: Emitter, name: str) -> bool:
    """Whether -inf may be among the elements: whether they are anything else than scaled products
    of matrices."""
    for node in reversed(graph.nodes):
        if name not in node.output:
            continue
        scaled = node.op_type in ("Mul", "Div") and node.input[1] in graph.constants
        if scaled or node.op_type in SAME_NUMBERS:
            name = node.input[0]
        else:
            return node.op_type not in FINITE
    return True


def softmax_backward(
    graph: Emitter, out: Tensor, grad: Value, y: Value, dim: int, input_dtype: torch.dtype
) -> str:
    total = _total(graph, graph.node("Mul", grad, y), dim, y.rank)
    result = graph.node("Mul", y, graph.node("Sub", grad, total))
    return result if y.dtype == out.dtype else graph.cast_node(result, out.dtype)


def log_softmax_backward(
    graph: Emitter, out: Tensor, grad: Value, y: Value, dim: int, input_dtype: torch.dtype
) -> str:
    total = _total(graph, grad.name, dim, y.rank)
    result = graph.node("Sub", grad, graph.node("Mul", graph.node("Exp", y), total))
    return result if y.dtype == out.dtype else graph.cast_node(result, out.dtype)


def _total(graph: Emitter, x: str, dim: int, rank: int) -> str:
    return (
        graph.node("ReduceSum", x, graph.integers([axis_of(dim, rank)]), keepdims=1) if rank else x
    )


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten._softmax.default: softmax("Softmax"),
    aten._log_softmax.default: softmax("LogSoftmax"),
    aten._safe_softmax.default: safe_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
}
