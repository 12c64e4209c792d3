"""One step of LSTM, GRU and RNN layers along time, and of their gradients. The arguments are those
of ``scan.Step``.

"Gates" are the results of their sigmoid or tanh, on the second axis in PyTorch's order. The
gradients are those of PyTorch's formulas (``torch.nn.LSTM``, ``GRU``, ``RNN``), by hand. Their
factors are multiplied with each other first where they follow from the rows alone: a GPU then has
those of all times computed together (fleetlearn_device/runtimes/cuda/scans.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fleetlearn_export.tracing.formulas.scan import Step


def lstm_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """rows: what the inputs add to the gates (n, 4 * size). fixed: the weights (size, 4 * size),
    and those that project the hidden state to another size, if there are any: then the first are
    (projected size, 4 * size)."""
    hidden, cell = states
    inside, forget, fresh, outside = (rows[0] + hidden @ fixed[0]).chunk(4, -1)
    inside, forget, fresh, outside = (
        inside.sigmoid(),
        forget.sigmoid(),
        fresh.tanh(),
        outside.sigmoid(),
    )
    cell = forget * cell + inside * fresh
    hidden = outside * cell.tanh()
    hidden = hidden @ fixed[1] if len(fixed) > 1 else hidden
    return [hidden, cell], [hidden, cell, torch.cat([inside, forget, fresh, outside], -1)]


def lstm_gradient_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """states: gradients by the state behind the step. rows: the gradient that arrives at the
    output, the gates, the cell state and the one before. fixed: the same weights, transposed.
    Outputs: the gradients by the gates' sums and by the hidden state."""
    arriving, gates, cell, before = rows
    inside, forget, fresh, outside = gates.chunk(4, -1)
    by_output, squashed = states[0] + arriving, cell.tanh()
    by_hidden = by_output @ fixed[1] if len(fixed) > 1 else by_output
    by_cell = states[1] + by_hidden * (outside * (1 - squashed * squashed))
    by_gates = torch.cat(
        [
            by_cell * (fresh * (inside * (1 - inside))),
            by_cell * (before * (forget * (1 - forget))),
            by_cell * (inside * (1 - fresh * fresh)),
            by_hidden * (squashed * (outside * (1 - outside))),
        ],
        -1,
    )
    outputs = [by_gates, by_output] if len(fixed) > 1 else [by_gates]
    return [by_gates @ fixed[0], by_cell * forget], outputs


def gru_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """rows: what the inputs add to the gates (n, 3 * size). fixed: the weights (size, 3 * size),
    their biases."""
    (hidden,) = states
    from_inputs, from_state = rows[0].chunk(3, -1), (hidden @ fixed[0] + fixed[1]).chunk(3, -1)
    reset, update = (
        (one + other).sigmoid() for one, other in zip(from_inputs[:2], from_state, strict=False)
    )
    fresh = (from_inputs[2] + reset * from_state[2]).tanh()
    hidden = fresh + update * (hidden - fresh)
    return [hidden], [hidden, torch.cat([reset, update, fresh, from_state[2]], -1)]


def gru_gradient_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """states, rows and fixed are as for the LSTM. Outputs: the gradients by reset, update and fresh
    gate as the inputs meet them, and by the last as the state meets it, (n, 4 * size)."""
    arriving, gates, before = rows
    reset, update, fresh, from_state = gates.chunk(4, -1)
    by_hidden = states[0] + arriving
    of_fresh = (1 - update) * (1 - fresh * fresh)
    by_reset = by_hidden * (of_fresh * from_state * (reset * (1 - reset)))
    by_update = by_hidden * ((before - fresh) * (update * (1 - update)))
    within = by_hidden * (of_fresh * reset)
    by_gates = torch.cat([by_reset, by_update, within], -1)
    return [by_hidden * update + by_gates @ fixed[0]], [
        torch.cat([by_reset, by_update, by_hidden * of_fresh, within], -1)
    ]


def tanh_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """rows: what the inputs add (n, size). fixed: the weights (size, size)."""
    hidden = (rows[0] + states[0] @ fixed[0]).tanh()
    return [hidden], [hidden]


def relu_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """rows and fixed are as for ``tanh_step``."""
    hidden = (rows[0] + states[0] @ fixed[0]).relu()
    return [hidden], [hidden]


def tanh_gradient_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """rows: the gradient that arrives at the output, and the output. Outputs: the gradient by the
    sums."""
    found = (states[0] + rows[0]) * (1 - rows[1] * rows[1])
    return [found @ fixed[0]], [found]


def relu_gradient_step(
    states: list[Tensor], rows: list[Tensor], fixed: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """rows and outputs are as for ``tanh_gradient_step``."""
    found = torch.where(rows[1] > 0, states[0] + rows[0], 0.0)
    return [found @ fixed[0]], [found]


STEPS: dict[str, Step] = {
    "lstm": lstm_step,
    "lstm_gradient": lstm_gradient_step,
    "gru": gru_step,
    "gru_gradient": gru_gradient_step,
    "tanh": tanh_step,
    "tanh_gradient": tanh_gradient_step,
    "relu": relu_step,
    "relu_gradient": relu_gradient_step,
}
