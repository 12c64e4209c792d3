"""The state and the sums of ``boosted-trees``, and where the parts of a tree are in them.

A tree of depth D has room for 2^D - 1 splits and 2^D leaves, by the numbers of a heap: the node at
place ``node`` of a level has the children 2 node (left) and 2 node + 1 of the next. A node without
a split sends its rows to the left until they reach a leaf. So a tree is 2^(D + 1) - 1 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.layout import Layout, StateField, SumsLayout
from fleetlearn_protocol.computations.shared_edges import boundaries_for, first_boundaries
from fleetlearn_protocol.splitmix64 import GAMMA, mix
from fleetlearn_protocol.vector import Vector

FIND_EDGES, GROW, DONE = 0, 1, 2
"""Phases: counting values for the edges of bins; growing trees, a level in each exchange; the end.
"""
GRID_BITS = 24
"""A row's first and second derivatives are rounded to multiples of 2^-24 of their scale."""
LOSS_BITS = 20
"""A row's loss is rounded to multiples of 2^-20 of the scale's square."""
EXPONENTS = 256
"""Exponents of a float32 y that are counted, from -127 on."""
LOWEST_EXPONENT = -127
COLUMNS = 2**33
"""The stream of the seed that says which columns a boosting round may split."""


@dataclass(frozen=True)
class BinTable:
    """Which bins each column has among all bins, one column after another: those of its values,
    and a last one for missing values."""

    counts: NDArray[np.int64]
    """Bins of values of each column, (F,). A column of categories has one more than categories, for
    codes that are none."""
    starts: NDArray[np.int64]
    """The first bin of each column, (F,)."""
    column_of: NDArray[np.int64]
    """The column of each bin, (total,)."""
    numeric: NDArray[np.int64]
    """The columns of numbers, (numeric,)."""
    is_category: NDArray[np.bool_]
    """Whether a column is of categories, (F,)."""

    @property
    def total(self) -> int:
        """All bins of all columns."""
        return len(self.column_of)

    @property
    def missing(self) -> NDArray[np.int64]:
        """The bin of missing values of each column, (F,)."""
        return self.starts + self.counts


@lru_cache(maxsize=16)
def bin_table(settings: BoostedTrees) -> BinTable:
    """Return where the bins of the columns are."""
    categories = np.array([column.codes for column in settings.columns], np.int64)
    counts = np.where(categories > 0, categories + 1, settings.bins)
    starts = np.concatenate([[0], np.cumsum(counts + 1)[:-1]])
    return BinTable(
        counts=counts,
        starts=starts,
        column_of=np.repeat(np.arange(len(counts)), counts + 1),
        numeric=np.flatnonzero(categories == 0),
        is_category=categories > 0,
    )


@lru_cache(maxsize=16)
def trees_state(settings: BoostedTrees) -> Layout:
    """Return how the state lies in its vector.

    ``kept`` boosting rounds are finished and count in a row's scores; of the open one, ``level``
    levels are split. ``best`` and ``best_loss`` are of the held-out rows. While edges are searched
    for, ``body`` holds the boundaries of the columns of numbers, afterwards the trees.
    """
    numeric = len(bin_table(settings).numeric)
    return Layout(
        StateField("phase", (), "int64"),
        StateField("exchange", (), "int64"),
        StateField("scale", (), "int64"),
        StateField("rows", (), "int64"),
        StateField("kept", (), "int64"),
        StateField("level", (), "int64"),
        StateField("best", (), "int64"),
        StateField("best_loss", (), "float64"),
        StateField("losses", (2,), "float64"),
        StateField("base", (settings.outputs,), "float32"),
        StateField("gains", (len(settings.columns),), "float64"),
        # With differential privacy the standard deviation of the noise of each scaled sum in the
        # last exchange; else 0.
        StateField("noise", (), "float64"),
        StateField("edges", (numeric, settings.bins - 1), "float32"),
        StateField("body", (max(_boundaries(settings), _trees(settings)),), "float32"),
    )


@lru_cache(maxsize=16)
def trees_sums(settings: BoostedTrees) -> SumsLayout:
    """Return how the sums lie in their vector.

    rows, losses: of the training rows and of the held-out ones. labels: the sum of y, or rows of
    each class. exponents: rows by the exponent of y (squared loss). body: counts between
    boundaries, or sums of first and second derivatives (level's nodes, K, bins, 2).
    """
    table = bin_table(settings)
    numeric = len(table.numeric)
    histogram = 2 ** (settings.depth - 1) * settings.outputs * table.total * 2
    counts = numeric * (boundaries_for(settings.bins) + 1)
    return SumsLayout(
        {
            "rows": (2,),
            "losses": (2,),
            "labels": (max(settings.outputs, 2),),
            "exponents": (EXPONENTS,) if settings.loss == "squared" else (0,),
            "body": (max(histogram, counts),),
        }
    )


def first_trees(settings: BoostedTrees) -> Vector:
    """Return the state before the first exchange."""
    layout = trees_state(settings)
    values = layout.unpack(np.zeros(layout.size, np.float32))
    boundaries_of(values["body"], settings)[:] = first_boundaries(boundaries_for(settings.bins))
    return layout.pack(values)


def ranged_edges(settings: BoostedTrees) -> Vector:
    """Return the edges of equally wide bins: float32, (numeric columns, bins - 1)."""
    ranges = [column.range or (0.0, 1.0) for column in settings.columns if not column.codes]
    edges = [np.linspace(low, high, settings.bins + 1)[1:-1] for low, high in ranges]
    return np.array(edges, np.float32).reshape(len(ranges), settings.bins - 1)


def drawn_columns(number: int, settings: BoostedTrees) -> NDArray[np.bool_]:
    """Return which columns a boosting round may split, (F,)."""
    count = len(settings.columns)
    wanted = max(1, int(np.ceil(settings.column_share * count)))
    state = mix(np.array([settings.seed], np.uint64)) + np.uint64(COLUMNS + number)
    places = np.arange(1, count + 1, dtype=np.uint64)
    order = np.argsort(mix(mix(state) + places * GAMMA), kind="stable")
    allowed = np.zeros(count, np.bool_)
    allowed[order[:wanted]] = True
    return allowed


def boundaries_of(body: Vector, settings: BoostedTrees) -> Vector:
    """Return a view of the boundaries in a state's body: (numeric columns, boundaries)."""
    numeric = len(bin_table(settings).numeric)
    return body[: _boundaries(settings)].reshape(numeric, boundaries_for(settings.bins))


def counts_of(body: NDArray[np.int64], settings: BoostedTrees) -> NDArray[np.int64]:
    """Return a view of the counts in the sums' body: (numeric columns, boundaries + 1)."""
    numeric, intervals = len(bin_table(settings).numeric), boundaries_for(settings.bins) + 1
    return body[: numeric * intervals].reshape(numeric, intervals)


def splits_of(body: Vector, settings: BoostedTrees) -> Vector:
    """Return a view of the splits in a state's body: (rounds, K, 2^D - 1), level by level.

    0: no split. Otherwise 1 + a bin of all columns, negative where missing values go to the left.
    On a column of numbers values of this bin and the bins before it go to the left; on one of
    categories the rows of this category go to the left.
    """
    trees, nodes = settings.rounds * settings.outputs, 2**settings.depth - 1
    return body[: trees * nodes].reshape(settings.rounds, settings.outputs, nodes)


def leaves_of(body: Vector, settings: BoostedTrees) -> Vector:
    """Return a view of the leaves in a state's body: (rounds, K, 2^D)."""
    trees, nodes = settings.rounds * settings.outputs, 2**settings.depth - 1
    leaves = body[trees * nodes : trees * (nodes + nodes + 1)]
    return leaves.reshape(settings.rounds, settings.outputs, nodes + 1)


def histogram_of(body: NDArray[np.int64], level: int, settings: BoostedTrees) -> NDArray[np.int64]:
    """Return a view of a level's sums in the sums' body: (2^level, K, bins of all columns, 2)."""
    shape = 2**level, settings.outputs, bin_table(settings).total, 2
    return body[: int(np.prod(shape))].reshape(shape)


def _boundaries(settings: BoostedTrees) -> int:
    return len(bin_table(settings).numeric) * boundaries_for(settings.bins)


def _trees(settings: BoostedTrees) -> int:
    nodes: int = 2 ** (settings.depth + 1) - 1
    return settings.rounds * settings.outputs * nodes
