"""LSTM, GRU and RNN layers. In evaluation each is recorded as one operator, which ONNX has too.

In a training step, where ONNX has none, a layer is a scan along time, and its gradient another one
in the other direction. The products that need no earlier time are outside: those with the inputs,
and the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleetlearn_export.tracing.formulas import recurrent_steps
from fleetlearn_export.tracing.formulas.scan import SCAN, STEPS

aten = torch.ops.aten
OPERATORS = {
    "LSTM": aten.lstm.input,
    "GRU": aten.gru.input,
    "Tanh": aten.rnn_tanh.input,
    "Relu": aten.rnn_relu.input,
}
"""PyTorch's operators by their kind: LSTM, GRU, or the nonlinearity of a plain recurrent layer."""
torch.library.define(
    "fleetlearn::recurrent_layer",
    "(str kind, Tensor values, Tensor[] state, Tensor[] weights, bool biased, bool both_ways) -> "
    "Tensor[]",
)
LAYER: Any = torch.ops.fleetlearn.recurrent_layer.default
"""Returns one layer's outputs (time, n, directions * hidden), and its state after the last step.
values: (time, n, size). state: the hidden state (directions, n, hidden), and for an LSTM the cell
state. weights: PyTorch's, those of the way back behind the others. biased: whether there are biases
among them. both_ways: two directions."""
SHUT = 1e4
"""A gate with this sum is 1, with its negative 0, whatever inputs and state add."""
Layer = Callable[[str, Tensor, list[Tensor], Sequence[Tensor], bool, bool], list[Tensor]]


def layers(
    one_layer: Layer,
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
    """Record the layers of ``OPERATORS[kind]``, whose arguments follow ``kind``. ``one_layer`` is
    as LAYER."""
    states = [state] if isinstance(state, Tensor) else list(state)
    if states[0].shape[-1] != states[-1].shape[-1]:
        # ONNX has no LSTM whose hidden state is projected to another size
        one_layer = scanned_layer
    values = values.transpose(0, 1) if batch_first else values
    directions, count = 2 if bidirectional else 1, len(weights) // num_layers
    ends: list[list[Tensor]] = []
    for number in range(num_layers):
        begin = [part.narrow(0, number * directions, directions) for part in states]
        own = weights[number * count : (number + 1) * count]
        values, *end = one_layer(kind, values, begin, own, has_biases, bidirectional)
        ends.append(end)
        if dropout and train and number < num_layers - 1:
            values = torch.dropout(values, dropout, train)
    last = [torch.cat(rows) for rows in zip(*ends, strict=True)]
    return values.transpose(0, 1) if batch_first else values, *last


def layer(
    kind: str,
    values: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    biased: bool,
    both_ways: bool,
) -> list[Tensor]:
    first_state = state if kind == "LSTM" else state[0]
    return list(
        OPERATORS[kind](values, first_state, weights, biased, 1, 0.0, False, both_ways, False)
    )


def _shapes(kind: str, values: Tensor, state: list[Tensor], *_: Any) -> list[Tensor]:
    directions, _rows, hidden = state[0].shape
    outputs = values.new_empty(*values.shape[:2], directions * hidden)
    return [outputs, *map(torch.empty_like, state)]


torch.library.impl("fleetlearn::recurrent_layer", "CPU")(layer)
torch.library.register_fake("fleetlearn::recurrent_layer")(_shapes)


def scanned_layer(
    kind: str,
    values: Tensor,
    state: list[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    both_ways: bool,
) -> list[Tensor]:
    """Return the same as LAYER, from scans."""
    count = len(weights) // (2 if both_ways else 1)
    ends = []
    for direction in range(2 if both_ways else 1):
        begin, own = (
            [part[direction] for part in state],
            weights[direction * count : (direction + 1) * count],
        )
        ends.append(one_way(kind, values, begin, own, biased, backwards=direction == 1))
    outputs = torch.cat([outputs for outputs, *_ in ends], 2) if both_ways else ends[0][0]
    return [
        outputs,
        *(torch.stack(rows) for rows in zip(*(last for _, *last in ends), strict=True)),
    ]


def one_way(
    kind: str,
    values: Tensor,
    state: list[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    *,
    backwards: bool = False,
    inside: Tensor | None = None,
) -> list[Tensor]:
    """Return one direction's outputs (time, n, size), and its state after the last step (n, size),
    from a scan.

    state: (n, size). inside: int64 (time, n), 0 where a sequence has ended: an LSTM's cells then
    keep their state.
    """
    inner, recurrent, *more = weights
    first, second = (
        more[:2] if biased else (inner.new_zeros(len(inner)), inner.new_zeros(len(inner)))
    )
    if kind == "GRU":
        results = _gru(
            functional.linear(values, inner, first), *state, recurrent, second, backwards
        )
    elif kind == "LSTM":
        gates = functional.linear(values, inner, first + second)
        if inside is not None:
            size = state[1].shape[1]
            closed = torch.cat(
                [
                    gates.new_full((size,), -SHUT),
                    gates.new_full((size,), SHUT),
                    gates.new_zeros(2 * size),
                ]
            )
            gates = gates + (1 - inside).unsqueeze(2) * closed
        projection = more[-1] if len(more) % 2 else None
        results = _lstm(gates, *state, recurrent, projection, backwards)
    else:
        results = _rnn(
            functional.linear(values, inner, first + second), *state, recurrent, kind, backwards
        )
    return list(results)


def _before(first: Tensor, states: Tensor, backwards: bool) -> Tensor:
    """Return the state before each step. states: those behind each step, (time, n, size)."""
    if backwards:
        return torch.cat([states[1:], first.unsqueeze(0)])
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _weight_gradient(gates: Tensor, before: Tensor) -> Tensor:
    """Return the sum over time and examples of the products of gate gradients and states, (gates,
    size)."""
    return gates.flatten(0, 1).t() @ before.flatten(0, 1)


class _LSTM(torch.autograd.Function):
    """Outputs (time, n, size), and the last hidden and cell state (n, size)."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden: Tensor,
        cell: Tensor,
        weight: Tensor,
        projection: Tensor | None,
        backwards: bool,
    ) -> Any:
        fixed = [weight] if projection is None else [weight, projection]
        rows, transposed = [gates], [value.t() for value in fixed]
        *last, outputs, cells, activated = SCAN("lstm", [hidden, cell], rows, transposed, backwards)
        ctx.save_for_backward(hidden, cell, outputs, cells, activated, *fixed)
        ctx.backwards = backwards
        return outputs, *last

    @staticmethod
    def backward(ctx: Any, by_outputs: Tensor, by_hidden: Tensor, by_cell: Tensor) -> Any:
        hidden, cell, outputs, cells, activated, *fixed = ctx.saved_tensors
        rows = [by_outputs, activated, cells, _before(cell, cells, ctx.backwards)]
        gradients = SCAN("lstm_gradient", [by_hidden, by_cell], rows, fixed, not ctx.backwards)
        by_first_hidden, by_first_cell, by_gates, *by_projected = gradients
        by_projection = None
        if by_projected:
            raw = activated[:, :, -cells.shape[2] :] * cells.tanh()
            by_projection = _weight_gradient(by_projected[0], raw)
        by_weight = _weight_gradient(by_gates, _before(hidden, outputs, ctx.backwards))
        return by_gates, by_first_hidden, by_first_cell, by_weight, by_projection, None


class _GRU(torch.autograd.Function):
    """Outputs (time, n, size), and the last hidden state (n, size)."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, backwards: bool
    ) -> Any:
        last, outputs, activated = SCAN("gru", [hidden], [gates], [weight.t(), bias], backwards)
        ctx.save_for_backward(hidden, weight, outputs, activated)
        ctx.backwards = backwards
        return outputs, last

    @staticmethod
    def backward(ctx: Any, by_outputs: Tensor, by_hidden: Tensor) -> Any:
        hidden, weight, outputs, activated = ctx.saved_tensors
        before = _before(hidden, outputs, ctx.backwards)
        last, by_products = SCAN(
            "gru_gradient",
            [by_hidden],
            [by_outputs, activated, before],
            [weight],
            not ctx.backwards,
        )
        size = weight.shape[1]
        by_gates = torch.cat([by_products[:, :, : 2 * size], by_products[:, :, 3 * size :]], 2)
        by_weight, by_bias = _weight_gradient(by_gates, before), by_gates.sum((0, 1))
        return by_products[:, :, : 3 * size], last, by_weight, by_bias, None


class _RNN(torch.autograd.Function):
    """Outputs (time, n, size), and the last hidden state (n, size)."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, hidden: Tensor, weight: Tensor, kind: str, backwards: bool
    ) -> Any:
        last, outputs = SCAN(kind.lower(), [hidden], [sums], [weight.t()], backwards)
        ctx.save_for_backward(hidden, weight, outputs)
        ctx.kind, ctx.backwards = kind.lower(), backwards
        return outputs, last

    @staticmethod
    def backward(ctx: Any, by_outputs: Tensor, by_hidden: Tensor) -> Any:
        hidden, weight, outputs = ctx.saved_tensors
        gradients = SCAN(
            f"{ctx.kind}_gradient", [by_hidden], [by_outputs, outputs], [weight], not ctx.backwards
        )
        return (
            gradients[1],
            gradients[0],
            _weight_gradient(gradients[1], _before(hidden, outputs, ctx.backwards)),
            None,
            None,
        )


# PyTorch gives these functions no types.
_lstm: Callable[..., Any] = _LSTM.apply
_gru: Callable[..., Any] = _GRU.apply
_rnn: Callable[..., Any] = _RNN.apply
STEPS |= recurrent_steps.STEPS
FORMULAS = {operator: partial(layers, scanned_layer, kind) for kind, operator in OPERATORS.items()}
IN_EVALUATION = {operator: partial(layers, LAYER, kind) for kind, operator in OPERATORS.items()}
