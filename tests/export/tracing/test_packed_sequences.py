"""Sequences of different lengths that a model packs, against PyTorch's own packing."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.errors import ExportError
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.emission_cases import check_emission
from tests.support.recurrent_layers import LAYERS

RANDOM = torch.Generator().manual_seed(0)
X, LENGTHS = torch.randn(3, 5, 4, generator=RANDOM), torch.tensor([3, 5, 1])


def flat(last: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [last] if isinstance(last, Tensor) else list(last)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_last_states_and_gradients(kind: str) -> None:
    torch.manual_seed(0)
    layers = LAYERS[kind](4, 6, 2, bidirectional=True, batch_first=True)

    def function(x: Tensor, lengths: Tensor) -> list[Tensor]:
        leaf = x.detach().clone().requires_grad_()
        packed = pack_padded_sequence(leaf, lengths, batch_first=True, enforce_sorted=False)
        outputs, last = layers(packed)
        padded, found = pad_packed_sequence(
            outputs, batch_first=True, padding_value=0.5, total_length=5
        )
        value = padded.square().sum() + sum(row.square().sum() * 3 for row in flat(last))
        gradients = torch.autograd.grad(value, [leaf, *layers.parameters()])
        return [row.detach() for row in (padded, found, *flat(last), *gradients)]

    check_emission(None, function, X, LENGTHS, tolerance=3e-6)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_time_first_sorted_and_with_a_given_state(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind](4, 6)

    @torch.no_grad()
    def function(x: Tensor) -> list[Tensor]:
        lengths = torch.full_like(x[:, 0, 0], 4).to(torch.int64)
        begin = x[:, 0].repeat(1, 2)[:, :6].unsqueeze(0)
        packed = pack_padded_sequence(x.transpose(0, 1), lengths)
        outputs, last = layer(packed, (begin, 2 * begin) if kind == "lstm" else begin)
        return [pad_packed_sequence(outputs, total_length=7)[0], *flat(last)]

    check_emission(None, function, X, tolerance=3e-6)


def test_a_given_state_in_another_order() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(4, 6, batch_first=True)

    @torch.no_grad()
    def function(x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        last: Tensor = layer(packed, x[:, 0].repeat(1, 2)[:, :6].unsqueeze(0))[1]
        return last

    check_emission(None, function, X, LENGTHS, tolerance=3e-6)


def test_padded_layers_are_left_alone() -> None:
    layer = nn.GRU(4, 6, batch_first=True)
    check_emission(None, lambda x: layer(x)[0].detach(), X, tolerance=3e-6)
    assert isinstance(
        layer(pack_padded_sequence(X, LENGTHS, True, False))[0], nn.utils.rnn.PackedSequence
    )


def test_dropout_between_layers_is_refused_with_what_to_do() -> None:
    layers = nn.GRU(4, 6, 2, dropout=0.5, batch_first=True)

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        last: Tensor = layers(
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        )[1]
        return last.detach()

    with pytest.raises(
        ExportError, match=r"GRU\(dropout=0.5\) of packed sequences.*Set the layer's dropout to 0"
    ):
        check_emission(None, function, X, LENGTHS)
