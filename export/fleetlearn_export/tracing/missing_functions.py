"""Functions that PyTorch computes with special operators, which ONNX does not have: running
extrema and sums of exponentials, medians, histograms, the gamma function's logarithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def _shifted(x: Tensor, axis: int, count: int, fill: float) -> Tensor:
    """Move the elements ``count`` places on along an axis, and fill what is before them."""
    size = int(x.shape[axis])
    pads = [0, 0] * (x.dim() - 1 - axis) + [count, 0]
    return torch.constant_pad_nd(x.narrow(axis, 0, size - count), pads, fill)


def _steps(x: Tensor, axis: int) -> list[int]:
    """Return 1, 2, 4, ...: combining each element with the one so far before it, one after the
    other, covers all."""
    return [2**step for step in range((int(x.shape[axis]) - 1).bit_length())]


def _running_extremum(
    later: Callable[[Tensor, Tensor], Tensor], start: float
) -> Callable[[Tensor, int], Pair]:
    """Return cummax or cummin: ``later(a, b)`` says where ``a`` replaces an earlier ``b``."""

    def function(x: Tensor, dim: int) -> Pair:
        places = torch.arange(x.shape[dim] if x.dim() else 1)
        if not x.dim():
            return x.clone(), places.reshape([])
        axis = dim % x.dim()
        places = places.reshape([-1] + [1] * (x.dim() - 1 - axis)).expand(x.shape)
        limits = None if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        fill = start if limits is None else limits.max if start > 0 else limits.min
        for step in _steps(x, axis):
            before = _shifted(x, axis, step, fill)
            kept = later(x, before)
            places = torch.where(kept, places, _shifted(places, axis, step, 0))
            x = torch.where(kept, x, before)
        return x, places.clone()

    return function


cummax = _running_extremum(torch.ge, -math.inf)
cummin = _running_extremum(torch.le, math.inf)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    if not x.dim():
        return x.clone()
    axis = dim % x.dim()
    for step in _steps(x, axis):
        before = _shifted(x, axis, step, -math.inf)
        largest, smallest = torch.maximum(x, before), torch.minimum(x, before)
        # Of two that are -inf the difference is not a number.
        gap = torch.where(largest == -math.inf, 0, smallest - largest)
        x = largest + gap.exp().log1p()
    return x.clone()


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    if not x.dim():
        return x.clone(), torch.zeros([], dtype=torch.int64)
    values, places = x.sort(dim)
    found = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def median(x: Tensor, dim: int, keepdim: bool = False) -> Pair:
    """Return the lower one of two medians. Numbers that are none (NaN) count as largest."""
    return kthvalue(x, (int(x.shape[dim]) + 1) // 2 if x.dim() else 1, dim, keepdim)


def median_of_all(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    values: Tensor = flat.sort(0)[0]
    return values.select(0, (flat.shape[0] - 1) // 2)


def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Count the elements in each of ``bins`` equal parts from ``low`` to ``high``. Others, and NaN,
    are not counted."""
    if not low < high:
        raise NotImplementedError("histc that takes its limits from the data: give min and max")
    flat = x.reshape(-1, 1)
    places = ((flat - low) * (bins / (high - low))).floor().clamp(max=bins - 1)
    counted = (flat >= low) & (flat <= high) & (places == torch.arange(bins))
    return counted.to(x.dtype).sum(0)


SHIFT = 8
"""The gamma function's series are used from here on. The recurrence moves smaller arguments up by
as much."""


def _reflected(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where x < 0.5, the argument 1 - x there and x elsewhere, and pi times x's distance
    from a whole number."""
    low = x < 0.5
    return low, torch.where(low, 1 - x, x), math.pi * (x - x.round())


def lgamma(x: Tensor) -> Tensor:
    """Return log |gamma(x)|: Stirling's series, recurrence and reflection (Abramowitz and Stegun,
    6.1.41, .15, .17)."""
    low, x, angle = _reflected(x)
    product: Any = 1
    for step in range(SHIFT):
        product = product * (x + step)
    small = x < SHIFT
    z = torch.where(small, x + SHIFT, x)
    square = 1 / (z * z)
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / z
    log_gamma = (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi) + series
    log_gamma = log_gamma - torch.where(small, product, 1).log()
    return torch.where(low, math.log(math.pi) - angle.sin().abs().log() - log_gamma, log_gamma)


def digamma(x: Tensor) -> Tensor:
    """Return lgamma's derivative (Abramowitz and Stegun 1964, 6.3.18, 6.3.6, 6.3.7)."""
    low, x, angle = _reflected(x)
    total: Any = 0
    for step in range(SHIFT):
        total = total + 1 / (x + step)
    small = x < SHIFT
    z = torch.where(small, x + SHIFT, x)
    square = 1 / (z * z)
    series = square * (
        1 / 12 - square * (1 / 120 - square * (1 / 252 - square * (1 / 240 - square / 132)))
    )
    psi = z.log() - 0.5 / z - series - torch.where(small, total, 0)
    return torch.where(low, psi - math.pi / angle.tan(), psi)
