"""The geometry of windows over an image, shared by convolution and pooling, and by both ways of
writing them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

FEW_CHANNELS = 8
"""With fewer channels, one matrix product for all taps costs less than a product for each tap."""
MANY_TAPS = 64
"""With more elements in a kernel, a graph with a few operators for each would be too long."""
LONG_ROW = 16
"""Rows of more than this many kernel widths are too long to be multiplied whole in a depthwise
convolution."""


class Windows(NamedTuple):
    """A convolution's geometry: one number for each of the image's axes."""

    kernel: list[int]
    places: list[int]
    """The output's size."""
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def taps(self) -> list[tuple[int, ...]]:
        """The indices of the kernel's elements, in order."""
        return list(product(*map(range, self.kernel)))

    @property
    def side_by_side(self) -> bool:
        """Whether no element of the image is in two windows, or between two, and none is
        padding."""
        return all(
            pad == 0 and gap == 1 and (count == 1 or step == size)
            for size, count, step, pad, gap in zip(*self, strict=True)
        )

    def begins(self, tap: Sequence[int]) -> list[int]:
        """Return the first element of the padded image that the tap multiplies."""
        return [element * gap for element, gap in zip(tap, self.dilation, strict=True)]

    def output_padding(self, sizes: Sequence[int]) -> list[int]:
        """Return what an image of these sizes has behind the elements that the windows reach."""
        reached = [
            (places - 1) * step - 2 * pad + gap * (size - 1) + 1
            for size, places, step, pad, gap in zip(*self, strict=True)
        ]
        return [size - covered for size, covered in zip(sizes, reached, strict=True)]


def per_axis(value: Sequence[int] | int, count: int, default: Sequence[int] = ()) -> list[int]:
    """Return one number for each of the image's axes. An operator may give one number for all, or
    none."""
    values = [value] if isinstance(value, int) else list(value) or list(default)
    return values * count if len(values) == 1 else values
