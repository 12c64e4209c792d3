"""``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` while a step is traced. They look at
their masks' values.

Both ask whether a mask is the causal one, for a faster kernel. A graph has no such kernel: it reads
the mask.

In evaluation mode an encoder that is given the examples' padding alone computes without the padded
places, in nested tensors, if all padding is at the examples' ends. It has zeros there, before its
last norm. ONNX has no nested tensors: graphs compute the padded places like all others, and put the
same zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer


@contextmanager
def masks_unread() -> Iterator[None]:
    """While active, encoders and decoders do the same whatever their masks' values are."""
    original: Any = nn.TransformerEncoder.forward
    detect = transformer._detect_is_causal_mask
    fast = torch.backends.mha.get_fastpath_enabled()

    def forward(
        encoder: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not (fast and _nests(encoder, src)):
            encoded: Tensor = original(encoder, src, mask, src_key_padding_mask, is_causal)
            return encoded
        output = src
        for layer in encoder.layers:
            output = layer(output, src_key_padding_mask=src_key_padding_mask)
        padded = src_key_padding_mask != 0  # True, or -inf
        at_ends = (padded[:, :-1] <= padded[:, 1:]).all()
        output = torch.where((padded & at_ends).unsqueeze(-1), 0, output)
        return output if encoder.norm is None else encoder.norm(output)

    nn.TransformerEncoder.forward = forward  # type: ignore[assignment, method-assign]
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        transformer._detect_is_causal_mask = detect
        nn.TransformerEncoder.forward = original  # type: ignore[method-assign]


def _nests(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether PyTorch uses nested tensors for a mask of padding alone. The conditions are its
    own."""
    first: Any = encoder.layers[0]
    trained = torch.is_grad_enabled() and any(
        value.requires_grad for value in (src, *first.parameters())
    )
    return bool(encoder.use_nested_tensor and not first.training and src.dim() == 3 and not trained)
