"""Accuracy against epsilon: what differential privacy costs by the size of the cohort, and what
correlated noise saves.

Softmax regression on scikit-learn's digits and on a synthetic federated set. A round takes 100,
1,000 or 10,000 of ten times as many devices; a device rests for five rounds, whatever the noise.
Every run is the simulator's: the coordinator's own clipping, noise, participation limits and
account. docs/studies/privacy.md says more.

Finished runs stay in a folder: started again, it goes on with those that are missing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import _privacy_data as scans
import torch
from _privacy_show import NEITHER, WITHOUT_NOISE, draw, table
from fleetlearn_export import LocalStep, TrainMany, export_bundle
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import views
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from torch import nn

DELTA = 1e-6
PER_COHORT = 10
"""Devices for each report of a round."""
SEPARATION = 5
"""Releases from one participation of a device to its next."""
CLIP, EPOCHS, BATCH, LR = 0.5, 5, 10, 0.3
FEWEST = 0.8
"""The share of a cohort that noise on devices is for (secure.minimum). All of them report."""
HELPER = {"helper": "https://helper.example:8770", "key": "0" * 64, "certificate": "0" * 64}
"""Of [secure]. Nobody asks it: the simulator adds masks neither up nor on."""
NEXT_TO_NONE = 0.002
"""The noise multiplier of runs that only clip: the least that a plan takes is 0.001."""
FEATURES = {"digits": scans.PIXELS, "synthetic": 60}
CLASSES = 10
BLOCK = 100, 5
"""Devices and steps of a call."""
HERE = Path(__file__).resolve().parent


class Cell(NamedTuple):
    """One run."""

    seed: int
    data: str
    cohort: int
    epsilon: float
    """Infinite: without noise."""
    mechanism: str
    """``gaussian``, ``dp-ftrl`` or ``distributed``; without noise one of ``WITHOUT_NOISE``."""

    @property
    def file(self) -> str:
        return f"{self.data}_{self.cohort}_{self.mechanism}_{self.epsilon:g}_{self.seed}.json"


def cells(
    sets: Iterable[str],
    cohorts: Iterable[int],
    epsilons: Iterable[float],
    mechanisms: Iterable[str],
    seeds: Iterable[int],
) -> list[Cell]:
    """All runs, the first seed's first. Those without noise are among them."""
    kinds = [*product(epsilons, mechanisms), *product([inf], WITHOUT_NOISE)]
    return [Cell(*place, *kind) for place in product(seeds, sets, cohorts) for kind in kinds]


def export(folder: Path, data: str) -> Path:
    """Softmax regression from zero; the cross-entropy is written out, in fewer operators than
    PyTorch's."""

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (
            -(torch.log_softmax(outputs, 1) * (y[:, None] == torch.arange(CLASSES))).sum(1).mean()
        )

    model = nn.Linear(FEATURES[data], CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    example = torch.randn(BATCH, FEATURES[data]), torch.randint(CLASSES, (BATCH,))
    path = folder / f"{data}.bundle"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        export_bundle(model, loss, example, path, step=LocalStep(), many=TrainMany(*BLOCK))
    return path


def scenario(bundle: Path, cell: Cell, rounds: int) -> Scenario:
    size = PER_COHORT * cell.cohort
    private = cell.mechanism != NEITHER
    plan: dict[str, Any] = {
        "bundle": str(bundle),
        "recipe": "dp-fedavg" if private else "fedavg",
        "local": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "evaluate": False},
        "round": {
            "goal": cell.cohort,
            "minimum": cell.cohort,
            "over_selection": 1.0,
            "weighting": "uniform",
        },
        "stop": {"rounds": rounds},
    }
    if private:
        own = {"epsilon": cell.epsilon, "mechanism": cell.mechanism}
        plan["privacy"] = {
            "delta": DELTA,
            "population": size,
            "clip": CLIP,
            "separation": SEPARATION,
            **(own if cell.epsilon < inf else {"noise": NEXT_TO_NONE}),
        }
    if cell.mechanism == "distributed":
        fewest = round(FEWEST * cell.cohort)
        plan["secure"] = {"mode": "helper", **HELPER, "minimum": fewest}
    drawn = {"kind": "function", "function": "_privacy_data:make", "path": str(HERE)}
    made = {"kind": "synthetic", "iid": True, "examples": BATCH}
    tables = {
        "name": "privacy",
        "seed": cell.seed,
        "plan": plan,
        "service": {"max_connections": size},
        "population": {"size": size, "connected": size},
        "data": drawn if cell.data == "digits" else made,
        "compute": {"step_seconds": 0.0},
    }
    return Scenario.read(tables, bundle.parent)


def run(bundle: Path, cell: Cell, rounds: int) -> dict[str, Any]:
    """Simulate a cell. Returns its figures."""
    rule, began = scenario(bundle, cell, rounds), time.process_time()
    with TemporaryDirectory(prefix="fleetlearn-study-") as folder:
        options = Options(backend="vectorized", workers=1, events=False, checkpoint=10**9, test=0)
        outcome = simulate(rule, Path(folder) / "run", options)
    assert outcome is not None
    opened = open_bundle(bundle)
    test = scans.test_scans() if cell.data == "digits" else source_of(rule, opened).test()
    assert test is not None
    weight, bias = views(outcome.model, opened.manifest.travelling).values()
    found = float(((test[0] @ weight.T + bias).argmax(axis=1) == test[1]).mean())
    rules = rule.plan.round_rules(opened.manifest).privacy
    spent = outcome.summary.get("privacy", {})
    return {
        "accuracy": found,
        "rounds": outcome.summary["rounds"],
        "noise": 0.0 if rules is None else rules.noise,
        "spent": spent.get("epsilon"),
        "cpu": time.process_time() - began,
    }


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--sets", default="digits,synthetic")
    parser.add_argument("--cohorts", default="100,1000,10000")
    parser.add_argument("--epsilons", default="1,2,4,8", help="beside runs without noise")
    parser.add_argument("--mechanisms", default="gaussian,dp-ftrl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", type=Path, default=Path("privacy.runs"), help="finished runs")
    parser.add_argument("--finished", action="store_true", help="show finished runs, and do none")
    parser.add_argument("--figure", type=Path, help="the PNG that is written")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    wanted = cells(
        given.sets.split(","),
        list(map(int, given.cohorts.split(","))),
        list(map(float, given.epsilons.split(","))),
        given.mechanisms.split(","),
        range(given.seeds),
    )
    if given.finished:
        wanted = [cell for cell in wanted if (given.runs / cell.file).exists()]
    results = do(wanted, given.rounds, given.runs, given.processes)
    print(table(results))
    spent = sum(row["cpu"] for row in results.values())
    print(f"{len(results)} runs of {given.rounds} rounds; {spent:.0f} s of CPU", file=sys.stderr)
    if given.figure is not None:
        draw(results, given.figure)
    settings = {key: str(getattr(given, key)) for key in ("sets", "cohorts", "epsilons", "rounds")}
    named = {cell.file.removesuffix(".json"): row for cell, row in results.items()}
    measure.write_json(given.json, settings, named)


def do(wanted: list[Cell], rounds: int, folder: Path, processes: int) -> dict[Cell, dict[str, Any]]:
    """Do the runs that are not in the folder yet. Returns all of them."""
    folder.mkdir(exist_ok=True)
    missing = [cell for cell in wanted if not (folder / cell.file).exists()]
    bundles = {data: export(folder, data) for data in {cell.data for cell in missing}}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = {pool.submit(run, bundles[cell.data], cell, rounds): cell for cell in missing}
        for number, done in enumerate(as_completed(waiting), 1):
            (folder / waiting[done].file).write_text(json.dumps(done.result()))
            print(f"\r{number} of {len(missing)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {cell: json.loads((folder / cell.file).read_text()) for cell in wanted}


if __name__ == "__main__":
    main()
