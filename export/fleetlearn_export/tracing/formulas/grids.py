"""Images read at computed places: PyTorch's grid_sample, in one formula for all axes and modes.

Along each axis an element of the result has a few taps: places in the image with weights that
depend on the coordinate. The sum over all combinations of taps is read with gather, whose gradient
adds at indices.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

aten = torch.ops.aten
BILINEAR, NEAREST = 0, 1
"""PyTorch's numbers of the interpolations; 2 is bicubic."""
ZEROS, BORDER = 0, 1
"""PyTorch's numbers for what is outside of the image; 2 is the image's reflection."""
CUBIC = -0.75
"""The slope that PyTorch's bicubic interpolation has (Keys 1981)."""


def grid_sampler(
    x: Tensor, grid: Tensor, interpolation: int, outside: int, align_corners: bool
) -> Tensor:
    """Read ``x`` (n, channels, ...) at the coordinates ``grid`` (n, ..., axes) from -1 to 1, the
    last axis first."""
    sizes = [int(size) for size in x.shape[2:]]
    lines = []
    for axis, size in enumerate(sizes):
        coordinate = grid[..., len(sizes) - 1 - axis]
        coordinate = (
            (coordinate + 1) / 2 * (size - 1)
            if align_corners
            else ((coordinate + 1) * size - 1) / 2
        )
        if interpolation in (BILINEAR, NEAREST):
            coordinate = _inside(coordinate, size, outside, align_corners)
        lines.append(
            [_tap(*tap, size, outside, align_corners) for tap in _taps(coordinate, interpolation)]
        )
    flat, channels = x.flatten(2), x.shape[1]
    result: Any = 0
    for taps in product(*lines):
        index, weight = taps[0]
        for size, (other, factor) in zip(sizes[1:], taps[1:], strict=True):
            index, weight = index * size + other, weight * factor
        read = flat.gather(2, index.flatten(1).unsqueeze(1).expand(-1, channels, -1))
        result = result + read * weight.flatten(1).unsqueeze(1)
    return result.reshape([x.shape[0], channels, *grid.shape[1:-1]])  # type: ignore[no-any-return]


def _inside(coordinate: Tensor, size: int, outside: int, align_corners: bool) -> Tensor:
    """Move coordinates into the image. At its border, and beyond it, they have no gradient, as in
    PyTorch."""
    if outside == ZEROS:
        return coordinate
    if outside != BORDER:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        if low == high:
            coordinate = coordinate * 0
        else:
            # A wave of triangles: what is left of the distance from one end in two spans, or the
            # rest of the way back.
            rest = torch.remainder(coordinate - low, 2 * (high - low))
            coordinate = low + torch.minimum(rest, 2 * (high - low) - rest)
    inside = (coordinate > 0) & (coordinate < size - 1)
    return torch.where(inside, coordinate, coordinate.detach().clamp(0, size - 1))


def _taps(coordinate: Tensor, interpolation: int) -> list[tuple[Tensor, Tensor]]:
    """Return the places that are read along an axis, whole numbers as floats, and their weights."""
    if interpolation == NEAREST:
        nearest = coordinate.detach().round()
        return [(nearest, torch.ones_like(nearest))]
    first = coordinate.detach().floor()
    rest = coordinate - first
    if interpolation == BILINEAR:
        return [(first, 1 - rest), (first + 1, rest)]
    weights = []
    for near, distance in ((False, rest + 1), (True, rest), (True, 1 - rest), (False, 2 - rest)):
        if near:
            weights.append(((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1)
        else:
            weights.append(
                ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
            )
    return [(first + step, weight) for step, weight in enumerate(weights, -1)]


def _tap(
    coordinate: Tensor, weight: Tensor, size: int, outside: int, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Return a tap's index in the image, and its weight: 0 outside of the image."""
    if outside == ZEROS:
        weight = weight * ((coordinate >= 0) & (coordinate < size)).to(weight.dtype)
    else:
        coordinate = _inside(coordinate, size, outside, align_corners)
    return coordinate.clamp(0, size - 1).to(torch.int64), weight


def affine_grid_generator(theta: Tensor, size: Any, align_corners: bool) -> Tensor:
    """PyTorch's own formula, whose gradient accepts a free number of examples."""
    grid: Tensor = decomposition_table[aten.affine_grid_generator.default](
        theta, size, align_corners
    )
    return grid


FORMULAS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.grid_sampler_2d.default: grid_sampler,
    aten.grid_sampler_3d.default: grid_sampler,
    aten.affine_grid_generator.default: affine_grid_generator,
}
