"""Activations and their backward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value
from fleetlearn_export.emission.operators.arithmetic import unary

aten = torch.ops.aten


def threshold_backward(graph: Emitter, out: Tensor, grad: Value, x: Value, threshold: float) -> str:
    """Multiply with a mask: ONNX Runtime's Where takes several times longer (ten times in version 1.19)."""
    above = graph.node("Greater", x, graph.number(threshold, x.dtype))
    return graph.node("Mul", grad, graph.cast_node(above, grad.dtype))


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.relu.default: unary("Relu"),
    aten.sigmoid.default: unary("Sigmoid"),
    aten.tanh.default: unary("Tanh"),
    aten.threshold_backward.default: threshold_backward,
}
