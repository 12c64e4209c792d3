"""Sums, products, powers, and mathematical functions of each element."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import EmissionError, Emitter, Handler, Value

aten = torch.ops.aten

COMPUTED_AS = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
"""Types that ONNX Runtime has no arithmetic for, and those that stand for them."""


def binary(operator: str) -> Handler:
    """Return the handler of an operator of two operands that broadcast, such as Mul."""

    def handler(graph: Emitter, out: Tensor, a: Any, b: Any, **_: Any) -> str:
        dtype = COMPUTED_AS.get(out.dtype, out.dtype)
        result = graph.node(operator, graph.operand(a, dtype), graph.operand(b, dtype))
        return result if dtype == out.dtype else graph.cast_node(result, out.dtype)

    return handler


def scaled(operator: str) -> Handler:
    """Return the handler of ``a + alpha * b`` or ``a - alpha * b``."""

    def handler(graph: Emitter, out: Tensor, a: Any, b: Any, alpha: Any = 1) -> str:
        dtype = COMPUTED_AS.get(out.dtype, out.dtype)
        second = graph.operand(b, dtype)
        if alpha != 1:
            second = graph.node("Mul", second, graph.number(alpha, dtype))
        result = graph.node(operator, graph.operand(a, dtype), second)
        return result if dtype == out.dtype else graph.cast_node(result, out.dtype)

    return handler


def unary(operator: str, **attributes: Any) -> Handler:
    """Return the handler of a function of each element, such as Exp."""

    def handler(graph: Emitter, out: Tensor, x: Value) -> str:
        dtype = COMPUTED_AS.get(out.dtype, out.dtype)
        result = graph.node(operator, graph.cast(x, dtype), **attributes)
        return result if dtype == out.dtype else graph.cast_node(result, out.dtype)

    return handler


def rounded(operator: str) -> Handler:
    """Return the handler of Floor, Ceil or Round: integers stay as they are."""

    def handler(graph: Emitter, out: Tensor, x: Value) -> str:
        return graph.node(operator, x) if out.dtype.is_floating_point else x.name

    return handler


def reversed_subtraction(graph: Emitter, out: Tensor, a: Value, b: Any, alpha: Any = 1) -> str:
    """Write ``b - alpha * a``."""
    return scaled("Sub")(graph, out, b, a, alpha)  # type: ignore[return-value]


def power(graph: Emitter, out: Tensor, x: Any, exponent: Any) -> str:
    """ONNX Runtime's Pow is fast for the exponents 2 and 3 only: otherwise it takes 60 times longer
    than Mul."""
    base = graph.operand(x, out.dtype)
    known = (
        exponent
        if isinstance(exponent, int | float) and exponent in (-2, -1, -0.5, 0.5, 1, 1.5, 2, 4)
        else None
    )
    if known is None:
        return graph.node("Pow", base, graph.operand(exponent, out.dtype))
    size = abs(known)
    root = graph.node("Sqrt", base) if size in (0.5, 1.5) else base
    square = graph.node("Mul", base, base) if size in (2, 4) else base
    by_size = {0.5: root, 1: base, 2: square}
    if size == 1.5:
        return graph.node("Mul", base, root)
    if size == 4:
        return graph.node("Mul", square, square)
    return graph.node("Reciprocal", by_size[size]) if known < 0 else by_size[size]


def reciprocal_root(graph: Emitter, out: Tensor, x: Value) -> str:
    return graph.node("Reciprocal", graph.node("Sqrt", graph.cast(x, out.dtype)))


def exponential_of_two(graph: Emitter, out: Tensor, x: Value) -> str:
    return graph.node(
        "Exp", graph.node("Mul", graph.cast(x, out.dtype), graph.number(math.log(2), out.dtype))
    )


def exponential_minus_one(graph: Emitter, out: Tensor, x: Value) -> str:
    return graph.node(
        "Sub", graph.node("Exp", graph.cast(x, out.dtype)), graph.number(1, out.dtype)
    )


def log_of_one_plus(graph: Emitter, out: Tensor, x: Value) -> str:
    return graph.node(
        "Log", graph.node("Add", graph.cast(x, out.dtype), graph.number(1, out.dtype))
    )


def logarithm(base: float) -> Handler:
    def handler(graph: Emitter, out: Tensor, x: Value) -> str:
        natural = graph.node("Log", graph.cast(x, out.dtype))
        return graph.node("Mul", natural, graph.number(1 / math.log(base), out.dtype))

    return handler


def complementary_error_function(graph: Emitter, out: Tensor, x: Value) -> str:
    return graph.node(
        "Sub", graph.number(1, out.dtype), graph.node("Erf", graph.cast(x, out.dtype))
    )


def arc_tangent_of_quotient(graph: Emitter, out: Tensor, y: Value, x: Value) -> str:
    """Write the angle of the point (x, y), by the half-angle formula where x > 0, else by one with
    y below.

    At y = 0 and x <= 0 the result is pi or 0, without regard to the sign of a zero.
    """
    top, right = graph.cast(y, out.dtype), graph.cast(x, out.dtype)
    zero, two = graph.number(0, out.dtype), graph.number(2, out.dtype)
    squares = graph.node("Add", graph.node("Mul", top, top), graph.node("Mul", right, right))
    length = graph.node("Sqrt", squares)
    to_the_right = graph.node("Greater", right, zero)
    above = graph.node("Where", to_the_right, top, graph.node("Sub", length, right))
    below = graph.node("Where", to_the_right, graph.node("Add", length, right), top)
    angle = graph.node("Mul", two, graph.node("Atan", graph.node("Div", above, below)))
    on_axis = graph.node("And", graph.node("Equal", top, zero), graph.node("Not", to_the_right))
    negative = graph.cast_node(graph.node("Less", right, zero), out.dtype)
    return graph.node(
        "Where", on_axis, graph.node("Mul", negative, graph.number(math.pi, out.dtype)), angle
    )


def hypotenuse(graph: Emitter, out: Tensor, a: Value, b: Value) -> str:
    first, second = graph.cast(a, out.dtype), graph.cast(b, out.dtype)
    return graph.node(
        "Sqrt",
        graph.node("Add", graph.node("Mul", first, first), graph.node("Mul", second, second)),
    )


def remainder_name(graph: Emitter, dtype: torch.dtype, a: str, b: str) -> str:
    """Return the remainder with the divisor's sign, as Python's ``%``."""
    if not dtype.is_floating_point:
        return graph.node("Mod", a, b)
    rest, zero = graph.node("Mod", a, b, fmod=1), graph.number(0, dtype)
    other_sign = graph.node("Less", graph.node("Mul", rest, b), zero)
    return graph.node("Add", rest, graph.node("Where", other_sign, b, zero))


def remainder(graph: Emitter, out: Tensor, a: Any, b: Any) -> str:
    dtype = COMPUTED_AS.get(out.dtype, out.dtype)
    result = remainder_name(graph, dtype, graph.operand(a, dtype), graph.operand(b, dtype))
    return result if dtype == out.dtype else graph.cast_node(result, out.dtype)


def divided(
    graph: Emitter, out: Tensor, a: Any, b: Any, *, rounding_mode: str | None = None
) -> str:
    """Divide, and round down ("floor") or to zero ("trunc"). Rounding down divides what the
    remainder leaves, as PyTorch does: 1 // 0.1 is 9. A floating-point divisor of 0 gives NaN, where
    PyTorch gives an infinity."""
    if rounding_mode is None:
        return binary("Div")(graph, out, a, b)  # type: ignore[return-value]
    dtype = COMPUTED_AS.get(out.dtype, out.dtype)
    first, second = graph.operand(a, dtype), graph.operand(b, dtype)
    whole = not dtype.is_floating_point
    if rounding_mode == "floor":
        rest = remainder_name(graph, dtype, first, second)
        result = graph.node("Div", graph.node("Sub", first, rest), second)
        result = result if whole else graph.node("Round", result)
    else:
        result = graph.node("Div", first, second)  # of integers: rounded to zero
        result = result if whole else truncated_name(graph, dtype, result)
    return result if dtype == out.dtype else graph.cast_node(result, out.dtype)


def floor_divided(graph: Emitter, out: Tensor, a: Any, b: Any) -> str:
    return divided(graph, out, a, b, rounding_mode="floor")


def truncated_name(graph: Emitter, dtype: torch.dtype, x: str) -> str:
    """Round to zero."""
    return graph.node("Mul", graph.node("Sign", x), graph.node("Floor", graph.node("Abs", x)))


def truncated(graph: Emitter, out: Tensor, x: Value) -> str:
    return truncated_name(graph, out.dtype, x.name) if out.dtype.is_floating_point else x.name


def fraction(graph: Emitter, out: Tensor, x: Value) -> str:
    return graph.node("Sub", x, truncated_name(graph, out.dtype, x.name))


def rounded_to_decimals(graph: Emitter, out: Tensor, x: Value, *, decimals: int) -> str:
    if not out.dtype.is_floating_point:
        raise EmissionError("integers")
    scale = graph.number(10.0 ** abs(decimals), out.dtype)
    there, back = ("Mul", "Div") if decimals >= 0 else ("Div", "Mul")
    return graph.node(back, graph.node("Round", graph.node(there, x, scale)), scale)


def sum_with_product(operator: str) -> Handler:
    """Return the handler of ``x + value * (a operator b)``."""

    def handler(
        graph: Emitter, out: Tensor, x: Value, a: Value, b: Value, *, value: Any = 1
    ) -> str:
        term = graph.node(operator, graph.cast(a, out.dtype), graph.cast(b, out.dtype))
        term = term if value == 1 else graph.node("Mul", term, graph.number(value, out.dtype))
        return graph.node("Add", graph.cast(x, out.dtype), term)

    return handler


def interpolated(graph: Emitter, out: Tensor, start: Value, end: Value, weight: Any) -> str:
    step = graph.node("Mul", graph.operand(weight, out.dtype), graph.node("Sub", end, start))
    return graph.node("Add", start, step)


FUNCTIONS = {
    "abs": "Abs",
    "acos": "Acos",
    "acosh": "Acosh",
    "asin": "Asin",
    "asinh": "Asinh",
    "atan": "Atan",
    "atanh": "Atanh",
    "cos": "Cos",
    "cosh": "Cosh",
    "erf": "Erf",
    "exp": "Exp",
    "log": "Log",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "sgn": "Sign",
    "sign": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "sqrt": "Sqrt",
    "tan": "Tan",
}
"""Functions of each element that are one ONNX operator."""

OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    **{getattr(aten, name).default: unary(operator) for name, operator in FUNCTIONS.items()},
    aten.add.Tensor: scaled("Add"),
    aten.add.Scalar: scaled("Add"),
    aten.sub.Tensor: scaled("Sub"),
    aten.sub.Scalar: scaled("Sub"),
    aten.rsub.Scalar: reversed_subtraction,
    aten.rsub.Tensor: reversed_subtraction,
    aten.mul.Tensor: binary("Mul"),
    aten.mul.Scalar: binary("Mul"),
    aten.div.Tensor: divided,
    aten.div.Scalar: divided,
    aten.div.Tensor_mode: divided,
    aten.div.Scalar_mode: divided,
    aten.floor_divide.default: floor_divided,
    aten.floor_divide.Scalar: floor_divided,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.fmod.Tensor: lambda graph, out, a, b: graph.node(
        "Mod", graph.operand(a, out.dtype), graph.operand(b, out.dtype), fmod=1
    ),
    aten.fmod.Scalar: lambda graph, out, a, b: graph.node(
        "Mod", a, graph.operand(b, out.dtype), fmod=1
    ),
    aten.floor.default: rounded("Floor"),
    aten.ceil.default: rounded("Ceil"),
    aten.round.default: rounded("Round"),
    aten.round.decimals: rounded_to_decimals,
    aten.trunc.default: truncated,
    aten.frac.default: fraction,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power,
    aten.pow.Scalar: power,
    aten.square.default: lambda graph, out, x: graph.node("Mul", x, x),
    aten.rsqrt.default: reciprocal_root,
    aten.exp2.default: exponential_of_two,
    aten.expm1.default: exponential_minus_one,
    aten.log1p.default: log_of_one_plus,
    aten.log2.default: logarithm(2),
    aten.log10.default: logarithm(10),
    aten.erfc.default: complementary_error_function,
    aten.atan2.default: arc_tangent_of_quotient,
    aten.hypot.default: hypotenuse,
    aten.addcmul.default: sum_with_product("Mul"),
    aten.addcdiv.default: sum_with_product("Div"),
    aten.lerp.Scalar: interpolated,
    aten.lerp.Tensor: interpolated,
}
