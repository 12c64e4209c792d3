"""The best split of each node, from the sums of first and second derivatives in each bin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.fixed_point import from_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.trees_layout import GRID_BITS, bin_table
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


class NodeSums(NamedTuple):
    """Sums over the rows of each node, or of one side of its split."""

    first: Sums
    """Of first derivatives, whole numbers: G."""
    second: Sums
    """Of second derivatives: H."""


class BestSplits(NamedTuple):
    """What was found for each node."""

    codes: NDArray[np.int64]
    """The split, as a state has it; 0: none."""
    gains: Doubles
    whole: NodeSums
    left: NodeSums
    right: NodeSums


def best_splits(
    histogram: Sums,
    scale: int,
    edges_used: NDArray[np.int64],
    allowed: NDArray[np.bool_],
    settings: BoostedTrees,
) -> BestSplits:
    """Return the split of the largest gain of each node.

    histogram: (nodes, bins of all columns, 2). scale: first derivatives are multiples of
    2^(scale - 24). edges_used: how many edges each column of numbers has, (F,). allowed: columns
    that may be split, (F,).

    Of splits with equal gains it is the one of the first column, and there of the first bin.
    Missing values go to the side where they gain more; where they gain nothing, to the right; where
    there are none, to the side with the larger sum of second derivatives.
    """
    table = bin_table(settings)
    nodes = len(histogram)
    first_column = histogram[:, : table.counts[0] + 1].sum(axis=1)
    whole = NodeSums(first_column[:, 0], first_column[:, 1])
    codes, gains = np.zeros(nodes, np.int64), np.zeros(nodes)
    left = NodeSums(np.zeros(nodes, np.int64), np.zeros(nodes, np.int64))
    for column in np.flatnonzero(allowed):
        begin, count = int(table.starts[column]), int(table.counts[column])
        own = histogram[:, begin : begin + count]
        missing = histogram[:, begin + count]
        if table.is_category[column]:
            below = own[:, :-1]  # one category alone; the last bin is of those unknown
        else:
            below = np.cumsum(own[:, : edges_used[column]], axis=1)
        if not below.shape[1]:
            continue
        # (nodes, bins, side of the missing values, 2): to the right, then to the left.
        sides = np.stack([below, below + missing[:, None]], axis=2)
        gain = _gain(sides, whole, scale, settings).reshape(nodes, -1)
        best = gain.argmax(axis=1)
        here = np.arange(nodes)
        better = gain[here, best] > gains
        chosen = sides.reshape(nodes, -1, 2)[here, best]
        goes_left = best % 2 == 1
        nobody = (missing == 0).all(axis=1)
        heavier = 2 * chosen[:, 1] >= whole.second
        goes_left = np.where(nobody, heavier, goes_left)
        code = (1 + begin + best // 2) * np.where(goes_left, -1, 1)
        codes[better] = code[better]
        gains[better] = gain[here, best][better]
        left.first[better], left.second[better] = chosen[better, 0], chosen[better, 1]
    right = NodeSums(whole.first - left.first, whole.second - left.second)
    return BestSplits(codes, gains, whole, left, right)


def leaf_values(sums: NodeSums, scale: int, settings: BoostedTrees) -> Doubles:
    """Return what a row's score gains in a leaf of these sums: -rate G / (H + lambda), (nodes,)."""
    first, second = _real(sums, scale)
    weight = second + settings.l2
    return -settings.learning_rate * first / np.where(weight > 0, weight, 1.0)


def _gain(left: Sums, whole: NodeSums, scale: int, settings: BoostedTrees) -> Doubles:
    """Return 1/2 [G_L^2 / (H_L + lambda) + G_R^2 / (H_R + lambda) - G^2 / (H + lambda)] - gamma of
    each split, (nodes, bins, 2); minus infinity where a side is too light."""
    here = NodeSums(left[..., 0], left[..., 1])
    other = NodeSums(
        whole.first[:, None, None] - here.first, whole.second[:, None, None] - here.second
    )
    parts = [_score(side, scale, settings) for side in (here, other)]
    gain = (parts[0] + parts[1] - _score(whole, scale, settings)[:, None, None]) / 2
    least = max(settings.min_child_weight, 2.0**-GRID_BITS)
    weights = [from_fixed(side.second, GRID_BITS) for side in (here, other)]
    allowed = (weights[0] >= least) & (weights[1] >= least)
    return np.where(allowed, gain - settings.min_gain, -np.inf)


def _score(sums: NodeSums, scale: int, settings: BoostedTrees) -> Doubles:
    first, second = _real(sums, scale)
    weight = second + settings.l2
    return first * first / np.where(weight > 0, weight, 1.0)


def _real(sums: NodeSums, scale: int) -> tuple[Doubles, Doubles]:
    return from_fixed(sums.first, GRID_BITS - scale), from_fixed(sums.second, GRID_BITS)
