"""A computation from its first to its last round, without sockets: the devices' function and the
coordinator's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.computations.registry import REGISTRY
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.secure.masks import mask_of
from fleetlearn_protocol.secure.whole_words import sums_to_words
from fleetlearn_protocol.vector import Vector

MOST_ROUNDS = 1000


def batches(columns: Columns, rows: int) -> Iterator[Columns]:
    """Yield the rows in batches of this many."""
    count = len(next(iter(columns.values())))
    for start in range(0, count, rows):
        yield {name: values[start : start + rows] for name, values in columns.items()}


def computed(
    settings: Any, tables: Sequence[Columns], rows: int = 1000
) -> tuple[dict[str, Any], list[Vector]]:
    """Return the result of a run over these devices' tables, and the state after each round."""
    kind = kind_of(settings)
    state, states = KINDS[kind].first(settings), []
    while not states or not REGISTRY[kind].is_done(state, settings):
        assert len(states) < MOST_ROUNDS, "the computation never ends"
        total = np.zeros(KINDS[kind].sums(settings).size, np.int64)
        for table in tables:
            total += sum_up(state, batches(table, rows), settings)
        state = REGISTRY[kind].advance(state, total, len(tables), settings)
        states.append(state)
    return REGISTRY[kind].result(state, settings), states


def texts(values: Sequence[str], longest: int = 24) -> np.ndarray:
    """Return texts as a device's batch has them: uint8, (n, longest)."""
    encoded = np.array([value.encode() for value in values], f"S{longest}")
    return np.ascontiguousarray(encoded).view(np.uint8).reshape(len(values), longest)


def reports_of_sums(sums: np.ndarray) -> ReportColumns:
    """Return the reports of devices with these sums, int64, (n, S)."""
    count = len(sums)
    ones: Any = np.ones(count, np.int64)
    return ReportColumns(
        weights=ones,
        examples=ones,
        steps=ones,
        complete=ones > 0,
        loss=np.zeros(count),
        metrics={},
        largest={"sums": np.abs(sums).max(axis=1).astype(np.float64)},
        parts={"sums": sums},
    )


def masked_sums(sums: np.ndarray) -> tuple[ReportColumns, np.ndarray]:
    """Return the reports of devices that mask these sums, and the sum of their masks."""
    words = sums_to_words(sums)
    masks = np.stack([mask_of(bytes([row]) * 32, words.shape[1]) for row in range(len(sums))])
    found = replace(
        reports_of_sums(sums), parts={"sums": words + masks}, largest={"sums": np.zeros(len(sums))}
    )
    return found, masks.sum(axis=0, dtype=np.uint32)
