"""What the coordinator makes of boosted trees' sums: edges of bins, then the best split of each
node."""

from __future__ import annotations

from math import sqrt
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.fixed_point import from_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.portable_math import portable_log
from fleetlearn_protocol.computations.private_sums import noise_of_first_sums
from fleetlearn_protocol.computations.private_trees import tree_groups
from fleetlearn_protocol.computations.shared_edges import (
    MAX_EXCHANGES,
    UNUSED,
    equal_edges,
    refine,
)
from fleetlearn_protocol.computations.trees_layout import (
    DONE,
    FIND_EDGES,
    GRID_BITS,
    GROW,
    LOSS_BITS,
    LOWEST_EXPONENT,
    bin_table,
    boundaries_of,
    counts_of,
    drawn_columns,
    histogram_of,
    leaves_of,
    ranged_edges,
    splits_of,
    trees_state,
    trees_sums,
)
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.computations.tree_splits import best_splits, leaf_values

Values = dict[str, NDArray[Any]]


def advance(state: Vector, total: Sums, devices: int, settings: BoostedTrees) -> Vector:
    """Return the state after an exchange. total: the sums of its devices, int64 (S,)."""
    layout = trees_state(settings)
    values, sums = layout.unpack(state), trees_sums(settings).unpack(total)
    if values["phase"] == FIND_EDGES:
        _find_edges(values, sums, settings)
    elif values["phase"] == GROW:
        if values["level"] == 0:
            _note_losses(values, sums, settings)
        if values["phase"] == GROW:
            _split_level(values, sums["body"], settings)
    return layout.pack(values)


def advance_noisy(
    state: Vector, total: Sums, devices: int, settings: BoostedTrees, noise: float
) -> Vector:
    """Return the state after an exchange whose sums have noise of the standard deviation ``noise``,
    in rows, on each scaled one.

    A sum of second derivatives is what a leaf's value is divided by, so noise on it could make a
    leaf as large as it likes. Each side of a split must have twice the noise's standard deviation,
    and leaves are smaller where there is more noise (``tree_splits._weight``)."""
    layout = trees_state(settings)
    values, sums = layout.unpack(state), trees_sums(settings).unpack(total)
    values["noise"][()] = noise
    if values["phase"] == FIND_EDGES:
        labels = np.maximum(sums["labels"], 0)
        values["rows"][()] = labels.sum()
        sums["rows"][0] = labels.sum()
        _begin_trees(values, {**sums, "labels": labels}, settings)
    elif values["phase"] == GROW:
        first, second = _noise_of_nodes(state, settings, noise)
        least = max(settings.min_child_weight, 2 * second)
        careful = msgspec.structs.replace(settings, min_child_weight=least)
        _split_level(values, sums["body"], careful, first)
    return layout.pack(values)


def _noise_of_nodes(state: Vector, settings: BoostedTrees, noise: float) -> tuple[float, float]:
    """Return the standard deviations of the noise on a node's sums of first and of second
    derivatives; the larger one of columns of numbers and of categories."""
    groups, found = tree_groups(settings, state), list[float]()
    for group in groups:
        if group.ordered:
            found.append(float(noise_of_first_sums(noise, groups, group)[-1]))
        else:
            table = bin_table(settings)
            most = int(table.counts[table.is_category].max()) + 1
            found.append(noise * group.most * sqrt(len(groups) * most))
    return max(found[::2]) * 2.0**-GRID_BITS, max(found[1::2]) * 2.0**-GRID_BITS


def is_done(state: Vector, settings: BoostedTrees) -> bool:
    return bool(trees_state(settings).unpack(state)["phase"] == DONE)


def progress(state: Vector, settings: BoostedTrees) -> str:
    """Return a line for ``status``."""
    values = trees_state(settings).unpack(state)
    kept = int(values["kept"])
    if values["phase"] == FIND_EDGES:
        return f"finding the edges of bins, exchange {int(values['exchange']) + 1}"
    if values["phase"] == DONE:
        return f"{kept} boosting rounds{', with noise' if values['noise'] else ''}"
    level = int(values["level"])
    where = f"boosting round {kept + 1} of {settings.rounds}, level {level + 1} of {settings.depth}"
    if values["noise"] or (kept == 0 and level == 0):  # no device has measured a loss yet
        return where
    return f"{where}; loss {values['losses'][0]:.6g}"


def _find_edges(values: Values, sums: dict[str, Sums], settings: BoostedTrees) -> None:
    boundaries = boundaries_of(values["body"], settings)
    counts = counts_of(sums["body"], settings)
    finer = [refine(*pair, settings.bins) for pair in zip(boundaries, counts, strict=True)]
    exchange = int(values["exchange"]) + 1
    values["exchange"][()] = exchange
    values["rows"][()] = sums["rows"][0]
    first_of_squared = settings.loss == "squared" and exchange == 1
    if first_of_squared:
        used = np.flatnonzero(sums["exponents"])
        values["scale"][()] = used[-1] + LOWEST_EXPONENT if len(used) else 0
    if first_of_squared or (any(b is not None for b in finer) and exchange < MAX_EXCHANGES):
        for place, found in enumerate(finer):
            if found is not None:
                boundaries[place] = found
        return
    for place, pair in enumerate(zip(boundaries, counts, strict=True)):
        values["edges"][place] = equal_edges(*pair, settings.bins)
    _begin_trees(values, sums, settings)


def _begin_trees(values: Values, sums: dict[str, Sums], settings: BoostedTrees) -> None:
    """Begin the first boosting round: the edges are known."""
    if settings.has_ranges:
        values["edges"][:] = ranged_edges(settings)
    values["base"][:] = _base(sums, int(values["scale"]), settings)
    values["body"][:] = 0
    values["phase"][()] = GROW


def _base(sums: dict[str, Sums], scale: int, settings: BoostedTrees) -> NDArray[np.float64]:
    """Return the score that every row begins with, (K,): the mean, log odds or log shares."""
    rows = max(int(sums["rows"][0]), 1)
    if settings.loss == "squared":
        return from_fixed(sums["labels"][:1], GRID_BITS - scale) / rows
    # Half a row more of each class: a class that nobody has does not begin at minus infinity.
    counts = sums["labels"].astype(np.float64) + 0.5
    shares = counts / (rows + 0.5 * len(counts))
    logs = portable_log(shares)
    return logs[1:] - logs[:1] if settings.loss == "logistic" else logs


def _note_losses(values: Values, sums: dict[str, Sums], settings: BoostedTrees) -> None:
    """Note the mean losses of the finished rounds; end where the held-out one became no less."""
    scale, kept = int(values["scale"]), int(values["kept"])
    loss = from_fixed(sums["losses"], LOSS_BITS - 2 * scale) / np.maximum(sums["rows"], 1)
    values["losses"][:] = loss
    if not settings.held_out or not sums["rows"][1]:
        return
    if kept == 0 or loss[1] < values["best_loss"]:
        values["best_loss"][()], values["best"][()] = loss[1], kept
    elif kept - int(values["best"]) >= settings.patience:
        values["kept"][()] = values["best"]
        splits_of(values["body"], settings)[int(values["best"]) :] = 0
        leaves_of(values["body"], settings)[int(values["best"]) :] = 0
        values["phase"][()] = DONE


def _split_level(values: Values, body: Sums, settings: BoostedTrees, noise: float = 0.0) -> None:
    """Split the nodes of the open level, of each of the round's trees. ``noise``: as in
    ``best_splits``."""
    number, level = int(values["kept"]), int(values["level"])
    histogram = histogram_of(body, level, settings)
    splits = splits_of(values["body"], settings)[number]
    leaves = leaves_of(values["body"], settings)[number]
    edges_used = np.zeros(len(settings.columns), np.int64)
    edges_used[bin_table(settings).numeric] = (values["edges"] < UNUSED).sum(axis=1)
    allowed, scale = drawn_columns(number, settings), int(values["scale"])
    # The nodes of all of the round's trees at once, (nodes, K): a few large arrays take less time.
    each_node = histogram.reshape(-1, *histogram.shape[2:])
    found = best_splits(each_node, scale, edges_used, allowed, settings, noise)
    whole, left, right = (
        leaf_values(sums, scale, settings, noise) for sums in (found.whole, found.left, found.right)
    )
    width = 2 ** (settings.depth - level)  # leaves below a node of this level
    for output in range(settings.outputs):
        for node in _open_nodes(splits[output], level):
            place, leaf = node * settings.outputs + output, node * width
            code = int(found.codes[place])
            if not code:
                leaves[output, leaf] = whole[place]
                continue
            splits[output, 2**level - 1 + node] = code
            leaves[output, leaf] = left[place]
            leaves[output, leaf + width // 2] = right[place]
            values["gains"][bin_table(settings).column_of[abs(code) - 1]] += found.gains[place]
    values["level"][()] = level + 1
    is_whole = level + 1 == settings.depth or not any(
        len(_open_nodes(tree, level + 1)) for tree in splits
    )
    if is_whole:
        values["level"][()], values["kept"][()] = 0, number + 1
        if number + 1 == settings.rounds:
            values["phase"][()] = DONE


def _open_nodes(splits: Vector, level: int) -> NDArray[np.int64]:
    """Return the nodes of a level of a tree whose parent is split, in order."""
    if level == 0:
        return np.zeros(1, np.int64)
    parents = np.flatnonzero(splits[2 ** (level - 1) - 1 : 2**level - 1])
    return np.sort(np.concatenate([2 * parents, 2 * parents + 1]))


def result(state: Vector, settings: BoostedTrees) -> dict[str, Any]:
    """Return what the trees are, for people and for JSON."""
    values = trees_state(settings).unpack(state)
    kept = int(values["kept"])
    gains = values["gains"] / max(float(values["gains"].sum()), 1e-300)
    order = np.argsort(-gains, kind="stable")
    used = splits_of(values["body"], settings)[:kept]
    return {
        "rounds": kept,
        "trees": kept * settings.outputs,
        "splits": int(np.count_nonzero(used)),
        "rows": int(values["rows"]),
        # With noise no loss is released.
        "loss": {"training": float(values["losses"][0]), "held_out": float(values["losses"][1])}
        if not values["noise"]
        else None,
        "columns": {
            settings.columns[column].name: round(float(gains[column]), 6)
            for column in order
            if gains[column] > 0
        },
    }
