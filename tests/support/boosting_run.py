"""Boosting over three devices' tables: bundles, data, and what must come out."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from computing import computed
from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.computations.boosting_settings import (
    BoostColumn,
    BoostedComponents,
    BoostedTrees,
)
from fleetlearn_protocol.computations.bundle import write_computation_bundle

COLUMNS = (BoostColumn("age"), BoostColumn("ward", categories=4), BoostColumn("dose"))
TREES = BoostedTrees(
    columns=COLUMNS, loss="logistic", rounds=3, depth=2, bins=16, row_share=0.8, label="ill"
)
COMPONENTS = BoostedComponents(
    columns=COLUMNS, loss="logistic", iterations=10, knots=6, label="ill"
)
Boosting = BoostedTrees | BoostedComponents


def boosting_bundle(folder: Path, settings: Boosting) -> Bundle:
    return open_bundle(write_computation_bundle(folder / "a.bundle", "illness", settings))


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    """Return columns as a device's file has them; some doses are missing."""
    rng = np.random.default_rng(seed)
    age, ward = rng.integers(1, 99, count), rng.integers(0, 4, count)
    dose = np.round(rng.uniform(0, 2, count), 3)
    ill = (age / 50 + 1.5 * (ward == 2) - dose + rng.normal(size=count) > 0.4).astype(np.int64)
    dose[rng.random(count) < 0.1] = np.nan
    return {"age": age.astype(float), "ward": ward.astype(float), "dose": dose, "ill": ill}


TABLES = {"a": rows(500, 1), "b": rows(120, 2), "c": rows(30, 3)}


def write_tables(folder: Path) -> dict[str, str]:
    """Write the tables as CSV files and an .npz. Returns each device's."""
    for name in "bc":
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(TABLES[name])
            for row in zip(*TABLES[name].values(), strict=True):
                writer.writerow(["" if value != value else value for value in row])
    np.savez(folder / "a.npz", **TABLES["a"])
    return {"a": str(folder / "a.npz"), **{name: str(folder / f"{name}.csv") for name in "bc"}}


def as_arrays(table: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a table as the batch has it."""
    x = np.column_stack([table[column.name] for column in COLUMNS]).astype(np.float32)
    return {"x": x, "y": table["ill"]}


def pooled_state(settings: Boosting) -> np.ndarray:
    """Return the last state of all rows in one table, without processes and sockets."""
    parts = [as_arrays(table) for table in TABLES.values()]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}
    return computed(settings, [whole])[1][-1]
