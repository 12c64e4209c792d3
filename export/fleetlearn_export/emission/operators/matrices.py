"""Matrix products. ``graphs/rewrite.py`` knows a MatMul whose operand is a Transpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value

aten = torch.ops.aten


def product(graph: Emitter, out: Tensor, a: Value, b: Value) -> str:
    return graph.node("MatMul", a, b)


def vector_product(graph: Emitter, out: Tensor, a: Value, b: Value) -> str:
    """Multiply with the vector as a matrix of one column: ONNX Runtime 1.31 merges a transposition
    into MatMul, and is then wrong for a vector."""
    return graph.reshaped(
        graph.node("MatMul", a, graph.reshaped(b, [*b.shape, 1])), list(out.shape)
    )


def products(graph: Emitter, out: Tensor, a: Value, b: Value) -> str:
    """Multiply batches of matrices. MatMul itself repeats a constant matrix for the batch."""
    return graph.node("MatMul", *(_unrepeated(graph, x.name) for x in (a, b)))


def _unrepeated(graph: Emitter, name: str) -> str:
    transposed = graph.maker(name, "Transpose")
    repeated = graph.maker(transposed.input[0] if transposed else name, "Expand")
    matrix = graph.constants.get(repeated.input[0]) if repeated else None
    if matrix is None or len(matrix.dims) != 2:
        return name
    return graph.node("Transpose", matrix.name, perm=[1, 0]) if transposed else matrix.name


def dot(graph: Emitter, out: Tensor, a: Value, b: Value) -> str:
    return graph.node("ReduceSum", graph.node("Mul", a, b), keepdims=0)


def addmm(
    graph: Emitter, out: Tensor, c: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1
) -> str:
    numbers = isinstance(alpha, int | float) and isinstance(beta, int | float)
    if not (out.dtype.is_floating_point and numbers):
        return _sum(graph, out, c, graph.node("MatMul", a, b), beta, alpha)
    # A factor of 0 leaves out c, even where it is infinite.
    return graph.node("Gemm", a, b, c if beta else None, alpha=float(alpha), beta=float(beta))


def added_product(
    graph: Emitter, out: Tensor, c: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1
) -> str:
    return _sum(graph, out, c, graph.node("MatMul", a, b), beta, alpha)


def added_vector_product(
    graph: Emitter, out: Tensor, c: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1
) -> str:
    return _sum(graph, out, c, vector_product(graph, out, a, b), beta, alpha)


def addbmm(
    graph: Emitter, out: Tensor, c: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1
) -> str:
    products = graph.node("MatMul", a, b)
    return _sum(
        graph,
        out,
        c,
        graph.node("ReduceSum", products, graph.integers([0]), keepdims=0),
        beta,
        alpha,
    )


def addr(
    graph: Emitter, out: Tensor, c: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1
) -> str:
    column = graph.node("Unsqueeze", a, graph.integers([1]))
    return _sum(graph, out, c, graph.node("Mul", column, b), beta, alpha)


def _sum(graph: Emitter, out: Tensor, c: Value, found: str, beta: Any, alpha: Any) -> str:
    """Write ``beta * c + alpha * found`` in the shape of the result."""
    if alpha != 1:
        found = graph.node("Mul", found, graph.number(alpha, out.dtype))
    if beta == 0:
        return found
    scaled = c.name if beta == 1 else graph.node("Mul", c, graph.number(beta, out.dtype))
    return graph.node("Add", scaled, found)


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.mm.default: product,
    aten.bmm.default: products,
    aten.mv.default: vector_product,
    aten.dot.default: dot,
    aten.vdot.default: dot,
    aten.addmm.default: addmm,
    aten.baddbmm.default: added_product,
    aten.addmv.default: added_vector_product,
    aten.addbmm.default: addbmm,
    aten.addr.default: addr,
}
