"""PyTorch's multilabel_margin_loss. Its own formula counts places behind the end of the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MEAN, SUM = 1, 2
"""PyTorch's numbers for reductions; 0 is none."""


def multilabel_margin_loss(scores: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Return the sum of max(0, 1 - (score of a label - score of another class)) / classes for each
    row.

    scores: (n, classes) or (classes,). target: int64 of the same shape, the labels and then -1.
    """
    classes = torch.arange(scores.shape[-1])
    labels = (target < 0).cumsum(-1) == 0
    places = torch.where(labels, target, 0)
    others = ~((places.unsqueeze(-1) == classes) & labels.unsqueeze(-1)).any(-2)
    gaps = 1 - scores.gather(-1, places).unsqueeze(-1) + scores.unsqueeze(-2)
    counted = labels.unsqueeze(-1) & others.unsqueeze(-2)
    losses = torch.where(counted, gaps.clamp(min=0), 0).sum((-2, -1)) / scores.shape[-1]
    return losses.mean() if reduction == MEAN else losses.sum() if reduction == SUM else losses


FORMULAS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.multilabel_margin_loss.default: multilabel_margin_loss
}
