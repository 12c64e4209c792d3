"""What hostile devices do to training, by aggregator: five attacks by up to 40 % of the devices,
data alike and skewed.

Every run is the simulator's, with the real engine and a small network for scikit-learn's digits
that trains for real. Runs are kept in --keep: started again, the command goes on with those that
are missing. docs/studies/robust.md says more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from dropout import BATCH, DATA, EPOCHS, GOAL, export, kept_run
from fleetlearn_coordinator.aggregation.robust.rules import RULES
from fleetlearn_simulator.results.loaded_run import series
from fleetlearn_simulator.scenario.scenario import Scenario

DEVICES, ROUNDS, LR = 500, 60, 0.3
"""The learning rate is the one that dropout.py chooses for fedavg."""
HOSTILE = {"trimmed-mean": 0.4, "krum": 0.4, "multi-krum": 0.4, "bulyan": 0.2}
"""What the plan says of hostile devices: as many as the aggregator takes, up to those of the
largest attack."""
CLIPPED = "fedavg, clipped"
BOUND = {"max_norm": 1.0, "norm_quantile": 0.5}
"""[aggregation] of FedAvg with a bound on norms, which comes to the updates' median."""
RECIPES = ("fedavg", CLIPPED, *RULES)
ATTACKS: dict[str, dict[str, Any]] = {
    "flipped": {"kind": "flipped", "factor": 3.0},
    "scaled": {"kind": "scaled", "factor": 30.0},
    "garbage": {"kind": "garbage", "factor": 30.0},
    "labels": {"kind": "labels", "factor": 9.0},
    "a little": {"kind": "little", "factor": 1.5},
}
"""[[failures.corrupt]] of each attack. scikit-learn's labels are 0 to 9, and a label y becomes 9 -
y."""
KINDS = ("alike", "skewed")


class Cell(NamedTuple):
    """Runs that differ in their seeds alone."""

    data: str
    recipe: str
    attack: str
    """Empty where no device is hostile."""
    share: float
    """Of the devices."""


def scenario(bundle: Path, cell: Cell, rounds: int, seed: int) -> Scenario:
    attack = [{"share": cell.share, **ATTACKS[cell.attack]}] if cell.attack else []
    hostile = {"hostile": HOSTILE[cell.recipe]} if cell.recipe in HOSTILE else {}
    tables = {
        "name": cell.recipe.replace(", ", "-"),
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "recipe": "fedavg" if cell.recipe == CLIPPED else cell.recipe,
            "local": {"epochs": EPOCHS, "batch_size": BATCH, "evaluate": False, "lr": LR},
            "round": {"goal": GOAL, "over_selection": 1.0},
            "stop": {"rounds": rounds},
            "aggregation": BOUND if cell.recipe == CLIPPED else hostile,
        },
        "population": {"size": DEVICES},
        "data": {**DATA[cell.data], "arrays": str(bundle.with_name("digits.npz")), "examples": 20},
        "failures": {"corrupt": attack},
    }
    return Scenario.read(tables, bundle.parent)


def accuracy(bundle: Path, cell: Cell, rounds: int, seed: int) -> float:
    """Return the mean test accuracy of the last ten rounds. The run is simulated unless its folder
    has it already."""
    run = scenario(bundle, cell, rounds, seed)
    attack = f"{cell.attack or 'none'}-{cell.share:g}".replace(" ", "-")
    folder = bundle.parent / cell.data / cell.recipe.replace(", ", "-") / attack / f"seed-{seed}"
    _, values = series(kept_run(run, folder)).get("accuracy", {}).get("test", (None, np.zeros(1)))
    return float(np.mean(values[-10:]))


def cells(chosen: Any) -> Iterator[Cell]:
    for data, recipe in product(chosen.data, chosen.recipes):
        yield Cell(data, recipe, "", 0.0)
        yield from (
            Cell(data, recipe, attack, share)
            for attack, share in product(chosen.attacks, chosen.shares)
        )


def table(results: Mapping[Cell, Sequence[float]], data: str) -> list[Sequence[str]]:
    """The accuracies in per cent: the median over seeds at each share of hostile devices, and
    without them also the least and the greatest."""
    cells = {cell: runs for cell, runs in results.items() if cell.data == data}
    shares = sorted({cell.share for cell in cells if cell.attack})
    attacks = list(dict.fromkeys(cell.attack for cell in cells if cell.attack))
    percent = " / ".join(f"{100 * share:g}" for share in shares)
    rows: list[Sequence[str]] = [
        ("recipe", "no attack", *(f"{attack}: {percent} %" for attack in attacks))
    ]
    for recipe in dict.fromkeys(cell.recipe for cell in cells):
        least, middle, most = (
            100 * np.quantile(cells[Cell(data, recipe, "", 0.0)], [0.0, 0.5, 1.0])
        ).tolist()
        shown = [
            " / ".join(
                f"{100 * np.median(cells[Cell(data, recipe, attack, share)]):.0f}"
                for share in shares
            )
            for attack in attacks
        ]
        rows.append((recipe, f"{middle:.1f} [{least:.1f}-{most:.1f}]", *shown))
    return rows


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("robust.runs"), help="folder of the finished runs"
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rounds", type=int, default=ROUNDS, help="committed rounds of a run")
    options.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    options.add_argument("--data", nargs="+", choices=KINDS, default=[*KINDS])
    options.add_argument("--attacks", nargs="+", choices=ATTACKS, default=[*ATTACKS])
    options.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.4])
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw robust.svg there")
    chosen = options.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    bundle = export(chosen.keep.absolute())
    jobs = [(cell, seed) for cell in cells(chosen) for seed in range(1, chosen.seeds + 1)]
    results: dict[Cell, list[float]] = {}
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(accuracy, bundle, cell, chosen.rounds, seed) for cell, seed in jobs]
        for number, ((cell, _), done) in enumerate(zip(jobs, waiting, strict=True), 1):
            results.setdefault(cell, []).append(done.result())
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    print(f"\r{len(jobs)} runs    ", file=sys.stderr)
    for data in chosen.data:
        print(
            f"## Test accuracy in per cent, data: {data}\n\n{measure.table(table(results, data))}\n"
        )
    if chosen.figures:
        import _robust_figure  # matplotlib takes its time

        print(_robust_figure.draw(results, chosen.figures), file=sys.stderr)
    settings = {
        key: value for key, value in vars(chosen).items() if key not in ("json", "keep", "figures")
    }
    measure.write_json(
        chosen.json,
        settings,
        {"cells": [cell._asdict() | {"runs": runs} for cell, runs in results.items()]},
    )


if __name__ == "__main__":
    main()
