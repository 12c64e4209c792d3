"""What a bundle says of its computation: the entry ``computation`` of manifest.json, one struct for
each kind."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from fleetlearn_protocol.computations.boosting_settings import BoostedComponents, BoostedTrees
from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.messages import Number

BINS = 256
"""Parts into which a round divides the range in which a quantile lies."""
FARTHEST = 2.0**500
"""A range ends here at the latest, so that the variance is a finite double."""
Bounds = tuple[Number, Number]
TableColumn = Annotated[str, Meta(min_length=1, max_length=200)]


class NumberColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column of numbers; NaN is a missing value."""

    name: TableColumn
    """As the device's table has it."""
    range: Bounds | None = None
    """The least and the greatest value that is expected: values outside are counted, and count as
    the nearest of the two in mean and variance. null: the range is found, in rounds."""
    quantiles: Annotated[tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(max_length=32)] = ()
    """Shares of the rows, such as 0.5 for the median. 0 is the minimum, 1 the maximum."""
    error: Annotated[float, Meta(ge=0, le=1)] = 1e-3
    """How far a quantile may be off, as a share of its magnitude. 0: not at all, to the last
    bit."""
    bins: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Of the histogram, equally wide; 0: there is none."""


class CategoryColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column of texts, or of whole numbers that name categories; an empty text is a missing
    value."""

    name: TableColumn
    """As the device's table has it."""
    values: Annotated[tuple[str, ...], Meta(max_length=65536)] = ()
    """The values that are counted. Empty: the most frequent ones are found."""
    top: Annotated[int, Meta(ge=1, le=4096)] = 20
    """How many values are found at most."""
    longest: Annotated[int, Meta(ge=8, le=256)] = 24
    """Bytes of a value in UTF-8, a multiple of 8; what is longer counts as its beginning."""


class Statistics(
    msgspec.Struct,
    frozen=True,
    tag="statistics",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """What is asked of the columns of all devices' tables."""

    numbers: Annotated[tuple[NumberColumn, ...], Meta(max_length=64)] = ()
    """Columns of numbers."""
    categories: Annotated[tuple[CategoryColumn, ...], Meta(max_length=64)] = ()
    """Columns of categories."""
    rounds: Annotated[int, Meta(ge=1, le=64)] = 16
    """After this many rounds the computation is done, also where a quantile is not as exact yet as
    its column asks."""

    @property
    def contradiction(self) -> str | None:
        """What of it cannot be; None: nothing."""
        names = [number.name for number in self.numbers]
        names += [category.name for category in self.categories]
        if not names:
            return "there is no column"
        if len({*names}) < len(names):
            return f"column {max(names, key=names.count)} is there twice"
        for number in self.numbers:
            low, high = number.range or (0.0, 1.0)
            if not (low < high and isfinite(high - low)):
                return f"column {number.name} has the range {low:g} to {high:g}"
            if max(-low, high) > FARTHEST:
                return (
                    f"column {number.name} has the range {low:g} to {high:g}; the farthest that "
                    f"it may end is {FARTHEST:g}"
                )
            if len({*number.quantiles}) < len(number.quantiles):
                return f"column {number.name} has a quantile twice"
        for category in self.categories:
            if category.longest % 8:
                return (
                    f"column {category.name}: longest is {category.longest}; it takes a multiple "
                    "of 8"
                )
            if len({*category.values}) < len(category.values):
                return f"column {category.name} has a value twice"
            for value in category.values:
                if not 0 < len(value.encode()) <= category.longest:
                    return (
                        f"column {category.name}: {value!r} takes {len(value.encode())} bytes; "
                        f"expected 1 to {category.longest} (longest)"
                    )
        return None


ComputationSettings: TypeAlias = Statistics | BoostedTrees | BoostedComponents | FunctionSums
"""The settings of any kind: a union of structs with the tag ``kind``."""


def kind_of(settings: ComputationSettings) -> str:
    """Return the name of the kind that the settings are of."""
    return _tag(type(settings))


def _tag(settings: type[msgspec.Struct]) -> str:
    tag = settings.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


FUNCTION = _tag(FunctionSums)
"""The kind that calls functions of the device's owner."""
KIND_NAMES = tuple(map(_tag, get_args(ComputationSettings)))
"""Of all kinds; ``kinds.KINDS`` has them, and imports what they compute with."""
