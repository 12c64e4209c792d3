"""Sequences of different lengths that a model packs (``torch.nn.utils.rnn``): while it is traced
they stay padded.

PyTorch's packed sequences have another size for each batch. Here their data are (time, n, ...), and
what PyTorch calls ``batch_sizes`` is an int64 (time, n): 1 where the time belongs to the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from fleetlearn_export.errors import ExportError
from fleetlearn_export.tracing.formulas.recurrent import one_way

KINDS = {"LSTM": "LSTM", "GRU": "GRU", "RNN_TANH": "Tanh", "RNN_RELU": "Relu"}
"""The modes of PyTorch's layers -> the kinds of ``recurrent.OPERATORS``."""


@contextmanager
def packed_sequences_padded() -> Iterator[None]:
    """While active, packing keeps the padding, and recurrent layers take the padded sequences."""
    with ExitStack() as replaced:
        # PyTorch's functions look these two up at each call.
        for name, function in (("_pack_padded_sequence", pack), ("_pad_packed_sequence", unpack)):
            replaced.enter_context(mock.patch.object(torch._VF, name, function, create=True))
        for layer in (nn.LSTM, nn.GRU, nn.RNN):
            replaced.enter_context(mock.patch.object(layer, "forward", _forward(layer.forward)))
        yield


def pack(values: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    values = values.transpose(0, 1) if batch_first else values
    inside = torch.arange(values.shape[0]).unsqueeze(1) < lengths.unsqueeze(0)
    return values, inside.to(torch.int64)


def unpack(
    data: Tensor, inside: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    mask = inside.reshape(*inside.shape, *(1 for _ in data.shape[2:])).to(torch.bool)
    padded = torch.where(mask, data, padding_value).to(data.dtype)
    missing = total_length - data.shape[0]
    padded = functional.pad(
        padded, [*(0 for _ in data.shape[1:] * 2), 0, missing], value=padding_value
    )
    return padded.transpose(0, 1) if batch_first else padded, inside.sum(0)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:  # noqa: A002  (PyTorch names it so)
        if not isinstance(input, PackedSequence):
            return original(self, input, hx)
        if self.training and self.dropout and self.num_layers > 1:
            raise ExportError(
                f"{type(self).__name__}(dropout={self.dropout}) of packed sequences: its random "
                "numbers depend on how they are packed. Set the layer's dropout to 0 (and put "
                "nn.Dropout behind it), or give it the padded batch"
            )
        data, inside, order, order_back = input
        directions = 2 if self.bidirectional else 1
        size = getattr(self, "proj_size", 0) or self.hidden_size
        if hx is None:
            sizes = [size, self.hidden_size] if isinstance(self, nn.LSTM) else [size]
            states = [
                data.new_zeros(self.num_layers * directions, data.shape[1], size) for size in sizes
            ]
        else:
            states_given = [hx] if isinstance(hx, Tensor) else list(hx)
            states = (
                states_given
                if order is None
                else [row.index_select(1, order) for row in states_given]
            )
        outputs, last = _layers(self, data, inside, states)
        last = last if order_back is None else [row.index_select(1, order_back) for row in last]
        return PackedSequence(outputs, inside, order, order_back), last[0] if len(
            last
        ) == 1 else tuple(last)

    return forward


def _layers(
    layer: nn.RNNBase, values: Tensor, inside: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    directions = 2 if layer.bidirectional else 1
    lengths, ends = inside.sum(0), []
    for place in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            number = place * directions + direction
            begin = [part[number] for part in states]
            turned = _turned(values, lengths) if direction else values
            made, *last = one_way(
                KINDS[layer.mode],
                turned,
                begin,
                layer.all_weights[number],
                layer.bias,
                inside=inside,
            )
            end = (lengths - 1).reshape(1, -1, 1).expand(1, -1, made.shape[2])
            # Padding changes the hidden state, so it is taken at the last real time. It leaves the
            # cells of an LSTM.
            ends.append([made.gather(0, end).squeeze(0), *last[1:]])
            outputs.append(_turned(made, lengths) if direction else made)
        values = torch.cat(outputs, 2)
    return values, [torch.stack(rows) for rows in zip(*ends, strict=True)]


def _turned(values: Tensor, lengths: Tensor) -> Tensor:
    """Return each sequence in the other direction, its padding where it is. values: (time, n,
    size)."""
    time = torch.arange(values.shape[0]).unsqueeze(1)
    places = torch.where(time < lengths, lengths - 1 - time, time)
    return values.gather(0, places.unsqueeze(2).expand(-1, -1, values.shape[2]))
