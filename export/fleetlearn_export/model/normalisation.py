"""Which parameters and buffers of a model belong to normalisation layers."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""PyTorch's normalisation layers that have parameters or buffers. _NormBase: BatchNorm and
InstanceNorm of all kinds. Classes of other packages are found if they derive from these."""


def normalisation_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters and buffers that normalisation layers hold, as
    ``named_parameters`` and ``named_buffers`` have them."""
    return {
        name
        for layer_name, layer in model.named_modules()
        if isinstance(layer, LAYERS)
        for name, _ in chain(
            layer.named_parameters(layer_name, recurse=False),
            layer.named_buffers(layer_name, recurse=False),
        )
    }
