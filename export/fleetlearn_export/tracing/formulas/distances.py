"""Distances between all pairs of two sets of points: PyTorch's cdist."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def cdist(a: Tensor, b: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Return the distances (..., r, s) between the points ``a`` (..., r, d) and ``b`` (..., s, d).

    The gradient of a distance of 0 is 0, as PyTorch has it.
    """
    gaps = a.unsqueeze(-2) - b.unsqueeze(-3)
    if p == 2:
        squares = gaps.square().sum(-1)
        apart = squares > 0
        return torch.where(apart, torch.where(apart, squares, 1).sqrt(), 0)
    if p == 0:
        return (gaps != 0).to(gaps.dtype).sum(-1)
    if p == 1:
        return gaps.abs().sum(-1)
    if math.isinf(p):
        return gaps.abs().amax(-1)
    sizes = gaps.abs()
    powers = torch.where(sizes > 0, torch.where(sizes > 0, sizes, 1).pow(p), 0).sum(-1)
    apart = powers > 0
    return torch.where(apart, torch.where(apart, powers, 1).pow(1 / p), 0)


FORMULAS: dict[torch._ops.OpOverload, Callable[..., Any]] = {aten.cdist.default: cdist}
