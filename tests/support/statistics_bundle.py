"""A bundle of statistics, and tables to answer it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics

QUESTIONS = Statistics(
    numbers=(
        NumberColumn("age", range=(0.0, 100.0), quantiles=(0.5,), bins=4),
        NumberColumn("income", quantiles=(0.1,), bins=2),
    ),
    categories=(CategoryColumn("city", top=4), CategoryColumn("smoker", values=("yes", "no"))),
)
PLAN = 'recipe = "statistics"\nname = "a"\nbundle = "a.bundle"\n[round]\ngoal = 4\n'


def statistics_bundle(folder: Path, questions: Statistics = QUESTIONS) -> Bundle:
    return open_bundle(write_computation_bundle(folder / "a.bundle", "questions", questions))


def raw_table(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return columns as an npz file or a CSV file would have them."""
    random = np.random.default_rng(seed)
    age = random.integers(1, 99, rows).astype(np.float64)
    age[random.random(rows) < 0.1] = np.nan
    return {
        "age": age,
        "income": random.lognormal(10, 1, rows),
        "city": np.array([f"city {number}" for number in random.zipf(2.0, rows) % 30]),
        "smoker": random.choice(["yes", "no", ""], rows),
    }


def pooled(tables: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
