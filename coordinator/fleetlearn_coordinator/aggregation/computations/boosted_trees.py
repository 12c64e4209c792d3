"""What the coordinator makes of boosted trees' sums: edges of bins, then the best split of each
node."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.fixed_point import from_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.portable_math import portable_log
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
    histogram_of,
    leaves_of,
    splits_of,
    trees_state,
    trees_sums,
)
from fleetlearn_protocol.splitmix64 import GAMMA, mix
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.computations.tree_splits import best_splits, leaf_values

COLUMNS = 2**33
"""The stream of the seed that says which columns a boosting round may split."""
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


def is_done(state: Vector, settings: BoostedTrees) -> bool:
    return bool(trees_state(settings).unpack(state)["phase"] == DONE)


def progress(state: Vector, settings: BoostedTrees) -> str:
    """Return a line for ``status``."""
    values = trees_state(settings).unpack(state)
    kept = int(values["kept"])
    if values["phase"] == FIND_EDGES:
        return f"finding the edges of bins, exchange {int(values['exchange']) + 1}"
    if values["phase"] == DONE:
        return f"{kept} boosting rounds"
    level = int(values["level"])
    where = f"boosting round {kept + 1} of {settings.rounds}, level {level + 1} of {settings.depth}"
    if kept == 0 and level == 0:  # no device has measured a loss yet
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


def _split_level(values: Values, body: Sums, settings: BoostedTrees) -> None:
    """Split the nodes of the open level, of each of the round's trees."""
    number, level = int(values["kept"]), int(values["level"])
    histogram = histogram_of(body, level, settings)
    splits = splits_of(values["body"], settings)[number]
    leaves = leaves_of(values["body"], settings)[number]
    edges_used = np.zeros(len(settings.columns), np.int64)
    edges_used[bin_table(settings).numeric] = (values["edges"] < UNUSED).sum(axis=1)
    allowed, scale = _drawn_columns(number, settings), int(values["scale"])
    # The nodes of all of the round's trees at once, (nodes, K): a few large arrays take less time.
    each_node = histogram.reshape(-1, *histogram.shape[2:])
    found = best_splits(each_node, scale, edges_used, allowed, settings)
    whole, left, right = (
        leaf_values(sums, scale, settings) for sums in (found.whole, found.left, found.right)
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


def _drawn_columns(number: int, settings: BoostedTrees) -> NDArray[np.bool_]:
    """Return which columns a boosting round may split, (F,)."""
    count = len(settings.columns)
    wanted = max(1, int(np.ceil(settings.column_share * count)))
    state = mix(np.array([settings.seed], np.uint64)) + np.uint64(COLUMNS + number)
    places = np.arange(1, count + 1, dtype=np.uint64)
    order = np.argsort(mix(mix(state) + places * GAMMA), kind="stable")
    allowed = np.zeros(count, np.bool_)
    allowed[order[:wanted]] = True
    return allowed


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
        "loss": {"training": float(values["losses"][0]), "held_out": float(values["losses"][1])},
        "columns": {
            settings.columns[column].name: round(float(gains[column]), 6)
            for column in order
            if gains[column] > 0
        },
    }
