"""nn.TransformerEncoder and nn.TransformerDecoder with masks, against PyTorch."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fleetlearn_export.tracing.transformer_masks import masks_unread
from torch import Tensor, nn

from tests.support.emission_cases import check_emission

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))
AT_ENDS = torch.tensor([[False, False, False, True], [False, False, True, True], [False] * 4])
WITHIN = torch.tensor([[False, True, False, False], [False, False, True, True], [False] * 4])


def encoder(nested: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.bias)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=nested).eval()


@pytest.mark.parametrize("padded", [AT_ENDS, WITHIN, torch.where(AT_ENDS, -torch.inf, 0.0)])
@pytest.mark.parametrize("nested", [True, False])
def test_padded_places_are_as_in_pytorch(padded: Tensor, nested: bool) -> None:
    model = encoder(nested)

    def function(x: Tensor, padded: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(x, src_key_padding_mask=padded)
            return found

    check_emission(None, function, X, padded, tolerance=1e-5)


def test_layers_that_are_trained_compute_all_places() -> None:
    model = encoder()

    def function(x: Tensor, padded: Tensor) -> Tensor:
        found: Tensor = model(x, src_key_padding_mask=padded)
        return found

    check_emission(None, function, X, AT_ENDS, tolerance=1e-5)


def test_a_mask_of_attention_beside_it_leaves_no_zeros() -> None:
    model = encoder()

    def function(x: Tensor, padded: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(
                x, mask=torch.ones(4, 4).triu(1).bool(), src_key_padding_mask=padded
            )
            return found

    check_emission(None, function, X, AT_ENDS, tolerance=1e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_causal_masks_are_read_like_others(grad: bool) -> None:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1
    ).eval()
    model = encoder()

    def function(x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        with torch.set_grad_enabled(grad):
            found: Tensor = decoder(x, model(x, mask=causal), tgt_mask=causal)
            return found

    check_emission(None, function, X, tolerance=1e-5)


def test_pytorch_is_as_before_even_after_an_error() -> None:
    before = nn.TransformerEncoder.forward
    with contextlib.suppress(ZeroDivisionError), masks_unread():
        assert not torch.backends.mha.get_fastpath_enabled()
        raise ZeroDivisionError
    assert torch.backends.mha.get_fastpath_enabled()
    assert nn.TransformerEncoder.forward is before
