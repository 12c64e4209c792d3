"""The state and the sums of ``boosted-components``, and its base learners.

A base learner is a few columns of a design matrix made of one column z of the table:

linear    1 and z, where z is the column, moved and scaled so that its range is 0 to 1
spline    cubic B-splines over evenly spaced knots of that range: knots + 4 of them, of which four
          are not 0 for a row
category  one for each category, 1 for the rows of this category

A row whose value is missing (or a code that is no category) has zeros, so the learner adds nothing
to its score. A value outside the range counts as the nearest end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.boosting_settings import BoostedComponents
from fleetlearn_protocol.computations.layout import Layout, StateField, SumsLayout
from fleetlearn_protocol.computations.shared_edges import first_boundaries
from fleetlearn_protocol.vector import Vector

FIND_RANGES, DESIGN, FIT, DONE = 0, 1, 2, 3
"""Phases: the range of each column of numbers; X^T X, once; X^T r, once for each iteration; the
end."""
BOUNDARIES = 128
"""Boundaries of a count that looks for a range: six counts find the least and the greatest value,
to the last bit."""
LOSS_BITS = 20
EXPONENTS, LOWEST_EXPONENT = 256, -127
"""Exponents of a float32 y that are counted, from -127 on."""
HEADROOM = 2
"""Residuals may be 2^2 as large as the largest y before sums are less exact than said."""

Doubles = NDArray[np.float64]


LearnerKind = Literal["linear", "spline", "category"]


class BaseLearner(NamedTuple):
    """What an iteration may add."""

    kind: LearnerKind
    column: int
    """Of x."""
    numeric: int
    """The column's place among the columns of numbers; -1 for a category."""
    coefficients: slice
    """Its place among all coefficients."""
    gram: slice
    """The place of its X^T X among all: linear: sums of 1, z, z^2; spline: (size, 4), the diagonal
    and the three beside it; category: the diagonal."""

    @property
    def size(self) -> int:
        """How many coefficients it has."""
        return int(self.coefficients.stop - self.coefficients.start)


@lru_cache(maxsize=16)
def base_learners(settings: BoostedComponents) -> tuple[BaseLearner, ...]:
    """Return the base learners, in the order of the columns and of ``settings.learners``."""
    learners: list[BaseLearner] = []
    first, gram, numeric = 0, 0, 0
    for number, column in enumerate(settings.columns):
        kinds: tuple[LearnerKind, ...] = ("category",) if column.codes else settings.learners
        for kind in kinds:
            sizes = {"linear": 2, "spline": settings.knots + 4, "category": column.codes}
            size = sizes[kind]
            grams = {"linear": 3, "spline": 4 * size, "category": size}[kind]
            learners.append(
                BaseLearner(
                    kind=kind,
                    column=number,
                    numeric=-1 if column.codes else numeric,
                    coefficients=slice(first, first + size),
                    gram=slice(gram, gram + grams),
                )
            )
            first, gram = first + size, gram + grams
        numeric += not column.codes
    return tuple(learners)


@lru_cache(maxsize=16)
def numeric_columns(settings: BoostedComponents) -> tuple[int, ...]:
    """Return the columns of numbers."""
    return tuple(i for i, column in enumerate(settings.columns) if not column.codes)


@lru_cache(maxsize=16)
def components_state(settings: BoostedComponents) -> Layout:
    """Return how the state lies in its vector. ``ranges``: the least and the greatest value of each
    column of numbers. ``chosen``: of each iteration, 1 + its base learner; 0: not yet."""
    learners, numeric = base_learners(settings), len(numeric_columns(settings))
    return Layout(
        StateField("phase", (), "int64"),
        StateField("exchange", (), "int64"),
        StateField("scale", (), "int64"),
        StateField("rows", (), "int64"),
        StateField("design_rows", (), "int64"),
        StateField("iteration", (), "int64"),
        StateField("base", (), "float64"),
        StateField("loss", (), "float64"),
        StateField("ranges", (numeric, 2), "float32"),
        StateField("boundaries", (numeric, BOUNDARIES), "float32"),
        StateField("gram", (learners[-1].gram.stop,), "float64"),
        StateField("penalties", (len(learners),), "float64"),
        StateField("coefficients", (learners[-1].coefficients.stop,), "float64"),
        StateField("gains", (len(learners),), "float64"),
        StateField("chosen", (settings.iterations,), "float32"),
    )


@lru_cache(maxsize=16)
def components_sums(settings: BoostedComponents) -> SumsLayout:
    """Return how the sums lie in their vector. body: counts between boundaries, X^T X, or X^T r."""
    last = base_learners(settings)[-1]
    counts = len(numeric_columns(settings)) * (BOUNDARIES + 1)
    return SumsLayout(
        {
            "rows": (),
            "label": (),
            "loss": (),
            "exponents": (EXPONENTS,) if settings.loss == "squared" else (0,),
            "body": (max(counts, last.gram.stop, last.coefficients.stop),),
        }
    )


def first_components(settings: BoostedComponents) -> Vector:
    """Return the state before the first exchange."""
    layout = components_state(settings)
    values = layout.unpack(np.zeros(layout.size, np.float32))
    values["boundaries"][:] = first_boundaries(BOUNDARIES)
    return layout.pack(values)


def range_counts_of(body: NDArray[np.int64], settings: BoostedComponents) -> NDArray[np.int64]:
    """Return a view of the counts in the sums' body: (columns of numbers, boundaries + 1)."""
    shape = len(numeric_columns(settings)), BOUNDARIES + 1
    return body[: shape[0] * shape[1]].reshape(shape)


def grid_bits(rows: int) -> int:
    """Return how finely each row's products are rounded: to multiples of 2^-bits of their scale.

    Of N rows the mean then is off by 2^-(bits + 1) / sqrt(N) or so: below 1e-13 for 10^3 and below
    1e-11 for 10^9 rows. Finer ones would not leave room for the sums of many devices in 62 bits.
    """
    return int(np.clip(50 - max(rows, 1).bit_length(), 24, 40))


def scaled(values: NDArray[np.float32], low: float, high: float) -> Doubles:
    """Return where values lie in a range, from 0 (at and below its low end) to 1: float64. NaN
    stays NaN."""
    wide = values.astype(np.float64)
    return (np.clip(wide, low, high) - low) / (high - low)


def spline_basis(places: Doubles, knots: int) -> tuple[NDArray[np.int64], Doubles]:
    """Return the first of the four B-splines that are not 0, (n,), and the values of the four,
    (n, 4), for places from 0 to 1. They add up to 1."""
    along = places * (knots + 1)
    first = np.minimum(along.astype(np.int64), knots)
    t = along - first
    s = 1 - t
    values = np.stack(
        [
            s * s * s,
            3 * t * t * t - 6 * t * t + 4,
            3 * s * s * s - 6 * s * s + 4,
            t * t * t,
        ],
        axis=1,
    )
    return first, values / 6
