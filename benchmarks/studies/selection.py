"""Uniform selection beside power-of-choice and Oort: time and rounds to a test accuracy, on a fleet
with slow tiers.

The fleet, the network and the data are those of dropout.py, without dropout: 1,000 devices; 26 are
chosen and 20 count in a round, on scikit-learn's digits. Every run is the simulator's, with the
coordinator's own engine. Finished runs are kept in --keep. docs/studies/selection.md has what came
out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from dropout import DATA, USUAL, Cell, Job, export, scenarios, target_of, work

STRATEGIES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "power-of-choice, d = 2m": {"strategy": "power-of-choice", "candidates": 2.0},
    "power-of-choice, d = 5m": {"strategy": "power-of-choice", "candidates": 5.0},
    # 20 s are what the faster half of the fleet takes.
    "oort": {"strategy": "oort", "oort": {"preferred_seconds": 20.0, "preferred_step": 10.0}},
}
LR = 0.3
"""Of FedAvg: the best for uniform selection of those that dropout.py tries. It is the same for all
strategies."""


def jobs_of(bundle: Path, chosen: Any) -> dict[tuple[str, str], list[Job]]:
    """Return the runs, one for each seed, by data and strategy."""
    jobs = {}
    for data in chosen.data:
        cell = Cell(data, "fedavg", "by time", 0.0, **USUAL)
        for name, selection in STRATEGIES.items():
            sweep: dict[str, list[Any]] = {
                "plan.local.lr": [LR],
                "plan.round.weighting": ["uniform"],
                "seed": list(range(1, chosen.seeds + 1)),
                **{f"plan.selection.{key}": [value] for key, value in selection.items()},
            }
            folder = bundle.with_name(f"{data}-{name}".replace(" ", "-"))
            runs = scenarios(bundle, cell, chosen.rounds, sweep, 0.0)
            jobs[data, name] = [
                Job(cell, run, folder / str(run.setting["seed"]), chosen.target) for run in runs
            ]
    return jobs


def row(data: str, name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line of the table: medians over the seeds, least and greatest beside them."""
    there = [run["to_target"] for run in runs]

    def middle(values: Sequence[float]) -> str:
        return f"{np.median(values):.3g} [{min(values):.3g}-{max(values):.3g}]"

    reached = [None if place is None else (place["rounds"], place["time"]) for place in there]
    rounds, times = (
        ("never", "never") if None in reached else map(middle, zip(*reached, strict=True))
    )
    ends = [[run[key] for run in runs] for key in ("time", "accuracy", "worst_decile")]
    slow = [run["heard"]["pi-zero-2"] for run in runs]
    return [data, name, rounds, times, *map(middle, [*ends, slow])]


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("selection.runs"), help="folder of the finished runs"
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rounds", type=int, default=100, help="committed rounds of a run")
    options.add_argument("--target", type=target_of, default="accuracy=0.85")
    options.add_argument("--data", nargs="+", choices=DATA, default=["skewed", "by tier"])
    options.add_argument("--workers", type=int, default=1, help="runs at a time")
    chosen = options.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(export(chosen.keep.absolute()), chosen)
    done = iter(work([job for runs in jobs.values() for job in runs], chosen.workers))
    results = {key: [next(done) for _ in runs] for key, runs in jobs.items()}
    head = [
        "data",
        "strategy",
        f"rounds to {chosen.target}",
        "seconds to it",
        "seconds of all rounds",
        "accuracy at the end",
        "of the worst tenth",
        "pi-zero-2 is heard",
    ]
    print(
        measure.table([head, *(row(*key, runs) for key, runs in results.items())]), file=sys.stdout
    )
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "keep")}
    cells = [
        {"data": data, "strategy": name, "runs": runs} for (data, name), runs in results.items()
    ]
    measure.write_json(chosen.json, settings | {"target": str(chosen.target)}, {"cells": cells})


if __name__ == "__main__":
    main()
