"""Cross-entropy in fewer passes over the outputs than PyTorch's decomposition needs.

With p = softmax(outputs), y one-hot and s the weight of the example in the loss, 0 where its target
is ignored, the gradient is (p - y) s. PyTorch first computes the gradient of log p, -y s, which is
0 almost everywhere.

The functions ``..._by_index`` pick the target's class by its index, which is least work for one
device. Those called ``..._one_hot`` compare it with all classes: vmap can apply them to many
devices and leave the number of examples free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
NONE, MEAN = 0, 1
"""PyTorch's numbers for reductions; 2 is the sum."""
TABLE_CLASSES = 128
"""Up to this many classes a one-hot row is copied from a table, because ONNX Runtime compares short
rows slowly."""
torch.library.define(
    "fleetlearn::cross_entropy_backward",
    "(Tensor grad, Tensor logp, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, "
    "Tensor total_weight) -> Tensor",
)
BACKWARD: Any = torch.ops.fleetlearn.cross_entropy_backward.default
"""Takes nll_loss_backward's arguments. Returns the gradient of log_softmax's input, where ``logp``
is its output."""


def fuse_cross_entropy(graph: torch.fx.Graph) -> None:
    """Replace the backward passes of log_softmax and of the loss on its output by one call of
    BACKWARD."""
    for node in list(graph.nodes):
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        loss, logp, dim, dtype = node.args
        if loss.target not in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
            continue
        value = logp.meta["val"]
        same = (
            undetached(logp) is undetached(loss.args[1])
            and dim % value.dim() == _axis(value)
            and dtype == value.dtype
        )
        if same and len(loss.users) == 1:
            with graph.inserting_before(node):
                fused = graph.call_function(BACKWARD, loss.args)
            fused.meta = dict(node.meta)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            graph.erase_node(loss)


def undetached(node: Any) -> Any:
    """Return the node that made the value, before automatic differentiation detached it (2.15: by
    alias)."""
    while node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def backward_by_index(
    grad: Tensor,
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    valid = target != ignore_index
    places = torch.where(valid, target, 0).unsqueeze(_axis(logp))
    ones = torch.ones_like(places, dtype=logp.dtype)
    weights = (
        None
        if weight is None
        else _by_class(weight, logp).expand_as(logp).gather(_axis(logp), places)
    )
    scale = _scale(grad, logp, valid, weights, reduction, total_weight)
    return logp.exp().scatter_add(_axis(logp), places, -ones) * scale


torch.library.impl("fleetlearn::cross_entropy_backward", "CompositeExplicitAutograd")(
    backward_by_index
)


def backward_one_hot(
    grad: Tensor,
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    chosen, valid = _chosen(logp, target, ignore_index), _valid(logp, target, ignore_index)
    if weight is None and reduction == MEAN:
        # The total is the number of valid examples. If it is 0, all rows are masked.
        scale = grad / total_weight.clamp(min=1) * valid.to(logp.dtype).unsqueeze(_axis(logp))
    else:
        weights = None
        if weight is not None:
            weights = torch.where(chosen, _by_class(weight, logp), 0.0).sum(
                _axis(logp), keepdim=True
            )
        scale = _scale(grad, logp, valid, weights, reduction, total_weight)
    return (logp.exp() - chosen.to(logp.dtype)) * scale


def forward_one_hot(
    logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Compute nll_loss_forward: the loss and the sum of the weights. A target that is no class is
    ignored."""
    chosen = _chosen(logp, target, ignore_index)
    by_class = None if weight is None else _by_class(weight, logp)
    # Not a product with a mask: the logarithm of another class may be infinite.
    picked = torch.where(chosen, logp if by_class is None else logp * by_class, 0.0)
    if reduction == NONE and logp.dim() > 1:
        return -picked.sum(_axis(logp)), logp.new_zeros(())
    counted = (
        _valid(logp, target, ignore_index).to(logp.dtype)
        if by_class is None
        else torch.where(chosen, by_class, 0.0)
    )
    loss, total = -picked.sum(), counted.sum()
    return (loss / total if reduction == MEAN else loss), total


def _axis(logp: Tensor) -> int:
    """Return the axis of the classes."""
    return min(logp.dim() - 1, 1)


def _by_class(values: Tensor, logp: Tensor) -> Tensor:
    """Reshape (classes,) so that it broadcasts over all other axes."""
    return values.reshape([-1, *[1] * (logp.dim() - 1 - _axis(logp))])


def _chosen(logp: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return, for each class, whether it is the target's and not ignored."""
    count = int(logp.shape[_axis(logp)])
    classes = torch.arange(count)
    if count <= TABLE_CLASSES:
        table = torch.arange(count + 1).unsqueeze(1) == classes
        rows = torch.where(_valid(logp, target, ignore_index), target, count)
        return torch.embedding(table, rows).movedim(-1, _axis(logp))
    # An ignored number that is no class equals none of them, and needs no mask.
    if 0 <= ignore_index < count:
        classes = torch.where(classes == ignore_index, torch.iinfo(torch.int64).min, classes)
    return _by_class(classes, logp) == target.unsqueeze(_axis(logp))


def _valid(logp: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return whether each example counts in the loss."""
    classes = int(logp.shape[_axis(logp)])
    valid = target.clamp(0, classes - 1) == target
    return valid & (target != ignore_index) if 0 <= ignore_index < classes else valid


def _scale(
    grad: Tensor,
    logp: Tensor,
    valid: Tensor,
    weights: Tensor | None,
    reduction: int,
    total_weight: Tensor,
) -> Tensor:
    """Return each example's weight in the gradient, (n, 1, ...). Not a product: the total is 0 if
    all are ignored."""
    if reduction == MEAN:
        grad = grad / total_weight
    if grad.dim():
        grad = grad.unsqueeze(_axis(logp))
    scale = grad if weights is None else grad * weights
    return torch.where(valid.unsqueeze(_axis(logp)), scale, 0.0)
