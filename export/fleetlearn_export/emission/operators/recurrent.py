"""LSTM, GRU and RNN layers, which ONNX has as operators. Its weights have the gates in another
order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fleetlearn_export.emission.emitter import EmissionError, Emitter, Handler, Value
from fleetlearn_export.tracing.formulas.recurrent import LAYER

GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
"""The places of ONNX's gates among PyTorch's. LSTM: input, output, forget, cell among input,
forget, cell, output. GRU: update, reset, new among reset, update, new."""


def recurrent_layer(
    graph: Emitter,
    out: Sequence[torch.Tensor],
    kind: str,
    values: Value,
    state: Sequence[Value],
    weights: Sequence[Value],
    biased: bool,
    both_ways: bool,
) -> Sequence[str]:
    if values.dtype != torch.float32:
        raise EmissionError(f"a recurrent layer of {values.dtype}")
    directions = 2 if both_ways else 1
    # Of each direction: from the input, from the state, and the two biases.
    by_kind = [
        weights[place :: len(weights) // directions] for place in range(len(weights) // directions)
    ]
    inner, recurrent, *biases = [[_gates(graph, kind, row) for row in rows] for rows in by_kind]
    bias = (
        [graph.node("Concat", *both, axis=0) for both in zip(*biases, strict=True)]
        if biased
        else []
    )
    options: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    if kind not in GATES:
        options = {"activations": [kind] * directions}
    made = graph.nodes_outputs(
        kind if kind in GATES else "RNN",
        1 + len(state),
        values,
        _stacked(graph, inner),
        _stacked(graph, recurrent),
        _stacked(graph, bias) if bias else None,
        None,  # the length of each sequence: all have the same
        *state,
        hidden_size=int(state[0].shape[-1]),
        direction="bidirectional" if both_ways else "forward",
        **options,
    )
    # ONNX gives (time, directions, n, hidden).
    return [graph.reshaped(graph.transposed(made[0], (0, 2, 1, 3)), out[0].shape), *made[1:]]


def _gates(graph: Emitter, kind: str, weights: Value) -> str:
    """Return weights or biases of one direction, with the gates in ONNX's order."""
    if kind not in GATES:
        return weights.name
    parts = graph.nodes_outputs(
        "Split", len(GATES[kind]), weights, axis=0, num_outputs=len(GATES[kind])
    )
    return graph.node("Concat", *(parts[gate] for gate in GATES[kind]), axis=0)


def _stacked(graph: Emitter, rows: Sequence[str]) -> str:
    """Return the rows along a new first axis."""
    rows = [graph.node("Unsqueeze", row, graph.integers([0])) for row in rows]
    return rows[0] if len(rows) == 1 else graph.node("Concat", *rows, axis=0)


OPERATORS: dict[torch._ops.OpOverload, Handler] = {LAYER: recurrent_layer}
