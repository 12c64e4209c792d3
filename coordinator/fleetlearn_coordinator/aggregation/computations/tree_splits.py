"""The best split of each node, from the sums of first and second derivatives in each bin."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.fixed_point import from_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.trees_layout import GRID_BITS, bin_table
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
TOGETHER = 2**20
"""Sums that are looked at together: bounds memory."""


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
    noise: float = 0.0,
) -> BestSplits:
    """Return the split of the largest gain of each node.

    histogram: (nodes, bins of all columns, 2). scale: first derivatives are multiples of
    2^(scale - 24). edges_used: how many edges each column of numbers has, (F,). allowed: columns
    that may be split, (F,).

    Of splits with equal gains it is the one of the first column, and there of the first bin.
    Missing values go to the side where they gain more; where they gain nothing, to the right; where
    there are none, to the side with the larger sum of second derivatives. ``noise``: the standard
    deviation of the noise on a node's sum of first derivatives.
    """
    per_node = 2 * bin_table(settings).total
    step = max(1, TOGETHER // per_node)
    parts = [
        _best_of(histogram[begin : begin + step], scale, edges_used, allowed, settings, noise)
        for begin in range(0, len(histogram), step)
    ]
    codes, gains, *sums = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    whole, left = NodeSums(sums[0], sums[1]), NodeSums(sums[2], sums[3])
    right = NodeSums(whole.first - left.first, whole.second - left.second)
    return BestSplits(codes, gains, whole, left, right)


def _best_of(
    histogram: Sums,
    scale: int,
    edges_used: NDArray[np.int64],
    allowed: NDArray[np.bool_],
    settings: BoostedTrees,
    noise: float,
) -> tuple[NDArray[Any], ...]:
    """Return codes, gains, G and H of the nodes, and G and H of their left sides, (nodes,) each."""
    table = bin_table(settings)
    nodes, columns = len(histogram), len(table.counts)
    # Each column's bins have all rows. With noise only those of allowed columns are there.
    any_allowed = int(allowed.argmax())
    own = slice(table.starts[any_allowed], table.missing[any_allowed] + 1)
    one_column = histogram[:, own].sum(axis=1)
    whole = NodeSums(one_column[:, 0], one_column[:, 1])
    gains = np.zeros((nodes, columns))
    codes = np.zeros((nodes, columns), np.int64)
    lefts = np.zeros((nodes, columns, 2), np.int64)
    # Columns of numbers have equally many bins: they are tried at once.
    groups = [table.numeric] if len(table.numeric) else []
    groups += [np.array([column]) for column in np.flatnonzero(table.is_category)]
    for group in groups:
        bins = table.starts[group][:, None] + np.arange(table.counts[group[0]] - 1)
        below, missing = histogram[:, bins], histogram[:, table.missing[group]]
        if table.is_category[group[0]]:
            # One category alone; the last bin, of those unknown, is never alone.
            is_split = np.repeat(allowed[group][:, None], bins.shape[1], axis=1)
        else:
            below = np.cumsum(below, axis=2)
            is_split = allowed[group][:, None] & (
                np.arange(bins.shape[1]) < edges_used[group][:, None]
            )
        # (nodes, columns, bins, side of the missing values, 2): to the right, then to the left.
        sides = np.stack([below, below + missing[:, :, None]], axis=3)
        gain = np.where(is_split[:, :, None], _gain(sides, whole, scale, settings, noise), -np.inf)
        gain = gain.reshape(nodes, len(group), -1)
        best = gain.argmax(axis=2)
        chosen = np.take_along_axis(
            sides.reshape(nodes, len(group), -1, 2), best[:, :, None, None], axis=2
        )[:, :, 0]
        nobody = (missing == 0).all(axis=2)
        heavier = 2 * chosen[..., 1] >= whole.second[:, None]
        goes_left = np.where(nobody, heavier, best % 2 == 1)
        gains[:, group] = np.take_along_axis(gain, best[:, :, None], axis=2)[:, :, 0]
        codes[:, group] = (1 + table.starts[group] + best // 2) * np.where(goes_left, -1, 1)
        lefts[:, group] = chosen
    here, column = np.arange(nodes), gains.argmax(axis=1)
    gain, left = gains[here, column], lefts[here, column]
    is_better = gain > 0
    return (
        np.where(is_better, codes[here, column], 0),
        np.where(is_better, gain, 0.0),
        whole.first,
        whole.second,
        left[:, 0],
        left[:, 1],
    )


def leaf_values(sums: NodeSums, scale: int, settings: BoostedTrees, noise: float = 0.0) -> Doubles:
    """Return what a row's score gains in a leaf of these sums: -rate G / (H + lambda), (nodes,).
    ``noise``: as in ``best_splits``."""
    first, second = _real(sums, scale)
    weight = _weight(second, settings, noise)
    return -settings.learning_rate * first / np.where(weight > 0, weight, 1.0)


def _weight(second: Doubles, settings: BoostedTrees, noise: float) -> Doubles:
    """Return H + lambda. Where G has noise of the standard deviation s, H + lambda + s^2 / H: -G
    divided by that is the best guess of a leaf's value if such values are 1 or so. H may be below 0
    by its own noise, and counts as 1 at least then."""
    if not noise:
        return second + settings.l2
    held = np.maximum(second, 1.0)
    return held + settings.l2 + noise**2 / held


def _gain(left: Sums, whole: NodeSums, scale: int, settings: BoostedTrees, noise: float) -> Doubles:
    """Return 1/2 [G_L^2 / (H_L + lambda) + G_R^2 / (H_R + lambda) - G^2 / (H + lambda)] - gamma of
    each split, (nodes, columns, bins, 2); minus infinity where a side is too light.

    left: (nodes, columns, bins, 2, 2). whole: of the nodes.
    """
    here = NodeSums(left[..., 0], left[..., 1])
    axes = (slice(None), None, None, None)
    other = NodeSums(whole.first[axes] - here.first, whole.second[axes] - here.second)
    parts = [_score(side, scale, settings, noise) for side in (here, other)]
    gain = (parts[0] + parts[1] - _score(whole, scale, settings, noise)[axes]) / 2
    least = max(settings.min_child_weight, 2.0**-GRID_BITS)
    weights = [from_fixed(side.second, GRID_BITS) for side in (here, other)]
    allowed = (weights[0] >= least) & (weights[1] >= least)
    return np.where(allowed, gain - settings.min_gain, -np.inf)


def _score(sums: NodeSums, scale: int, settings: BoostedTrees, noise: float) -> Doubles:
    first, second = _real(sums, scale)
    weight = _weight(second, settings, noise)
    return first * first / np.where(weight > 0, weight, 1.0)


def _real(sums: NodeSums, scale: int) -> tuple[Doubles, Doubles]:
    return from_fixed(sums.first, GRID_BITS - scale), from_fixed(sums.second, GRID_BITS)
