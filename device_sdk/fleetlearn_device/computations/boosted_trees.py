"""What a device computes for boosted trees: counts for the edges of bins, then the sums of first
and second derivatives of each node, column and bin.

Every number of a row is rounded to a whole one before it is added, and no step depends on the other
rows. So the sums of all devices are those of all rows in one place, however they are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.fixed_point import to_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.portable_math import (
    logistic_losses,
    portable_log,
    sigmoid,
    softmax,
)
from fleetlearn_protocol.computations.shared_edges import count_between
from fleetlearn_protocol.computations.trees_layout import (
    EXPONENTS,
    FIND_EDGES,
    GRID_BITS,
    LOSS_BITS,
    LOWEST_EXPONENT,
    BinTable,
    bin_table,
    boundaries_of,
    counts_of,
    histogram_of,
    leaves_of,
    splits_of,
    trees_state,
    trees_sums,
)
from fleetlearn_protocol.splitmix64 import GAMMA, mix
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.remembered_scores import Remembered, ScoreMemory, digest_of

HELD_OUT = 2**32
"""The stream of the seed that says which rows are held out. Smaller numbers are boosting rounds."""
MEMORY = ScoreMemory()
"""Of the rows of this process."""
Values = Mapping[str, NDArray[Any]]
Doubles = NDArray[np.float64]
Whole = NDArray[np.int64]


def compute(state: Vector, columns: Columns, settings: BoostedTrees) -> Sums:
    """Return a batch's sums, int64 (S,).

    columns: ``x`` float32 (n, F), NaN where a value is missing; ``y`` (n,): float32, or int64 with
    logistic and softmax loss. Raises ValueError where a y is not finite.
    """
    values = trees_state(settings).unpack(state)
    x, y = columns["x"], columns["y"]
    if settings.loss == "squared" and not np.isfinite(y).all():
        row = int(np.flatnonzero(~np.isfinite(y))[0])
        raise ValueError(f"y of row {row} (the first is 0) is {y[row]}; expected a finite number")
    held_out = _is_held_out(x, y, settings)
    if values["phase"] == FIND_EDGES:
        return _edge_sums(values, x[~held_out], y[~held_out], settings)
    return _level_sums(values, x, y, held_out, settings)


def scores(
    values: Values,
    bins: Whole,
    settings: BoostedTrees,
    rounds: int,
    before: tuple[int, Doubles] | None = None,
) -> Doubles:
    """Return the rows' scores by the first ``rounds`` boosting rounds: float64, (n, K).

    values: the state, unpacked. bins: (n, F), from ``bins_of``. before: the scores by some of
    these rounds, the first ones, and how many.
    """
    first, found = before or (0, np.repeat(values["base"].astype(np.float64)[None], len(bins), 0))
    found, leaves = found.copy(), leaves_of(values["body"], settings)
    for number in range(first, rounds):
        for output in range(settings.outputs):
            nodes, _ = nodes_of(values["body"], bins, number, output, settings.depth, settings)
            found[:, output] += leaves[number, output][nodes]
    return found


def nodes_of(
    body: Vector, bins: Whole, number: int, output: int, level: int, settings: BoostedTrees
) -> tuple[Whole, NDArray[np.bool_]]:
    """Return each row's node of a level of a tree, (n,), and whether the node above it is split."""
    table = bin_table(settings)
    codes = splits_of(body, settings)[number, output].astype(np.int64)
    nodes = np.zeros(len(bins), np.int64)
    is_open = np.ones(len(bins), np.bool_)
    flat, row_starts = bins.reshape(-1), np.arange(len(bins)) * bins.shape[1]
    for above in range(level):
        code = codes[2**above - 1 :][nodes]
        is_open = code != 0
        split = np.maximum(np.abs(code) - 1, 0)
        column = table.column_of[split]
        own = flat[row_starts + column]
        left = np.where(table.is_category[column], own == split, own <= split)
        left = np.where(own == table.missing[column], code < 0, left)
        nodes = 2 * nodes + ~(left | ~is_open)
    return nodes, is_open


def bins_of(x: NDArray[np.float32], edges: NDArray[np.float32], table: BinTable) -> Whole:
    """Return the bin of each value among the bins of all columns: int64, (n, F).

    edges: float32, (columns of numbers, bins - 1).
    """
    found = np.empty(x.shape, np.int64)
    for own_edges, column in zip(edges, table.numeric, strict=True):
        found[:, column] = np.searchsorted(own_edges, x[:, column], side="right")
    for column in np.flatnonzero(table.is_category):
        values, known = x[:, column], table.counts[column] - 1
        is_code = (values >= 0) & (values < known) & (np.floor(values) == values)
        found[:, column] = np.where(is_code, np.where(is_code, values, 0), known)
    found = np.where(np.isnan(x), table.counts, found)
    found += table.starts
    return found


def _bins_and_scores(
    values: Values, x: NDArray[np.float32], settings: BoostedTrees
) -> tuple[Whole, Doubles]:
    """Return the rows' bins, (n, F), and scores, (n, K), by the finished boosting rounds."""
    kept = int(values["kept"])
    splits, leaves = splits_of(values["body"], settings), leaves_of(values["body"], settings)

    def trees(rounds: int) -> bytes:
        # Other settings, such as another number of categories, make other bins of the same rows.
        arrays = values["edges"], values["base"], splits[:rounds], leaves[:rounds]
        return digest_of(*arrays, about=msgspec.json.encode(settings))

    rows = digest_of(x)
    known = MEMORY.find(rows, trees)
    if known is None or known.rounds > kept:
        bins = bins_of(x, values["edges"], bin_table(settings))
        found = scores(values, bins, settings, kept)
    else:
        bins = known.bins
        found = scores(values, bins, settings, kept, (known.rounds, known.scores))
    MEMORY.keep(rows, Remembered(trees(kept), kept, bins, found))
    return bins, found


def _edge_sums(
    values: Values,
    x: NDArray[np.float32],
    y: NDArray[Any],
    settings: BoostedTrees,
) -> Sums:
    layout, table = trees_sums(settings), bin_table(settings)
    total = np.zeros(layout.size, np.int64)
    sums = layout.unpack(total)  # views, which are filled in
    sums["rows"][0] = len(x)
    boundaries = boundaries_of(values["body"], settings)
    counts = counts_of(sums["body"], settings)
    for place, column in enumerate(() if settings.has_ranges else table.numeric):
        counts[place] = count_between(x[:, column], boundaries[place])
    if settings.loss != "squared":
        sums["labels"][:] = np.bincount(y, minlength=len(sums["labels"]))
        return total
    powers = np.frexp(y)[1].astype(np.int64)
    cells = np.where(y == 0, 0, np.clip(powers - LOWEST_EXPONENT, 0, EXPONENTS - 1))
    sums["exponents"][:] = np.bincount(cells, minlength=EXPONENTS)
    if values["exchange"] > 0:
        # The first exchange found how large y is, and so the multiples to which it is rounded.
        sums["labels"][0] = to_fixed(y, GRID_BITS - int(values["scale"])).sum()
    return total


def _level_sums(
    values: Values,
    x: NDArray[np.float32],
    y: NDArray[Any],
    held_out: NDArray[np.bool_],
    settings: BoostedTrees,
) -> Sums:
    layout, table = trees_sums(settings), bin_table(settings)
    total = np.zeros(layout.size, np.int64)
    sums = layout.unpack(total)  # views, which are filled in
    number, level = int(values["kept"]), int(values["level"])
    bins, found = _bins_and_scores(values, x, settings)
    scale = int(values["scale"])
    if level == 0:
        losses = to_fixed(_losses(found, y, settings), LOSS_BITS - 2 * scale)
        for place, group in enumerate((~held_out, held_out)):
            sums["rows"][place] = np.count_nonzero(group)
            sums["losses"][place] = losses[group].sum()
    used = ~held_out
    if settings.row_share < 1:
        used &= _drawn(x, y, settings.seed, number) < settings.row_share
    bins, found, y = bins[used], found[used], y[used]
    first, second = _derivatives(found, y, settings)
    histogram = histogram_of(sums["body"], level, settings)
    for output in range(settings.outputs):
        nodes, is_open = nodes_of(values["body"], bins, number, output, level, settings)
        places = (nodes[is_open, None] * table.total + bins[is_open]).reshape(-1)
        for order, derivative in enumerate((first, second)):
            own = to_fixed(derivative[is_open, output], GRID_BITS - (0 if order else scale))
            # bincount adds doubles: exact, for 2^14 rows of at most 2^32 are below 2^53.
            weights = np.repeat(own.astype(np.float64), bins.shape[1])
            added = np.bincount(places, weights, minlength=2**level * table.total)
            histogram[:, output, :, order] = added.reshape(2**level, -1)
    return total


def _derivatives(
    found: Doubles, y: NDArray[Any], settings: BoostedTrees
) -> tuple[Doubles, Doubles]:
    """Return the loss's first and second derivative by the score: float64, (n, K) each."""
    if settings.loss == "squared":
        return found - y[:, None], np.ones_like(found)
    if settings.loss == "logistic":
        chance = sigmoid(found)
        return chance - y[:, None], chance * (1 - chance)
    chance = softmax(found)
    return chance - (y[:, None] == np.arange(settings.outputs)), chance * (1 - chance)


def _losses(found: Doubles, y: NDArray[Any], settings: BoostedTrees) -> Doubles:
    """Return each row's loss: half the squared error, or minus the log likelihood; (n,)."""
    if settings.loss == "squared":
        error = found[:, 0] - y
        squares: Doubles = error * error / 2
        return squares
    if settings.loss == "logistic":
        return logistic_losses(found[:, 0], y)
    chance = softmax(found)[np.arange(len(y)), y]
    losses: Doubles = -portable_log(np.maximum(chance, 1e-300))
    return losses


def _is_held_out(
    x: NDArray[np.float32], y: NDArray[Any], settings: BoostedTrees
) -> NDArray[np.bool_]:
    if not settings.held_out:
        return np.zeros(len(x), np.bool_)
    return _drawn(x, y, settings.seed, HELD_OUT) < settings.held_out


def _drawn(x: NDArray[np.float32], y: NDArray[Any], seed: int, stream: int) -> Doubles:
    """Return a fraction below 1 for each row, drawn from what the row holds: (n,). So it is the
    same on whatever device the row is; rows that are alike get the same one."""
    state = mix(np.array([seed], np.uint64)) + np.uint64(stream)
    hashes = np.repeat(mix(state), len(x))
    parts = np.column_stack([x.astype(np.float32), y.astype(np.float32)]) + np.float32(0)
    for column in np.ascontiguousarray(parts.T).view(np.uint32):
        hashes = mix((hashes ^ column) + GAMMA)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
