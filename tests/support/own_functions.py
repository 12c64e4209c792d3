"""Own functions for tests: the examples' questions, and tables for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.computations.registry import REGISTRY
from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_device.own_code import OwnFunctions, read_functions
from fleetlearn_protocol import extensions
from fleetlearn_protocol.computations.bundle import read_questions
from fleetlearn_protocol.computations.function_settings import (
    FunctionSums,
    RowArray,
    StateArray,
    SumArray,
)
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.vector import Vector

EXAMPLES = Path(__file__).parents[2] / "examples" / "functions"
DEVICES = ("kmeans:sums", "newton:sums", "partial_fit:fit")
"""The functions of the examples that devices allow."""
KIND = KINDS["function"]
MEAN = FunctionSums(
    device="mean",
    coordinator="next-mean",
    rows={"x": RowArray()},
    state={"mean": StateArray(value=0.0), "seen": StateArray((2,), "int64")},
    sums={"total": SumArray(range=(-1e6, 1e6)), "count": SumArray(dtype="int64")},
    metrics=("moved",),
    rounds=5,
    calls="batches",
)
"""The mean of a column."""


def mean_sums(state: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    return {"total": rows["x"].sum(), "count": len(rows["x"])}


def next_mean(
    state: Mapping[str, Any], sums: Mapping[str, Any], count: Any, *, stop_at: float = 1e-9
) -> tuple[dict[str, Any], dict[str, float], bool]:
    mean = sums["total"] / sums["count"]
    moved = abs(float(mean - state["mean"]))
    seen = np.array([count.devices, count.rows])
    return {"mean": mean, "seen": seen}, {"moved": moved}, moved <= stop_at


@contextmanager
def allowed_examples() -> Iterator[OwnFunctions]:
    """Within the block the examples' modules may be named. Yields the devices' functions."""
    with extensions.apart():
        extensions.allow(["kmeans", "newton", "partial_fit"], EXAMPLES)
        yield read_functions(DEVICES)


def questions(name: str) -> FunctionSums:
    found = read_questions(EXAMPLES / f"{name}.toml").settings
    assert isinstance(found, FunctionSums)
    return found


def computed_by(
    settings: FunctionSums, tables: Sequence[Columns], functions: OwnFunctions
) -> tuple[dict[str, Any], list[Vector]]:
    """Return the result of a run over these devices' tables, and the state after each round."""
    kind, states = REGISTRY["function"], [KIND.first(settings)]
    while not kind.is_done(states[-1], settings):
        total = np.zeros(KIND.sums(settings).size, np.int64)
        for table in tables:
            total += sum_up(states[-1], [table], settings, functions)
        states.append(kind.advance(states[-1], total, len(tables), settings))
    return kind.result(states[-1], settings), states


def points(devices: int = 4) -> list[Columns]:
    """Return tables of points around three places, other ones on each device."""
    random = np.random.default_rng(5)
    tables = []
    for device in range(devices):
        places = [(155 + device, 55, 60), (172, 70 - device, 40), (186, 93, 30 + 5 * device)]
        rows = [random.normal((x, y), 4.0, (count, 2)) for x, y, count in places]
        tables.append({"x": np.concatenate(rows)})
    return tables


def patients(devices: int = 4) -> list[dict[str, np.ndarray]]:
    """Return tables of three features and a label, whose distribution differs by device."""
    random = np.random.default_rng(6)
    tables = []
    for device in range(devices):
        x = random.normal(device / 4, 1.0, (80 + 40 * device, 3))
        chance = 1 / (1 + np.exp(-(x @ [1.0, -2.0, 0.5] + 0.3)))
        tables.append({"x": x, "y": (random.random(len(x)) < chance).astype(np.float64)})
    return tables
