"""Operators that PyTorch does not decompose and ONNX does not have, written with other PyTorch
operators.

Sums at repeated indices use ``scatter_add``, which becomes ONNX's ScatterElements. The exporter
turns ``index_put`` into ScatterND, which loses some of the summands in ONNX Runtime 1.19 when it
runs on more than one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MEAN, MAX = 1, 2
"""PyTorch's numbers for the modes of embedding bags; 0 is the sum."""
REPLICATION = (
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)


def replication_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Add the gradients of the repeated edges to the edges. ``padding`` begins with the last
    axis."""
    for index in range(len(padding) // 2):
        axis, before, after = -1 - index, padding[2 * index], padding[2 * index + 1]
        size = int(x.shape[axis])
        whole, grad = grad, grad.narrow(axis, before, size)
        for begin, count, beside in (
            (0, before, (0, size - 1)),
            (before + size, after, (size - 1, 0)),
        ):
            if count:
                edge = whole.narrow(axis, begin, count).sum(axis, keepdim=True)
                grad = grad + torch.constant_pad_nd(edge, [0, 0] * index + list(beside))
    return grad


def _sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Return (count, ...) with each of ``rows`` added at its index on the first axis."""
    flat = rows.reshape(rows.shape[0], -1)
    where = places.reshape(-1, 1).expand(flat.shape)
    shape = [count, *rows.shape[1:]]
    return flat.new_zeros([count, flat.shape[1]]).scatter_add(0, where, flat).reshape(shape)


def embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    flat = indices.reshape(-1)
    rows = grad.reshape(flat.shape[0], -1)
    if padding_idx >= 0:
        rows = rows * (flat != padding_idx).to(rows.dtype)[:, None]
    if scale_grad_by_freq:
        rows = rows / _sum_rows(rows.new_ones(flat.shape), flat, num_weights)[flat][:, None]
    return _sum_rows(rows, flat, num_weights)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bags' sums or means (bags, width); for the backward pass each word's bag, and twice the
    bags' sizes."""
    if sparse or mode == MAX or scale_grad_by_freq:
        raise NotImplementedError("embedding_bag with sparse, mode='max' or scale_grad_by_freq")
    begins = offsets[:-1] if include_last_offset else offsets
    bags, words = begins.shape[0], indices.shape[0]
    # A word's bag is the number of bags that begin up to it, less 1. Bags may be empty, the last
    # ones too.
    marks = _sum_rows(torch.ones_like(begins), begins, words + 1)
    bag = marks.cumsum(0)[:words] - 1
    rows = _weighted(weight.index_select(0, indices), indices, per_sample_weights, padding_idx)
    present = (
        torch.ones_like(indices) if padding_idx < 0 else (indices != padding_idx).to(torch.int64)
    )
    sizes = _sum_rows(present, bag, bags)
    out = _sum_rows(rows, bag, bags)
    if mode == MEAN:
        out = out / sizes.clamp(min=1)[:, None]
    return out, bag, sizes, sizes


def _weighted(rows: Tensor, indices: Tensor, weights: Tensor | None, padding_idx: int) -> Tensor:
    if weights is not None:
        rows = rows * weights[:, None]
    return rows * (indices != padding_idx).to(rows.dtype)[:, None] if padding_idx >= 0 else rows


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    if mode == MEAN:
        grad = grad / bag_size.clamp(min=1)[:, None]
    rows = _weighted(grad.index_select(0, offset2bag), indices, per_sample_weights, padding_idx)
    return _sum_rows(rows, indices, num_weights)


def embedding_bag_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    rows = grad.index_select(0, offset2bag) * weight.index_select(0, indices)
    return _weighted(rows, indices, None, padding_idx).sum(1)


def index_put(
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    """Add rows at indices (``accumulate``, the gradient of ``x[indices]``). Leaves other calls to
    the exporter."""
    indexed_axes = [axis for axis, places in enumerate(indices) if places is not None]
    places = [indices[axis] for axis in indexed_axes]
    if not accumulate or any(
        indices is not None and indices.dtype == torch.bool for indices in places
    ):
        return NotImplemented
    others = [axis for axis in range(x.dim()) if axis not in indexed_axes]
    flat = torch.zeros([], dtype=torch.int64)
    for axis, row in zip(
        indexed_axes, (indices for indices in places if indices is not None), strict=True
    ):
        flat = flat * x.shape[axis] + torch.where(row < 0, row + x.shape[axis], row)
    # The indices' axes are where the first indexed axis was, or in front if the indexed axes were
    # not adjacent.
    front = (
        indexed_axes[0] if indexed_axes == list(range(indexed_axes[0], indexed_axes[-1] + 1)) else 0
    )
    rest = [x.shape[axis] for axis in others]
    values = values.expand([*rest[:front], *flat.shape, *rest[front:]])
    values = values.permute(
        [*range(front, front + flat.dim()), *range(front), *range(front + flat.dim(), values.dim())]
    )
    rows = values.reshape([-1, prod(rest)])
    order = [*indexed_axes, *others]
    moved = x.permute(order)
    sums = moved.reshape([-1, prod(rest)]).scatter_add(
        0, flat.reshape(-1, 1).expand(rows.shape), rows
    )
    return (
        sums.reshape(moved.shape)
        .permute([order.index(axis) for axis in range(x.dim())])
        .contiguous()
    )


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Multiply the three and sum over ``sumdim``; nn.Bilinear uses it."""
    for axis in expand1:
        a = a.unsqueeze(axis)
    for axis in expand2:
        b = b.unsqueeze(axis)
    for axis in expand3:
        c = c.unsqueeze(axis)
    return (a * b * c).sum(list(sumdim)) if sumdim else a * b * c


def shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    """Return the gradient of hardshrink and softshrink: 0 inside -lambd .. lambd."""
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros_like(grad), grad)


def weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and g in w = g * v / |v|, with the norm over all axes except
    ``dim``.

    Salimans, Kingma 2016, arXiv 1602.07868, equation 3.
    """
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    grad_g = (grad * v).sum(axes, keepdim=True) / norms
    return g / norms * (grad - v * grad_g / norms), grad_g


def reason_without_gradient(node: torch.fx.Node) -> str | None:
    """Return why a call of an operator in the user's model can have no gradient in a bundle, or
    None."""
    operator: Any = node.target
    names = [argument.name for argument in operator._schema.arguments]
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if arguments.get("sparse"):
        return "has sparse gradients: leave out sparse=True"
    if operator in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
        if arguments.get("mode") == MAX:
            return "takes each bag's largest: use nn.Embedding, and amax over the words"
        if arguments.get("scale_grad_by_freq"):
            return (
                "scales its gradients by how often words occur: leave out scale_grad_by_freq=True"
            )
    if operator in REPLICATION and min(arguments["padding"]) < 0:
        return "has a negative padding: cut with a slice instead"
    return None
