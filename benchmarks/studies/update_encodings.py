"""Encodings of updates: bytes against accuracy in simulated runs, and what an update costs the
coordinator.

Runs are the simulator's, on scikit-learn's digits (alike and skewed) and on synthetic data; each
encoding has the same seeds. They are kept in --keep: started again, the command goes on with those
that are missing. The coordinator is a real process, with devices that send a ready-made update of
2^20 elements. docs/studies/encodings.md says more. (A file encodings.py in this folder would hide
Python's own module of that name.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
import rounds
from _dropout_data import EXAMPLES, scans
from dropout import BATCH, DATA, EPOCHS, export_digits, kept_run
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_simulator.results.loaded_run import series
from fleetlearn_simulator.scenario.scenario import Scenario

ROUNDS = 50
STEPS = 10
"""Of a device in a call of train_many.onnx."""
ENCODINGS = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "topk-0.1",
    "topk-0.1-int8",
    "topk-0.01",
    "topk-0.01-int8",
)
KINDS: dict[str, dict[str, Any]] = {
    "digits, alike": {**DATA["alike"], "examples": EXAMPLES},
    "digits, skewed": {**DATA["skewed"], "examples": EXAMPLES},
    "synthetic(1, 1)": {"kind": "synthetic", "alpha": 1.0, "beta": 1.0, "examples": 100},
}
FLEETS = {"digits": (500, 20, 0.3), "synthetic": (30, 10, 0.1)}
"""Devices, those of a round, and the learning rate: as in dropout.py for fedavg, and as many
devices as Li et al. have (arXiv 1812.06127)."""
WIDTHS = {"digits": [64, 128, 10], "synthetic": [60, 10]}
"""Layers of the networks: 9,610 and 610 parameters."""


class Cell(NamedTuple):
    """Runs that differ in their seeds alone."""

    data: str
    up: str
    down: str


CELLS = [
    *(Cell(data, up, "float32") for data, up in product(KINDS, ENCODINGS)),
    *(Cell(data, "int8", "float16") for data in KINDS),
]


class Found(NamedTuple):
    """What the runs of a cell gave."""

    accuracy: list[float]
    """Mean test accuracy of the last ten rounds, for each seed."""
    up: float
    """Bytes of an update, as a share of float32's."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracy))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(np.std(self.accuracy, ddof=1) / len(self.accuracy) ** 0.5)


def export(folder: Path) -> dict[str, Path]:
    """Write the bundles of the two kinds of data, and the digits."""
    x, y = scans()
    np.savez(folder / "digits.npz", x=x, y=y)
    digits = export_digits(folder / "digits.bundle", WIDTHS["digits"], (20, STEPS), BATCH)
    return {"digits": digits, "synthetic": _export_synthetic(folder / "synthetic.bundle")}


def _export_synthetic(bundle: Path) -> Path:
    if not bundle.exists():
        import torch  # here, since the worker processes do not need it
        from fleetlearn_export import TrainMany, export_bundle

        def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (outputs.argmax(1) == y).float()

        torch.manual_seed(0)
        example = torch.randn(BATCH, 60), torch.randint(10, (BATCH,))
        export_bundle(
            torch.nn.Linear(60, 10),
            torch.nn.functional.cross_entropy,
            example,
            bundle,
            metrics={"accuracy": accuracy},
            many=TrainMany(10, STEPS),
        )
    return bundle


def kind_of(cell: Cell) -> str:
    return "digits" if cell.data.startswith("digits") else "synthetic"


def scenario(bundle: Path, cell: Cell, committed: int, seed: int) -> Scenario:
    arrays = {"arrays": str(bundle.with_name("digits.npz"))} if kind_of(cell) == "digits" else {}
    devices, goal, lr = FLEETS[kind_of(cell)]
    tables = {
        "name": "encodings",
        "seed": seed,
        "plan": {
            "bundle": str(bundle),
            "local": {"epochs": EPOCHS, "batch_size": BATCH, "evaluate": False, "lr": lr},
            "round": {"goal": goal, "over_selection": 1.0},
            "encoding": {"up": cell.up, "down": cell.down},
            "stop": {"rounds": committed},
        },
        "population": {"size": devices},
        "data": {**KINDS[cell.data], **arrays},
    }
    return Scenario.read(tables, bundle.parent)


def accuracy(bundle: Path, cell: Cell, committed: int, seed: int) -> float:
    """Return the mean test accuracy of the last ten rounds. The run is simulated unless its folder
    has it already."""
    name = "-".join(cell).replace(", ", "-").replace("(", "-").replace(")", "")
    folder = bundle.parent / name / f"seed-{seed}"
    _, values = series(kept_run(scenario(bundle, cell, committed, seed), folder))["accuracy"][
        "test"
    ]
    return float(np.mean(values[-10:]))


def study(chosen: Any) -> dict[Cell, Found]:
    chosen.keep.mkdir(parents=True, exist_ok=True)
    bundles = export(chosen.keep.absolute())
    bundle_of = {cell: bundles[kind_of(cell)] for cell in CELLS if cell.data in chosen.data}
    sizes = {bundle: open_bundle(bundle).manifest.size for bundle in bundles.values()}
    jobs = [(cell, seed) for cell in bundle_of for seed in range(1, chosen.seeds + 1)]
    accuracies: dict[Cell, list[float]] = {}
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(accuracy, bundle_of[cell], cell, chosen.rounds, seed) for cell, seed in jobs
        ]
        for number, ((cell, _), done) in enumerate(zip(jobs, waiting, strict=True), 1):
            accuracies.setdefault(cell, []).append(done.result())
            if sys.stderr.isatty():
                print(f"\r{number} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    results = {}
    for cell, values in accuracies.items():
        size = sizes[bundle_of[cell]]
        results[cell] = Found(values, find_encoding(cell.up).size(size) / (4 * size))
    return results


def table(results: Mapping[Cell, Found]) -> list[Sequence[str]]:
    kinds = list(dict.fromkeys(cell.data for cell in results))
    rows: list[Sequence[str]] = [("up", "down", "bytes up", *kinds)]
    for up, down in dict.fromkeys(cell[1:] for cell in results):
        found = [results[Cell(data, up, down)] for data in kinds]
        shown = [f"{100 * row.mean:.2f} ± {100 * row.error:.2f}" for row in found]
        rows.append((up, down, f"{found[0].up:.4g}", *shown))
    return rows


def cost(chosen: Any) -> dict[str, list[float]]:
    """Return the coordinator's CPU milliseconds for an update, of each encoding, in turns."""
    cpu: dict[str, list[float]] = {}
    for _ in range(chosen.repeats):
        for name in ENCODINGS:
            figures, _ = rounds.fleetlearn(
                20, chosen.elements, chosen.cost_rounds, 120.0, encoding=name
            )
            cpu.setdefault(name, []).append(figures["cpu_ms_per_update"])
    return cpu


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("encodings.runs"), help="folder of the finished runs"
    )
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=ROUNDS, help="committed rounds of a run")
    options.add_argument("--data", nargs="+", choices=KINDS, default=[*KINDS])
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    options.add_argument(
        "--elements", type=int, default=2**20, help="of the update whose cost is measured"
    )
    options.add_argument(
        "--cost-rounds", type=int, default=10, help="rounds of 20 such updates that count"
    )
    options.add_argument("--repeats", type=int, default=3, help="of the measurement of the cost")
    chosen = options.parse_args()
    results = study(chosen)
    print(
        "Test accuracy in per cent: mean and standard error over "
        f"seeds\n\n{measure.table(table(results))}\n"
    )
    costs = cost(chosen)
    rows: list[Sequence[str]] = [
        ("up", f"bytes of {chosen.elements} elements", "CPU ms an update", "least", "most")
    ]
    for name, values in costs.items():
        size = find_encoding(name).size(chosen.elements)
        rows.append(
            (
                name,
                f"{size}",
                f"{np.median(values):.2f}",
                f"{min(values):.2f}",
                f"{max(values):.2f}",
            )
        )
    print(f"The coordinator's cost\n\n{measure.table(rows)}")
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "keep")}
    cells = [cell._asdict() | figures._asdict() for cell, figures in results.items()]
    measure.write_json(chosen.json, settings, {"cells": cells, "cpu_ms": costs})


if __name__ == "__main__":
    main()
