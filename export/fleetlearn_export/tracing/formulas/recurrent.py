"""LSTM, GRU and RNN layers in evaluation: each is recorded as one operator, which ONNX has too.

A training step has their steps one by one, which autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
OPERATORS = {
    "LSTM": aten.lstm.input,
    "GRU": aten.gru.input,
    "Tanh": aten.rnn_tanh.input,
    "Relu": aten.rnn_relu.input,
}
"""PyTorch's operators by their kind: LSTM, GRU, or the nonlinearity of a plain recurrent layer."""
STEP_BY_STEP = {kind: operator.py_kernels[torch._C.DispatchKey.Autograd] for kind, operator in OPERATORS.items()}
"""PyTorch's formulas, which have the steps one by one."""
torch.library.define(
    "fleetlearn::recurrent_layer",
    "(str kind, Tensor values, Tensor[] state, Tensor[] weights, bool biased, bool both_ways) -> Tensor[]",
)
LAYER: Any = torch.ops.fleetlearn.recurrent_layer.default
"""Returns one layer's outputs (time, n, directions * hidden), and its state after the last step. values: (time, n,
size). state: the hidden state (directions, n, hidden), and for an LSTM the cell state. weights: PyTorch's, those of the
way back behind the others. biased: whether there are biases among them. both_ways: two directions."""


def layers(
    kind: str,
    values: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Record the layers of ``OPERATORS[kind]``, whose arguments these are."""
    states = [state] if isinstance(state, Tensor) else list(state)
    # ONNX has no LSTM whose hidden state is projected to another size.
    if (dropout and train) or states[0].shape[-1] != states[-1].shape[-1]:
        options = has_biases, num_layers, dropout, train, bidirectional, batch_first
        return STEP_BY_STEP[kind](values, state, weights, *options)
    values = values.transpose(0, 1) if batch_first else values
    directions, count = 2 if bidirectional else 1, len(weights) // num_layers
    ends: list[list[Tensor]] = []
    for layer in range(num_layers):
        begin = [row.narrow(0, layer * directions, directions) for row in states]
        own = weights[layer * count : (layer + 1) * count]
        values, *end = LAYER(kind, values, begin, own, has_biases, bidirectional)
        ends.append(end)
    last = [torch.cat(rows) for rows in zip(*ends, strict=True)]
    return values.transpose(0, 1) if batch_first else values, *last


def layer(
    kind: str, values: Tensor, state: list[Tensor], weights: list[Tensor], biased: bool, both_ways: bool
) -> list[Tensor]:
    given = state if kind == "LSTM" else state[0]
    return list(OPERATORS[kind](values, given, weights, biased, 1, 0.0, False, both_ways, False))


def _shapes(kind: str, values: Tensor, state: list[Tensor], *_: Any) -> list[Tensor]:
    directions, _rows, hidden = state[0].shape
    outputs = values.new_empty(*values.shape[:2], directions * hidden)
    return [outputs, *map(torch.empty_like, state)]


torch.library.impl("fleetlearn::recurrent_layer", "CPU")(layer)
torch.library.register_fake("fleetlearn::recurrent_layer")(_shapes)

FORMULAS = {operator: partial(layers, kind) for kind, operator in OPERATORS.items()}
