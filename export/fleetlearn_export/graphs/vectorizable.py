"""Operators of one device's step, run for many devices by PyTorch's ``vmap``, so that the number of
examples stays free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from fleetlearn_export.tracing import cross_entropy
from fleetlearn_export.tracing.decompositions import Decompositions

aten = torch.ops.aten
torch.library.define("fleetlearn::concatenate", "(Tensor[] values, int axis) -> Tensor")
CONCATENATE: Any = torch.ops.fleetlearn.concatenate.default
"""torch.cat with a vmap rule of our own, which leaves the number of examples free."""


def gather(values: Tensor, axis: int, index: Tensor, **_: Any) -> Tensor:
    return torch.where(_indices_along(values, axis) == index, values, 0.0).sum(axis, keepdim=True)


def scatter_value(values: Tensor, axis: int, index: Tensor, value: float) -> Tensor:
    return torch.where(_indices_along(values, axis) == index, value, values)


def _indices_along(values: Tensor, axis: int) -> Tensor:
    """Return the index of each element along the axis."""
    return torch.arange(values.shape[axis]).reshape(
        -1, *[1] * (values.dim() - 1 - axis % values.dim())
    )


def addmm(added: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    """Add a bias to a product: vmap would multiply the bias with 1 first."""
    return torch.addmm(added, a, b, **factors) if factors else a @ b + added


def _concatenate(values: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat(list(values), axis)


def _concatenate_for_each(
    devices: Any, axes: tuple[Sequence[int | None], None], values: Sequence[Tensor], axis: int
) -> tuple[Tensor, int]:
    """Concatenate for each device, as ``torch.library.register_vmap`` asks for. axes: each tensor's
    axis of the devices; None if they share it."""
    of_each = [
        value.expand(devices.batch_size, *value.shape) if own is None else value.movedim(own, 0)
        for value, own in zip(values, axes[0], strict=True)
    ]
    return torch.cat(of_each, axis + 1), 0


torch.library.impl("fleetlearn::concatenate", "CompositeImplicitAutograd")(_concatenate)
torch.library.register_vmap("fleetlearn::concatenate", _concatenate_for_each)

VECTORIZABLE: Decompositions = {
    **get_decompositions([aten._native_batch_norm_legit_functional]),
    aten.addmm.default: addmm,
    cross_entropy.BACKWARD: cross_entropy.backward_one_hot,
    aten.nll_loss_forward.default: cross_entropy.forward_one_hot,
    aten.nll_loss2d_forward.default: cross_entropy.forward_one_hot,
    aten.gather.default: gather,
    aten.scatter.value: scatter_value,
}
"""Replacements that are cheaper under vmap, or in which it leaves the number of examples free."""


class Vectorizable(torch.fx.Interpreter):
    """Runs a graph so that vmap leaves the number of examples free: sizes are read from the
    values."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        if target is aten.sym_numel.default:
            return args[0].numel()
        if target is aten.view.default:
            # The axis of the devices may lie between two that become one.
            return args[0].reshape(args[1])
        if target is aten.cat.default:
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return CONCATENATE(args[0], axis % args[0][0].dim())
        if target in VECTORIZABLE:
            return VECTORIZABLE[target](*args, **kwargs)
        return super().call_function(target, args, kwargs)
