"""Comparisons, logic, bits, the choice between two tensors, and limits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import EmissionError, Emitter, Handler, Value
from fleetlearn_export.emission.operators.arithmetic import COMPUTED_AS

aten = torch.ops.aten


def common_dtype(a: Any, b: Any) -> torch.dtype:
    """Return the type in which PyTorch compares two operands."""
    kinds = [
        operand.traced if isinstance(operand, Value) else _plain(operand) for operand in (a, b)
    ]
    dtype = torch.result_type(*kinds)
    return COMPUTED_AS.get(dtype, dtype)


def _plain(number: Any) -> Any:
    """Return a number of the same kind, in place of one that depends on the number of examples."""
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return 1 if isinstance(number, torch.SymInt) else 1.0
    return number


def comparison(operator: str, inverted: bool = False) -> Handler:
    def handler(graph: Emitter, out: Tensor, a: Any, b: Any) -> str:
        dtype = common_dtype(a, b)
        result = graph.node(operator, graph.operand(a, dtype), graph.operand(b, dtype))
        return graph.node("Not", result) if inverted else result

    return handler


def logical(operator: str) -> Handler:
    def handler(graph: Emitter, out: Tensor, *operands: Value) -> str:
        return graph.node(operator, *(graph.cast(operand, torch.bool) for operand in operands))

    return handler


def bitwise(operator: str) -> Handler:
    """Return the handler of And, Or, Xor or Not of each bit, or of booleans."""

    def handler(graph: Emitter, out: Tensor, *operands: Any) -> str:
        whole = operator if out.dtype == torch.bool else f"Bitwise{operator}"
        return graph.node(whole, *(graph.operand(operand, out.dtype) for operand in operands))

    return handler


def shifted_left(graph: Emitter, out: Tensor, x: Any, bits: Any) -> str:
    return graph.node("Mul", graph.operand(x, out.dtype), _power_of_two(graph, out, bits))


def shifted_right(graph: Emitter, out: Tensor, x: Any, bits: Any) -> str:
    """Divide and round down. ONNX's BitShift takes unsigned types only."""
    value, divisor = graph.operand(x, out.dtype), _power_of_two(graph, out, bits)
    return graph.node("Div", graph.node("Sub", value, graph.node("Mod", value, divisor)), divisor)


def _power_of_two(graph: Emitter, out: Tensor, bits: Any) -> str:
    if isinstance(bits, int):
        return graph.number(2**bits, out.dtype)
    return graph.node("Pow", graph.number(2, out.dtype), graph.operand(bits, out.dtype))


def where(graph: Emitter, out: Tensor, condition: Value, a: Any, b: Any) -> str:
    return _chosen(graph, out.dtype, graph.cast(condition, torch.bool), a, b)


def _chosen(graph: Emitter, dtype: torch.dtype, condition: str, a: Any, b: Any) -> str:
    """Return ``a`` where the condition holds, else ``b``. ONNX Runtime's Where does not take all
    types."""
    if dtype == torch.bool:
        first = graph.node("And", condition, graph.operand(a, dtype))
        return graph.node(
            "Or", first, graph.node("And", graph.node("Not", condition), graph.operand(b, dtype))
        )
    stand_in = COMPUTED_AS.get(dtype, dtype)
    result = graph.node("Where", condition, graph.operand(a, stand_in), graph.operand(b, stand_in))
    return result if stand_in == dtype else graph.cast_node(result, dtype)


def masked_fill(graph: Emitter, out: Tensor, x: Value, mask: Value, value: Any) -> str:
    return _chosen(graph, out.dtype, mask.name, value, x)


def extremum(operator: str) -> Handler:
    """Return the handler of Max or Min of two tensors."""

    def handler(graph: Emitter, out: Tensor, a: Value, b: Value) -> str:
        if out.dtype == torch.bool:
            return graph.node("Or" if operator == "Max" else "And", a, b)
        dtype = COMPUTED_AS.get(out.dtype, out.dtype)
        result = graph.node(operator, graph.cast(a, dtype), graph.cast(b, dtype))
        return result if dtype == out.dtype else graph.cast_node(result, out.dtype)

    return handler


def clamp(
    graph: Emitter, out: Tensor, x: Value, low: Any = None, high: Any = None, **named: Any
) -> str:
    low, high = named.get("min", low), named.get("max", high)
    if out.dtype in COMPUTED_AS:
        raise EmissionError(f"limits of a tensor of {out.dtype}")
    value = graph.cast(x, out.dtype)
    if not any(isinstance(bound, Value) for bound in (low, high)):
        limits = [
            None if bound is None else graph.number(bound, out.dtype) for bound in (low, high)
        ]
        return graph.node("Clip", value, *(limits if limits[1] else limits[:1]))
    value = value if low is None else graph.node("Max", value, graph.operand(low, out.dtype))
    return value if high is None else graph.node("Min", value, graph.operand(high, out.dtype))


def clamp_min(graph: Emitter, out: Tensor, x: Value, low: Any) -> str:
    return clamp(graph, out, x, low)


def clamp_max(graph: Emitter, out: Tensor, x: Value, high: Any) -> str:
    return clamp(graph, out, x, None, high)


def is_special(operator: str) -> Handler:
    """Return the handler of IsNaN or IsInf: False for integers."""

    def handler(graph: Emitter, out: Tensor, x: Value) -> str:
        return graph.node(
            operator, x if x.dtype.is_floating_point else graph.cast(x, torch.float32)
        )

    return handler


def filled_like(graph: Emitter, out: Tensor, x: Value, value: Any) -> str:
    """Write a tensor of the shape of ``x`` from a number or a tensor that broadcasts to it."""
    return graph.node("Expand", graph.operand(value, out.dtype), graph.shape(list(out.shape)))


def copied(graph: Emitter, out: Tensor, x: Value, source: Value, non_blocking: bool = False) -> str:
    """Write ``source`` in the shape and type of ``x``."""
    value = graph.cast(source, out.dtype)
    if source.shape == x.shape:
        return value
    return graph.node("Expand", value, graph.shape(list(out.shape)))


COMPARISONS = {
    "eq": comparison("Equal"),
    "ne": comparison("Equal", inverted=True),
    "lt": comparison("Less"),
    "le": comparison("LessOrEqual"),
    "gt": comparison("Greater"),
    "ge": comparison("GreaterOrEqual"),
}
BITWISE = {
    "bitwise_and": bitwise("And"),
    "bitwise_or": bitwise("Or"),
    "bitwise_xor": bitwise("Xor"),
}
SHIFTS = {"bitwise_left_shift": shifted_left, "bitwise_right_shift": shifted_right}

OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    **{getattr(aten, name).Tensor: handler for name, handler in COMPARISONS.items()},
    **{getattr(aten, name).Scalar: handler for name, handler in COMPARISONS.items()},
    **{getattr(aten, name).Tensor: handler for name, handler in BITWISE.items()},
    **{getattr(aten, name).Scalar: handler for name, handler in BITWISE.items()},
    **{getattr(aten, name).Scalar_Tensor: handler for name, handler in BITWISE.items()},
    **{getattr(aten, name).Tensor: handler for name, handler in SHIFTS.items()},
    **{getattr(aten, name).Tensor_Scalar: handler for name, handler in SHIFTS.items()},
    **{getattr(aten, name).Scalar_Tensor: handler for name, handler in SHIFTS.items()},
    aten.__lshift__.Scalar: shifted_left,
    aten.__rshift__.Scalar: shifted_right,
    aten.__lshift__.Tensor: shifted_left,
    aten.__rshift__.Tensor: shifted_right,
    aten.bitwise_not.default: bitwise("Not"),
    aten.logical_and.default: logical("And"),
    aten.logical_or.default: logical("Or"),
    aten.logical_xor.default: logical("Xor"),
    aten.logical_not.default: logical("Not"),
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.minimum.default: extremum("Min"),
    aten.maximum.default: extremum("Max"),
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp_min,
    aten.clamp_min.Tensor: clamp_min,
    aten.clamp_max.default: clamp_max,
    aten.clamp_max.Tensor: clamp_max,
    aten.isnan.default: is_special("IsNaN"),
    aten.isinf.default: is_special("IsInf"),
    aten.fill.Scalar: filled_like,
    aten.fill.Tensor: filled_like,
    aten.copy.default: copied,
}
