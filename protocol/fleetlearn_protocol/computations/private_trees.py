"""Boosted trees with differential privacy: how the sums of an exchange are scaled.

A row's first derivative is at most 1 with logistic loss, and its second at most 1/4; with softmax
loss those of all classes are at most sqrt(2) and 1/2 long. They stand once in each column that the
boosting round may split. So a row moves a level's sums by no more than the root of the number of
these columns: fewer columns (``column_share``) have less noise.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from fleetlearn_protocol.computations.boosting_settings import BoostedTrees
from fleetlearn_protocol.computations.private_sums import SumsGroup
from fleetlearn_protocol.computations.trees_layout import (
    FIND_EDGES,
    GRID_BITS,
    bin_table,
    drawn_columns,
    histogram_of,
    trees_state,
    trees_sums,
)
from fleetlearn_protocol.vector import Vector


def no_sense_in_trees(settings: BoostedTrees) -> str | None:
    """Return what of the settings has no bound, or would find nothing but noise, and what to do;
    None: nothing."""
    if settings.loss == "squared":
        return (
            'loss = "squared": a row with a large y moves the sums as far as it likes. It takes '
            '"logistic" or "softmax"'
        )
    if settings.held_out:
        return (
            f"held_out = {settings.held_out:g}: the loss of held-out rows is not released. Leave "
            "held_out out, and set rounds"
        )
    if not settings.has_ranges and any(not column.codes for column in settings.columns):
        return (
            "columns of numbers have no range, and looking for the edges of equally full bins "
            "would spend privacy on single values. Give each a range that everybody may know"
        )
    return None


def releases_of_trees(settings: BoostedTrees) -> int:
    """Return how many exchanges there are at most."""
    return 1 + settings.rounds * settings.depth


def tree_groups(settings: BoostedTrees, state: Vector) -> tuple[SumsGroup, ...]:
    """Return the sums that the next exchange releases: rows of each class, or a level's sums of
    first and of second derivatives, of columns of numbers and of categories."""
    values, layout = trees_state(settings).unpack(state), trees_sums(settings)
    places = layout.unpack(np.arange(layout.size))
    if values["phase"] == FIND_EDGES:
        return (SumsGroup(places["labels"], 1.0),)
    table, level = bin_table(settings), int(values["level"])
    allowed = drawn_columns(int(values["kept"]), settings)
    body = histogram_of(places["body"], level, settings)  # (nodes, K, bins, 2)
    bounds = (1.0, 0.25) if settings.loss == "logistic" else (sqrt(2), 0.5)
    groups = []
    for categories in (False, True):
        columns = np.flatnonzero(allowed & (table.is_category == categories)).tolist()
        for order, bound in enumerate(bounds):
            rows = [_in_order(body[..., order], column, settings) for column in columns]
            if rows and not categories:  # they have equally many bins
                cells = np.concatenate(rows)
            elif rows:
                cells = np.concatenate([row.reshape(-1) for row in rows])
            else:
                continue
            most = sqrt(len(columns)) * bound * 2.0**GRID_BITS
            # Each row's derivative is rounded: by half a step, in each column and class.
            most += sqrt(len(columns) * settings.outputs)
            groups.append(SumsGroup(cells, most, ordered=not categories))
    return tuple(groups)


def _in_order(
    body: np.ndarray[tuple[int, ...], np.dtype[np.int64]], column: int, settings: BoostedTrees
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the places of a column's sums, (nodes * K, bins + 1): missing values, then its
    bins."""
    table = bin_table(settings)
    first, missing = table.starts[column], table.missing[column]
    order = [missing, *range(first, missing)]
    return body[..., order].reshape(-1, len(order))
