"""Sums, products, comparisons, and functions of each element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value

aten = torch.ops.aten


def binary(operator: str) -> Handler:
    """Return the handler of an operator of two operands that broadcast, such as Add."""

    def handler(graph: Emitter, out: Tensor, a: Any, b: Any, **_: Any) -> str:
        return graph.node(operator, graph.operand(a, out.dtype), graph.operand(b, out.dtype))

    return handler


def scaled(operator: str) -> Handler:
    """Return the handler of ``a + alpha * b`` or ``a - alpha * b``."""

    def handler(graph: Emitter, out: Tensor, a: Any, b: Any, alpha: Any = 1) -> str:
        second = graph.operand(b, out.dtype)
        if alpha != 1:
            second = graph.node("Mul", second, graph.number(alpha, out.dtype))
        return graph.node(operator, graph.operand(a, out.dtype), second)

    return handler


def unary(operator: str) -> Handler:
    """Return the handler of a function of each element, such as Exp."""

    def handler(graph: Emitter, out: Tensor, x: Value) -> str:
        return graph.node(operator, graph.cast(x, out.dtype))

    return handler


def reversed_subtraction(graph: Emitter, out: Tensor, a: Value, b: Any, alpha: Any = 1) -> str:
    """Write ``b - alpha * a``."""
    return scaled("Sub")(graph, out, b, a, alpha)  # type: ignore[return-value]


def power(graph: Emitter, out: Tensor, x: Value, exponent: Any) -> str:
    base = graph.cast(x, out.dtype)
    if isinstance(exponent, int | float) and exponent in (1, 2, 0.5, -1):
        if exponent == 2:
            return graph.node("Mul", base, base)
        return base if exponent == 1 else graph.node("Sqrt" if exponent == 0.5 else "Reciprocal", base)
    return graph.node("Pow", base, graph.operand(exponent, out.dtype))


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.add.Tensor: scaled("Add"),
    aten.add.Scalar: scaled("Add"),
    aten.sub.Tensor: scaled("Sub"),
    aten.sub.Scalar: scaled("Sub"),
    aten.rsub.Scalar: reversed_subtraction,
    aten.rsub.Tensor: reversed_subtraction,
    aten.mul.Tensor: binary("Mul"),
    aten.mul.Scalar: binary("Mul"),
    aten.div.Tensor: binary("Div"),
    aten.div.Scalar: binary("Div"),
    aten.pow.Tensor_Scalar: power,
    aten.sqrt.default: unary("Sqrt"),
    aten.neg.default: unary("Neg"),
    aten.exp.default: unary("Exp"),
    aten.log.default: unary("Log"),
    aten.reciprocal.default: unary("Reciprocal"),
}
